"""What an episode of dialogue is worth, as functions of its statistics."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl_llm.types import ConfigError


@struct.dataclass
class EpisodeStatistics:
    """Counts of one episode; every field is a float32 scalar."""

    questions: Float[Array, ""]  # that the episode has, asked or not
    answered: Float[Array, ""]
    correct: Float[Array, ""]  # answers that are right
    turns: Float[Array, ""]  # of the agent
    tokens: Float[Array, ""]  # of the agent
    calls: Float[Array, ""]  # well-formed calls, of which
    succeeded: Float[Array, ""]  # the tool returned a result
    failed: Float[Array, ""]  # the tool returned an error
    unknown: Float[Array, ""]  # there is no such tool
    redundant: Float[Array, ""]  # the same call was made before
    unnecessary: Float[Array, ""]  # the question needed no (further) call
    malformed: Float[Array, ""]  # turns that are neither call nor answer
    by_tool: Float[Array, "N"]  # calls of each tool


RewardFn = Callable[[EpisodeStatistics], Float[Array, ""]]

CALL_COST = 0.02
PENALTY = 0.1


def task_success(s: EpisodeStatistics) -> Float[Array, ""]:
    """Right answers per question; calls cost nothing."""
    return s.correct / s.questions


def tool_efficiency(s: EpisodeStatistics) -> Float[Array, ""]:
    """Success − 0.02 a call − 0.1 for each redundant, malformed, failing or unnecessary one.

    A call may be penalised for several of these at once.
    """
    wasted = s.redundant + s.malformed + s.failed + s.unknown + s.unnecessary
    return task_success(s) - CALL_COST * s.calls - PENALTY * wasted


def dialogue_quality(s: EpisodeStatistics) -> Float[Array, ""]:
    """½ for answering, ½ for well-formed turns, less what takes over 16 tokens a question."""
    answering = s.answered / s.questions
    protocol = 1.0 - s.malformed / jnp.maximum(s.turns, 1.0)
    rambling = jnp.maximum(s.tokens / (16.0 * s.questions) - 1.0, 0.0)
    return 0.5 * answering + 0.5 * protocol - 0.1 * rambling


REWARDS: dict[str, RewardFn] = {
    "task_success": task_success,
    "tool_efficiency": tool_efficiency,
    "dialogue_quality": dialogue_quality,
}


def make_reward(reward_fn: str | RewardFn | Mapping[str, float]) -> RewardFn:
    """A reward by name, as it is, or as a weighted mix {name: weight}.

    Raises:
        ConfigError: no such reward.
    """
    if callable(reward_fn):
        return reward_fn
    weights = {reward_fn: 1.0} if isinstance(reward_fn, str) else dict(reward_fn)
    unknown = sorted(set(weights) - set(REWARDS))
    if unknown or not weights:
        raise ConfigError(
            f"reward_fn: no reward called {', '.join(unknown) or 'nothing'}; expected "
            f"{', '.join(REWARDS)}, a mapping from these to weights, or a function of "
            "EpisodeStatistics"
        )
    parts = [(weight, REWARDS[name]) for name, weight in weights.items()]
    return lambda s: jnp.stack([weight * reward(s) for weight, reward in parts]).sum()
