"""Policy-gradient surrogates, one value per token."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

RatioLevel = Literal["token", "sequence", "sequence_mean"]
Surrogate = Literal["clipped", "unclipped", "cispo"]

MAX_LOG_RATIO = 20.0  # beyond it only overflow is left: e²⁰ ≈ 5e8


def importance_ratio(
    logp_t: Float[Array, "*b T"],
    old_logp_t: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    level: RatioLevel = "token",
) -> Float[Array, "*b T"]:
    """How much more likely the current policy makes what the old one sampled.

      token          rₜ = π_θ(aₜ|sₜ) / π_old(aₜ|sₜ)                     (PPO, GRPO, DAPO)
      sequence       r = Πₜ rₜ, the same at every token                  (RLOO)
      sequence_mean  r = (Πₜ rₜ)^(1/|o|), the same at every token        (GSPO)

    Args:
        logp_t: log π_θ in nats, differentiated.
        old_logp_t: log π_old of the same tokens.
        mask: the tokens that the policy sampled; the ratio is 1 elsewhere at level "token".
        level: what the ratio is of.

    Returns:
        One ratio per token. Its logarithm is cut at ±20.

    References:
        Zheng et al. 2025 (GSPO), eq. 7, https://arxiv.org/abs/2507.18071
    """
    log_ratio_t = jnp.where(mask, logp_t - old_logp_t, 0.0)
    if level != "token":
        total = log_ratio_t.sum(-1, keepdims=True)
        if level == "sequence_mean":
            total /= jnp.maximum(mask.sum(-1, keepdims=True), 1)
        log_ratio_t = jnp.broadcast_to(total, log_ratio_t.shape)
    return jnp.exp(jnp.clip(log_ratio_t, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate_loss(
    ratio_t: Float[Array, "*b T"],
    adv_t: Float[Array, "*b T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "*b T"]:
    """PPO's clipped surrogate loss.

      ℓₜ(θ) = −min(rₜ Âₜ, clip(rₜ, 1−ε_low, 1+ε_high) Âₜ)

    PPO and GRPO use ε_low = ε_high; DAPO's "clip-higher" uses ε_high > ε_low. Dual clip bounds the
    loss where Âₜ < 0 and rₜ is large, which the minimum does not: there ℓₜ = min(ℓₜ, −c Âₜ).

    Args:
        ratio_t: rₜ, of `importance_ratio`.
        adv_t: advantages Âₜ.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, ≥ 0.
        dual_clip: c > 1, or None for no second clip.

    Returns:
        Per-token losses; mask and reduce them with `losses.aggregate`.

    References:
        Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
        Yu et al. 2025 (DAPO), eq. 8, https://arxiv.org/abs/2503.14476
        Ye et al. 2020 (dual clip), eq. 3, https://arxiv.org/abs/1912.09729
    """
    clipped_t = jnp.clip(ratio_t, 1.0 - clip_low, 1.0 + clip_high)
    gain_t = jnp.minimum(ratio_t * adv_t, clipped_t * adv_t)
    if dual_clip is not None:
        gain_t = jnp.where(adv_t < 0, jnp.maximum(gain_t, dual_clip * adv_t), gain_t)
    return -gain_t


def cispo_loss(
    ratio_t: Float[Array, "*b T"],
    logp_t: Float[Array, "*b T"],
    adv_t: Float[Array, "*b T"],
    *,
    clip_high: float,
) -> Float[Array, "*b T"]:
    """CISPO's loss: a truncated importance weight on log π, so that no token loses its gradient.

      ℓₜ(θ) = −sg(min(rₜ, 1+ε_high)) Âₜ log π_θ(aₜ|sₜ)

    sg stops the gradient. Several updates on one rollout are so corrected by their truncated
    importance weights.

    References:
        MiniMax 2025 (M1), eq. 4 and 5, https://arxiv.org/abs/2506.13585
    """
    weight_t = jax.lax.stop_gradient(jnp.minimum(ratio_t, 1.0 + clip_high))
    return -weight_t * adv_t * logp_t


def truncated_importance_weight(
    old_logp_t: Float[Array, "*b T"], behavior_logp_t: Float[Array, "*b T"], *, cap: float
) -> Float[Array, "*b T"]:
    """Weight of a token that a stale or differently computed policy has sampled.

      wₜ = min(π_old(aₜ|sₜ) / π_behavior(aₜ|sₜ), C)

    π_old is the policy before the updates, which the clipped ratio is taken to; π_behavior the one
    that sampled. The weight multiplies the surrogate, and no gradient passes through it.

    Args:
        old_logp_t: log π_old in nats.
        behavior_logp_t: log π_behavior in nats.
        cap: C ≥ 1.

    References:
        Espeholt et al. 2018 (IMPALA), section 4.1, https://arxiv.org/abs/1802.01561
        Hilton et al. 2021 (decoupled objective), eq. 5, https://arxiv.org/abs/2110.00641
    """
    log_weight_t = jnp.clip(old_logp_t - behavior_logp_t, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_weight_t), cap))
