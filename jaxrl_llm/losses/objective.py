"""The objective of the whole family: advantages before the updates, one loss per token in them.

  L(θ) = agg [ wₜ·ℓₜ(θ) + β·KLₜ − c₂·Hₜ + c₁·Vₜ + λ·dₜ ]

ℓ is a surrogate, w the truncated importance weight of stale tokens, KL the estimate to the
reference, H the entropy, V the value loss and d the Jacobian drift. Everything is per token and
aggregated once. `losses/ppo.py`, `grpo.py`, `dapo.py` and `family.py` name the published points.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import controllers
from jaxrl_llm.advantages import (
    gae,
    group_centered,
    group_normalized,
    leave_one_out,
    soft_overlong_penalty,
    token_rewards,
    whiten,
)
from jaxrl_llm.logprobs import kl_estimate
from jaxrl_llm.losses.aggregate import aggregate
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.regularizers import jacobian_drift
from jaxrl_llm.losses.surrogate import (
    cispo_loss,
    clipped_surrogate_loss,
    importance_ratio,
    truncated_importance_weight,
)
from jaxrl_llm.losses.value import clipped_value_loss
from jaxrl_llm.masking import masked_max, masked_sum
from jaxrl_llm.types import Algorithm, Batch, KLController, LossOutput, Scores


def with_advantages(
    batch: Batch,
    rewards: Float[Array, "B G"],
    kl_coef: Float[Array, ""],
    axis_name: str | None,
    *,
    config: AlgorithmConfig,
) -> Batch:
    """The batch with advantages, and with the value model's targets where there is one.

    The soft overlong penalty is added to the reward first. A KL in the reward is charged to each
    token where rewards are per token (gae, reward_to_go), else to the completion as a whole.
    """
    completions = batch.completions
    mask = completions.loss_mask
    if config.overlong_cache > 0:
        rewards = rewards + config.overlong_penalty * soft_overlong_penalty(
            mask.sum(-1), max_length=mask.shape[-1], cache=config.overlong_cache
        )
    penalty_t = jnp.zeros(mask.shape)
    if config.kl_in == "reward" and batch.ref_logp_t is not None:
        kl_t = kl_estimate(completions.logprobs, batch.ref_logp_t, config.kl_estimator)
        penalty_t = kl_coef * jnp.where(mask, kl_t, 0.0)

    return_t = None
    if config.advantage in ("gae", "reward_to_go"):
        reward_t = token_rewards(rewards, mask) - penalty_t
        if config.advantage == "gae":
            assert batch.value_t is not None, "gae needs the predictions of a value model"
            adv_t = gae(reward_t, batch.value_t, mask, gamma=config.gamma, lam=config.gae_lambda)
            return_t = adv_t + batch.value_t
        else:
            adv_t = gae(reward_t, jnp.zeros(mask.shape), mask, gamma=config.gamma, lam=1.0)
    else:
        of_group = {
            "group_normalized": functools.partial(
                group_normalized, ddof=config.advantage_ddof, eps=config.advantage_eps
            ),
            "group_centered": group_centered,
            "leave_one_out": leave_one_out,
        }[config.advantage]
        adv = of_group(rewards - penalty_t.sum(-1))
        adv_t = jnp.where(mask, adv[..., None], 0.0)
    if config.whiten:
        adv_t = whiten(adv_t, mask, axis_name=axis_name)
    return batch._replace(adv_t=adv_t, return_t=return_t)


def policy_loss(
    scores: Scores, batch: Batch, kl_coef: Float[Array, ""], *, config: AlgorithmConfig
) -> LossOutput:
    """The objective of one minibatch, to be minimised, with what is logged of it.

    Args:
        scores: of the current parameters, differentiated.
        batch: with advantages.
        kl_coef: β of this update.
        config: which terms, and their weights.
    """
    mask = batch.completions.loss_mask

    def sampled(x):
        # Replaced before exp: an overflow at a masked position would be a NaN in the gradient.
        return jnp.where(mask, x, 0.0)

    logp_t, entropy_t, old_logp_t = map(
        sampled, (scores.logp_t, scores.entropy_t, batch.old_logp_t)
    )
    behavior_logp_t = sampled(batch.completions.logprobs)
    adv_t = batch.adv_t
    assert adv_t is not None, "estimate the advantages first: algorithm.advantages(batch, ...)"
    ratio_t = importance_ratio(logp_t, old_logp_t, mask, config.ratio)
    logged = {"policy/entropy": entropy_t, "policy/ratio_mean": ratio_t}
    logged |= clip_fractions(ratio_t, adv_t, config)

    if config.surrogate == "clipped":
        loss_t = clipped_surrogate_loss(
            ratio_t,
            adv_t,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
    elif config.surrogate == "cispo":
        loss_t = cispo_loss(ratio_t, logp_t, adv_t, clip_high=config.clip_high)
    else:
        loss_t = -ratio_t * adv_t
    if config.importance_cap is not None:
        weight_t = truncated_importance_weight(
            old_logp_t, behavior_logp_t, cap=config.importance_cap
        )
        loss_t = weight_t * loss_t
        logged["policy/importance_weight"] = weight_t
    if batch.ref_logp_t is not None:
        ref_logp_t = sampled(batch.ref_logp_t)
        logged["policy/kl_k1"] = kl_estimate(logp_t, ref_logp_t, "k1")
        logged["policy/kl_k3"] = kl_estimate(logp_t, ref_logp_t, "k3")
        if config.kl_in == "loss":
            loss_t += kl_coef * kl_estimate(logp_t, ref_logp_t, config.kl_estimator)
    loss_t -= config.entropy_coef * entropy_t
    if scores.value_t is not None:
        value_t, old_value_t, return_t = map(
            sampled, (scores.value_t, batch.value_t, batch.return_t)
        )
        logged["value/loss"] = clipped_value_loss(
            value_t, old_value_t, return_t, clip=config.value_clip
        )
        loss_t += config.value_coef * logged["value/loss"]
    if scores.tangent_t is not None and batch.drift is not None:
        tangents = scores.tangent_t, batch.drift.old_tangent_t
        logged["policy/jacobian_drift"] = jacobian_drift(
            *(jnp.where(mask[..., None], x, 0.0) for x in tangents)
        )
        loss_t += config.grad_reg_coeff * logged["policy/jacobian_drift"]

    means = {name: masked_sum(x.astype(jnp.float32), mask) for name, x in logged.items()}
    maxima = {
        "policy/ratio_max": masked_max(ratio_t, mask),
        "policy/logprob_gap": masked_max(jnp.abs(logp_t - behavior_logp_t), mask),
    }
    minima = {"policy/ratio_min": -masked_max(-ratio_t, mask)}
    return LossOutput(aggregate(loss_t, mask, config.aggregation), means, maxima, minima)


def clip_fractions(
    ratio_t: Float[Array, "B G T"], adv_t: Float[Array, "B G T"], config: AlgorithmConfig
) -> dict[str, Bool[Array, "B G T"]]:
    """Which tokens are cut at the lower and at the upper bound of their surrogate."""
    nowhere = jnp.zeros(ratio_t.shape, bool)
    too_high = ratio_t > 1.0 + config.clip_high
    low, high = {
        "clipped": ((ratio_t < 1.0 - config.clip_low) & (adv_t < 0), too_high & (adv_t > 0)),
        "cispo": (nowhere, too_high),
        "unclipped": (nowhere, nowhere),
    }[config.surrogate]
    if config.dual_clip is not None:
        high |= (ratio_t > config.dual_clip) & (adv_t < 0)
    return {"policy/clip_fraction_low": low, "policy/clip_fraction_high": high}


def make_controller(config: AlgorithmConfig, iterations: int) -> KLController:
    """The rule for β over `iterations` updates of it."""
    if config.kl_schedule == "linear":
        return controllers.linear(
            config.kl_coef, iterations, target=config.kl_target, horizon=config.kl_horizon
        )
    if config.kl_schedule == "adaptive" and config.kl_target is not None:
        return controllers.adaptive(
            config.kl_coef, target=config.kl_target, horizon=config.kl_horizon
        )
    return controllers.fixed(config.kl_coef)


def make_algorithm(
    config: AlgorithmConfig, *, iterations: int, needs_reference: bool | None = None
) -> Algorithm:
    """What `training.make_iteration` runs.

    Args:
        config: a preset, such as `GRPOConfig()`, or any other combination.
        iterations: of the whole run; a linear KL schedule ends there.
        needs_reference: instead of the config's own, where its coefficients are traced.
    """
    if needs_reference is None:
        needs_reference = config.needs_reference
    return Algorithm(
        advantages=functools.partial(with_advantages, config=config),
        loss=functools.partial(policy_loss, config=config),
        kl=make_controller(config, iterations),
        needs_reference=needs_reference,
        critic=config.value_model if config.advantage == "gae" else None,
        needs_drift=config.grad_reg_coeff > 0,
        rescores_old=config.importance_cap is not None,
        masks_dead_groups=config.mask_dead_groups,
        sampling_rounds=config.max_sampling_rounds if config.dynamic_sampling else 1,
    )
