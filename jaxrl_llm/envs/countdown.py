"""Countdown: combine every number exactly once, with + − × ÷ and parentheses, into the target.

A gymnax environment that runs wholly on the device. An episode is one problem, an action is one
completion. Problems are told apart, and held out, by their key (target, sorted numbers).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from string import Formatter

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxrl_llm.envs import host
from jaxrl_llm.envs.expression import grade
from jaxrl_llm.tokenizers import Tokenizer, tokens_to_bytes
from jaxrl_llm.types import ConfigError, Prompts

MIN_COUNT, MAX_COUNT = 3, 6  # numbers of a problem
MAX_NUMBER, MAX_TARGET = 100, 999
_LISTED_COUNT = 4  # numbers up to which `sft_examples` chooses among all solutions
TRAIN, HELD_OUT, BOTH = 0, 1, -1

Scalar = int | Int[Array, ""]

# Numbers are redrawn this many at a time: the more there are, the dearer is the search and the
# more often it succeeds.
_CANDIDATES = {3: 64, 4: 16, 5: 2}  # 6 numbers become 5
_TURNS_PER_TARGET = 64  # then the target counts as out of reach, and another is drawn
_MAX_TURNS = 8 * _TURNS_PER_TARGET
_CHUNK = 64  # problems drawn at once on behalf of the host
_VALUE_CAP = 1e6  # see `_combine`
_BYTES_PER_TOKEN = 4  # room for a completion's text; longer texts are never correct


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Which problems are drawn, and what answers are worth. Every leaf may be a traced scalar."""

    min_numbers: int = 3
    max_numbers: int = 3
    min_number: int = 1
    max_number: int = 20
    min_target: int = 1
    max_target: int = 100
    reward_missing: float = 0.0
    reward_wrong: float = 0.1
    reward_correct: float = 1.0
    split: int = TRAIN  # or HELD_OUT, or BOTH
    held_out_every: int = 8  # a key is held out when its hash is a multiple of this


@struct.dataclass
class EnvState(environment.EnvState):
    """One problem. `is_solvable` is False only if the tries ran out (see `draw_problem`)."""

    time: Int[Array, ""]
    numbers: Int[Array, "M"]  # in the order of the prompt, padded with zeros
    target: Int[Array, ""]
    is_solvable: Bool[Array, ""]


_PRESETS = {
    "small": EnvParams(),
    # As the generator of the public data set Jiayi-Pan/Countdown-Tasks-3to4 (that of Stream of
    # Search, https://arxiv.org/abs/2404.03683): the target first, then numbers below the largest
    # target until the problem can be solved in integer steps. How often it has 3 and how often 4
    # numbers is not documented: here, equally often.
    "3to4": EnvParams(max_numbers=4, max_number=99, min_target=10),
    "3to6": EnvParams(max_numbers=6, max_number=100, min_target=10),
}


def countdown_params(preset: str = "small", **overrides: int | float) -> EnvParams:
    """A named problem distribution: "small", "3to4" or "3to6".

    `small` has 3 numbers of 1..20 and targets 1..100; `3to4` has 3 or 4 numbers of 1..99 and
    targets 10..100, as the public data set; `3to6` has 3 to 6 numbers of 1..100, same targets.

    >>> countdown_params("3to4", split=HELD_OUT).max_number
    99

    Raises:
        ConfigError: no such preset, or an override that is no field of `EnvParams`.
    """
    if preset not in _PRESETS:
        raise ConfigError(f"unknown preset {preset!r}: expected one of {', '.join(_PRESETS)}")
    unknown = sorted(set(overrides) - set(EnvParams.__dataclass_fields__))
    if unknown:
        raise ConfigError(
            f"unknown Countdown parameters {unknown}: expected some of "
            f"{', '.join(EnvParams.__dataclass_fields__)}"
        )
    return dataclasses.replace(_PRESETS[preset], **overrides)


