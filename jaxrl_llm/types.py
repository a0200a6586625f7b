"""The data that flows through the library, and the letters that name its axes.

B  prompts            G  completions per prompt    P  prompt length (left-padded)
T  completion length  V  vocabulary                L  layers
H  query heads        K  key/value heads           E  head width
D  model width        S  positions fed at once     U  positions held in a key/value cache
R  query heads per key/value head (H / K)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class ConfigError(Exception):
    """A setting or an input that cannot work.

    The message is one line for the person who typed it: what is wrong, what was expected, what
    to type instead. Command lines print it and exit with status 2.
    """


class Prompts(NamedTuple):
    """Left-padded prompts: the last position of every row is a real token."""

    tokens: Int[Array, "*B P"]
    mask: Bool[Array, "*B P"]


class Completions(NamedTuple):
    """G completions of each of B prompts, right-padded."""

    tokens: Int[Array, "B G T"]
    loss_mask: Bool[Array, "B G T"]  # sampled by the policy (the end token included)
    attention_mask: Bool[Array, "B G T"]  # real: sampled, or written by the environment
    logprobs: Float[Array, "B G T"]  # nats, under the sampling policy; 0 where not sampled


class Batch(NamedTuple):
    """What one policy update is computed from."""

    prompts: Prompts
    completions: Completions
    adv_t: Float[Array, "B G T"]
    ref_logp_t: Float[Array, "B G T"]  # nats, under the reference policy; 0 without one


class KeyValues(NamedTuple):
    """Keys and values of one layer (or of all, with a leading L), heads first.

    A prompt's are `[B, K, P, E]`, computed once for its G completions; a completion's own are
    `[B, K, G, U, E]`.
    """

    keys: Float[Array, "*B K U E"]
    values: Float[Array, "*B K U E"]


class WeightedSum(NamedTuple):
    """A sum and its weight, kept apart until everything has been added.

    Devices and microbatches hold different numbers of tokens, so means of means are wrong: add
    totals and weights first (`+`, `psum`), divide once.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: "WeightedSum") -> "WeightedSum":  # type: ignore[override]
        return WeightedSum(self.total + other.total, self.weight + other.weight)

    def psum(self, axis_name: str | None) -> "WeightedSum":
        """Sum over a mapped device axis; the identity when `axis_name` is None."""
        if axis_name is None:
            return self
        return WeightedSum(*jax.lax.psum(tuple(self), axis_name))

    def mean(self, axis_name: str | None = None) -> Float[Array, ""]:
        """total / weight over all devices of `axis_name`; 0 when the weight is 0."""
        total, weight = self.psum(axis_name)
        return total / jnp.where(weight > 0, weight, 1.0)


class Scores(NamedTuple):
    """What the current policy says of a batch's completions."""

    logp_t: Float[Array, "B G T"]  # nats
    entropy_t: Float[Array, "B G T"]  # nats


class LossOutput(NamedTuple):
    """An objective's value, and what is worth logging beside it, ready to be added up."""

    loss: WeightedSum
    means: dict[str, WeightedSum]
    maxima: dict[str, Float[Array, ""]]
    minima: dict[str, Float[Array, ""]]


class Algorithm(NamedTuple):
    """What distinguishes one algorithm from another: two pure functions and what they need.

    `losses.grpo.grpo(config)` and its siblings make one.
    """

    advantages: Callable[[Float[Array, "B G"], Completions], Float[Array, "B G T"]]
    loss: Callable[[Scores, Batch], LossOutput]
    needs_reference: bool
