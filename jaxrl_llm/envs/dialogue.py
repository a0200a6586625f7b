"""A dialogue with tools, on the device: a user asks, the agent calls tools and answers.

An action is one turn of the agent, tokens that end with an end token and read

    <call>NAME ARGUMENTS</call>    or    <answer>TEXT</answer>

A call is answered by `<result>TEXT</result>`, an answer by the next question or by the end of the
episode. Anything else is malformed, and told so. Questions are of five families
(`questions.FAMILIES`); some need no tool, one needs two calls.

Tools of the host are called from the compiled program through one callback a turn. Their results
are written as far as the tokenizer knows the characters (`host_calls.encode_known`) and there is
room; without such tools nothing leaves the device.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxrl_llm.envs import device_tools, questions
from jaxrl_llm.envs.device_tools import World
from jaxrl_llm.envs.host_calls import HostCaller
from jaxrl_llm.envs.questions import FAMILIES, PHRASES, Question, QuestionWriter
from jaxrl_llm.envs.rewards import EpisodeStatistics, make_reward
from jaxrl_llm.envs.text import (
    Lexicon,
    Text,
    Tokens,
    Writer,
    cut,
    find,
    fingerprint,
    join,
    left_padded,
    split,
    when,
)
from jaxrl_llm.envs.tools import ToolManager
from jaxrl_llm.tokenizers import CharTokenizer, Tokenizer, tokens_to_bytes
from jaxrl_llm.types import ConfigError, Prompts

TURN_BYTES = 96  # of a turn; longer ones are malformed
CONTENT_BYTES = 40  # between the tags
ERRORS = {
    "malformed": "error: malformed",
    "unknown": "error: unknown tool",
    "failed": "error: failed",
}


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Which episodes are drawn. Every leaf may be a traced scalar."""

    weights: Float[Array, "5"] = struct.field(
        default_factory=lambda: np.full(len(FAMILIES), 1 / len(FAMILIES), np.float32)
    )
    large: float = 0.5  # chance that a sum is of large numbers, which need the calculator
    follow_up: float = 0.5  # chance of a second question
    max_turns: int = 8  # turns of the agent, after which the episode ends


@struct.dataclass
class EnvState(environment.EnvState):
    """One episode."""

    time: Int[Array, ""]  # turns taken
    world: World
    question: Question
    follow_up: Question
    n_questions: Int[Array, ""]  # of the episode, 1 or 2
    calls_here: Int[Array, ""]  # calls since the running question was asked
    history: UInt32[Array, "C"]  # fingerprints of the calls so far
    statistics: EpisodeStatistics


class Turn(NamedTuple):
    """What the agent has said."""

    is_call: Bool[Array, ""]
    is_answer: Bool[Array, ""]
    content: Text


