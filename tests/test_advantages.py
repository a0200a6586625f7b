import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import dead_groups, group_centered, group_normalized


def test_normalised_advantages_are_those_derived_by_hand():
    # mean 1, deviations −1, 0, 0, 1: std √(2/3) with ddof 1, √(1/2) with ddof 0
    rewards = jnp.array([[0.0, 1.0, 1.0, 2.0]])
    expected = np.array([[-1.0, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(
        group_normalized(rewards, eps=0.0), expected / np.sqrt(2 / 3), rtol=1e-6
    )
    np.testing.assert_allclose(
        group_normalized(rewards, ddof=0, eps=0.5), expected / (np.sqrt(0.5) + 0.5), rtol=1e-6
    )


@pytest.mark.parametrize("reward", [0.05, 0.1, 0.35, 0.95])
@pytest.mark.parametrize("advantages", [group_normalized, group_centered])
def test_equal_rewards_teach_exactly_nothing(advantages, reward):
    rewards = jnp.full((2, 16), reward)
    assert dead_groups(rewards).all()
    assert jnp.all(advantages(rewards) == 0)


def test_groups_do_not_see_each_other():
    rewards = jax.random.uniform(jax.random.key(0), (4, 8))
    np.testing.assert_allclose(
        group_normalized(rewards)[1:3], group_normalized(rewards[1:3]), rtol=1e-6
    )


def test_a_better_completion_has_the_higher_advantage():
    advantages = group_normalized(jnp.array([[0.0, 0.1, 1.0]]))[0]
    assert advantages[0] < advantages[1] < advantages[2]
    assert advantages.sum() == pytest.approx(0, abs=1e-6)
