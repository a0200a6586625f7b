import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.masking import masked_max, masked_sum


def test_what_is_masked_out_reaches_neither_the_sum_nor_the_gradient():
    x, mask = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
    value, gradient = jax.value_and_grad(lambda x: masked_sum(x, mask).mean())(x)
    assert value == 2
    assert gradient.tolist() == [0.5, 0.0, 0.5]


def test_nothing_selected_has_mean_zero():
    assert masked_sum(jnp.ones(3), jnp.zeros(3, bool)).mean() == 0
    assert masked_max(jnp.ones(3), jnp.zeros(3, bool)) == -jnp.inf


def test_the_largest_selected_value_is_found():
    assert masked_max(jnp.array([5.0, 2.0, 3.0]), jnp.array([False, True, True])) == pytest.approx(
        3
    )
