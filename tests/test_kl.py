"""The KL to the reference pulls the policy back, and is steered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.training import scan_iterations


@pytest.mark.parametrize(
    "axes",
    [
        {"kl_in": "loss", "kl_estimator": "k2"},
        {"kl_in": "loss", "kl_estimator": "k3"},
        {"kl_in": "reward", "kl_estimator": "k1", "advantage": "reward_to_go"},
        {"kl_in": "reward", "kl_estimator": "k1", "advantage": "leave_one_out"},
    ],
)
def test_a_zero_reward_and_a_kl_penalty_bring_the_policy_back_to_the_reference(
    begin, toy, bandit, axes
):
    # The same shape with other weights: far from the reference, and able to come back.
    away = jax.tree.map(lambda x: 3.0 * x, toy.init(jax.random.key(1)))
    zero = bandit(lambda tokens: jnp.zeros(tokens.shape[:2]), group_size=16)
    config = AlgorithmConfig(kl_coef=1.0, **axes)
    state, step = begin(config, zero, 50, group_size=16, learning_rate=1e-2)
    _, metrics = jax.jit(scan_iterations(step, 50))(state.replace(params=away))
    kl = metrics["kl/rollout"]
    assert kl[0] > 0.05
    assert kl[-5:].mean() < 0.5 * kl[0]
    assert metrics["reward/dead_groups"].min() == 1


def test_the_adaptive_controller_holds_the_kl_near_its_target(run, bandit):
    config = AlgorithmConfig(
        kl_coef=0.05, kl_schedule="adaptive", kl_target=0.1, kl_horizon=1.0, aggregation="token"
    )
    state, metrics = run(config, bandit(group_size=16), 150, group_size=16)
    kl, coef = (np.asarray(metrics[name]) for name in ("kl/rollout", "kl/coef"))
    assert kl.max() > 0.2  # the reward alone would pull it away
    assert 0.05 < np.median(kl[-30:]) < 0.2
    # β of iteration k is logged, and the controller's state is that of the next one.
    assert coef[0] == np.float32(0.05)
    factors = 1 + np.clip(kl / 0.1 - 1, -0.2, 0.2)
    np.testing.assert_allclose(coef[1:], 0.05 * np.cumprod(factors)[:-1], rtol=1e-4)
    np.testing.assert_allclose(state.kl.coef, 0.05 * np.prod(factors), rtol=1e-4)
    assert state.kl.step == 150
