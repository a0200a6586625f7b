"""Policy-gradient surrogates, one value per token."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def clipped_surrogate_loss(
    logp_t: Float[Array, "*b T"],
    old_logp_t: Float[Array, "*b T"],
    adv_t: Float[Array, "*b T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*b T"]:
    """PPO's clipped surrogate loss.

      ℓₜ(θ) = −min(rₜ Âₜ, clip(rₜ, 1−ε_low, 1+ε_high) Âₜ),   rₜ = π_θ(aₜ|sₜ) / π_old(aₜ|sₜ)

    PPO and GRPO use ε_low = ε_high; DAPO's "clip-higher" uses ε_high > ε_low.

    Args:
        logp_t: log π_θ(aₜ|sₜ) in nats, differentiated.
        old_logp_t: log π_old(aₜ|sₜ) of the policy that sampled the tokens.
        adv_t: advantages Âₜ.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, ≥ 0.

    Returns:
        Per-token losses; mask and reduce them with `losses.aggregate`.

    References:
        Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
        Yu et al. 2025 (DAPO), eq. 8, https://arxiv.org/abs/2503.14476
    """
    ratio_t = jnp.exp(logp_t - old_logp_t)
    clipped_t = jnp.clip(ratio_t, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_t * adv_t, clipped_t * adv_t)
