"""Attention over [shared prompt prefix | own completion]: XLA's, or cuDNN's, which is fused."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import ConfigError, KeyValues

Backend = Literal["auto", "xla", "cudnn"]

# Finite, so that a row that may attend to nothing (padding) gets a uniform average, not NaN.
MASKED_SCORE = -1e30


def choose_backend(asked: Backend, dtype: str, head_size: int, device: Any) -> Backend:
    """xla or cudnn: what was asked for, or what suits the device.

    cuDNN computes in bfloat16, for heads of up to 128 numbers, on GPUs since Ampere.

    Args:
        asked: auto takes cudnn where it can, and xla elsewhere.
        dtype: of the computation.
        head_size: width E of one head.
        device: of JAX.

    Raises:
        ConfigError: cudnn is asked for where it cannot.
    """
    capability = float(getattr(device, "compute_capability", 0.0))
    if device.platform != "gpu" or capability < 8.0:
        reason = f"{device.device_kind} is no NVIDIA GPU since Ampere"
    elif dtype != "bfloat16":
        reason = f"the computation is in {dtype}; set dtype=bfloat16"
    elif head_size % 8 or head_size > 128:
        reason = f"heads have {head_size} numbers, and not a multiple of 8 up to 128"
    else:
        return "xla" if asked == "xla" else "cudnn"
    if asked == "cudnn":
        raise ConfigError(f"attention=cudnn cannot be: {reason}; or leave it at auto")
    return "xla"


def attend(
    queries: Float[Array, "B K R G S E"],
    own: KeyValues,
    own_mask: Bool[Array, "B G S U"],
    prefix: KeyValues | None = None,
    prefix_mask: Bool[Array, "B P"] | None = None,
) -> Float[Array, "B K R G S E"]:
    """Softmax attention over [shared prompt prefix | own completion].

    The prefix is read once for the whole group: its scores are one matmul of all G·S queries with
    the P keys. The two parts are normalised together without being concatenated.

    Args:
        queries: S queries of each completion, R to each key/value head.
        own: the completion's keys and values, `[B, K, G, U, E]`.
        own_mask: which of the U own positions each query may see.
        prefix: the prompt's keys and values, `[B, K, P, E]`.
        prefix_mask: which of the P prompt positions are real.
    """
    queries = queries * queries.shape[-1] ** -0.5

    def scores(equation, keys, mask):
        return jnp.where(mask, einsum_float32(equation, queries, keys), MASKED_SCORE)

    parts = [
        (scores("bkrgse,bkgue->bkrgsu", own.keys, own_mask[:, None, None]), own.values, "bkgue")
    ]
    if prefix is not None:
        assert prefix_mask is not None
        mask = prefix_mask[:, None, None, None, None]
        parts.append((scores("bkrgse,bkue->bkrgsu", prefix.keys, mask), prefix.values, "bkue"))
    top = jax.lax.stop_gradient(
        jnp.stack([part.max(-1, keepdims=True) for part, _, _ in parts]).max(0)
    )
    numerator, denominator = jnp.float32(0), jnp.float32(0)
    for part, values, axes in parts:
        weights = jnp.exp(part - top)
        denominator += weights.sum(-1, keepdims=True)
        weights = weights.astype(values.dtype)
        numerator += einsum_float32(f"bkrgsu,{axes}->bkrgse", weights, values)
    return (numerator / denominator).astype(queries.dtype)


def einsum_float32(equation: str, x: Array, y: Array) -> Array:
    """Of operands of any type, with sums and result in float32.

    On the CPU these are converted before: XLA has no such product of bfloat16 for small sizes in a
    loop there, and fails when it runs.
    """
    if jax.default_backend() == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def fused_attend(
    queries: Float[Array, "B K R G S E"],
    own: KeyValues,
    own_mask: Bool[Array, "B G S U"],
    prefix: KeyValues | None = None,
    prefix_mask: Bool[Array, "B P"] | None = None,
    *,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "B K R G S E"]:
    """`attend` as one call of `jax.nn.dot_product_attention`.

    Scores are never in memory, but the prompt's keys and values are, once for each completion.
    Queries and keys are padded to even numbers, which cuDNN's backward pass wants.
    """
    b, k, r, g, s, e = queries.shape
    keys, values, mask = (
        own.keys,
        own.values,
        jnp.broadcast_to(own_mask, (b, g, s, own_mask.shape[-1])),
    )
    if prefix is not None:
        assert prefix_mask is not None
        p = prefix_mask.shape[-1]

        def with_prefix(shared, x):
            return jnp.concatenate([jnp.broadcast_to(shared[:, :, None], (b, k, g, p, e)), x], 3)

        keys, values = with_prefix(prefix.keys, keys), with_prefix(prefix.values, values)
        seen = jnp.broadcast_to(prefix_mask[:, None, None], (b, g, s, p))
        mask = jnp.concatenate([seen, mask], 3)

    def rows(x):  # [B, heads, G, S, E] → [B·G, S, heads, E]
        x = x.transpose(0, 2, 3, 1, 4).reshape(b * g, x.shape[3], -1, e)
        return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))

    u = mask.shape[-1]
    mask = jnp.pad(mask.reshape(b * g, 1, s, u), ((0, 0), (0, 0), (0, s % 2), (0, u % 2)))
    mixed = jax.nn.dot_product_attention(
        rows(queries.reshape(b, k * r, g, s, e)),
        rows(keys),
        rows(values),
        mask=mask,
        implementation=implementation,
    )
    return mixed[:, :s].reshape(b, g, s, k, r, e).transpose(0, 3, 4, 1, 2, 5)
