"""Sampler × environment: problems drawn, completions sampled and rewarded, wholly on the device."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jaxtyping import Array, Float, Key

from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.sampling import SamplingConfig, sample
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


def make_rollout(
    env: "Environment",
    env_params: Any,
    model: LanguageModel,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    prompts: int,
    group_size: int,
) -> RolloutFn:
    """A pure function `(params, key) -> Rollout` of B = prompts problems × G completions.

    Problem b is drawn with fold_in(reset key, b), completion g of it with
    fold_in(fold_in(sample key, b), g): what a row draws does not depend on how many rows there are
    or on which device they lie.

    The environment follows gymnax: its observation is a `Prompts` of one row, its action one
    completion's tokens `[T]`, its `step_env` returns the reward and an info of scalars.
    """

    def rollout(params: Params, key: Key[Array, ""]) -> Rollout:
        reset_key, sample_key, step_key = jax.random.split(key, 3)
        observed, states = jax.vmap(env.reset_env, in_axes=(0, None))(
            row_keys(reset_key, prompts), env_params
        )
        completions = sample(
            params,
            model,
            observed,
            jax.vmap(lambda k: row_keys(k, group_size))(row_keys(sample_key, prompts)),
            sampling,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
        )
        step_keys = jax.vmap(lambda k: row_keys(k, group_size))(row_keys(step_key, prompts))
        step = jax.vmap(jax.vmap(env.step_env, in_axes=(0, None, 0, None)), in_axes=(0, 0, 0, None))
        _, _, rewards, _, info = step(step_keys, states, completions.tokens, env_params)
        return Rollout(observed, completions, rewards, info)

    return rollout


def row_keys(key: Key[Array, ""], n: int) -> Key[Array, "n"]:
    """fold_in(key, 0 … n−1)."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jax.numpy.arange(n))
