"""RLax, an independent library of the same equations, as a second reference."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import gae
from jaxrl_llm.losses.surrogate import clipped_surrogate_loss


@pytest.fixture(scope="module")
def rlax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax

    return rlax


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0)])
def test_generalised_advantages_agree_with_rlax_where_all_tokens_are_sampled(rlax, gamma, lam):
    reward_t, value_t = jax.random.normal(jax.random.key(0), (2, 9))
    expected = rlax.truncated_generalized_advantage_estimation(
        reward_t, jnp.full(9, gamma), lam, jnp.append(value_t, 0.0)
    )
    adv_t = gae(reward_t, value_t, jnp.ones(9, bool), gamma=gamma, lam=lam)
    np.testing.assert_allclose(adv_t, expected, rtol=1e-5, atol=1e-6)


def test_the_clipped_loss_and_its_gradient_agree_with_rlax(rlax):
    log_ratio_t, adv_t = jax.random.normal(jax.random.key(1), (2, 64))
    ratio_t = jnp.exp(0.5 * log_ratio_t)

    def ours(ratio_t):
        return clipped_surrogate_loss(ratio_t, adv_t, clip_low=0.2, clip_high=0.2).mean()

    def theirs(ratio_t):
        return rlax.clipped_surrogate_pg_loss(ratio_t, adv_t, 0.2)

    for mine, expected in zip(
        jax.value_and_grad(ours)(ratio_t), jax.value_and_grad(theirs)(ratio_t), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
