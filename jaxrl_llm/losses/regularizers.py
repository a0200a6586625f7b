"""Regularisers that stand beside the surrogate."""

import jax
from jaxtyping import Array, Float


def jacobian_drift(
    tangent_t: Float[Array, "*b T D"], old_tangent_t: Float[Array, "*b T D"], *, eps: float = 1e-8
) -> Float[Array, "*b T"]:
    """How much the Jacobian of the hidden states has changed along one random direction.

      dₜ = ‖J_θ(e)u − J_old(e)u‖² / (‖J_old(e)u‖² + δ)

    J(e) is the derivative of the last hidden states with respect to the embeddings e of the
    completion's tokens, both taken at the old policy's e; u is random on the completion's
    positions. dₜ ≥ 0, and exactly 0 with gradient 0 at θ = θ_old.

    Args:
        tangent_t: J_θ(e)u at the position that predicts token t, differentiated.
        old_tangent_t: J_old(e)u there; 0 at the first token, which only the prompt predicts.
        eps: δ.
    """
    old_tangent_t = jax.lax.stop_gradient(old_tangent_t)
    moved_t = ((tangent_t - old_tangent_t) ** 2).sum(-1)
    return moved_t / ((old_tangent_t**2).sum(-1) + eps)
