"""The scanned sampling loop: G completions of each prompt, inside a compiled program."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl_llm.logprobs import select
from jaxrl_llm.models.cache import empty_caches, grow
from jaxrl_llm.models.transformer import Context, LanguageModel, Params
from jaxrl_llm.types import Completions, ConfigError, KeyValues, Prompts

MAX_WINDOWS = 8  # distinct cache sizes, each of which is compiled once
MAX_DIALOGUE_WINDOWS = 2  # each compiles the environment's step too
MIN_PACKED_WINDOWS = 4  # with fewer, what is left when most rows have ended is short
PACKED = 4  # rows of a group to one that goes on alone when the others have ended


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn."""

    max_tokens: int = 16
    """Longest completion T, in tokens, end token included."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in scoring alike."""
    greedy: bool = False
    """Take the most likely token instead of drawing one."""
    top_k: int | None = None
    """Evaluation only: draw among the k most likely tokens."""
    top_p: float | None = None
    """Evaluation only: draw among the smallest set of tokens that holds this probability."""
    block: int = 8
    """Steps between two looks at whether every completion has ended."""

    def __post_init__(self):
        if self.max_tokens < 1 or self.block < 1:
            raise ConfigError(
                f"max_tokens={self.max_tokens}, block={self.block}: expected at least 1 of each"
            )
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature}: expected > 0; for the most likely token set "
                "greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: expected a probability in (0, 1]")

    def check_for_training(self) -> None:
        """Raises ConfigError when the tokens would not be samples of the policy that is trained."""
        for name in ("greedy", "top_k", "top_p"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} in a training rollout: the tokens would come "
                    "from another distribution than the one whose log-probabilities are trained; "
                    f"leave {name} to evaluation"
                )


def keep_top_k(logits: Float[Array, "*b V"], k: int) -> Float[Array, "*b V"]:
    """−inf for all but the k largest logits (ties with the k-th stay)."""
    if k >= logits.shape[-1]:
        return logits
    threshold = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "*b V"], p: float) -> Float[Array, "*b V"]:
    """−inf outside the smallest set of most likely tokens whose probability reaches p.

    References:
        Holtzman et al. 2019 (nucleus sampling), https://arxiv.org/abs/1904.09751
    """
    descending = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(descending)
    before = jnp.cumsum(probabilities, -1) - probabilities
    threshold = jnp.where(before < p, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def inverse_cdf_sample(
    uniform: Float[Array, "*b"], logits: Float[Array, "*b V"]
) -> Int[Array, "*b"]:
    """The token at which the cumulative softmax passes `uniform`: one random number per draw.

    In float32, where uniforms are multiples of 2⁻²³: events rarer than about 1e-7 are not resolved.

    Args:
        uniform: numbers in [0, 1).
        logits: unnormalised log-probabilities; −inf is never drawn.
    """
    cumulative = jnp.cumsum(jax.nn.softmax(logits.astype(jnp.float32)), -1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1)


def draw(
    logits: Float[Array, "B G V"],
    row_keys: Key[Array, "B G"],
    t: int | Array,
    config: SamplingConfig,
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
    """One token per row, and its log-probability under softmax(logits / temperature).

    Each row draws from its own stream, fold_in(row key, t), so its tokens depend neither on the
    rows beside it nor on how the loop is cut into blocks.
    """
    scaled = logits / config.temperature
    if config.greedy:
        tokens = scaled.argmax(-1)
    else:
        kept = scaled if config.top_k is None else keep_top_k(scaled, config.top_k)
        kept = kept if config.top_p is None else keep_top_p(kept, config.top_p)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, t))))
        tokens = inverse_cdf_sample(uniform(row_keys), kept)
    return tokens, select(jax.nn.log_softmax(scaled), tokens)


class Reply(NamedTuple):
    """An environment's answers to one turn of each completion."""

    states: Any  # of the environment, leaves [B, G, …]
    written: Prompts  # [B, G, P]: what it writes next, nothing where the episode has ended
    rewards: Float[Array, "B G"]
    is_terminated: Bool[Array, "B G"]
    info: dict[str, Float[Array, "B G"]]


