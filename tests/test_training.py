import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.training import (
    TrainConfig,
    batch_metrics,
    minibatch_order,
    scan_iterations,
    take_minibatch,
)
from jaxrl_llm.types import Batch, Completions, ConfigError

EVERYTHING = PPOConfig(
    value_model="separate",
    kl_schedule="adaptive",
    kl_target=0.01,
    importance_cap=2.0,
    grad_reg_coeff=0.05,
    entropy_coef=0.01,
)


# Sizes and order.


def test_every_epoch_sees_every_prompt_once_in_a_new_order():
    config = TrainConfig(prompts=8, epochs=2, minibatches=4, microbatches=1)
    order = minibatch_order(jax.random.key(0), config, prompts=8)
    assert order.shape == (8, 2)
    seen = np.array([take_minibatch(jnp.arange(8), places, 4) for places in order])
    epochs = seen.reshape(2, 8)
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()
    # One of every four in a row, so that none has to leave its device.
    assert (seen // 4 == [0, 1]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "at least 1"),
        ({"prompts": 6, "minibatches": 4}, "multiple of 16"),
        ({"iterations": 0}, "at least 1"),
        ({"rollout_lag": 2}, "expected 0 or 1"),
        ({"rollout_lag": -1}, "expected 0 or 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


# Iterations of a toy policy.


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (GRPOConfig(), {"epochs": 4}),
        (PPOConfig(), {"minibatches": 3}),
    ],
)
def test_later_updates_see_ratios_other_than_one_and_large_steps_are_clipped(
    run, bandit, config, settings
):
    _, often = run(config, bandit(), 4, learning_rate=2e-2, **settings)
    assert often["policy/ratio_max"].max() > 1.05
    assert often["policy/ratio_min"].min() < 0.95
    clipped = often["policy/clip_fraction_low"] + often["policy/clip_fraction_high"]
    assert clipped.max() > 0


@pytest.fixture(scope="module")
def everything(begin, bandit):
    """A state, and two iterations of an algorithm that uses every part."""
    state, step = begin(EVERYTHING, bandit(), 6, epochs=2, microbatches=2, rollout_lag=1)
    chex.clear_trace_counter()
    return state, jax.jit(chex.assert_max_traces(scan_iterations(step, 2), n=1))


def test_consecutive_rollouts_differ_and_the_same_seed_repeats_exactly(everything):
    state, call = everything
    first, again = call(state), call(state)
    chex.assert_trees_all_equal(first, again)
    # The first two iterations sample with the same parameters, and yet other tokens.
    rewards = first[1]["reward/mean"]
    assert rewards[0] != rewards[1]
    other = call(state.replace(key=jax.random.key(1)))
    assert (other[1]["reward/mean"] != rewards).any()


def test_one_compilation_serves_all_iterations(everything):
    state, call = everything
    for _ in range(3):
        state, _ = call(state)
    assert state.iteration == 6
    assert call._cache_size() == 1


def test_one_compilation_serves_any_number_of_sampling_rounds(begin, bandit):
    # Group b is alive if its first completion says something odd: rarely all of them.
    def reward_of(tokens):
        return jnp.where(jnp.arange(8)[None] == 0, tokens[:, :1, 0] % 2, 0).astype(jnp.float32)

    state, step = begin(DAPOConfig(), bandit(reward_of), 8)
    call = jax.jit(scan_iterations(step, 4))
    state, metrics = call(state)
    _, more = call(state)
    rounds = np.concatenate([metrics["rollout/rounds"], more["rollout/rounds"]])
    assert len(set(rounds.tolist())) > 1
    assert ((rounds >= 1) & (rounds <= 4)).all()
    assert call._cache_size() == 1


def test_the_spread_of_advantages_and_the_kl_of_the_rollout_are_those_derived_by_hand():
    # Advantages 1, 2, 6: mean 3, variance (4 + 1 + 9)/3. π_ref/π = 2, 1, 1: k3 = 1 − log 2, 0, 0.
    mask = jnp.array([[[True, True, False, True]]])
    logp_t = jnp.log(jnp.array([[[0.25, 0.5, 1e-9, 0.5]]]))
    batch = Batch(
        None,
        Completions(jnp.zeros(mask.shape, int), mask, mask, logp_t),
        old_logp_t=logp_t,
        ref_logp_t=jnp.log(jnp.array([[[0.5, 0.5, 1.0, 0.5]]])),
        adv_t=jnp.array([[[1.0, 2.0, 0.0, 6.0]]]),
    )
    expected = {"advantage/std": np.sqrt(14 / 3), "kl/rollout": (1 - np.log(2)) / 3}
    chex.assert_trees_all_close(batch_metrics(batch, None), expected, rtol=1e-5)


# Groups without weight.


@pytest.mark.parametrize("axes", [{}, {"dynamic_sampling": False, "mask_dead_groups": True}])
def test_when_every_group_is_dead_the_iteration_ends_and_changes_nothing(run, bandit, axes):
    # β > 0 away from the reference: what is without weight must not train its KL either.
    steered = dict(kl_in="loss", kl_coef=1.0, kl_schedule="adaptive", kl_target=0.01)
    config = DAPOConfig(**steered, entropy_coef=0.1, **axes)
    dead = bandit(lambda tokens: jnp.full(tokens.shape[:2], 0.35))
    state, metrics = run(config, dead, 3, epochs=2)
    chex.assert_trees_all_equal(state.params, state.ref_params)
    assert jnp.all(metrics["optimizer/gradient_norm"] == 0)
    assert jnp.all(metrics["optimizer/skipped_updates"] == 0)
    assert jnp.all(metrics["reward/dead_groups"] == 1)
    assert jnp.all(metrics["kl/coef"] == 1.0)  # no KL was measured that could move it
    assert all(jnp.isfinite(x).all() for x in metrics.values())
    for extreme in ("policy/ratio_max", "policy/ratio_min", "policy/logprob_gap"):
        assert jnp.all(metrics[extreme] == 0)  # as the mean of nothing is
    if config.dynamic_sampling:
        assert jnp.all(metrics["rollout/rounds"] == config.max_sampling_rounds)
        assert jnp.all(metrics["rollout/filled"] == 0)


def test_masked_dead_groups_train_not_even_their_entropy(begin, bandit):
    # Only prompt 0 is alive; the others' groups would train their entropy.
    def reward_of(tokens):
        return jnp.where(jnp.arange(6)[:, None] == 0, jnp.arange(8.0)[None], 0.35)

    rollout = bandit(reward_of)

    def alone(params, key):
        return jax.tree.map(lambda x: x[:1], rollout(params, key))

    axes = {"entropy_coef": 0.1, "dynamic_sampling": False}
    steps = [
        begin(DAPOConfig(mask_dead_groups=True, **axes), rollout, 1),
        begin(DAPOConfig(**axes), alone, 1, prompts=1),
    ]
    norms = [jax.jit(step)(state)[1]["optimizer/gradient_norm"] for state, step in steps]
    np.testing.assert_allclose(*norms, rtol=1e-4)


@pytest.mark.slow
def test_resident_memory_is_flat_over_two_hundred_iterations(begin, bandit):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    state, step = begin(EVERYTHING, bandit(), 250, epochs=2)
    call = jax.jit(step, donate_argnums=0)
    sizes = []
    for _ in range(250):
        state, metrics = call(state)
        jax.device_get(metrics)
        sizes.append(resident())
    assert sizes[-1] - sizes[50] < 2**23
