import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import (
    dead_groups,
    gae,
    group_centered,
    group_normalized,
    leave_one_out,
    soft_overlong_penalty,
    token_rewards,
    whiten,
)


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


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards = jnp.array([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    expected = [[1 - 4, 2 - 3.5, 6 - 1.5], [-1.5, -1.5, 3.0]]
    np.testing.assert_allclose(leave_one_out(rewards), expected, rtol=1e-6)


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1():
    rewards = jax.random.uniform(jax.random.key(0), (4, 8))
    np.testing.assert_allclose(
        leave_one_out(rewards), 8 / 7 * group_centered(rewards), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("reward", [0.05, 0.1, 0.35, 0.95])
@pytest.mark.parametrize("advantages", [group_normalized, group_centered, leave_one_out])
def test_equal_rewards_teach_exactly_nothing(advantages, reward):
    rewards = jnp.full((2, 16), reward)
    assert dead_groups(rewards).all()
    adv = advantages(rewards)
    assert jnp.all(adv == 0)
    assert jnp.all(whiten(adv, jnp.ones((2, 16), bool)) == 0)


def test_only_groups_of_equal_rewards_are_dead():
    rewards = jnp.array([[0.1, 0.1 + 1e-8, 0.1], [0.1, 0.1, 0.11], [-1.0, 1.0, 0.0]])
    assert dead_groups(rewards).tolist() == [True, False, False]


def test_groups_do_not_see_each_other():
    rewards = jax.random.uniform(jax.random.key(0), (4, 8))
    np.testing.assert_allclose(
        group_normalized(rewards)[1:3], group_normalized(rewards[1:3]), rtol=1e-6
    )


def test_a_better_completion_has_the_higher_advantage():
    advantages = group_normalized(jnp.array([[0.0, 0.1, 1.0]]))[0]
    assert advantages[0] < advantages[1] < advantages[2]
    assert advantages.sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1), (500, -1)],
)
def test_the_overlong_penalty_has_the_three_pieces_of_its_equation(length, penalty):
    result = soft_overlong_penalty(jnp.array([length]), max_length=100, cache=20)
    np.testing.assert_allclose(result, [penalty], rtol=1e-6)


def test_the_reward_comes_at_the_last_sampled_token():
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], bool)
    expected = [[0, 0, 5.0, 0], [0, 0, 6.0, 0], [0, 0, 0, 7.0], [0, 0, 0, 0]]
    assert token_rewards(jnp.array([5.0, 6.0, 7.0, 8.0]), mask).tolist() == expected


def test_generalised_advantages_skip_what_was_not_sampled():
    # Tokens 0, 2 and 3 are sampled; 1 is an observation whose reward and value are nonsense.
    # γ = ½, λ = ½: δ₃ = 8 − 2 = 6, δ₂ = 1 + ½·2 − 4 = −2, δ₀ = 0 + ½·4 − 1 = 1;
    # Â₃ = 6, Â₂ = −2 + ¼·6 = −½, Â₀ = 1 + ¼·(−½) = ⅞.
    reward_t = jnp.array([[0.0, 1e9, 1.0, 8.0, 1e9]])
    value_t = jnp.array([[1.0, jnp.nan, 4.0, 2.0, jnp.nan]])
    mask = jnp.array([[True, False, True, True, False]])
    adv_t = gae(reward_t, value_t, mask, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(adv_t, [[0.875, 0.0, -0.5, 6.0, 0.0]], rtol=1e-6)


def test_without_values_lambda_one_is_the_discounted_reward_to_go():
    # 1 + ½·2 + ¼·4, 2 + ½·4, 4
    adv_t = gae(jnp.array([1.0, 2.0, 4.0]), jnp.zeros(3), jnp.ones(3, bool), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(adv_t, [3.0, 4.0, 4.0], rtol=1e-6)


def test_lambda_zero_is_the_one_step_error():
    # 1 + ½·20 − 10, 2 + ½·30 − 20, 4 − 30
    values = jnp.array([10.0, 20.0, 30.0])
    adv_t = gae(jnp.array([1.0, 2.0, 4.0]), values, jnp.ones(3, bool), gamma=0.5, lam=0.0)
    np.testing.assert_allclose(adv_t, [1.0, -3.0, -26.0], rtol=1e-6)


def test_whitened_values_are_those_derived_by_hand():
    # Selected: 1, 2, 6: mean 3, variance (4 + 1 + 9)/3.
    values = jnp.array([[1.0, 1e9, 2.0], [jnp.nan, 6.0, -1e9]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    std = np.sqrt(14 / 3)
    expected = [[-2 / std, 0, -1 / std], [0, 3 / std, 0]]
    np.testing.assert_allclose(whiten(values, mask), expected, rtol=1e-6)
    expected = np.array([[-2.0, 0, -1], [0, 3, 0]]) / (std + 1.0)
    np.testing.assert_allclose(whiten(values, mask, eps=1.0), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.05, 0.1, 0.35, 0.95])
def test_equal_values_whiten_to_exactly_zero(value):
    assert jnp.all(whiten(jnp.full((3, 7), value), jnp.ones((3, 7), bool)) == 0)
    assert jnp.all(whiten(jnp.full((3, 7), value), jnp.zeros((3, 7), bool)) == 0)


def test_whitening_is_over_all_devices(completions):
    values = jax.random.normal(jax.random.key(0), (4, 4, 7)) + jnp.arange(4.0)[:, None, None]
    mask = completions.loss_mask[:4]
    shards = (values.reshape(2, 2, 4, 7), mask.reshape(2, 2, 4, 7))
    parts = jax.vmap(lambda v, m: whiten(v, m, axis_name="device"), axis_name="device")(*shards)
    np.testing.assert_allclose(parts.reshape(4, 4, 7), whiten(values, mask), rtol=1e-5, atol=1e-6)
