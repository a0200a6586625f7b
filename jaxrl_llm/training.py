"""From rollout to a better policy: the update step and the iteration, one pure function each."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key

from jaxrl_llm.logprobs import kl_estimate, token_logprobs
from jaxrl_llm.losses.value import explained_variance
from jaxrl_llm.masking import masked_sum
from jaxrl_llm.models import critic as critics
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.optimizer import Trained, skipped_updates
from jaxrl_llm.parallel import prompt_keys
from jaxrl_llm.rollout import (
    Metrics,
    Rollout,
    RolloutFn,
    completion_keys,
    mask_dead_groups,
    rollout_metrics,
    sample_until_alive,
)
from jaxrl_llm.types import (
    Algorithm,
    Batch,
    Completions,
    ConfigError,
    Drift,
    KLState,
    LossOutput,
    Prompts,
    Scores,
)


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
        parts = deal(batch, microbatches)

        def body(grads, part):
            part_grads, out = gradient(part)
            return jax.tree.map(jnp.add, grads, part_grads), out

        grads, outs = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        out = LossOutput(
            loss=jax.tree.map(lambda x: x.sum(0), outs.loss),
            means=jax.tree.map(lambda x: x.sum(0), outs.means),
            maxima=jax.tree.map(lambda x: x.max(0), outs.maxima),
            minima=jax.tree.map(lambda x: x.min(0), outs.minima),
        )
    loss = out.loss.psum(axis_name)
    scale = 1.0 / jnp.where(loss.weight > 0, loss.weight, 1.0)
    maxima, minima = out.maxima, out.minima
    if axis_name is not None:
        grads = jax.lax.psum(grads, axis_name)
        maxima, minima = jax.lax.pmax(maxima, axis_name), jax.lax.pmin(minima, axis_name)
    grads = jax.tree.map(lambda g: g * scale, grads)
    metrics = {name: value.mean(axis_name) for name, value in out.means.items()}
    return grads, metrics | maxima | minima | {"loss": loss.mean()}


def deal(tree: Any, n: int) -> Any:
    """Deal out the rows of every leaf like cards, [N, …] → [n, N/n, …]: part i gets i, i + n, ….

    Of rows that are spread over devices in order, every part then has equally many on each.
    """
    return jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), tree)


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

    params: Params  # the policy's
    opt_state: optax.OptState  # of Trained(params, critic)
    ref_params: Params | None  # the reference policy, unless it is `params` without adapters
    key: Key[Array, ""]  # the run's; iteration i uses fold_in(key, i)
    iteration: Int[Array, ""]
    critic: Params | None = None  # the value model, where the algorithm has one
    lagged_params: Params | None = None  # the policy that samples, where it is an iteration old
    kl: KLState | None = None  # of the KL controller; None in supervised training


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
    rollout_lag: Literal[0, 1] = 0
    """1: train on what the policy before the last iteration's updates has sampled, as when sampling
    and training overlap; algorithm.importance_cap corrects for it."""
    minibatches: int = 1
    """Updates per pass; divides `prompts`, groups stay whole."""
    microbatches: int = 4
    """Parts in which each update's gradient is accumulated: less memory, same result; on a CPU
    parts that fit its cache are faster."""
    iterations_per_call: int = 10
    """Iterations inside one compiled call, between two looks of the host."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1 and name != "rollout_lag":
                raise ConfigError(f"{name}={value}: expected at least 1")
        if self.rollout_lag not in (0, 1):
            raise ConfigError(f"rollout_lag={self.rollout_lag}: expected 0 or 1")
        parts = self.minibatches * self.microbatches
        if self.prompts % parts:
            raise ConfigError(
                f"prompts={self.prompts} cannot be cut into minibatches={self.minibatches} × "
                f"microbatches={self.microbatches} equal parts: make prompts a multiple of {parts}"
            )

    @property
    def microbatch(self) -> int:
        """Prompts whose gradient is taken at once."""
        return self.prompts // (self.minibatches * self.microbatches)

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps in one iteration."""
        return self.epochs * self.minibatches

    @property
    def updates(self) -> int:
        """Optimizer steps in the whole run."""
        return self.iterations * self.updates_per_rollout


def score(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    completions: Completions,
    *,
    temperature: float = 1.0,
    critic: Params | None = None,
    drift: Drift | None = None,
) -> Scores:
    """Log-probability and entropy of every completion token, at the sampler's temperature.

    With a critic also its values; with a drift also the Jacobian along its direction.
    """
    hidden = model.completion_hidden(params, prompts, completions)
    logp_t, entropy_t = token_logprobs(
        hidden, model.head(params), completions.tokens, temperature=temperature
    )
    value_t = tangent_t = None
    if critic is not None:
        value_t = critics.values(critic, model, prompts, completions, hidden)
    if drift is not None:
        tangent_t = model.completion_tangent(
            params, prompts, completions, drift.embeddings, drift.direction
        )
    return Scores(logp_t, entropy_t, value_t, tangent_t)


def make_drift(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    completions: Completions,
    key: Key[Array, ""],
    axis_name: str | None = None,
) -> Drift:
    """A random direction of norm 1 for each completion, and the Jacobian of `params` along it."""
    b, g, t = completions.tokens.shape
    keys = completion_keys(key, b, g, axis_name)
    normal = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (t, model.config.width))))(keys)
    normal = jnp.where(completions.attention_mask[..., None], normal, 0.0)
    norm = jnp.sqrt((normal**2).sum((-2, -1), keepdims=True))
    embeddings = model.embed(params, completions.tokens)
    direction = (normal / jnp.where(norm > 0, norm, 1.0)).astype(embeddings.dtype)
    tangent_t = model.completion_tangent(params, prompts, completions, embeddings, direction)
    return Drift(embeddings, direction, tangent_t)


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    *,
    model: LanguageModel | None = None,
    algorithm: Algorithm | None = None,
    rollout_lag: int = 0,
) -> TrainState:
    """Start from `params`, which also become the reference policy where one is needed.

    Where they have adapters (`models.lora`), only these are trained.

    Args:
        params: the policy's.
        optimizer: as in `make_iteration`.
        key: of the whole run.
        model: the policy's functions, for a value model.
        algorithm: as in `make_iteration`; None for supervised training.
        rollout_lag: as in `TrainConfig`.
    """
    changing, frozen = lora.partition(params)

    def copy(wanted: bool) -> Params | None:
        return lora.combine(jax.tree.map(jnp.copy, changing), frozen) if wanted else None

    critic = None
    if algorithm is not None and algorithm.critic is not None:
        assert model is not None, "a value model is made for a policy: pass model"
        critic = critics.init_critic(algorithm.critic, model, params)
    return TrainState(
        params=params,
        opt_state=optimizer.init(Trained(changing, critic)),  # type: ignore[arg-type]
        ref_params=copy(algorithm is not None and algorithm.needs_reference and frozen is None),
        key=key,
        iteration=jnp.int32(0),
        critic=critic,
        lagged_params=copy(rollout_lag == 1),
        kl=None if algorithm is None else algorithm.kl.init(),
    )


def detach(state: TrainState) -> tuple[TrainState, Any]:
    """(the state without the frozen weights, the frozen weights): they are kept once, unchanged.

    Without adapters nothing is frozen: (state, None).
    """
    changing, frozen = lora.partition(state.params)
    lagged = state.lagged_params
    lagged = None if lagged is None else lora.partition(lagged)[0]
    return dataclasses.replace(state, params=changing, lagged_params=lagged), frozen


def attach(state: TrainState, frozen: Any) -> TrainState:
    """Undo `detach`."""
    lagged = state.lagged_params
    return dataclasses.replace(
        state,
        params=lora.combine(state.params, frozen),
        lagged_params=None if lagged is None else lora.combine(lagged, frozen),
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

    It can be jitted with its state donated, scanned over (`scan_iterations`) and mapped over
    `axis_name`; the rollout then is of each device's part of `config.prompts`.
    """
    draw = make_draw(rollout, algorithm, axis_name)

    def score_batch(params, batch, critic=None, drift=None) -> Scores:
        return score(
            params,
            model,
            batch.prompts,
            batch.completions,
            temperature=temperature,
            critic=critic,
            drift=drift,
        )

    def prepare(state: TrainState, rolled: Rollout, drift_key) -> Batch:
        """Score the rollout with everything that stays fixed during its updates."""
        prompts, completions = rolled.prompts, rolled.completions
        batch = Batch(prompts, completions, old_logp_t=completions.logprobs)
        if algorithm.needs_reference:
            reference = state.ref_params
            if reference is None:
                reference = lora.without_adapters(state.params)
            batch = batch._replace(ref_logp_t=score_batch(reference, batch).logp_t)
        if algorithm.critic is not None or algorithm.rescores_old:
            old = score_batch(state.params, batch, state.critic)
            batch = batch._replace(value_t=old.value_t)
            if algorithm.rescores_old:
                batch = batch._replace(old_logp_t=old.logp_t)
        if algorithm.needs_drift:
            sampler = sampling_params(state)
            drift = make_drift(sampler, model, prompts, completions, drift_key, axis_name)
            batch = batch._replace(drift=drift)
        return batch

    def next_kl(kl: KLState, batch: Batch, metrics: Metrics) -> KLState:
        """The controller's next state; without a token there is nothing that it could learn."""
        updated = algorithm.kl.update(kl, metrics.get("kl/rollout", jnp.zeros(())))
        counted = masked_sum(batch.old_logp_t, batch.completions.loss_mask).psum(axis_name)
        return jax.tree.map(lambda new, old: jnp.where(counted.weight > 0, new, old), updated, kl)

    def iteration(state: TrainState) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.iteration)
        rollout_key, order_key, drift_key = jax.random.split(key, 3)
        assert state.kl is not None, "the state is one of supervised training: pass algorithm"
        kl_coef = state.kl.coef
        rolled, drawn_metrics = draw(sampling_params(state), rollout_key)
        batch = prepare(state, rolled, drift_key)
        batch = algorithm.advantages(batch, rolled.rewards, kl_coef, axis_name)
        changing, frozen = lora.partition(state.params)

        def objective(trained: Trained, part: Batch) -> LossOutput:
            policy = lora.combine(trained.policy, frozen)
            scores = score_batch(policy, part, trained.critic, part.drift)
            return algorithm.loss(scores, part, kl_coef)

        update = make_update_step(
            objective, optimizer, microbatches=config.microbatches, axis_name=axis_name
        )

        def minibatch_step(carry, places):
            trained, opt_state = carry
            chosen = take_minibatch(batch, places, config.minibatches)
            trained, opt_state, metrics = update(trained, opt_state, chosen)
            return (trained, opt_state), metrics

        (trained, opt_state), metrics = jax.lax.scan(
            minibatch_step,
            (Trained(changing, state.critic), state.opt_state),
            minibatch_order(order_key, config, len(rolled.rewards), axis_name),
        )
        metrics = over_updates(metrics) | drawn_metrics | batch_metrics(batch, axis_name)
        metrics["optimizer/skipped_updates"] = skipped_updates(opt_state)
        if algorithm.needs_reference:
            metrics["kl/coef"] = kl_coef
        new_state = dataclasses.replace(
            state,
            params=lora.combine(trained.policy, frozen),
            critic=trained.critic,
            opt_state=opt_state,
            iteration=state.iteration + 1,
            lagged_params=None if state.lagged_params is None else state.params,
            kl=next_kl(state.kl, batch, metrics),
        )
        return new_state, metrics

    return iteration


