"""The value model's loss, one value per token."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.masking import masked_sum


def clipped_value_loss(
    value_t: Float[Array, "*b T"],
    old_value_t: Float[Array, "*b T"],
    return_t: Float[Array, "*b T"],
    *,
    clip: float | None,
) -> Float[Array, "*b T"]:
    """PPO's value loss, pessimistic about moves of more than ε from the old prediction.

      ℓₜ = ½ max((V − R)², (clip(V, V_old−ε, V_old+ε) − R)²)

    Args:
        value_t: V(sₜ), differentiated.
        old_value_t: V_old(sₜ), before the updates.
        return_t: R, the target.
        clip: ε, in units of the return; None for the plain squared error.

    References:
        Huang et al. 2024 (RLHF details), detail 18, https://arxiv.org/abs/2403.17031
    """
    error_t = (value_t - return_t) ** 2
    if clip is not None:
        clipped_t = old_value_t + jnp.clip(value_t - old_value_t, -clip, clip)
        error_t = jnp.maximum(error_t, (clipped_t - return_t) ** 2)
    return 0.5 * error_t


def explained_variance(
    value_t: Float[Array, "*b T"],
    return_t: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """1 − Var(R − V)/Var(R) over the selected tokens: 1 is perfect, 0 no better than a constant."""

    def variance(x):
        mean = masked_sum(x, mask).mean(axis_name)
        return masked_sum((x - mean) ** 2, mask).mean(axis_name)

    total = variance(return_t)
    return jnp.where(total > 0, 1.0 - variance(return_t - value_t) / total, 0.0)
