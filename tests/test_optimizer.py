import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.optimizer import (
    OptimizerConfig,
    Trained,
    make_optimizer,
    make_schedule,
    skipped_updates,
)


def test_a_non_finite_gradient_is_skipped_counted_and_leaves_no_trace():
    optimizer = make_optimizer(OptimizerConfig(), 10)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    updates, after = optimizer.update({"w": jnp.array([1.0, jnp.nan, 1.0])}, state, params)
    assert jnp.all(updates["w"] == 0)
    assert skipped_updates(after) == 1
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    updates, after = optimizer.update({"w": jnp.ones(3)}, after, params)
    assert jnp.all(updates["w"] < 0)
    assert skipped_updates(after) == 1


def test_the_warm_up_starts_above_zero_and_the_schedule_ends_at_zero():
    config = OptimizerConfig(learning_rate=1.0, warmup=4, schedule="linear")
    rates = [float(make_schedule(config, 12)(i)) for i in range(13)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates[5:13], np.arange(7, -1, -1) / 8, atol=1e-6)


def test_clipping_bounds_the_gradient_that_the_optimizer_sees():
    config = OptimizerConfig(clip_norm=1.0, learning_rate=1.0, warmup=0)
    optimizer = make_optimizer(config, 10)
    params = {"w": jnp.zeros(2)}
    _, state = optimizer.update({"w": jnp.array([30.0, 40.0])}, optimizer.init(params), params)
    first_moment = optax.tree.get(state, "mu")["w"]
    np.testing.assert_allclose(first_moment, 0.1 * np.array([0.6, 0.8]), rtol=1e-5)


@pytest.mark.parametrize("value_rate", [0.0, 0.5, 3.0])
def test_the_value_rate_scales_the_value_models_steps_and_no_others(value_rate):
    config = OptimizerConfig(weight_decay=0.1)
    trained = Trained({"w": jnp.ones(3)}, {"v": jnp.arange(3.0)})
    grads = jax.tree.map(jnp.cos, trained)

    def step(rate):
        optimizer = make_optimizer(config, 10, value_rate=rate)
        return optimizer.update(grads, optimizer.init(trained), trained)[0]

    plain, scaled = step(1.0), step(value_rate)
    chex.assert_trees_all_equal(scaled.policy, plain.policy)
    chex.assert_trees_all_close(scaled.critic["v"], value_rate * plain.critic["v"], rtol=1e-6)