class Countdown(environment.Environment):
    """The environment, for one tokenizer and static sizes.

    `reset` observes a `Prompts` of one row; `step` takes one completion, tokens `[T]`, of which
    everything after the first end token is ignored, and rewards it (all three are parameters):

      reward_missing   no end token among the T, or nothing but spaces before it
      reward_wrong     an answer that is not exactly right
      reward_correct   well formed, each number used exactly once, value exactly the target

    The info holds `is_present`, `is_correct`, `is_truncated` (no end token) and `is_solvable`
    (see `draw_problem`), each 0 or 1. Special tokens within an answer stand for no text.

    Args:
        tokenizer: must encode the comma as one token, and a number alike wherever it stands.
        max_numbers: M, the most numbers of a problem, 3 to 6. Up to 5, problems are drawn by
            exhaustive search in integer steps; for 6 see `is_reachable`.
        max_completion: T, in tokens, end token included.
        prompt_format: the prompt. Its literal pieces are encoded one by one. The default writes
            "3,7,12=24 ": the space ends the target.

    Raises:
        ConfigError: a size out of range, a character that is not one token, a format that does
            not hold {numbers} and {target} once each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_numbers: int = 3,
        max_completion: int = 16,
        prompt_format: str = "{numbers}={target} ",
    ):
        if not MIN_COUNT <= max_numbers <= MAX_COUNT or max_completion < 1:
            raise ConfigError(
                f"max_numbers={max_numbers}, max_completion={max_completion}: expected "
                f"{MIN_COUNT} to {MAX_COUNT} numbers and at least 1 token"
            )
        self.tokenizer = tokenizer
        self.max_numbers = max_numbers
        self.max_completion = max_completion
        self.prompt_format = prompt_format
        self._pieces = [(tokenizer.encode(text), field) for text, field in _parse(prompt_format)]
        self._number_ids = _encode_integers(tokenizer, MAX_NUMBER)
        self._target_ids = _encode_integers(tokenizer, MAX_TARGET)
        self._comma_id = _single_token(tokenizer, ",")
        self._end_ids = np.array(tokenizer.eos_ids)
        self._token_bytes = tokenizer.token_bytes
        bytes_per_token = min(self._token_bytes.table.shape[1], _BYTES_PER_TOKEN)
        self._max_bytes = max_completion * bytes_per_token

    @property
    def name(self) -> str:
        return "Countdown"

    @property
    def default_params(self) -> EnvParams:
        return countdown_params("small", max_numbers=self.max_numbers)

    @property
    def prompt_length(self) -> int:
        """P: the longest prompt of any problem with M numbers, in tokens."""
        literals = sum(len(ids) for ids, _ in self._pieces)
        number, target = self._number_ids.mask.shape[1], self._target_ids.mask.shape[1]
        return literals + self.max_numbers * (number + 1) - 1 + target

    def prompt_text(self, numbers: Sequence[int], target: int) -> str:
        """The prompt that asks for `target` from `numbers`."""
        return self.prompt_format.format(numbers=",".join(map(str, numbers)), target=target)

    def reset_env(self, key: Key[Array, ""], params: EnvParams) -> tuple[Prompts, EnvState]:
        state = draw_problem(key, params, self.max_numbers)
        return self.render(state.numbers, state.target), state

    def step_env(
        self,
        key: Key[Array, ""],
        state: EnvState,
        action: Int[Array, "T"],
        params: EnvParams,
    ) -> tuple[Prompts, EnvState, Float[Array, ""], Bool[Array, ""], dict[str, Float[Array, ""]]]:
        del key  # nothing is random
        is_end = jnp.isin(action, self._end_ids)
        is_truncated = ~is_end.any()
        text, length = tokens_to_bytes(
            action, jnp.cumsum(is_end) == 0, self._token_bytes, self._max_bytes
        )
        graded = grade(text, length, state.numbers, state.target)
        is_present = graded.is_present & ~is_truncated
        is_correct = graded.is_correct & is_present
        reward_present = jnp.where(is_correct, params.reward_correct, params.reward_wrong)
        reward = jnp.where(is_present, reward_present, params.reward_missing)
        claims = {
            "is_present": is_present,
            "is_correct": is_correct,
            "is_truncated": is_truncated,
            "is_solvable": state.is_solvable,
        }
        return (
            self.render(state.numbers, state.target),
            dataclasses.replace(state, time=state.time + 1),
            reward.astype(jnp.float32),
            jnp.array(True),
            {name: claim.astype(jnp.float32) for name, claim in claims.items()},
        )

    def is_terminated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        return state.time > 0

    def is_truncated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        """Never: an episode ends with its only answer, not by a time limit."""
        return jnp.array(False)

    def action_space(self, params: EnvParams) -> spaces.Box:
        last_id = self.tokenizer.vocab_size - 1
        return spaces.Box(0, last_id, (self.max_completion,), jnp.int32)

    def observation_space(self, params: EnvParams) -> spaces.Dict:
        last_id, shape = self.tokenizer.vocab_size - 1, (self.prompt_length,)
        tokens, mask = spaces.Box(0, last_id, shape, jnp.int32), spaces.Box(0, 1, shape, jnp.bool_)
        return spaces.Dict({"tokens": tokens, "mask": mask})

    def render(self, numbers: Int[Array, "M"], target: Int[Array, ""]) -> Prompts:
        """The left-padded prompt, written from integers inside a compiled program."""
        fields = {
            "numbers": self._render_numbers(numbers),
            "target": jax.tree.map(lambda x: jnp.asarray(x)[target], self._target_ids),
        }
        pieces = []
        for ids, field in self._pieces:
            pieces.append(Prompts(jnp.array(ids, jnp.int32), jnp.ones(len(ids), bool)))
            pieces += [fields[field]] if field else []
        tokens, mask = map(jnp.concatenate, zip(*pieces, strict=True))
        places = jnp.where(mask, self.prompt_length - mask.sum() + jnp.cumsum(mask) - 1, mask.size)
        empty = jnp.full(self.prompt_length, self.tokenizer.pad_id)
        return Prompts(
            empty.at[places].set(tokens, mode="drop"),
            jnp.zeros(self.prompt_length, bool).at[places].set(True, mode="drop"),
        )

    def _render_numbers(self, numbers: Int[Array, "M"]) -> Prompts:
        ids, mask = jax.tree.map(lambda x: jnp.asarray(x)[numbers], self._number_ids)
        commas = jnp.full((self.max_numbers, 1), self._comma_id)
        has_comma = (numbers > 0) & (jnp.arange(self.max_numbers) > 0)
        tokens = jnp.concatenate([commas, ids], axis=1)
        return Prompts(
            tokens.reshape(-1), jnp.concatenate([has_comma[:, None], mask], axis=1).reshape(-1)
        )


def check_params(params: EnvParams, env: Countdown) -> None:
    """Refuse parameters that cannot work: check the ranges, then draw 64 problems.

    Raises:
        ConfigError: an empty range, one outside the environment's bounds, or one in which
            solvable problems of the split are too rare to be found.
    """
    for low, high, least, most in (
        ("min_numbers", "max_numbers", MIN_COUNT, env.max_numbers),
        ("min_number", "max_number", 1, MAX_NUMBER),
        ("min_target", "max_target", 1, MAX_TARGET),
    ):
        lower, upper = getattr(params, low), getattr(params, high)
        if not least <= lower <= upper <= most:
            raise ConfigError(
                f"{low}={lower}, {high}={upper}: expected {least} <= {low} <= {high} <= {most}"
            )
    if params.split not in (TRAIN, HELD_OUT, BOTH) or params.held_out_every < 2:
        raise ConfigError(
            f"split={params.split}, held_out_every={params.held_out_every}: expected a split of "
            f"{TRAIN} (training), {HELD_OUT} (held out) or {BOTH} (both), and at least 2"
        )
    _draw_many(env, params, seed=0, n=_CHUNK)


def draw_problem(key: Key[Array, ""], params: EnvParams, max_numbers: int) -> EnvState:
    """A solvable problem of the requested split.

    Target and count are drawn uniformly first; then numbers are drawn until `is_reachable`. A
    target that 64 turns did not reach is replaced, so that targets are uniform over those within
    reach. After eight such targets the last problem drawn is returned as it is, with `is_solvable`
    False: the loop is bounded, and `check_params` refuses ranges where that happens.
    """
    target_key, numbers_key = jax.random.split(key)

    def is_searching(carry: tuple[Int[Array, ""], EnvState]) -> Bool[Array, ""]:
        turn, state = carry
        return ~state.is_solvable & (turn < _MAX_TURNS)

    def search(carry: tuple[Int[Array, ""], EnvState]) -> tuple[Int[Array, ""], EnvState]:
        turn, _ = carry
        target, count = _draw_target(
            jax.random.fold_in(target_key, turn // _TURNS_PER_TARGET), params
        )
        bits = jax.random.bits(
            jax.random.fold_in(numbers_key, turn), (max_numbers, max(_CANDIDATES.values()))
        )
        drawn = _within(bits, params.min_number, params.max_number)
        numbers = jnp.where(jnp.arange(max_numbers)[:, None] < count, drawn, 0)
        held_out_every = jnp.asarray(params.held_out_every, jnp.uint32)
        is_held_out = problem_key_hash(numbers, target) % held_out_every == 0
        in_split = (params.split == BOTH) | (is_held_out == (params.split == HELD_OUT))
        is_accepted = in_split & is_reachable(numbers, target, count)
        first = jnp.argmax(is_accepted)
        return turn + 1, EnvState(
            time=jnp.int32(0),
            numbers=numbers[:, first],
            target=target,
            is_solvable=is_accepted[first],
        )

    nothing = EnvState(
        time=jnp.int32(0),
        numbers=jnp.zeros(max_numbers, jnp.int32),
        target=jnp.int32(0),
        is_solvable=jnp.array(False),
    )
    return jax.lax.while_loop(is_searching, search, (jnp.int32(0), nothing))[1]


def problem_key_hash(numbers: Int[Array, "M *C"], target: Int[Array, ""]) -> UInt32[Array, "*C"]:
    """The compiled twin of `host.problem_key_hash`, for C problems at once, zero-padded."""
    total = _mix(numbers.astype(jnp.uint32)).sum(axis=0, dtype=jnp.uint32)
    return _mix(total + _mix(target.astype(jnp.uint32) << 8))


def is_reachable(
    numbers: Int[Array, "M C"], target: Int[Array, ""], count: Int[Array, ""]
) -> Bool[Array, "C"]:
    """Whether each candidate's first `count` numbers give the target in integer steps.

    Steps are a+b, |a−b|, a·b and a/b where it divides. With up to 5 numbers the search is
    exhaustive. With 6 the first step is fixed by the problem's hash and the rest is exhaustive:
    what is accepted is solvable, but problems with many solutions are accepted more often.
    The dearer the search, the fewer candidates are looked at; the others count as not reachable.
    """
    values, n_candidates = numbers.astype(jnp.float32), numbers.shape[1]
    if len(numbers) == MAX_COUNT:
        reduced = _take_one_step(values, problem_key_hash(numbers, target))
        values = jnp.where(count == MAX_COUNT, reduced, values[:-1])

    def search(n: int) -> Bool[Array, "C"]:
        is_found = _search(values[:n, : _CANDIDATES[n]], target.astype(jnp.float32))
        return jnp.pad(is_found, (0, n_candidates - is_found.size))

    by_count = jnp.stack([search(n) for n in range(MIN_COUNT, len(values) + 1)])
    return by_count[jnp.minimum(count, len(values)) - MIN_COUNT]


def sft_examples(
    env: Countdown, params: EnvParams, n: int, seed: int, max_completion: int
) -> tuple[Prompts, Int[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]:
    """N training problems, each with one of its solutions, uniformly drawn among the distinct.

    Problems come from the training split, whatever `params.split` says. With 5 or 6 numbers,
    where listing all solutions takes long, it is the first solution that the solver finds.

    Returns:
        Prompts `[N, P]`; completions `[N, T]` with T = `max_completion`, ended by the tokenizer's
        first end token and padded; and the mask of the tokens to learn, end token included.

    Raises:
        ConfigError: a solution is longer than `max_completion`, or a solvable problem is not found.
    """
    problems = _draw_many(env, dataclasses.replace(params, split=TRAIN), seed=seed, n=n)
    prompts = jax.device_get(jax.jit(jax.vmap(env.render))(problems.numbers, problems.target))
    tokens = np.full((n, max_completion), env.tokenizer.pad_id, np.int32)
    mask = np.zeros((n, max_completion), bool)
    choice = np.random.default_rng(seed)
    for row, (numbers, target) in enumerate(zip(problems.numbers, problems.target, strict=True)):
        text = _one_solution(numbers[numbers > 0].tolist(), int(target), choice)
        ids = [*env.tokenizer.encode(text), env.tokenizer.eos_ids[0]]
        if len(ids) > max_completion:
            raise ConfigError(
                f"max_completion={max_completion} cannot hold the solution {text}: "
                f"expected at least {len(ids)} tokens"
            )
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return prompts, tokens, mask


def _one_solution(numbers: list[int], target: int, choice: np.random.Generator) -> str:
    if len(numbers) > _LISTED_COUNT:
        return str(host.solve(numbers, target))
    found = host.solutions(numbers, target)
    return found[choice.integers(len(found))]


def _draw_many(env: Countdown, params: EnvParams, *, seed: int, n: int) -> EnvState:
    """N problems on the host; one compiled program whatever N, and bounded memory."""
    keys = jax.random.split(jax.random.key(seed), (-(-n // _CHUNK), _CHUNK))
    chunks = [jax.device_get(_draw_chunk(chunk, params, env.max_numbers)) for chunk in keys]
    drawn = jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *chunks)
    n_failed = n - int(drawn.is_solvable.sum())
    if n_failed:
        raise ConfigError(
            f"{n_failed} of {n} searches for a solvable problem of split {params.split} failed, "
            f"with {params.min_numbers} to {params.max_numbers} numbers in "
            f"{params.min_number}..{params.max_number} and targets in "
            f"{params.min_target}..{params.max_target}: widen the numbers, or lower the targets"
        )
    return drawn


@partial(jax.jit, static_argnames="max_numbers")
def _draw_chunk(keys: Key[Array, "N"], params: EnvParams, max_numbers: int) -> EnvState:
    return jax.vmap(draw_problem, (0, None, None))(keys, params, max_numbers)


def _draw_target(key: Key[Array, ""], params: EnvParams) -> tuple[Int[Array, ""], Int[Array, ""]]:
    target_bits, count_bits = jax.random.bits(key, (2,))
    target = _within(target_bits, params.min_target, params.max_target)
    return target, _within(count_bits, params.min_numbers, params.max_numbers)


def _within(bits: UInt32[Array, "*C"], low: Scalar, high: Scalar) -> Int[Array, "*C"]:
    """Uniform over low..high, to within (high − low) / 2³²: `randint` costs twice the bits."""
    span = jnp.asarray(high - low + 1, jnp.uint32)
    return low + (bits % span).astype(jnp.int32)


def _mix(word: UInt32[Array, "*C"]) -> UInt32[Array, "*C"]:
    """The 32-bit finalizer of MurmurHash3."""
    word = (word ^ word >> 16) * jnp.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * jnp.uint32(0xC2B2AE35)
    return word ^ word >> 16


# The search keeps lists of integers as float32 arrays, one per place in the list, each [N, C]:
# N lists for each of C candidates. Float32 is exact up to 2²⁴ and, unlike integer division,
# vectorized on CPUs. Negative values are not needed: every |value| is reached without them.


def _search(values: Float[Array, "n C"], target: Float[Array, ""]) -> Bool[Array, "C"]:
    """Whether the target can be reached from n numbers: exhaustive, in integer steps."""
    lists = values[:, None, :]
    while len(lists) > 2:
        lists = _take_every_step(lists)
    small, large = jnp.minimum(*lists), jnp.maximum(*lists)
    is_quotient = (small * target == large) & (large > 0)
    is_other = (small + large == target) | (large - small == target) | (small * large == target)
    return (is_quotient | is_other).any(axis=0)


def _take_every_step(lists: Float[Array, "n N C"]) -> Float[Array, "n-1 N2 C"]:
    """All lists that follow from combining two places, by any operation, into one."""
    first, second, *rest = lists[_pairs_first(len(lists)).T]  # each [pairs, N, C]
    results = jnp.stack(_combine(first, second))
    kept = [jnp.broadcast_to(place, results.shape) for place in rest]
    return jnp.stack([results, *kept]).reshape(len(lists) - 1, -1, lists.shape[-1])


def _take_one_step(values: Float[Array, "6 C"], choice: UInt32[Array, "C"]) -> Float[Array, "5 C"]:
    """Combine two of six numbers; `choice` says which, and how."""
    orders = _pairs_first(MAX_COUNT)
    order = jnp.array(orders)[choice % len(orders)].T
    first, second, *rest = jnp.take_along_axis(values, order, axis=0)
    results = _combine(first, second)
    result = jnp.choose((choice // len(orders)).astype(jnp.int32), results, mode="wrap")
    return jnp.stack([result, *rest])


def _pairs_first(n: int) -> Int[np.ndarray, "pairs n"]:
    """For each pair of n places: the pair, then the other places."""
    return np.array(
        [[i, j, *(k for k in range(n) if k not in (i, j))] for i, j in combinations(range(n), 2)]
    )


def _combine(a: Float[Array, "*N"], b: Float[Array, "*N"]) -> list[Float[Array, "*N"]]:
    """a + b, |a − b|, a · b, and the larger through the smaller.

    A quotient that is no integer, and a product above 10⁶, are replaced by the sum, which is
    listed anyway. Nothing is lost: three numbers make at most 10⁶, and from a larger product of
    four the one number that is left leads back to no target.
    """
    total, small, large = a + b, jnp.minimum(a, b), jnp.maximum(a, b)
    product = jnp.where(a * b <= _VALUE_CAP, a * b, total)
    quotient = jnp.round(large / jnp.maximum(small, 1.0))
    is_divisor = (small > 0) & (quotient * small == large)
    return [total, large - small, product, jnp.where(is_divisor, quotient, total)]


def _parse(prompt_format: str) -> list[tuple[str, str | None]]:
    """Literal pieces, each with the field that follows it."""
    pieces = [(text, field) for text, field, _, _ in Formatter().parse(prompt_format)]
    if sorted(field for _, field in pieces if field is not None) != ["numbers", "target"]:
        raise ConfigError(
            f"prompt_format={prompt_format!r}: expected {{numbers}} and {{target}}, once each"
        )
    return pieces


def _encode_integers(tokenizer: Tokenizer, largest: int) -> Prompts:
    """The tokens of every integer up to `largest`; 0 is an empty slot and leaves nothing."""
    encoded = [[], *(tokenizer.encode(str(n)) for n in range(1, largest + 1))]
    lengths = np.array([len(ids) for ids in encoded])
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(encoded)
    return Prompts(jnp.asarray(tokens), jnp.asarray(mask))


def _single_token(tokenizer: Tokenizer, character: str) -> int:
    ids = tokenizer.encode(character)
    if len(ids) != 1:
        raise ConfigError(
            f"Countdown needs a tokenizer with one token for {character!r}, got {len(ids)}: use "
            "tokenizers.arithmetic_tokenizer()"
        )
    return ids[0]
