"""Group Relative Policy Optimization: the group is the baseline, there is no value model."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.logprobs import kl_estimate
from jaxrl_llm.losses.aggregate import aggregate
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.surrogate import clipped_surrogate_loss, importance_ratio
from jaxrl_llm.types import WeightedSum


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
    """GRPO as published (DeepSeekMath, https://arxiv.org/abs/2402.03300)."""

    kl_coef: float = 0.04


def grpo_loss(
    logp_t: Float[Array, "B G T"],
    old_logp_t: Float[Array, "B G T"],
    ref_logp_t: Float[Array, "B G T"],
    adv: Float[Array, "B G"],
    mask: Bool[Array, "B G T"],
    *,
    clip: float = 0.2,
    kl_coef: float = 0.04,
) -> WeightedSum:
    """GRPO's objective, negated to be minimised, with `advantages.group_normalized`.

      L(θ) = 1/G Σᵢ 1/|oᵢ| Σₜ [ −min(rᵢₜ Âᵢ, clip(rᵢₜ, 1−ε, 1+ε) Âᵢ) + β·k3ᵢₜ ]

    with rᵢₜ = π_θ/π_old of token t of completion i and k3 the estimate of KL(π_θ ‖ π_ref).
    `objective.policy_loss` with `GRPOConfig()` is this function; here it is for loops of your own.

    References:
        Shao et al. 2024 (DeepSeekMath), eq. 3 and 4, https://arxiv.org/abs/2402.03300
    """
    ratio_t = importance_ratio(logp_t, old_logp_t, mask)
    adv_t = jnp.broadcast_to(adv[..., None], mask.shape)
    loss_t = clipped_surrogate_loss(ratio_t, adv_t, clip_low=clip, clip_high=clip)
    sampled = jnp.where(mask, logp_t, 0.0), jnp.where(mask, ref_logp_t, 0.0)
    loss_t += kl_coef * kl_estimate(*sampled, "k3")
    return aggregate(loss_t, mask, "sequence")