def dialogue_tokenizer() -> CharTokenizer:
    """The tokenizer of small dialogue models: characters, and a token for each usual word."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEF0123456789 +-*/.,:?!<>_'\""
    words = [
        *PHRASES, *ERRORS.values(), "<call>", "</call>", "<result>", "</result>", "<answer>",
        "</answer>", "calc ", "lookup ", "search ", "price", "stock", " price", " stock", " item",
        ": made by ", " in ", " is the opposite of ", " maker", " town",
    ]  # fmt: skip
    lexicons = (
        device_tools.ITEMS, device_tools.THINGS, device_tools.GIVEN, questions.ANSWERS,
    )  # fmt: skip
    words += [word for lexicon in lexicons for word in lexicon.words]
    return CharTokenizer(alphabet, words)


def read_turn(action: Int[Array, "A"], tokenizer: Tokenizer) -> Turn:
    """Take a turn apart. Without an end token, too long, or with other text it is neither."""
    is_end = jnp.isin(action, np.array(tokenizer.eos_ids))
    raw, length = tokens_to_bytes(
        action, jnp.cumsum(is_end) == 0, tokenizer.token_bytes, TURN_BYTES
    )
    is_whole = is_end.any() & (length <= TURN_BYTES)
    text = cut(Text(raw, jnp.minimum(length, TURN_BYTES)), 0, length, TURN_BYTES)
    has_two_tags = (text.bytes == ord("<")).sum() == 2

    def inside(tag: str) -> tuple[Bool[Array, ""], Text]:
        opening, closing = f"<{tag}>".encode(), f"</{tag}>".encode()
        stop = find(text, closing)
        is_framed = (find(text, opening) == 0) & (stop + len(closing) == text.length)
        content = cut(text, len(opening), stop, CONTENT_BYTES)
        is_short = (content.length > 0) & (content.length <= CONTENT_BYTES)
        return is_whole & has_two_tags & is_framed & is_short, content

    is_call, call = inside("call")
    is_answer, answer = inside("answer")
    return Turn(
        is_call, is_answer, jax.tree.map(lambda a, b: jnp.where(is_call, a, b), call, answer)
    )


class DialogueEnv(environment.Environment):
    """The environment, for one tokenizer, one set of tools and one reward.

    `reset` observes the first question, `step` what the agent reads next (nothing at the end). The
    reward of a step is by how much it changes reward_fn(statistics of the episode): the sum over an
    episode is reward_fn of its end. It is dense, but not shaping by a potential of the state that
    leaves the optimal policy alone: it *is* the objective, in instalments.

    Args:
        reward_fn: a name of `rewards.REWARDS`, a function of `EpisodeStatistics`, or a mapping from
            names to weights.
        tools: those that the agent may call; by default the built-in calculator, lookup and search.
        tokenizer: the policy's; by default `dialogue_tokenizer()`.
        max_turn_tokens: A, tokens of one turn at most, end token included.
        max_written: P, tokens that the environment writes at once at most; more is cut off.
        max_completion: T, tokens that a whole dialogue usually needs after its first question.

    Raises:
        ConfigError: an unknown reward, or no tool.
    """

    max_turns = 8

    def __init__(
        self,
        reward_fn: str
        | Callable[[EpisodeStatistics], Array]
        | Mapping[str, float] = "task_success",
        *,
        tools: ToolManager | None = None,
        tokenizer: Tokenizer | None = None,
        max_turn_tokens: int = 16,
        max_written: int = 20,
        max_completion: int = 80,
    ):
        self.reward_fn = make_reward(reward_fn)
        self.tools = device_tools.registered(ToolManager()) if tools is None else tools
        self.tokenizer = dialogue_tokenizer() if tokenizer is None else tokenizer
        self.max_turn_tokens = max_turn_tokens
        writer = Writer(self.tokenizer)
        on_device, on_host = self.tools.device_tools(), self.tools.host_tools()
        self.tool_names = [tool.name for tool in (*on_device, *on_host)]
        if not self.tool_names:
            raise ConfigError("DialogueEnv has no tool: register one, or leave `tools` out")
        self._names = Lexicon(self.tool_names)
        self._handlers = [tool.function(writer) for tool in on_device]
        self._errors = {name: writer.literal(text) for name, text in ERRORS.items()}
        self._open, self._close = writer.literal("<result>"), writer.literal("</result>")
        self._questions = QuestionWriter(writer)
        self.max_written, self.max_completion = max_written, max_completion
        room = max(max_written - self._open.ids.size - self._close.ids.size, 1)
        self._call_host = HostCaller(self.tools, self.tokenizer, room) if on_host else None

    @property
    def name(self) -> str:
        return "Dialogue"

    @property
    def default_params(self) -> EnvParams:
        return EnvParams(max_turns=self.max_turns)

    @property
    def prompt_length(self) -> int:
        """P: room for whatever the environment writes at once, in tokens."""
        return self.max_written

    def reset_env(self, key: Key[Array, ""], params: EnvParams) -> tuple[Prompts, EnvState]:
        keys = jax.random.split(key, 5)
        world = questions.draw_world(keys[0])
        question, fresh = (
            questions.draw_question(k, world, jnp.asarray(params.weights), params.large)
            for k in keys[1:3]
        )
        follow_up = questions.draw_follow_up(question, fresh, world)
        n_questions = 1 + jax.random.bernoulli(keys[3], params.follow_up).astype(jnp.int32)
        state = EnvState(
            time=jnp.int32(0),
            world=world,
            question=question,
            follow_up=follow_up,
            n_questions=n_questions,
            calls_here=jnp.int32(0),
            history=jnp.zeros(self.max_turns, jnp.uint32),
            statistics=no_statistics(n_questions, len(self.tool_names)),
        )
        return self._written(self._questions.write(question, world)), state

    def step_env(
        self, key: Key[Array, ""], state: EnvState, action: Int[Array, "A"], params: EnvParams
    ) -> tuple[Prompts, EnvState, Float[Array, ""], Bool[Array, ""], dict[str, Float[Array, ""]]]:
        del key  # nothing is random after the reset
        turn = read_turn(action, self.tokenizer)
        statistics, called = self._account(state, turn, action)
        is_right = turn.is_answer & questions.is_right(turn.content, state.question)
        statistics = dataclasses.replace(
            statistics,
            answered=statistics.answered + turn.is_answer,
            correct=statistics.correct + is_right,
        )
        time = state.time + 1
        has_more = (statistics.answered < state.n_questions) & (time < params.max_turns)
        reply = join(
            when(~turn.is_answer, join(self._open, called, self._close)),
            when(turn.is_answer, self._questions.write(state.follow_up, state.world)),
        )
        new_state = dataclasses.replace(
            state,
            time=time,
            question=jax.tree.map(
                lambda new, old: jnp.where(turn.is_answer, new, old),
                state.follow_up,
                state.question,
            ),
            calls_here=jnp.where(turn.is_answer, 0, state.calls_here + turn.is_call),
            history=state.history.at[state.time].set(
                jnp.where(turn.is_call, fingerprint(turn.content), 0), mode="drop"
            ),
            statistics=statistics,
        )
        reward = self.reward_fn(statistics) - self.reward_fn(state.statistics)
        return (
            self._written(when(has_more, reply)),
            new_state,
            jnp.float32(reward),
            ~has_more,
            self._info(statistics),
        )

    def _account(
        self, state: EnvState, turn: Turn, action: Int[Array, "A"]
    ) -> tuple[EpisodeStatistics, Tokens]:
        """Run the call, if it is one; the statistics with it, and what to write for it."""
        name, arguments = split(turn.content, 2, CONTENT_BYTES)
        tool = jnp.where(turn.is_call, self._names.read(name), -1)
        answers = [
            (tool == i, handle(arguments, state.world)) for i, handle in enumerate(self._handlers)
        ]
        if self._call_host is not None:
            on_host = tool - len(self._handlers)
            answers.append((on_host >= 0, self._call_host(on_host, arguments)))
        is_ok = jnp.stack([is_chosen & answer.is_ok for is_chosen, answer in answers]).any()
        is_known = tool >= 0
        is_malformed = ~turn.is_call & ~turn.is_answer
        is_repeated = turn.is_call & (state.history == fingerprint(turn.content)).any()
        written = join(
            *(when(is_chosen & answer.is_ok, answer.tokens) for is_chosen, answer in answers),
            when(is_known & ~is_ok, self._errors["failed"]),
            when(turn.is_call & ~is_known, self._errors["unknown"]),
            when(is_malformed, self._errors["malformed"]),
        )
        old = state.statistics
        is_end = jnp.isin(action, np.array(self.tokenizer.eos_ids))
        n_tokens = jnp.where(is_end.any(), is_end.argmax() + 1, action.size)
        counted = {
            "turns": True,
            "tokens": n_tokens,
            "calls": turn.is_call,
            "succeeded": is_ok,
            "failed": is_known & ~is_ok,
            "unknown": turn.is_call & ~is_known,
            "redundant": is_repeated,
            "unnecessary": turn.is_call & (state.calls_here >= state.question.n_needed),
            "malformed": is_malformed,
            "by_tool": tool == jnp.arange(len(self.tool_names)),
        }
        counts = {field: getattr(old, field) + counted[field] for field in counted}
        return dataclasses.replace(old, **counts), written

    def _info(self, s: EpisodeStatistics) -> dict[str, Float[Array, ""]]:
        """What rollouts report of an episode, each a float32 scalar."""
        info = {
            "success": s.correct / s.questions,
            "is_correct": (s.correct == s.questions).astype(jnp.float32),
            "answered": s.answered / s.questions,
            "turns": s.turns,
            "calls": s.calls,
            "calls_succeeded": s.succeeded,
            "calls_failed": s.failed,
            "calls_unknown": s.unknown,
            "calls_redundant": s.redundant,
            "calls_unnecessary": s.unnecessary,
            "calls_malformed": s.malformed,
        }
        return info | {f"calls/{name}": s.by_tool[i] for i, name in enumerate(self.tool_names)}

    def _written(self, tokens: Tokens) -> Prompts:
        return left_padded(tokens, self.prompt_length, self.tokenizer.pad_id)

    def is_terminated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        is_answered = state.statistics.answered >= state.n_questions
        return is_answered | (state.time >= params.max_turns)

    def is_truncated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        """Never: running out of turns is a loss of the episode, not of patience."""
        return jnp.array(False)

    def action_space(self, params: EnvParams) -> spaces.Box:
        return spaces.Box(0, self.tokenizer.vocab_size - 1, (self.max_turn_tokens,), jnp.int32)

    def observation_space(self, params: EnvParams) -> spaces.Dict:
        last_id, shape = self.tokenizer.vocab_size - 1, (self.prompt_length,)
        tokens, mask = spaces.Box(0, last_id, shape, jnp.int32), spaces.Box(0, 1, shape, jnp.bool_)
        return spaces.Dict({"tokens": tokens, "mask": mask})


def no_statistics(n_questions: Int[Array, ""], n_tools: int) -> EpisodeStatistics:
    """Of an episode that has just begun."""
    zeros = {f.name: jnp.float32(0) for f in dataclasses.fields(EpisodeStatistics)}
    changed = dict(questions=n_questions.astype(jnp.float32), by_tool=jnp.zeros(n_tools))
    return EpisodeStatistics(**(zeros | changed))
