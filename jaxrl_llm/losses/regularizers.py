"""Diagnostics and regularisers that stand beside the surrogate."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.logprobs import kl_estimate
from jaxrl_llm.masking import masked_max, masked_sum
from jaxrl_llm.types import Batch, Scores, WeightedSum


def update_diagnostics(
    scores: Scores, batch: Batch, *, clip_low: float, clip_high: float
) -> tuple[dict[str, WeightedSum], dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """How far the policy has moved from the one that sampled, and from the reference.

    Returns:
        Token averages (entropy, k1 and k3 to the reference, ratio, fraction of tokens whose
        surrogate is cut at the lower and at the upper bound), maxima and minima.
    """
    logp_t, entropy_t = scores
    mask, adv_t = batch.completions.loss_mask, batch.adv_t
    gap_t = logp_t - batch.completions.logprobs
    ratio_t = jnp.exp(gap_t)
    of_tokens = {
        "policy/entropy": entropy_t,
        "policy/kl_k1": kl_estimate(logp_t, batch.ref_logp_t, "k1"),
        "policy/kl_k3": kl_estimate(logp_t, batch.ref_logp_t, "k3"),
        "policy/ratio_mean": ratio_t,
        "policy/clip_fraction_low": (ratio_t < 1.0 - clip_low) & (adv_t < 0),
        "policy/clip_fraction_high": (ratio_t > 1.0 + clip_high) & (adv_t > 0),
    }
    means = {name: masked_sum(x.astype(jnp.float32), mask) for name, x in of_tokens.items()}
    maxima = {
        "policy/ratio_max": masked_max(ratio_t, mask),
        "policy/logprob_gap": masked_max(jnp.abs(gap_t), mask),
    }
    minima = {"policy/ratio_min": -masked_max(-ratio_t, mask)}
    return means, maxima, minima
