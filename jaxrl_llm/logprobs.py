"""Token log-probabilities and entropies from hidden states, and estimators of the KL divergence."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.parallel import row_shards

KLEstimator = Literal["k1", "k2", "k3"]


def select(values: Float[Array, "*b V"], tokens: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """values[..., tokens], written as a masked sum.

    It fuses with what made the values and its gradient is no scatter.
    """
    is_token = tokens[..., None] == jnp.arange(values.shape[-1]).reshape((1,) * tokens.ndim + (-1,))
    return jnp.where(is_token, values, 0.0).sum(-1)


def logprob_and_entropy(
    logits: Float[Array, "*b V"], tokens: Int[Array, "*b"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """log softmax(logits)[token] and −Σ p log p, both in nats and in float32."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return select(logp, tokens), -(jnp.exp(logp) * logp).sum(-1)


def token_logprobs(
    hidden: Float[Array, "*b D"],
    head: Float[Array, "D V"],
    tokens: Int[Array, "*b"],
    *,
    temperature: float | Array = 1.0,
    max_logits: int = 2**24,
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Log-probability of each token and entropy of its distribution, chunk by chunk.

      log π(a) = log softmax(h·W / τ)[a]

    Logits exist for one chunk of positions at a time, in the backward pass too (they are computed
    again there), so memory does not grow with positions × vocabulary.

    Args:
        hidden: the hidden state that predicts each token.
        head: the output projection W; its dtype is the matmul's, the result is float32.
        tokens: the tokens to score.
        temperature: τ, the sampler's, so that both are the same policy.
        max_logits: how many logits may exist at once (4 bytes each), on each device of a mesh.

    Returns:
        Log-probabilities and entropies in nats, shaped like `tokens`.
    """

    def score(chunk):
        chunk_hidden, chunk_tokens = chunk
        logits = jnp.matmul(chunk_hidden, head, preferred_element_type=jnp.float32) / temperature
        return logprob_and_entropy(logits, chunk_tokens)

    # A chunk has some of every device's positions.
    shards = row_shards(len(tokens))
    count = tokens.size // shards
    size = min(count, max(1, max_logits // head.shape[1]))
    n_chunks = -(-count // size)
    pad = n_chunks * size - count

    def cut(x):
        flat = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return flat.reshape(shards, n_chunks, size, *x.shape[2:]).swapaxes(0, 1)

    chunks = cut(hidden.reshape(shards, count, -1)), cut(tokens.reshape(shards, count))
    if n_chunks == 1:
        scored = jax.tree.map(lambda x: x[None], score((chunks[0][0], chunks[1][0])))
    else:
        scored = jax.lax.map(jax.checkpoint(score), chunks)
    logp, entropy = (
        x.swapaxes(0, 1).reshape(shards, -1)[:, :count].reshape(tokens.shape) for x in scored
    )
    return logp, entropy


def kl_estimate(
    logp_t: Float[Array, "*b T"], ref_logp_t: Float[Array, "*b T"], estimator: KLEstimator = "k3"
) -> Float[Array, "*b T"]:
    """Per-token estimates of KL(π_θ ‖ π_ref) from tokens sampled by π_θ.

      log ρ = log π_ref − log π_θ;   k1 = −log ρ,   k2 = ½ (log ρ)²,   k3 = ρ − 1 − log ρ

    As *estimates* k1 and k3 are unbiased, k2 is not, and only k1 can be negative. As *losses* under
    their own samples they differ: k1's gradient has mean zero (it does nothing but add noise),
    k2's is the reverse KL's, k3's is the gradient of the forward KL(π_ref ‖ π_θ).

    Args:
        logp_t: log π_θ in nats, differentiated.
        ref_logp_t: log π_ref of the same tokens.
        estimator: "k1", "k2" or "k3".

    Returns:
        One estimate per token, in nats.

    References:
        Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    log_rho = ref_logp_t - logp_t
    if estimator == "k1":
        return -log_rho
    if estimator == "k2":
        return 0.5 * log_rho**2
    return jnp.expm1(log_rho) - log_rho
