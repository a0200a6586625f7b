"""Every preset learns what credit assignment needs: the right token, at the right time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.family import PRESETS

TASKS = ("immediate", "delayed", "joint")
RUNS = {name: (config(), {}) for name, config in PRESETS.items()} | {
    "ppo": (PRESETS["ppo"](), {"minibatches": 2, "learning_rate": 3e-3}),
    "ppo_separate": (
        PRESETS["ppo"](value_model="separate", value_rate=2.0),
        {"epochs": 2, "learning_rate": 3e-3},
    ),
}


def reward_of(tokens):
    """Task 0: the share of right tokens. 1: the first token decides. 2: two must be right."""
    first, second = tokens[..., 0], tokens[..., 1]
    rewards = jnp.stack([(tokens == 5).mean(-1), first == 3, (first < 3) & (second > 4)])
    return rewards[jnp.arange(6) // 2, jnp.arange(6)].astype(jnp.float32)


@pytest.fixture(scope="module")
def tasks(bandit):
    """The rollout of all three tasks, which reports the mean reward of each."""
    rollout = bandit(reward_of, group_size=32, temperature=1.2)

    def reporting(params, key):
        rolled = rollout(params, key)
        is_task = (jnp.arange(6) // 2)[None, :, None] == jnp.arange(3)[:, None, None]
        of_task = jnp.where(is_task, 3.0 * rolled.rewards[None], 0.0)
        return rolled._replace(info=dict(zip(TASKS, of_task, strict=True)))

    return reporting


@pytest.mark.parametrize("name", [*PRESETS, pytest.param("ppo_separate", marks=pytest.mark.slow)])
def test_every_preset_learns_immediate_delayed_and_joint_rewards(run, tasks, name):
    config, settings = RUNS[name]
    sizes = {"group_size": 32, "temperature": 1.2, "learning_rate": 5e-3}
    _, metrics = run(config, tasks, 60, **sizes | settings)
    for task in TASKS:
        rewards = metrics[f"rollout/{task}"]
        assert rewards[0] < 0.3
        assert rewards[-5:].mean() > 0.8
    assert 0 < metrics["policy/logprob_gap"].max() <= 1e-5
    if set(settings).isdisjoint({"epochs", "minibatches"}):
        for name in ("policy/ratio_max", "policy/ratio_min"):
            np.testing.assert_allclose(metrics[name], 1.0, atol=1e-4)
