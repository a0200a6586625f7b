"""The coefficient β of the KL to the reference: fixed, ramped, or steered to a target distance.

Each controller is a pure `(init, update)` pair. β_k of update k is `state.coef`; the KL measured
there, in nats per token, makes the next state. The state is an array tree and is checkpointed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import KLController, KLState

ERROR_LIMIT = 0.2  # a KL far from its target counts as 20 % off
SCALE_LIMITS = 1e-4, 1e4  # a coefficient can always come back


def initial(coef: float) -> KLState:
    """β = coef before the first update."""
    return KLState(jnp.float32(coef), jnp.float32(1.0), jnp.int32(0))


def factor(kl: Float[Array, ""], target: float, horizon: float) -> Float[Array, ""]:
    """1 + clip(KL/target − 1, −0.2, 0.2) / horizon."""
    return 1.0 + jnp.clip(kl / target - 1.0, -ERROR_LIMIT, ERROR_LIMIT) / horizon


def fixed(coef: float) -> KLController:
    """β_k = β."""
    return KLController(
        lambda: initial(coef), lambda state, kl: state._replace(step=state.step + 1)
    )


def linear(
    max_coef: float, steps: int, *, target: float | None = None, horizon: float = 10.0
) -> KLController:
    """β_k = β_max · k/(N−1) for k = 0 … N−1, and steered under that ceiling when given a target.

      β_k = β_max · k/(N−1) · m_k
      m_{k+1} = min(1, m_k · (1 + clip(KL_k/target − 1, −0.2, 0.2) / horizon))

    Args:
        max_coef: β_max.
        steps: N, updates of the whole run.
        target: KL in nats per token; above it the coefficient tightens, below it relaxes.
        horizon: updates over which a fully clipped error changes m by 20 %.
    """

    def update(state, kl):
        step = state.step + 1
        scale = state.scale
        if target is not None:
            scale = jnp.clip(scale * factor(kl, target, horizon), SCALE_LIMITS[0], 1.0)
        ramp = jnp.minimum(step / max(steps - 1, 1), 1.0)
        return KLState(max_coef * ramp * scale, scale, step)

    return KLController(lambda: initial(0.0), update)


def adaptive(coef: float, *, target: float, horizon: float = 10.0) -> KLController:
    """β_{k+1} = β_k · (1 + clip(KL_k/target − 1, −0.2, 0.2) / horizon).

    Args:
        coef: β_0.
        target: KL in nats per token.
        horizon: updates over which a fully clipped error changes β by 20 %.

    References:
        Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    """

    def update(state, kl):
        scale = jnp.clip(state.scale * factor(kl, target, horizon), *SCALE_LIMITS)
        return KLState(coef * scale, scale, state.step + 1)

    return KLController(lambda: initial(coef), update)
