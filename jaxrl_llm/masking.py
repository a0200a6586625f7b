"""Masked reductions that stay finite, gradients included, when nothing is selected."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import WeightedSum


def masked_sum(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> WeightedSum:
    """Σ of the selected values, with their number as weight.

    What is masked out is replaced, not multiplied by 0, so a NaN there reaches neither the sum
    nor a gradient.
    """
    return WeightedSum(jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32))


def masked_max(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Largest selected value; −inf when nothing is selected."""
    return jnp.where(mask, values, -jnp.inf).max()
