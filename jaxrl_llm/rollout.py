"""Sampler × environment: problems drawn, completions sampled and rewarded, wholly on the device."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxrl_llm.advantages import dead_groups
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.parallel import prompt_keys, shard_rows
from jaxrl_llm.sampling import Dialogue, Reply, SamplingConfig, sample, sample_dialogue
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import Completions, Prompts

if TYPE_CHECKING:  # importing gymnax starts JAX's devices, too early for some programs
    from gymnax.environments.environment import Environment


class Rollout(NamedTuple):
    """What one round of sampling produced."""

    prompts: Prompts
    completions: Completions
    rewards: Float[Array, "B G"]
    info: dict[str, Float[Array, "B G"]]  # what the environment reports of each completion


RolloutFn = Callable[[Params, Key[Array, ""]], Rollout]
Metrics = dict[str, Float[Array, ""]]


def make_rollout(
    env: "Environment",
    env_params: Any,
    model: LanguageModel,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    prompts: int,
    group_size: int,
    axis_name: Any = None,
) -> RolloutFn:
    """A pure function `(params, key) -> Rollout` of B = prompts problems × G completions.

    Problem b is drawn with fold_in(reset key, b), completion g of it with
    fold_in(fold_in(sample key, b), g): what a row draws does not depend on how many rows there are
    or on which device they lie. Mapped over `axis_name`, each device draws `prompts` of them.

    The environment follows gymnax: its observation is a `Prompts` of one row, its action tokens,
    its `step_env` returns the reward and an info of scalars. One without `max_turns`, or with 1,
    is stepped once, with the whole completion `[T]`. One with more is stepped within the sampling
    loop, at the end of each turn of at most `max_turn_tokens` tokens `[A]`; what it observes then
    is what it writes into the transcript, rewards are added up, and the last info counts, to
    which `is_truncated` is added.
    """
    if getattr(env, "max_turns", 1) > 1:
        return make_dialogue_rollout(
            env,
            env_params,
            model,
            tokenizer,
            sampling,
            prompts=prompts,
            group_size=group_size,
            axis_name=axis_name,
        )

    def rollout(params: Params, key: Key[Array, ""]) -> Rollout:
        reset_key, sample_key, step_key = jax.random.split(key, 3)
        observed: Any
        observed, states = jax.vmap(env.reset_env, in_axes=(0, None))(
            prompt_keys(reset_key, prompts, axis_name), env_params
        )
        completions = sample(
            params,
            model,
            shard_rows(observed),
            completion_keys(sample_key, prompts, group_size, axis_name),
            sampling,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
        )
        step_keys = completion_keys(step_key, prompts, group_size, axis_name)
        step = jax.vmap(jax.vmap(env.step_env, in_axes=(0, None, 0, None)), in_axes=(0, 0, 0, None))
        _, _, rewards, _, info = step(step_keys, states, completions.tokens, env_params)
        return Rollout(observed, completions, rewards, info)

    return rollout


def make_dialogue_rollout(
    env: Any,
    env_params: Any,
    model: LanguageModel,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    prompts: int,
    group_size: int,
    axis_name: Any = None,
) -> RolloutFn:
    """`make_rollout` for an environment of several turns."""
    shape = prompts, group_size
    step = jax.vmap(jax.vmap(env.step_env, in_axes=(0, 0, 0, None)), in_axes=(0, 0, 0, None))

    def rollout(params: Params, key: Key[Array, ""]) -> Rollout:
        keys = jax.random.split(key, 3)
        reset_keys = prompt_keys(keys[0], prompts, axis_name)
        sample_keys, step_keys = (
            completion_keys(k, prompts, group_size, axis_name) for k in keys[1:]
        )
        observed, states = jax.vmap(env.reset_env, in_axes=(0, None))(reset_keys, env_params)

        def reply(states: Any, turns: Int[Array, "B G A"], t: Int[Array, ""]) -> Reply:
            turn_keys = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, t)))(step_keys)
            written, states, rewards, is_terminated, info = step(
                turn_keys, states, turns, env_params
            )
            return Reply(states, written, rewards, is_terminated, info)

        per_row = jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, None], (*shape, *x.shape[1:])), states
        )
        completions, last = sample_dialogue(
            params,
            model,
            shard_rows(observed),
            sample_keys,
            sampling,
            Dialogue(reply, per_row, env.max_turn_tokens),
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
        )
        info = last.info | {"is_truncated": 1.0 - last.is_terminated}
        return Rollout(observed, completions, last.rewards, info)

    return rollout


def row_keys(key: Key[Array, ""], n: int) -> Key[Array, "n"]:
    """fold_in(key, 0 … n−1)."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))


def completion_keys(
    key: Key[Array, ""], prompts: int, group_size: int, axis_name: Any = None
) -> Key[Array, "B G"]:
    """fold_in(fold_in(key, b), g) for the completions of this device's prompts."""
    keys = prompt_keys(key, prompts, axis_name)
    return jax.vmap(lambda k: row_keys(k, group_size))(keys)