class Dialogue(NamedTuple):
    """An environment that answers every turn within the sampling loop.

    A turn is what a completion samples until an end token, or until it is `max_turn_tokens` long.
    """

    # (states, turns [B, G, A] padded, position) -> Reply
    reply: Callable[[Any, Int[Array, "B G A"], Int[Array, ""]], Reply]
    states: Any  # after the reset
    max_turn_tokens: int  # A


class Conversation(NamedTuple):
    """Where each completion stands in its dialogue."""

    last: Reply  # the newest answers; rewards are added up
    n_unread: Int[Array, "B G"]  # tokens of last.written that are still to be fed
    turn_start: Int[Array, "B G"]  # position of the running turn's first token


class Loop(NamedTuple):
    """The carry of the sampling loop."""

    t: Int[Array, ""]  # the next position to sample
    row_keys: Key[Array, "B G"]
    token: Int[Array, "B G"]  # at t − 1
    is_done: Bool[Array, "B G"]
    caches: list[KeyValues]  # positions < t − 1 are filled
    completions: Completions
    conversation: Conversation | None


def sample(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    row_keys: Key[Array, "B G"],
    config: SamplingConfig,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> Completions:
    """Draw G completions of each prompt; the first end token ends a completion.

    The prompt is run once. Steps are compiled in blocks; a block starts only while some row has
    not ended, and attends to a cache that is as long as what the block fills. Of long completions
    the last quarter of each group goes on alone once the others have ended (`packed_rows`).

    Args:
        params: the policy's parameters.
        model: its functions.
        prompts: B left-padded prompts.
        row_keys: one random key per completion; the draw at t uses fold_in(row key, t).
        config: sampling settings; `config.max_tokens` is T.
        eos_ids: each of these ends a completion; it is kept and belongs to the loss.
        pad_id: written after the end. Masks come from the loop, never from ids, so `pad_id` may
            be an end id, and a sampled `pad_id` is a token like any other.

    Returns:
        Completions with log-probabilities under the sampling policy, at its temperature.
    """
    return _sample(params, model, prompts, row_keys, config, eos_ids, pad_id, None)[0]


def sample_dialogue(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    row_keys: Key[Array, "B G"],
    config: SamplingConfig,
    dialogue: Dialogue,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> tuple[Completions, Reply]:
    """Draw G completions of each prompt in dialogue with an environment.

    As `sample`, but an end token ends a turn, which the environment answers, and the environment
    ends the completion. Every row advances by one token a step: it samples, or it reads the next
    token that the environment wrote. So all rows write at the same position, and what is written is
    never encoded again; it is attended to and not in the loss. A turn that `max_tokens` cuts off is
    not answered.

    Returns:
        The transcripts, and the environment's last answers with the sums of the rewards.
    """
    completions, conversation = _sample(
        params, model, prompts, row_keys, config, eos_ids, pad_id, dialogue
    )
    assert conversation is not None
    return completions, conversation.last


def _sample(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    row_keys: Key[Array, "B G"],
    config: SamplingConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dialogue: Dialogue | None,
) -> tuple[Completions, Conversation | None]:
    b, g = row_keys.shape
    t_max = config.max_tokens
    head = model.head(params)
    ends = jnp.asarray(eos_ids, jnp.int32)

    def emit(hidden, t, row_keys, is_done, completions, conversation):
        """Sample or read position t and write it, unless the row has ended."""
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        token, logp = draw(logits, row_keys, t, config)
        is_sampled = ~is_done
        if conversation is not None:
            is_sampled &= conversation.n_unread == 0
            token = jnp.where(is_sampled, token, next_written(conversation))
        token = jnp.where(is_done, pad_id, token).astype(jnp.int32)
        values = Completions(token, is_sampled, ~is_done, jnp.where(is_sampled, logp, 0.0))
        completions = jax.tree.map(
            lambda whole, value: jax.lax.dynamic_update_index_in_dim(whole, value, t, 2),
            completions,
            values,
        )
        is_end = is_sampled & (token[..., None] == ends.reshape(1, 1, -1)).any(-1)
        if dialogue is None:
            return token, is_done | is_end, completions, None
        assert conversation is not None
        conversation = converse(dialogue, conversation, completions, t, is_sampled, is_end, pad_id)
        return token, conversation.last.is_terminated, completions, conversation

    empty = Completions(
        jnp.full((b, g, t_max), pad_id, jnp.int32),
        jnp.zeros((b, g, t_max), bool),
        jnp.zeros((b, g, t_max), bool),
        jnp.zeros((b, g, t_max), jnp.float32),
    )
    last, stacked_prefix = model.prefill(params, prompts)
    first = jnp.broadcast_to(last[:, None], (b, g, last.shape[-1]))
    conversation = None if dialogue is None else start_conversation(dialogue, (b, g))
    token, is_done, completions, conversation = emit(
        first, jnp.int32(0), row_keys, jnp.zeros((b, g), bool), empty, conversation
    )
    if t_max == 1:
        return completions, conversation

    layers = model.unstack(params)
    prefixes = [jax.tree.map(lambda x: x[i], stacked_prefix) for i in range(len(layers))]
    rotations = model.completion_rotation(prompts, t_max)

    def step(window: int, loop: Loop) -> Loop:
        slot = loop.t - 1
        context = Context(
            rotation=jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=2), rotations
            ),
            own_mask=(jnp.arange(window) <= slot)[None, None, None],
            prefix_mask=prompts.mask,
            write_at=slot,
        )
        hidden, caches = model.decode(params, layers, loop.token, prefixes, loop.caches, context)
        token, is_done, completions, conversation = emit(
            hidden, loop.t, loop.row_keys, loop.is_done, loop.completions, loop.conversation
        )
        return Loop(loop.t + 1, loop.row_keys, token, is_done, caches, completions, conversation)

    def run_window(loop: Loop, begin: int, end: int, few: int) -> Loop:
        """Sample positions begin + 1 … end by blocks, while more than `few` rows of a prompt run.

        The cache has `end` slots, or more where it had more.
        """
        size = max(end, loop.caches[0].keys.shape[3])
        loop = loop._replace(caches=grow(loop.caches, size))

        def run_block(loop):
            length = min(config.block, end - begin)
            return jax.lax.scan(lambda c, _: (step(size, c), None), loop, length=length)[0]

        def is_running(loop):
            return (loop.t <= end) & (n_running(loop) > few)

        return jax.lax.while_loop(is_running, run_block, loop)

    most = MAX_WINDOWS if dialogue is None else MAX_DIALOGUE_WINDOWS
    cuts = windows(t_max - 1, config.block, most)
    few = 0 if dialogue is not None else packed_rows(g, t_max, config.block)
    caches = empty_caches(model.config, b, g)
    loop = Loop(jnp.int32(1), row_keys, token, is_done, caches, completions, conversation)
    for begin, end in cuts:
        loop = run_window(loop, begin, end, few)
    if not few:
        return loop.completions, loop.conversation

    def finish(loop: Loop) -> Completions:
        rows = jnp.argsort(loop.is_done, axis=1, stable=True)[:, :few]
        packed = pick(loop, rows)
        for begin, end in windows(t_max - 1, config.block, 1):
            packed = run_window(packed, begin, end, 0)

        def put(whole, part):
            return jax.vmap(lambda x, chosen, new: x.at[chosen].set(new))(whole, rows, part)

        return jax.tree.map(put, loop.completions, packed.completions)

    is_unfinished = (loop.t < t_max) & ~loop.is_done.all()
    return jax.lax.cond(is_unfinished, finish, lambda loop: loop.completions, loop), None