def sampling_params(state: TrainState) -> Params:
    """The policy that samples: the newest, or the one before it where rollouts lag."""
    return state.params if state.lagged_params is None else state.lagged_params


def make_draw(
    rollout: RolloutFn, algorithm: Algorithm, axis_name: str | None = None
) -> Callable[[Params, Key[Array, ""]], tuple[Rollout, Metrics]]:
    """`(params, key) -> (the groups to train on, metrics of all groups drawn)`."""
    if algorithm.sampling_rounds > 1:
        return sample_until_alive(rollout, algorithm.sampling_rounds, axis_name)

    def draw(params, key):
        rolled = rollout(params, key)
        metrics = rollout_metrics(rolled, axis_name)
        return mask_dead_groups(rolled) if algorithm.masks_dead_groups else rolled, metrics

    return draw


def batch_metrics(batch: Batch, axis_name: str | None) -> Metrics:
    """What was known before the updates: advantages, KL of the rollout, quality of the values."""
    mask, adv_t = batch.completions.loss_mask, batch.adv_t
    assert adv_t is not None
    mean_square = masked_sum(adv_t**2, mask).mean(axis_name)
    mean = masked_sum(adv_t, mask).mean(axis_name)
    metrics = {"advantage/std": jnp.sqrt(jnp.maximum(mean_square - mean**2, 0.0))}
    if batch.ref_logp_t is not None:
        kl_t = kl_estimate(
            jnp.where(mask, batch.old_logp_t, 0.0), jnp.where(mask, batch.ref_logp_t, 0.0)
        )
        metrics["kl/rollout"] = masked_sum(kl_t, mask).mean(axis_name)
    if batch.value_t is not None and batch.return_t is not None:
        metrics["value/mean"] = masked_sum(batch.value_t, mask).mean(axis_name)
        metrics["value/explained_variance"] = explained_variance(
            batch.value_t, batch.return_t, mask, axis_name=axis_name
        )
    return metrics


