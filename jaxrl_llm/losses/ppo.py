"""Proximal Policy Optimization, in the form used for language models: one action per token."""

from dataclasses import dataclass

from jaxtyping import Array, Bool, Float

from jaxrl_llm.logprobs import KLEstimator
from jaxrl_llm.losses.aggregate import Aggregation, aggregate
from jaxrl_llm.losses.config import Advantage, AlgorithmConfig, KLPlace
from jaxrl_llm.losses.surrogate import clipped_surrogate_loss, importance_ratio
from jaxrl_llm.losses.value import clipped_value_loss
from jaxrl_llm.types import WeightedSum


@dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig):
    """PPO as in RLHF: a value model, whitened GAE, the KL in the reward.

    References:
        Huang et al. 2024 (RLHF details), https://arxiv.org/abs/2403.17031
    """

    advantage: Advantage = "gae"
    whiten: bool = True
    aggregation: Aggregation = "token"
    kl_in: KLPlace = "reward"
    kl_coef: float = 0.05
    kl_estimator: KLEstimator = "k1"


def ppo_loss(
    logp_t: Float[Array, "B G T"],
    old_logp_t: Float[Array, "B G T"],
    adv_t: Float[Array, "B G T"],
    value_t: Float[Array, "B G T"],
    old_value_t: Float[Array, "B G T"],
    return_t: Float[Array, "B G T"],
    entropy_t: Float[Array, "B G T"],
    mask: Bool[Array, "B G T"],
    *,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    value_coef: float = 0.1,
    entropy_coef: float = 0.0,
) -> WeightedSum:
    """PPO's objective, negated to be minimised, with advantages from `advantages.gae`.

      L(θ) = 1/Σ|oᵢ| Σᵢₜ [ −min(rᵢₜ Âᵢₜ, clip(rᵢₜ, 1−ε, 1+ε) Âᵢₜ) + c₁ Vᵢₜ − c₂ Hᵢₜ ]
      Vᵢₜ  = ½ max((V − R)², (clip(V, V_old−ε_v, V_old+ε_v) − R)²)

    `objective.policy_loss` with `PPOConfig()` is this function; here it is for loops of your own.

    References:
        Schulman et al. 2017, eq. 9, https://arxiv.org/abs/1707.06347
    """
    ratio_t = importance_ratio(logp_t, old_logp_t, mask)
    loss_t = clipped_surrogate_loss(ratio_t, adv_t, clip_low=clip, clip_high=clip)
    loss_t += value_coef * clipped_value_loss(value_t, old_value_t, return_t, clip=value_clip)
    loss_t -= entropy_coef * entropy_t
    return aggregate(loss_t, mask, "token")