def rollout_metrics(rolled: Rollout, axis_name: str | None = None) -> Metrics:
    """What the samples of all devices looked like before anything was learned from them."""

    def over_devices(reduce, x):
        return x if axis_name is None else reduce(x, axis_name)

    def mean(x):
        return over_devices(jax.lax.pmean, x.mean())  # of equally many on each device

    rewards = rolled.rewards
    lengths = rolled.completions.loss_mask.sum(-1).astype(jnp.float32)
    info = {f"rollout/{name.removeprefix('is_')}": mean(x) for name, x in rolled.info.items()}
    return info | {
        "reward/mean": mean(rewards),
        "reward/std": jnp.sqrt(mean((rewards - mean(rewards)) ** 2)),
        "reward/dead_groups": mean(dead_groups(rewards)),
        "rollout/length_mean": mean(lengths),
        "rollout/length_max": over_devices(jax.lax.pmax, lengths.max()),
        "rollout/tokens": over_devices(jax.lax.psum, lengths.sum()),
    }


def mask_dead_groups(rolled: Rollout) -> Rollout:
    """Give groups of equal rewards no weight in the loss."""
    completions = rolled.completions
    loss_mask = completions.loss_mask & ~dead_groups(rolled.rewards)[:, None, None]
    return rolled._replace(completions=completions._replace(loss_mask=loss_mask))


class Pool(NamedTuple):
    """The carry of dynamic sampling."""

    kept: Rollout  # the first `count` groups are alive
    count: Int[Array, ""]
    rounds: Int[Array, ""]
    totals: Metrics  # rollout metrics added up over the rounds


def sample_until_alive(
    rollout: RolloutFn, max_rounds: int, axis_name: str | None = None
) -> Callable[[Params, Key[Array, ""]], tuple[Rollout, Metrics]]:
    """DAPO's dynamic sampling: roll out again until every group has rewards that differ.

    Each round draws B fresh groups; those whose rewards differ by more than a tolerance fill the
    batch in the order of their drawing, and a surplus is dropped, so all tokens are fresh. Shapes
    are fixed and the number of rounds is bounded: after `max_rounds` the groups that are missing
    are placeholders without weight (`loss_mask` False).

    Args:
        rollout: draws B groups.
        max_rounds: rounds at most, the first included.
        axis_name: mapped device axis: all devices fill one batch together, of which each then
            takes its part, so that it does not depend on their number.

    Returns:
        `(params, key) -> (rollout, metrics)`. Metrics are of all groups drawn, not only of those
        kept; `rollout/rounds` and `rollout/filled` (the fraction of the batch) are added.

    References:
        Yu et al. 2025 (DAPO), section 3.2, https://arxiv.org/abs/2503.14476
    """

    def roll(params: Params, key: Key[Array, ""]) -> Rollout:
        drawn = rollout(params, key)
        return drawn if axis_name is None else jax.lax.all_gather(drawn, axis_name, tiled=True)

    def draw(params: Params, key: Key[Array, ""]) -> tuple[Rollout, Metrics]:
        shapes = jax.eval_shape(lambda: roll(params, key))
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # A prompt of all padding would be an attention over nothing.
        prompts = empty.prompts._replace(mask=jnp.ones_like(empty.prompts.mask))
        n_groups = empty.rewards.shape[0]
        metric_shapes = jax.eval_shape(rollout_metrics, shapes)

        def is_short(pool: Pool):
            return (pool.count < n_groups) & (pool.rounds < max_rounds)

        def one_round(pool: Pool) -> Pool:
            drawn = roll(params, jax.random.fold_in(key, pool.rounds))
            is_alive = ~dead_groups(drawn.rewards)
            place = pool.count + jnp.cumsum(is_alive) - 1
            place = jnp.where(is_alive, place, n_groups)  # out of range: dropped
            kept = jax.tree.map(
                lambda old, new: old.at[place].set(new, mode="drop"), pool.kept, drawn
            )
            metrics = rollout_metrics(drawn)
            longest = jnp.maximum(pool.totals["rollout/length_max"], metrics["rollout/length_max"])
            totals = jax.tree.map(jnp.add, pool.totals, metrics) | {"rollout/length_max": longest}
            count = jnp.minimum(pool.count + is_alive.sum(), n_groups)
            return Pool(kept, count, pool.rounds + 1, totals)

        pool = jax.lax.while_loop(
            is_short,
            one_round,
            Pool(
                empty._replace(prompts=prompts),
                jnp.int32(0),
                jnp.int32(0),
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metric_shapes),
            ),
        )
        sums = ("rollout/tokens", "rollout/length_max")
        metrics = {k: x if k in sums else x / pool.rounds for k, x in pool.totals.items()}
        metrics["rollout/rounds"] = pool.rounds.astype(jnp.float32)
        metrics["rollout/filled"] = pool.count / n_groups
        return shard_rows(own_rows(pool.kept, axis_name)), metrics

    return draw


def own_rows(tree: Any, axis_name: str | None) -> Any:
    """This device's part of arrays that all devices have whole."""
    if axis_name is None:
        return tree
    size, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:])[index], tree)
