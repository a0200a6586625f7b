import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.logprobs import logprob_and_entropy
from jaxrl_llm.losses.grpo import GRPOConfig, grpo, grpo_loss
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import Rollout, row_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.training import (
    OptimizerConfig,
    TrainConfig,
    accumulate_gradient,
    init_state,
    make_iteration,
    make_optimizer,
    make_schedule,
    minibatch_order,
    scan_iterations,
    skipped_updates,
    split_leading,
)
from jaxrl_llm.types import Batch, ConfigError, LossOutput, Scores, WeightedSum


@pytest.fixture
def batch(prompts, completions):
    """Four prompts of ragged completions with random advantages."""
    prompts, completions = jax.tree.map(lambda x: x[:4], (prompts, completions))
    adv_t = jax.random.normal(jax.random.key(0), completions.tokens.shape)
    return Batch(prompts, completions, adv_t, completions.logprobs - 0.1)


TABLE = jax.random.normal(jax.random.key(1), (23, 23))


def objective_of(**settings):
    """GRPO's loss of a policy that draws each token from a row of a table."""

    def objective(table, batch):
        tokens = batch.completions.tokens
        logits = table[jnp.roll(tokens, 1, axis=-1)]
        scores = Scores(*logprob_and_entropy(logits, tokens))
        return grpo_loss(scores, batch, GRPOConfig(entropy_coef=0.1, **settings))

    return objective


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_change_neither_gradient_nor_metrics(batch, how, microbatches):
    objective = objective_of(aggregation=how)
    whole = accumulate_gradient(objective, TABLE, batch)
    parts = accumulate_gradient(objective, TABLE, batch, microbatches=microbatches)
    chex.assert_trees_all_close(parts, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_devices_change_neither_gradient_nor_metrics(batch, how):
    objective = objective_of(aggregation=how)
    whole = accumulate_gradient(objective, TABLE, batch)
    # vmap with an axis name reduces as pmap does, on one device.
    mapped = jax.vmap(
        lambda part: accumulate_gradient(objective, TABLE, part, axis_name="devices"),
        axis_name="devices",
    )(split_leading(batch, 4))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], mapped), whole, rtol=2e-5, atol=2e-6)


def test_only_sampled_tokens_are_trained(batch):
    nothing = batch._replace(
        completions=batch.completions._replace(
            loss_mask=jnp.zeros_like(batch.completions.loss_mask)
        )
    )
    grads, metrics = accumulate_gradient(objective_of(), TABLE, nothing)
    assert jnp.all(grads == 0)
    assert metrics["loss"] == 0


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


def test_every_epoch_sees_every_prompt_once_in_a_new_order():
    config = TrainConfig(prompts=8, epochs=2, minibatches=4, microbatches=1)
    order = np.asarray(minibatch_order(jax.random.key(0), config))
    assert order.shape == (8, 2)
    epochs = order.reshape(2, 8)
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "at least 2"),
        ({"prompts": 6, "minibatches": 4}, "multiple of 16"),
        ({"iterations": 0}, "at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.fixture(scope="module")
def model():
    return LanguageModel(ModelConfig(width=16, layers=1, heads=2), vocab_size=23)


@pytest.fixture(scope="module")
def params(model):
    return jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(0)))


# A rollout that needs no environment: reward the token 5, so the policy should learn to say it.


def bandit(model, prompts, reward_of=lambda tokens: (tokens == 5).mean(-1)):
    chosen = jax.tree.map(lambda x: x[:4], prompts)

    def rollout(params, key):
        keys = jax.vmap(lambda k: row_keys(k, 8))(row_keys(key, 4))
        completions = sample(
            params, model, chosen, keys, SamplingConfig(max_tokens=2), eos_ids=(2,), pad_id=0
        )
        return Rollout(chosen, completions, reward_of(completions.tokens), {})

    return rollout


def run(model, params, rollout, algorithm, iterations, **settings):
    config = TrainConfig(
        **{"prompts": 4, "group_size": 8, "microbatches": 1, "iterations": iterations} | settings
    )
    optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-3, warmup=5), config.updates)
    state = init_state(
        params, optimizer, jax.random.key(0), needs_reference=algorithm.needs_reference
    )
    step = make_iteration(rollout, model, algorithm, optimizer, config)
    return jax.jit(scan_iterations(step, iterations))(state)


