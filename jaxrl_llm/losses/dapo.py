"""Decoupled Clip and Dynamic sAmpling Policy Optimization."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.aggregate import Aggregation, aggregate
from jaxrl_llm.losses.config import AlgorithmConfig, KLPlace
from jaxrl_llm.losses.surrogate import clipped_surrogate_loss, importance_ratio
from jaxrl_llm.types import WeightedSum


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(AlgorithmConfig):
    """DAPO as published (https://arxiv.org/abs/2503.14476).

    Its soft overlong penalty is in tokens and so depends on the task: `overlong_cache` is a fifth
    of the longest completion in the paper, and 0 (off) here.
    """

    clip_high: float = 0.28
    aggregation: Aggregation = "token"
    kl_in: KLPlace = "none"
    dynamic_sampling: bool = True


def dapo_loss(
    logp_t: Float[Array, "B G T"],
    old_logp_t: Float[Array, "B G T"],
    adv: Float[Array, "B G"],
    mask: Bool[Array, "B G T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> WeightedSum:
    """DAPO's objective, negated to be minimised, with `advantages.group_normalized`.

      L(θ) = −1/Σ|oᵢ| Σᵢₜ min(rᵢₜ Âᵢ, clip(rᵢₜ, 1−ε_low, 1+ε_high) Âᵢ)

    over groups whose rewards differ (`rollout.sample_until_alive`).
    `objective.policy_loss` with `DAPOConfig()` is this function; here it is for loops of your own.

    References:
        Yu et al. 2025 (DAPO), eq. 8, https://arxiv.org/abs/2503.14476
    """
    ratio_t = importance_ratio(logp_t, old_logp_t, mask)
    adv_t = jnp.broadcast_to(adv[..., None], mask.shape)
    loss_t = clipped_surrogate_loss(ratio_t, adv_t, clip_low=clip_low, clip_high=clip_high)
    return aggregate(loss_t, mask, "token")
