import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.value import clipped_value_loss, explained_variance


# V_old = 0, ε = 0.2, so V counts as at most ±0.2 away; the worse of both errors counts.
@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.1, 1.0, 0.405, -0.9),  # a small move: the squared error
        (0.5, 1.0, 0.32, 0.0),  # moved further than ε towards the target: earns nothing more
        (-0.5, -1.0, 0.32, 0.0),
        (0.5, 0.0, 0.125, 0.5),  # moved away from the target: pulled back
        (0.5, -1.0, 1.125, 1.5),
        (1.5, 0.8, 0.245, 0.7),  # overshot: 0.7²/2 > 0.6²/2
    ],
)
def test_the_clipped_loss_and_its_slope_are_those_derived_by_hand(value, target, loss, slope):
    def of(value, clip=0.2):
        return clipped_value_loss(value, jnp.zeros(1), jnp.array([target]), clip=clip).sum()

    result = jax.value_and_grad(of)(jnp.array([value]))
    np.testing.assert_allclose(result[0], loss, rtol=1e-5)
    np.testing.assert_allclose(result[1], [slope], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(of(jnp.array([value]), None), (value - target) ** 2 / 2, rtol=1e-5)


MASK = jnp.array([True, True, False, True])
RETURNS = jnp.array([1.0, 2.0, jnp.nan, 6.0])  # variance (4 + 1 + 9)/3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 1e9, 6.0], 1.0),
        ([3.0, 3.0, jnp.nan, 3.0], 0.0),
        ([11.0, 12.0, 0.0, 16.0], 1.0),  # an offset is not counted
        ([1.0, 2.0, 0.0, 3.0], 1 - 2 / (14 / 3)),  # residues 0, 0, 3: mean 1, variance 2
        ([-1.0, -2.0, 0.0, -6.0], -3.0),  # twice the deviation
    ],
)
def test_explained_variance_is_that_derived_by_hand(values, expected):
    result = explained_variance(jnp.array(values), RETURNS, MASK)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_returns_that_do_not_vary_explain_nothing():
    assert explained_variance(jnp.zeros(4), jnp.ones(4), MASK) == 0
    assert explained_variance(jnp.zeros(4), RETURNS, jnp.zeros(4, bool)) == 0


def test_explained_variance_is_over_all_devices():
    values, returns = jax.random.normal(jax.random.key(0), (2, 2, 5))
    returns += jnp.array([[0.0], [10.0]])
    mask = jnp.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    parts = jax.vmap(
        lambda v, r, m: explained_variance(v, r, m, axis_name="device"), axis_name="device"
    )(values, returns, mask)
    whole = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