def n_running(loop: Loop) -> Int[Array, ""]:
    """Rows that have not ended, of the prompt that has most of them."""
    return (~loop.is_done).sum(1).max()


def packed_rows(group_size: int, max_tokens: int, block: int) -> int:
    """How many rows of each prompt go on alone once none has more that run; 0: none do."""
    is_long = len(windows(max_tokens - 1, block)) >= MIN_PACKED_WINDOWS
    return group_size // PACKED if is_long else 0


def pick(loop: Loop, rows: Int[Array, "B N"]) -> Loop:
    """The loop with these rows of each prompt alone."""

    def take(axis):
        return lambda x: jax.vmap(lambda of_prompt, i: jnp.take(of_prompt, i, axis))(x, rows)

    return loop._replace(
        row_keys=take(0)(loop.row_keys),
        token=take(0)(loop.token),
        is_done=take(0)(loop.is_done),
        caches=jax.tree.map(take(1), loop.caches),
        completions=jax.tree.map(take(0), loop.completions),
    )


def start_conversation(dialogue: Dialogue, shape: tuple[int, int]) -> Conversation:
    """Nothing said and nothing to read."""
    turns = jax.ShapeDtypeStruct((*shape, dialogue.max_turn_tokens), jnp.int32)
    reply = jax.eval_shape(dialogue.reply, dialogue.states, turns, jnp.int32(0))
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), reply)
    zero = jnp.zeros(shape, jnp.int32)
    return Conversation(empty._replace(states=dialogue.states), zero, zero)


