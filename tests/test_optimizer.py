import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import (
    OptimizerConfig,
    Trained,
    make_optimizer,
    make_schedule,
    skipped_updates,
)
from jaxrl_llm.types import ConfigError, Prompts


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


def descend(optimizer, params, steps=200):
    """Fit the first columns of a random matrix by gradient descent."""
    target = jax.random.normal(jax.random.key(0), (8, 4))

    def loss(params):
        return ((params["w"].astype(jnp.float32) @ params["a"] - target) ** 2).mean()

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(lambda a: loss(params | {"a": a}))(params["a"])
        updates, state = optimizer.update({"a": grads}, state, {"a": params["a"]})
        return (params | optax.apply_updates({"a": params["a"]}, updates), state), value

    start = params, optimizer.init({"a": params["a"]})
    return jax.lax.scan(step, start, length=steps)


def test_a_bfloat16_first_moment_trains_like_a_float32_one():
    params = {"w": jax.random.normal(jax.random.key(1), (8, 8)), "a": jnp.zeros((8, 4))}
    losses = {}
    for name in ("float32", "bfloat16"):
        config = OptimizerConfig(learning_rate=1e-2, first_moment=name)
        (_, state), losses[name] = descend(make_optimizer(config, 200), params)
        assert optax.tree.get(state, "mu")["a"].dtype == name
        assert optax.tree.get(state, "nu")["a"].dtype == jnp.float32
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)
    assert (losses["bfloat16"] != losses["float32"]).any()


@pytest.mark.slow
def test_float32_adapters_train_beside_frozen_bfloat16_weights():
    model = LanguageModel(ModelConfig(width=16, layers=1, heads=2, dtype="bfloat16"), 8)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(jax.random.key(0)))
    params = lora.add_adapters(base, lora.LoRAConfig(rank=2), jax.random.key(1))
    changing, frozen = lora.partition(params)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = optimizer.init(Trained(changing))
    prompts = Prompts(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool))

    def loss(trained):
        last, _ = model.prefill(lora.combine(trained.policy, frozen), prompts)
        return (last.astype(jnp.float32) ** 3).sum()

    grads = jax.grad(loss)(Trained(changing))
    updates, state = optimizer.update(grads, state, Trained(changing))
    moved = optax.apply_updates(Trained(changing), updates)
    for leaf in jax.tree.leaves((moved, optax.tree.get(state, "nu"))):
        assert leaf.dtype == jnp.float32
    assert optax.tree.norm(jax.tree.map(jnp.subtract, moved, Trained(changing))) > 0
    assert skipped_updates(state) == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(name, x, "above 0") for name in ("learning_rate", "clip_norm", "eps") for x in (0, -1)]
    + [("warmup", -1, "0 or more"), ("weight_decay", -0.1, "0 or more")]
    + [(name, value, "in [0, 1)") for name in ("b1", "b2") for value in (-0.1, 1.0)]
    + [(name, float("nan"), "expected") for name in ("learning_rate", "clip_norm", "b2")]
    + [("learning_rate", float("inf"), "above 0")],
)
def test_settings_that_cannot_work_are_refused_in_one_line(name, value, expected):
    with pytest.raises(ConfigError) as refusal:
        OptimizerConfig(**{name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name}={value}: ") and expected in message
    assert "\n" not in message
