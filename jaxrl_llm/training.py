"""From rollout to a better policy: the update step and the iteration, one pure function each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key

from jaxrl_llm.advantages import dead_groups
from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.rollout import Rollout, RolloutFn
from jaxrl_llm.types import Algorithm, Batch, Completions, ConfigError, LossOutput, Prompts, Scores

Metrics = dict[str, Float[Array, ""]]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW behind gradient clipping, with a warm-up."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup: int = 10
    """Updates over which the rate rises from 0; Adam's first steps are large without it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stay, or fall to 0 at the last update."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.99
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's ε."""


def make_schedule(config: OptimizerConfig, total: int) -> optax.Schedule:
    """Learning rate of each of `total` updates."""
    rest = max(total - config.warmup, 1)
    peak = config.learning_rate
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]
    # From 1/warmup, not from 0: the first update should not be thrown away.
    warmup = optax.linear_schedule(peak / max(config.warmup, 1), peak, max(config.warmup - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup])


def make_optimizer(config: OptimizerConfig, total: int) -> optax.GradientTransformation:
    """AdamW; an update with a non-finite gradient is skipped, counted, and changes no moment."""
    inner = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, total),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
    return optax.apply_if_finite(inner, max_consecutive_errors=2**31 - 2)


def skipped_updates(opt_state: optax.ApplyIfFiniteState) -> Int[Array, ""]:
    """How many updates have been skipped for a non-finite gradient."""
    return opt_state.total_notfinite


def accumulate_gradient(
    objective: Callable[[Params, Any], LossOutput],
    params: Params,
    batch: Any,
    *,
    microbatches: int = 1,
    axis_name: str | None = None,
) -> tuple[Params, Metrics]:
    """Gradient and metrics of Σ totals / Σ weights, the same however the batch is cut.

    Totals are differentiated and added up over microbatches and devices, and divided by the
    weight of all of them, once.

    Args:
        objective: loss of one microbatch, as total and weight.
        params: what to differentiate with respect to.
        batch: arrays with a leading axis that `microbatches` divides.
        microbatches: how many parts run one after the other; less memory and smaller working sets.
        axis_name: mapped device axis to sum over.
    """

    def gradient(part):
        def total(params):
            out = objective(params, part)
            return out.loss.total, out

        grads, out = jax.grad(total, has_aux=True)(params)
        return grads, out

    if microbatches == 1:
        grads, out = gradient(batch)
    else:
        parts = split_leading(batch, microbatches)

        def body(grads, part):
            part_grads, out = gradient(part)
            return jax.tree.map(jnp.add, grads, part_grads), out

        grads, outs = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        sums = jax.tree.map(lambda x: x.sum(0), (outs.loss, outs.means))
        maxima = jax.tree.map(lambda x: x.max(0), outs.maxima)
        out = LossOutput(*sums, maxima, jax.tree.map(lambda x: x.min(0), outs.minima))
    loss = out.loss.psum(axis_name)
    scale = 1.0 / jnp.where(loss.weight > 0, loss.weight, 1.0)
    maxima, minima = out.maxima, out.minima
    if axis_name is not None:
        grads = jax.lax.psum(grads, axis_name)
        maxima, minima = jax.lax.pmax(maxima, axis_name), jax.lax.pmin(minima, axis_name)
    grads = jax.tree.map(lambda g: g * scale, grads)
    metrics = {name: value.mean(axis_name) for name, value in out.means.items()}
    return grads, metrics | maxima | minima | {"loss": loss.mean()}


def split_leading(tree: Any, n: int) -> Any:
    """Cut the leading axis of every leaf into n equal parts: [N, …] → [n, N/n, …]."""
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)


def make_update_step(
    objective: Callable[[Params, Any], LossOutput],
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    axis_name: str | None = None,
) -> Callable[[Params, optax.OptState, Any], tuple[Params, optax.OptState, Metrics]]:
    """One optimizer step as a pure function `(params, opt_state, batch)`."""

    def update(params, opt_state, batch):
        grads, metrics = accumulate_gradient(
            objective, params, batch, microbatches=microbatches, axis_name=axis_name
        )
        metrics["optimizer/gradient_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return update


@struct.dataclass
class TrainState:
    """All that changes from iteration to iteration; a checkpoint holds exactly this."""

    params: Params
    opt_state: optax.OptState
    ref_params: Params | None  # the frozen reference policy, where the algorithm has one
    key: Key[Array, ""]  # the run's; iteration i uses fold_in(key, i)
    iteration: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sizes and order of the updates."""

    iterations: int = 300
    """Rollout-and-update rounds."""
    prompts: int = 32
    """Problems per rollout, B."""
    group_size: int = 16
    """Completions per problem, G."""
    epochs: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Updates per pass; divides `prompts`, groups stay whole."""
    microbatches: int = 4
    """Parts in which each update's gradient is accumulated: less memory, same result; on a CPU
    parts that fit its cache are faster."""
    iterations_per_call: int = 10
    """Iterations inside one compiled call, between two looks of the host."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1")
        if self.group_size == 1:
            raise ConfigError(
                "group_size=1: a group-relative advantage compares the completions of one prompt, "
                "so it needs at least 2; set group_size=8 or more"
            )
        parts = self.minibatches * self.microbatches
        if self.prompts % parts:
            raise ConfigError(
                f"prompts={self.prompts} cannot be cut into minibatches={self.minibatches} × "
                f"microbatches={self.microbatches} equal parts: make prompts a multiple of {parts}"
            )

    @property
    def updates(self) -> int:
        """Optimizer steps in the whole run."""
        return self.iterations * self.epochs * self.minibatches


def score(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    completions: Completions,
    *,
    temperature: float = 1.0,
) -> Scores:
    """Log-probability and entropy of every completion token, at the sampler's temperature."""
    hidden = model.completion_hidden(params, prompts, completions)
    return Scores(
        *token_logprobs(hidden, model.head(params), completions.tokens, temperature=temperature)
    )


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    *,
    needs_reference: bool = False,
) -> TrainState:
    """Start from `params`, which also become the reference policy where one is needed."""
    reference = jax.tree.map(jnp.copy, params) if needs_reference else None
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        ref_params=reference,
        key=key,
        iteration=jnp.int32(0),
    )