def test_grpo_learns_a_bandit(model, params, prompts):
    _, metrics = run(model, params, bandit(model, prompts), grpo(GRPOConfig(kl_coef=0.0)), 40)
    assert metrics["reward/mean"][0] < 0.2
    assert metrics["reward/mean"][-5:].mean() > 0.8
    assert metrics["policy/logprob_gap"].max() <= 1e-5


def test_a_zero_reward_and_a_kl_penalty_bring_the_policy_back_to_the_reference(
    model, params, prompts
):
    # The same shape with other weights: far from the reference, and able to come back.
    away = jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(1)))
    algorithm = grpo(GRPOConfig(kl_coef=1.0))
    config = TrainConfig(prompts=4, group_size=8, microbatches=1, iterations=50)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup=5), 50)
    zero = bandit(model, prompts, lambda tokens: jnp.zeros(tokens.shape[:2]))
    state = init_state(params, optimizer, jax.random.key(0), needs_reference=True)
    step = make_iteration(zero, model, algorithm, optimizer, config)
    _, metrics = jax.jit(scan_iterations(step, 50))(state.replace(params=away))
    kl = metrics["policy/kl_k3"]
    assert kl[0] > 0.05
    assert kl[-5:].mean() < 0.5 * kl[0]
    assert metrics["reward/dead_groups"].min() == 1


def test_later_epochs_see_ratios_other_than_one_and_large_steps_are_clipped(model, params, prompts):
    _, once = run(model, params, bandit(model, prompts), grpo(GRPOConfig()), 4)
    _, often = run(model, params, bandit(model, prompts), grpo(GRPOConfig()), 4, epochs=4)
    np.testing.assert_allclose(once["policy/ratio_max"], 1.0, atol=1e-4)
    assert often["policy/ratio_max"].max() > 1.05
    clipped = often["policy/clip_fraction_low"] + often["policy/clip_fraction_high"]
    assert clipped.max() > 0


def test_consecutive_rollouts_differ_and_the_same_seed_repeats_exactly(model, params, prompts):
    algorithm = grpo(GRPOConfig(kl_coef=0.0))
    first = run(model, params, bandit(model, prompts), algorithm, 3)
    again = run(model, params, bandit(model, prompts), algorithm, 3)
    chex.assert_trees_all_equal(first[1], again[1])
    chex.assert_trees_all_equal(first[0].params, again[0].params)
    assert len(set(np.asarray(first[1]["rollout/tokens"]).tolist())) > 1


def test_one_compilation_serves_all_iterations(model, params, prompts):
    algorithm = grpo(GRPOConfig())
    config = TrainConfig(prompts=4, group_size=8, microbatches=2, iterations=6)
    optimizer = make_optimizer(OptimizerConfig(), 6)
    step = make_iteration(bandit(model, prompts), model, algorithm, optimizer, config)
    call = jax.jit(chex.assert_max_traces(scan_iterations(step, 2), n=1))
    state = init_state(params, optimizer, jax.random.key(0), needs_reference=True)
    for _ in range(3):
        state, _ = call(state)
    assert state.iteration == 6
    assert call._cache_size() == 1


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


def test_clipping_bounds_the_gradient_that_the_optimizer_sees():
    config = OptimizerConfig(clip_norm=1.0, learning_rate=1.0, warmup=0)
    optimizer = make_optimizer(config, 10)
    params = {"w": jnp.zeros(2)}
    _, state = optimizer.update({"w": jnp.array([30.0, 40.0])}, optimizer.init(params), params)
    first_moment = optax.tree.get(state, "mu")["w"]
    np.testing.assert_allclose(first_moment, 0.1 * np.array([0.6, 0.8]), rtol=1e-5)


@pytest.mark.slow
def test_resident_memory_is_flat_over_two_hundred_iterations(model, params, prompts):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    algorithm = grpo(GRPOConfig())
    config = TrainConfig(prompts=4, group_size=8, microbatches=1, iterations=250)
    optimizer = make_optimizer(OptimizerConfig(), 250)
    step = make_iteration(bandit(model, prompts), model, algorithm, optimizer, config)
    call = jax.jit(step, donate_argnums=0)
    state = init_state(
        jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0), needs_reference=True
    )
    sizes = []
    for _ in range(250):
        state, metrics = call(state)
        jax.device_get(metrics)
        sizes.append(resident())
    assert sizes[-1] - sizes[50] < 2**23
