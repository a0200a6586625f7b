"""Group Relative Policy Optimization, the whole objective."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.advantages import group_normalized
from jaxrl_llm.logprobs import KLEstimator, kl_estimate
from jaxrl_llm.losses.aggregate import Aggregation, aggregate
from jaxrl_llm.losses.regularizers import update_diagnostics
from jaxrl_llm.losses.surrogate import clipped_surrogate_loss
from jaxrl_llm.types import Algorithm, Batch, Completions, ConfigError, LossOutput, Scores


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """GRPO as published (DeepSeekMath, https://arxiv.org/abs/2402.03300)."""

    clip_low: float = 0.2
    """ε_low: the ratio's lower clip is 1 − ε_low."""
    clip_high: float = 0.2
    """ε_high: the ratio's upper clip is 1 + ε_high."""
    kl_coef: float = 0.04
    """β: weight of the KL to the reference policy, in the loss (0: no reference is kept)."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that KL; the paper's is k3."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, per nat; the paper has none."""
    aggregation: Aggregation = "sequence"
    """Average of the per-token losses: token, sequence (the paper's) or constant."""
    advantage_ddof: int = 1
    """Degrees of freedom taken off the group's standard deviation, 0 or 1."""
    advantage_eps: float = 1e-6
    """Added to the group's standard deviation, in units of the reward."""
    mask_dead_groups: bool = False
    """Leave groups of equal rewards out of the loss, so that not even their KL is trained."""

    def __post_init__(self):
        if not 0.0 <= self.clip_low < 1.0 or self.clip_high < 0.0:
            raise ConfigError(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected "
                "0 <= clip_low < 1 and clip_high >= 0, for example 0.2 and 0.2"
            )
        if self.kl_coef < 0.0:
            raise ConfigError(
                f"kl_coef={self.kl_coef}: a negative coefficient pushes the policy away from the "
                "reference; use 0 to switch the term off"
            )


def grpo_advantages(
    rewards: Float[Array, "B G"], completions: Completions, config: GRPOConfig
) -> Float[Array, "B G T"]:
    """Every token of a completion gets its reward, normalised in the group."""
    adv = group_normalized(rewards, ddof=config.advantage_ddof, eps=config.advantage_eps)
    return jnp.broadcast_to(adv[..., None], completions.tokens.shape)


def grpo_loss(scores: Scores, batch: Batch, config: GRPOConfig) -> LossOutput:
    """GRPO's objective, negated to be minimised.

      L(θ) = 1/G Σᵢ 1/|oᵢ| Σₜ [ −min(rᵢₜ Âᵢ, clip(rᵢₜ, 1−ε_low, 1+ε_high) Âᵢ) + β·k3ᵢₜ ]

    with rᵢₜ = π_θ/π_old of token t of completion i and k3 the estimate of KL(π_θ ‖ π_ref).

    References:
        Shao et al. 2024 (DeepSeekMath), eq. 3 and 4, https://arxiv.org/abs/2402.03300
    """
    mask = batch.completions.loss_mask
    # Replaced before exp: an overflow at a masked position would be a NaN in the gradient.
    logp_t, entropy_t, ref_logp_t = (
        jnp.where(mask, x, 0.0) for x in (scores.logp_t, scores.entropy_t, batch.ref_logp_t)
    )
    if config.mask_dead_groups:
        is_alive = (batch.adv_t != 0).any((1, 2))
        mask &= is_alive[:, None, None]
    loss_t = clipped_surrogate_loss(
        logp_t,
        batch.completions.logprobs,
        batch.adv_t,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    loss_t += config.kl_coef * kl_estimate(logp_t, ref_logp_t, config.kl_estimator)
    loss_t -= config.entropy_coef * entropy_t
    diagnostics = update_diagnostics(
        scores, batch, clip_low=config.clip_low, clip_high=config.clip_high
    )
    return LossOutput(aggregate(loss_t, mask, config.aggregation), *diagnostics)


def grpo(config: GRPOConfig) -> Algorithm:
    """GRPO for `training.make_iteration`."""
    return Algorithm(
        advantages=lambda rewards, completions: grpo_advantages(rewards, completions, config),
        loss=lambda scores, batch: grpo_loss(scores, batch, config),
        needs_reference=config.kl_coef > 0,
    )