def next_written(conversation: Conversation) -> Int[Array, "B G"]:
    """The next token to read, where there is one."""
    written = conversation.last.written.tokens
    place = jnp.clip(written.shape[-1] - conversation.n_unread, 0, written.shape[-1] - 1)
    return jnp.take_along_axis(written, place[..., None], -1)[..., 0]


def converse(
    dialogue: Dialogue,
    conversation: Conversation,
    completions: Completions,
    t: Int[Array, ""],
    is_sampled: Bool[Array, "B G"],
    is_end: Bool[Array, "B G"],
    pad_id: int,
) -> Conversation:
    """Account for the token at t, and let the environment answer the turns that it ended.

    Args:
        dialogue: the environment.
        conversation: before t.
        completions: position t included.
        t: the position just written.
        is_sampled: the token at t was sampled, not read.
        is_end: it is an end token.
        pad_id: fills up the turns that the environment is given.
    """
    n_unread = jnp.maximum(conversation.n_unread - 1, 0)
    is_read_up = (conversation.n_unread > 0) & (n_unread == 0)
    turn_start = jnp.where(is_read_up, t + 1, conversation.turn_start)
    is_full = is_sampled & (t + 1 - turn_start >= dialogue.max_turn_tokens)
    is_over = is_end | is_full
    running = Conversation(conversation.last, n_unread, turn_start)

    def answer(running: Conversation) -> Conversation:
        last = running.last
        at = running.turn_start[..., None] + jnp.arange(dialogue.max_turn_tokens).reshape(1, 1, -1)
        within = jnp.minimum(at, completions.tokens.shape[-1] - 1)
        turns = jnp.take_along_axis(completions.tokens, within, -1)
        # Rows whose turn is not over say nothing: an environment may act on what is said.
        is_said = (at <= t) & is_over[..., None]
        reply = dialogue.reply(last.states, jnp.where(is_said, turns, pad_id), t)
        reply = reply._replace(rewards=last.rewards + reply.rewards)

        def choose(new, old):
            return jnp.where(is_over.reshape(is_over.shape + (1,) * (new.ndim - 2)), new, old)

        n_written = reply.written.mask.sum(-1)
        return Conversation(
            jax.tree.map(choose, reply, last),
            choose(jnp.where(reply.is_terminated, 0, n_written), running.n_unread),
            choose(jnp.full_like(running.turn_start, t + 1), running.turn_start),
        )

    return jax.lax.cond(is_over.any(), answer, lambda running: running, running)


def windows(steps: int, block: int, most: int = MAX_WINDOWS) -> list[tuple[int, int]]:
    """Cut `steps` into at most `most` ranges of whole blocks, and a rest.

    >>> windows(15, 8)
    [(0, 8), (8, 15)]
    """
    whole = steps - steps % block
    size = -(-whole // (block * most)) * block
    edges = list(range(0, whole, size)) if whole else []
    edges += [whole, steps] if steps % block else [whole]
    return list(zip(edges[:-1], edges[1:], strict=True))
