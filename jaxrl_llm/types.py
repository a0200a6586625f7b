"""The data that flows through the library, and the letters that name its axes.

B  prompts            G  completions per prompt    P  prompt length (left-padded)
T  completion length  V  vocabulary                L  layers
H  query heads        K  key/value heads           E  head width
D  model width        S  positions fed at once     U  positions held in a key/value cache
R  query heads per key/value head (H / K)
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

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


class Drift(NamedTuple):
    """Where and along what the Jacobian of the hidden states is compared with the old policy's."""

    embeddings: Float[Array, "B G T D"]  # of the completion's tokens, under the old policy
    direction: Float[Array, "B G T D"]  # u: random, of norm 1 in each completion
    old_tangent_t: Float[Array, "B G T D"]  # J_old·u at the hidden state that predicts token t


class Batch(NamedTuple):
    """What policy updates are computed from: a rollout, and what was known of it before them."""

    prompts: Prompts
    completions: Completions  # its logprobs are those of the policy that sampled
    old_logp_t: Float[Array, "B G T"]  # nats, under π_old, which the ratio is taken to
    ref_logp_t: Float[Array, "B G T"] | None = None  # nats, under the reference policy
    value_t: Float[Array, "B G T"] | None = None  # the value model's prediction before the updates
    drift: Drift | None = None
    adv_t: Float[Array, "B G T"] | None = None  # 0 where not sampled
    return_t: Float[Array, "B G T"] | None = None  # what the value model should have predicted


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
    """What the current parameters say of a batch's completions."""

    logp_t: Float[Array, "B G T"]  # nats
    entropy_t: Float[Array, "B G T"]  # nats
    value_t: Float[Array, "B G T"] | None = None  # expected return before token t
    tangent_t: Float[Array, "B G T D"] | None = None  # J·u, as `Drift.old_tangent_t`


class LossOutput(NamedTuple):
    """An objective's value, and what is worth logging beside it, ready to be added up."""

    loss: WeightedSum
    means: dict[str, WeightedSum]
    maxima: dict[str, Float[Array, ""]]
    minima: dict[str, Float[Array, ""]]


class KLState(NamedTuple):
    """State of a KL controller."""

    coef: Float[Array, ""]  # β of the coming update
    scale: Float[Array, ""]  # what the distance to the target made of β, as a factor
    step: Int[Array, ""]  # updates seen


class KLController(NamedTuple):
    """A rule for the KL coefficient β, as a pure `(init, update)` pair."""

    init: Callable[[], KLState]
    update: Callable[[KLState, Float[Array, ""]], KLState]  # given the measured KL, nats per token


class Algorithm(NamedTuple):
    """What distinguishes one algorithm from another: pure functions, and what they need to know.

    `losses.objective.make_algorithm(config)` makes one; `training.make_iteration` runs it.
    """

    # (batch without advantages, rewards [B, G], β, device axis) -> batch with advantages
    advantages: Callable[[Batch, Float[Array, "B G"], Float[Array, ""], str | None], Batch]
    # (scores, batch, β) -> objective
    loss: Callable[[Scores, Batch, Float[Array, ""]], LossOutput]
    kl: KLController
    needs_reference: bool = False
    critic: Literal["head", "separate"] | None = None  # the kind of value model, if any
    needs_drift: bool = False  # Jacobian drift: Batch.drift and Scores.tangent_t
    rescores_old: bool = False  # π_old is the policy before the updates, not the one that sampled
    masks_dead_groups: bool = False  # groups of equal rewards get no weight
    sampling_rounds: int = 1  # rollouts of an iteration at most, until all groups are alive
