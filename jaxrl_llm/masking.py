"""Masked reductions that stay finite, gradients included, when nothing is selected; padding."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import Prompts, WeightedSum

_SMALLEST_BUCKET = 16  # tokens


def masked_sum(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> WeightedSum:
    """Σ of the selected values, with their number as weight.

    What is masked out is replaced, not multiplied by 0, so a NaN there reaches neither the sum
    nor a gradient.
    """
    return WeightedSum(jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32))


def masked_max(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Largest selected value; −inf when nothing is selected."""
    return jnp.where(mask, values, -jnp.inf).max()


def bucket_length(n: int) -> int:
    """The length that n tokens are padded to so that few shapes are compiled: 2ᵏ or 1.5·2ᵏ.

    >>> [bucket_length(n) for n in (1, 17, 25, 33, 100)]
    [16, 24, 32, 48, 128]
    """
    power = max(_SMALLEST_BUCKET, 1 << (n - 1).bit_length())
    return power * 3 // 4 if _SMALLEST_BUCKET < power and n <= power * 3 // 4 else power


def padded(
    rows: Sequence[Sequence[int]], length: int, pad_id: int = 0, *, from_left: bool = True
) -> Prompts:
    """Token ids of any lengths as one array `[B, length]` with its mask."""
    tokens = np.full((len(rows), length), pad_id, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, ids in enumerate(rows):
        place = slice(length - len(ids), length) if from_left else slice(len(ids))
        tokens[i, place], mask[i, place] = ids, True
    return Prompts(jnp.asarray(tokens), jnp.asarray(mask))
