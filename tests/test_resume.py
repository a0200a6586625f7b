"""A run that is saved and resumed is, to the last bit, the run that went straight on."""

import chex
import jax
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.ppo import PPOConfig

RUNS = {
    "ppo": (
        PPOConfig(
            value_model="separate",
            value_rate=2.0,
            kl_schedule="adaptive",
            kl_target=0.01,
            kl_horizon=1.0,
            importance_cap=1.5,
            grad_reg_coeff=0.1,
            entropy_coef=0.01,
        ),
        {"rollout_lag": 1, "epochs": 2, "minibatches": 3},
    ),
    "dapo": (
        DAPOConfig(kl_in="loss", kl_coef=0.5, kl_schedule="linear", kl_target=1.0, kl_horizon=1.0),
        {"minibatches": 2},
    ),
}


@pytest.mark.parametrize("name", [pytest.param("ppo", marks=pytest.mark.slow), "dapo"])
def test_three_iterations_saved_and_three_more_are_six_bit_for_bit(tmp_path, begin, bandit, name):
    config, settings = RUNS[name]
    start, step = begin(config, bandit(), 6, learning_rate=2e-2, **settings)
    call = jax.jit(step)

    def go_on(state, n):
        history = []
        for _ in range(n):
            state, metrics = call(state)
            history.append(metrics)
        return state, history

    straight, expected = go_on(start, 6)
    state, before = go_on(start, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    fresh, _ = begin(config, bandit(), 6, learning_rate=2e-2, **settings)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(fresh)
    chex.assert_trees_all_equal(*(jax.tree.map(bits, x) for x in (restored.state, state)))
    resumed, after = go_on(restored.state, 3)
    chex.assert_trees_all_equal(*(jax.tree.map(bits, x) for x in (resumed, straight)))
    chex.assert_trees_all_equal(before + after, expected)
    # What a checkpoint could forget has moved by then.
    moving = ["critic", "lagged_params"] if name == "ppo" else []
    for part in ["params", "opt_state", "kl", "iteration", *moving]:
        then, now = (jax.tree.leaves(getattr(x, part)) for x in (start, state))
        assert any((a != b).any() for a, b in zip(then, now, strict=True)), part
    chex.assert_trees_all_equal(state.ref_params, start.ref_params)
    assert state.kl.scale != 1
    assert len({float(metrics["kl/coef"]) for metrics in expected}) == 6
    if name == "dapo":
        assert len({float(metrics["rollout/rounds"]) for metrics in expected}) > 1


def bits(x):
    """Typed keys as the numbers that they are."""
    return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
