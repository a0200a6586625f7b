"""From per-token losses to one number: which average is taken decides what long answers weigh."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.masking import masked_sum
from jaxrl_llm.types import WeightedSum

Aggregation = Literal["token", "sequence", "constant"]


def aggregate(
    loss_t: Float[Array, "B G T"], mask: Bool[Array, "B G T"], how: Aggregation
) -> WeightedSum:
    """Sum per-token losses with the weights of one of the published averages.

      token     Σᵢₜ ℓᵢₜ / Σᵢ |oᵢ|                every token weighs the same (PPO, DAPO)
      sequence  Σᵢ (Σₜ ℓᵢₜ / |oᵢ|) / N            every completion weighs the same (GRPO)
      constant  Σᵢₜ ℓᵢₜ / (N · T)                 every token the same, and no longer dependent on
                                                 the lengths of the others (Dr. GRPO)

    |oᵢ| counts the selected tokens of completion i, N the completions with at least one. A sum over
    all completions of a batch equals the mean over groups of the mean over a group whenever groups
    have equal size, which they have here.

    Args:
        loss_t: per-token losses; what stands at unselected positions does not matter, NaN included.
        mask: the tokens that the policy sampled.
        how: "token", "sequence" or "constant".

    Returns:
        Total and weight; add those of all microbatches and devices, then take `.mean()`.

    References:
        Shao et al. 2024 (DeepSeekMath), eq. 3, https://arxiv.org/abs/2402.03300
        Yu et al. 2025 (DAPO), section 3.3, https://arxiv.org/abs/2503.14476
        Liu et al. 2025 (Dr. GRPO), section 3.2, https://arxiv.org/abs/2503.20783
    """
    if how == "token":
        return masked_sum(loss_t, mask)
    row_total = jnp.where(mask, loss_t, 0.0).sum(-1)
    length = mask.sum(-1)
    n_rows = (length > 0).sum().astype(jnp.float32)
    if how == "sequence":
        return WeightedSum((row_total / jnp.maximum(length, 1)).sum(), n_rows)
    return WeightedSum(row_total.sum() / mask.shape[-1], n_rows)
