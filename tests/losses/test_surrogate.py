import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.surrogate import (
    cispo_loss,
    clipped_surrogate_loss,
    importance_ratio,
    truncated_importance_weight,
)

RATIOS = (0.5, 1.0, 1.5, 5.0)


def surrogate(name, logp_t, adv_t):
    """Loss against π_old = 1 of tokens that all are completions of their own."""
    ratio_t = importance_ratio(logp_t, jnp.zeros_like(logp_t), jnp.ones(logp_t.shape, bool))
    if name == "unclipped":
        return -ratio_t * adv_t
    if name == "cispo":
        return cispo_loss(ratio_t, logp_t, adv_t, clip_high=0.28)
    dual_clip = 3.0 if name == "dual clip" else None
    return clipped_surrogate_loss(ratio_t, adv_t, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)


# By hand: −min(r Â, clip(r, 0.8, 1.28) Â); the same, at most 3 where Â < 0; −r Â; and
# −min(r, 1.28) Â log r; each at r = 0.5, 1, 1.5, 5, first for Â = 1, then for Â = −1.
LOG = np.log(RATIOS)
LOSSES = {
    "clipped": ([-0.5, -1.0, -1.28, -1.28], [0.8, 1.0, 1.5, 5.0]),
    "dual clip": ([-0.5, -1.0, -1.28, -1.28], [0.8, 1.0, 1.5, 3.0]),
    "unclipped": ([-0.5, -1.0, -1.5, -5.0], [0.5, 1.0, 1.5, 5.0]),
    "cispo": ([-0.5, -1.0, -1.28, -1.28] * LOG, [0.5, 1.0, 1.28, 1.28] * LOG),
}
# dL/dlog π: −r Â where the surrogate still moves, 0 where it is cut; CISPO's weight never is 0.
SLOPES = {
    "clipped": ([-0.5, -1.0, 0.0, 0.0], [0.0, 1.0, 1.5, 5.0]),
    "dual clip": ([-0.5, -1.0, 0.0, 0.0], [0.0, 1.0, 1.5, 0.0]),
    "unclipped": ([-0.5, -1.0, -1.5, -5.0], [0.5, 1.0, 1.5, 5.0]),
    "cispo": ([-0.5, -1.0, -1.28, -1.28], [0.5, 1.0, 1.28, 1.28]),
}


@pytest.mark.parametrize("adv", [1, -1])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_slopes_are_those_of_the_sign_table(name, adv):
    logp_t, adv_t = jnp.log(jnp.array(RATIOS)), jnp.full(4, float(adv))
    column = 0 if adv == 1 else 1
    np.testing.assert_allclose(
        surrogate(name, logp_t, adv_t), LOSSES[name][column], rtol=1e-5, atol=1e-7
    )
    slopes = jax.grad(lambda logp_t: surrogate(name, logp_t, adv_t).sum())(logp_t)
    np.testing.assert_allclose(slopes, SLOPES[name][column], rtol=1e-5, atol=1e-7)


def test_clip_low_and_clip_high_are_not_interchangeable():
    ratio_t, adv_t = jnp.array([1.25, 0.75]), jnp.array([1.0, -1.0])
    loss_t = clipped_surrogate_loss(ratio_t, adv_t, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(loss_t, [-1.25, 0.8], rtol=1e-6)  # inside 1.28, outside 0.8


# Tokens 0 and 2 are sampled, with ratios 2 and 4: the product is 8, its geometric mean √8.
@pytest.mark.parametrize(
    ("level", "expected", "slopes"),
    [
        ("token", [2.0, 1.0, 4.0], [2.0, 0.0, 4.0]),
        # The sum over three tokens of a ratio r that each sampled token scales by r, or √r.
        ("sequence", [8.0, 8.0, 8.0], [24.0, 0.0, 24.0]),
        ("sequence_mean", [8**0.5] * 3, [1.5 * 8**0.5, 0.0, 1.5 * 8**0.5]),
    ],
)
def test_ratios_of_each_level_are_those_derived_by_hand(level, expected, slopes):
    logp_t, old_logp_t = jnp.log(jnp.array([2.0, 1e9, 4.0])), jnp.zeros(3)
    mask = jnp.array([True, False, True])
    np.testing.assert_allclose(
        importance_ratio(logp_t, old_logp_t, mask, level), expected, rtol=1e-5
    )
    gradient = jax.grad(lambda logp_t: importance_ratio(logp_t, old_logp_t, mask, level).sum())
    np.testing.assert_allclose(gradient(logp_t), slopes, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_nothing_sampled_has_ratio_one(level):
    nothing = jnp.zeros((2, 3), bool)
    assert jnp.all(importance_ratio(jnp.ones((2, 3)), jnp.zeros((2, 3)), nothing, level) == 1)


@pytest.mark.parametrize("log_ratio", [-1e9, 1e9])
def test_the_ratio_of_impossible_tokens_is_finite(log_ratio):
    ratio, slope = jax.value_and_grad(
        lambda x: importance_ratio(x, jnp.zeros(1), jnp.ones(1, bool)).sum()
    )(jnp.array([log_ratio]))
    assert jnp.isfinite(ratio)
    assert slope == 0


def test_the_importance_weight_is_old_over_behaviour_up_to_its_cap():
    old_logp_t = jnp.log(jnp.array([0.2, 0.4, 0.9]))
    behavior_logp_t = jnp.log(jnp.array([0.4, 0.4, 0.1]))
    weight_t = truncated_importance_weight(old_logp_t, behavior_logp_t, cap=2.0)
    np.testing.assert_allclose(weight_t, [0.5, 1.0, 2.0], rtol=1e-6)


def test_no_gradient_passes_through_a_weight():
    def capped(old_logp_t, behavior_logp_t):
        return truncated_importance_weight(old_logp_t, behavior_logp_t, cap=2.0).sum()

    def cispo(ratio_t, logp_t):
        return cispo_loss(ratio_t, logp_t, jnp.ones(2), clip_high=0.2).sum()

    x = jnp.array([0.9, -0.1]), jnp.array([1.0, 0.5])
    assert all(jnp.all(g == 0) for g in jax.grad(capped, (0, 1))(*x))
    assert jnp.all(jax.grad(cispo)(*x) == 0)
