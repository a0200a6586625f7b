"""However a batch is cut into microbatches and over devices, the update is the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.logprobs import logprob_and_entropy
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.training import accumulate_gradient, scan_iterations
from jaxrl_llm.types import Batch, LossOutput, Scores, WeightedSum

TABLE = jax.random.normal(jax.random.key(1), (23, 23))
BETA = jnp.float32(0.3)


@pytest.fixture(scope="module")
def batch(prompts, completions):
    """Four prompts of ragged completions, with what any algorithm may ask for."""
    prompts, completions = jax.tree.map(lambda x: x[:4], (prompts, completions))
    noise = jax.random.normal(jax.random.key(0), (2, *completions.tokens.shape))
    return Batch(
        prompts,
        completions,
        old_logp_t=completions.logprobs,
        ref_logp_t=completions.logprobs - 0.1 * noise[0],
        value_t=noise[1],
    )


REWARDS = jax.random.uniform(jax.random.key(5), (4, 4)).at[0].set(0.1)


def table_objective(algorithm):
    """The loss of a policy that draws each token, and predicts its value, from a row of a table."""

    def objective(table, batch):
        tokens = batch.completions.tokens
        row = table[jnp.roll(tokens, 1, axis=-1)]
        value_t = row[..., 0] if algorithm.critic else None
        return algorithm.loss(Scores(*logprob_and_entropy(row, tokens), value_t), batch, BETA)

    return objective


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("preset", ["ppo", "grpo", "dapo", "gspo"])
def test_microbatches_and_devices_change_neither_advantages_nor_gradient_nor_metrics(
    batch, preset, aggregation
):
    config = PRESETS[preset](aggregation=aggregation, entropy_coef=0.1)
    algorithm = make_algorithm(config, iterations=1)
    objective = table_objective(algorithm)
    advantages = jax.jit(algorithm.advantages, static_argnums=3)
    whole = advantages(batch, REWARDS, BETA, None)
    assert jnp.abs(whole.adv_t).max() > 0.5
    gradient = functools.partial(accumulate_gradient, objective, TABLE)
    expected = jax.jit(gradient)(whole)
    parts = jax.jit(functools.partial(gradient, microbatches=4))(whole)
    chex.assert_trees_all_close(parts, expected, rtol=2e-5, atol=2e-6)

    # vmap with an axis name reduces as pmap does, on one device.
    def on_device(batch, rewards):
        batch = algorithm.advantages(batch, rewards, BETA, "devices")
        return batch, gradient(batch, axis_name="devices")

    mapped = jax.jit(jax.vmap(on_device, axis_name="devices"))
    quarters = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (batch, REWARDS))
    cut, reduced = mapped(*quarters)
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), cut)
    chex.assert_trees_all_close(joined, whole, rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], reduced), expected, rtol=2e-5, atol=2e-6
    )


@pytest.mark.slow
def test_an_iteration_is_the_same_on_two_devices_in_microbatches(begin, bandit):
    rollout = bandit()

    def half(params, key):
        start = 3 * jax.lax.axis_index("devices")
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, 3), rollout(params, key)
        )

    def two(step):
        return lambda state: jax.tree.map(
            lambda x: x[0], jax.vmap(step, axis_name="devices", axis_size=2, in_axes=None)(state)
        )

    config = PPOConfig(kl_schedule="adaptive", kl_target=0.01, importance_cap=2.0)
    state, whole = begin(config, rollout, 2, rollout_lag=1)
    sizes = {"prompts": 3, "microbatches": 3, "axis_name": "devices"}
    _, parts = begin(config, half, 2, rollout_lag=1, **sizes)
    expected, found = (jax.jit(scan_iterations(step, 2))(state) for step in (whole, two(parts)))
    states = [x[0].replace(key=jax.random.key_data(x[0].key)) for x in (found, expected)]
    chex.assert_trees_all_close(*states, rtol=1e-3, atol=2e-5)
    assert {"kl/rollout", "value/explained_variance", "loss", "reward/std"} < set(expected[1])
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-3, atol=1e-5)


def test_only_sampled_tokens_are_trained(batch):
    algorithm = make_algorithm(PPOConfig(), iterations=1)
    batch = algorithm.advantages(batch, REWARDS, BETA, None)
    completions = batch.completions
    nothing = completions._replace(loss_mask=jnp.zeros_like(completions.loss_mask))
    grads, metrics = accumulate_gradient(
        table_objective(algorithm), TABLE, batch._replace(completions=nothing)
    )
    assert jnp.all(grads == 0)
    assert metrics["loss"] == 0


def test_the_gradient_of_a_linear_model_is_the_one_derived_by_hand():
    # loss = Σ wᵢ·x over selected i / their number
    def objective(w, x):
        total = WeightedSum((w * x).sum(), jnp.float32(x.size))
        return LossOutput(total, {"x": WeightedSum(x.sum(), jnp.float32(x.size))}, {}, {})

    grads, metrics = accumulate_gradient(
        objective, jnp.float32(3.0), jnp.arange(6.0), microbatches=3
    )
    assert grads == 2.5
    assert metrics["loss"] == 7.5
    assert metrics["x"] == 2.5