def make_iteration(
    rollout: RolloutFn,
    model: LanguageModel,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    *,
    temperature: float = 1.0,
    axis_name: str | None = None,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """Rollout, reward, advantages, epochs × minibatches of updates: one pure function.

    It can be jitted with its state donated, scanned over (`scan_iterations`) and mapped.
    """

    def objective(params: Params, batch: Batch) -> LossOutput:
        scores = score(params, model, batch.prompts, batch.completions, temperature=temperature)
        return algorithm.loss(scores, batch)

    update = make_update_step(
        objective, optimizer, microbatches=config.microbatches, axis_name=axis_name
    )

    def iteration(state: TrainState) -> tuple[TrainState, Metrics]:
        rollout_key, order_key = jax.random.split(jax.random.fold_in(state.key, state.iteration))
        rolled = rollout(state.params, rollout_key)
        prompts, completions, rewards, _ = rolled
        if algorithm.needs_reference:
            ref_logp_t = score(
                state.ref_params, model, prompts, completions, temperature=temperature
            ).logp_t
        else:
            ref_logp_t = completions.logprobs
        batch = Batch(prompts, completions, algorithm.advantages(rewards, completions), ref_logp_t)

        def minibatch_step(carry, indices):
            params, opt_state = carry
            chosen = jax.tree.map(lambda x: x[indices], batch)
            params, opt_state, metrics = update(params, opt_state, chosen)
            return (params, opt_state), metrics

        order = minibatch_order(order_key, config)
        (params, opt_state), metrics = jax.lax.scan(
            minibatch_step, (state.params, state.opt_state), order
        )
        metrics = over_updates(metrics) | rollout_metrics(rolled)
        metrics["optimizer/skipped_updates"] = skipped_updates(opt_state)
        state = state.replace(params=params, opt_state=opt_state, iteration=state.iteration + 1)
        return state, metrics

    return iteration


def minibatch_order(key: Key[Array, ""], config: TrainConfig) -> Int[Array, "updates prompts"]:
    """Which prompts each update of an iteration sees: every epoch all of them, in a new order."""
    keys = jax.random.split(key, config.epochs)
    orders = jax.vmap(lambda k: jax.random.permutation(k, config.prompts))(keys)
    return orders.reshape(config.epochs * config.minibatches, -1)


def over_updates(metrics: Metrics) -> Metrics:
    """Summarise an iteration's updates: means, but extremes where a mean would hide them.

    The log-prob gap is taken at the first update, where the policy still is the one that sampled.
    """
    reduce = {
        "policy/ratio_max": jnp.max,
        "policy/ratio_min": jnp.min,
        "policy/logprob_gap": lambda x: x[0],
    }
    return {name: reduce.get(name, jnp.mean)(x) for name, x in metrics.items()}


def rollout_metrics(rolled: Rollout) -> Metrics:
    """What the samples looked like before anything was learned from them."""
    lengths = rolled.completions.loss_mask.sum(-1).astype(jnp.float32)
    info = {f"rollout/{name.removeprefix('is_')}": x.mean() for name, x in rolled.info.items()}
    return info | {
        "reward/mean": rolled.rewards.mean(),
        "reward/std": rolled.rewards.std(),
        "reward/dead_groups": dead_groups(rolled.rewards).mean(),
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/tokens": lengths.sum(),
    }


def scan_iterations(
    iteration: Callable[[TrainState], tuple[TrainState, Metrics]], length: int
) -> Callable[[TrainState], tuple[TrainState, dict[str, Float[Array, "length"]]]]:
    """`length` iterations as one program; metrics gain a leading axis."""

    def call(state):
        return jax.lax.scan(lambda s, _: iteration(s), state, length=length)

    return call
