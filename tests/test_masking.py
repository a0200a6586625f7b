import doctest

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import masking
from jaxrl_llm.masking import bucket_length, masked_max, masked_sum, padded


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


def test_few_lengths_are_compiled():
    assert doctest.testmod(masking).failed == 0
    lengths = [bucket_length(n) for n in range(1, 1025)]
    assert all(n <= length <= max(16, 1.5 * n) for n, length in enumerate(lengths, 1))
    assert len(set(lengths)) == 13


def test_rows_are_padded_on_either_side():
    left, right = (padded([[5, 6], [7]], 3, 9, from_left=side) for side in (True, False))
    assert left.tokens.tolist() == [[9, 5, 6], [9, 9, 7]]
    assert left.mask.tolist() == [[False, True, True], [False, False, True]]
    assert right.tokens.tolist() == [[5, 6, 9], [7, 9, 9]]
    assert right.mask.tolist() == [[True, True, False], [True, False, False]]