def minibatch_order(
    key: Key[Array, ""], config: TrainConfig, prompts: int, axis_name: str | None = None
) -> Int[Array, "updates prompts"]:
    """Which prompts each update of an iteration sees: every epoch all of them, dealt out anew.

    Of every n = `config.minibatches` prompts in a row each goes to another minibatch, so prompts
    that are spread over devices in order stay where they are. Entry i of an update is the place
    among the prompts n·i … n·i + n − 1.

    Args:
        key: of the iteration.
        config: epochs and minibatches.
        prompts: how many there are on this device.
        axis_name: mapped device axis.
    """
    n = config.minibatches

    def epoch(key):
        keys = prompt_keys(key, prompts // n, axis_name)
        return jax.vmap(lambda k: jax.random.permutation(k, n), out_axes=1)(keys)

    orders = jax.vmap(epoch)(jax.random.split(key, config.epochs))
    return orders.reshape(config.updates_per_rollout, -1)


def take_minibatch(batch: Any, places: Int[Array, "prompts"], n: int) -> Any:
    """The prompts of an update: one of every n."""
    if n == 1:
        return batch
    take = jax.vmap(lambda rows, place: rows[place])
    return jax.tree.map(lambda x: take(x.reshape(-1, n, *x.shape[1:]), places), batch)


def over_updates(metrics: Metrics) -> Metrics:
    """Summarise an iteration's updates: means, but extremes where a mean would hide them.

    The log-prob gap is taken at the first update, where the policy still is the one that sampled.
    Where no token was trained on, because every group was dead, extremes are 0, as means are.
    """
    reduce = {
        "policy/ratio_max": jnp.max,
        "policy/ratio_min": jnp.min,
        "policy/logprob_gap": lambda x: x[0],
    }
    of_nothing = {
        "policy/ratio_max": -jnp.inf,
        "policy/ratio_min": jnp.inf,
        "policy/logprob_gap": -jnp.inf,
    }
    reduced = {name: reduce.get(name, jnp.mean)(x) for name, x in metrics.items()}
    return {
        name: jnp.where(x == of_nothing[name], 0.0, x) if name in of_nothing else x
        for name, x in reduced.items()
    }


def scan_iterations(
    iteration: Callable[[TrainState], tuple[TrainState, Metrics]], length: int
) -> Callable[[TrainState], tuple[TrainState, dict[str, Float[Array, "length"]]]]:
    """`length` iterations as one program; metrics gain a leading axis."""

    def call(state):
        return jax.lax.scan(lambda s, _: iteration(s), state, length=length)

    return call
