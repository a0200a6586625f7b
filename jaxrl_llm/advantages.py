"""Advantages: how much better a completion was than expected."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def dead_groups(rewards: Float[Array, "B G"], *, tol: float = 1e-6) -> Bool[Array, "B"]:
    """Groups that teach nothing: all rewards equal, max − min ≤ tol.

    Decided on the rewards. The standard deviation of equal floats is often not 0, and
    dividing by that residue makes huge advantages out of rounding.
    """
    return rewards.max(-1) - rewards.min(-1) <= tol


def group_normalized(
    rewards: Float[Array, "B G"], *, ddof: int = 1, eps: float = 1e-6
) -> Float[Array, "B G"]:
    """GRPO's advantage: rewards standardised within their group.

      Âᵢ = (Rᵢ − mean(R)) / (std(R) + ε);   exactly 0 in a group of equal rewards

    Published code disagrees on the details: the paper's std leaves ddof open; TRL uses ddof = 1 and
    ε = 1e-4, verl ddof = 1 and ε = 1e-6, others ddof = 0 and ε = 1e-8.

    Args:
        rewards: R, one per completion, any unit.
        ddof: delta degrees of freedom of the standard deviation, 0 or 1.
        eps: ε, in units of the reward.

    References:
        Shao et al. 2024 (DeepSeekMath), section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    centered = rewards - rewards.mean(-1, keepdims=True)
    std = rewards.std(-1, ddof=ddof, keepdims=True)
    return jnp.where(dead_groups(rewards)[:, None], 0.0, centered / (std + eps))


def group_centered(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """Dr. GRPO's advantage: Âᵢ = Rᵢ − mean(R); exactly 0 in a group of equal rewards.

    References:
        Liu et al. 2025, section 3.2, https://arxiv.org/abs/2503.20783
    """
    centered = rewards - rewards.mean(-1, keepdims=True)
    return jnp.where(dead_groups(rewards)[:, None], 0.0, centered)
