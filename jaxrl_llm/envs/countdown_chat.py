"""Countdown for language models: a chat prompt, reasoning, an answer between tags.

The model is asked to think within `<think>…</think>` and to give an equation within
`<answer>…</answer>`. It is graded on the device, through the tokenizer's byte table.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.countdown_data import Problems
from jaxrl_llm.envs import single_turn
from jaxrl_llm.envs.expression import find_answer, grade
from jaxrl_llm.envs.single_turn import ChatTokenizer, SingleTurnEnv, check_chat
from jaxrl_llm.envs.text import SPACE, Text, cut, find
from jaxrl_llm.tokenizers import tokens_to_bytes
from jaxrl_llm.types import ConfigError

SYSTEM = "You are a helpful assistant. You think step by step before you give your answer."
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use +, -, * "
    "and / and parentheses, and you must use each number exactly once. Show your work in <think> "
    "</think> tags. Then give the final equation, without its result, in <answer> </answer> tags, "
    "for example <answer>(1 + 2) / 3</answer>."
)
ANSWER_BYTES = 128  # longer answers are never correct
_BYTES_PER_TOKEN = 8  # room for a completion's text, on average


@struct.dataclass
class EnvParams(single_turn.EnvParams):
    """Which problems are drawn, and what completions are worth."""

    reward_missing: float = 0.0
    reward_wrong: float = 0.1
    reward_correct: float = 1.0


class Verdict(NamedTuple):
    """What is to be said of one response."""

    is_correct: Bool[Array, ""]  # the last answer is
    has_format: Bool[Array, ""]  # exactly one answer, and it is not empty
    has_think: Bool[Array, ""]  # <think>…</think> comes before the last answer


class CountdownChat(SingleTurnEnv):
    """The environment, for one tokenizer and a list of problems.

    A completion is read up to its end token, and graded even without one, since a tag closes the
    answer. The answer is what stands in the last `<answer>…</answer>`; see `grade_response`.

      reward_correct   the answer uses each number exactly once and its value is the target
      reward_wrong     otherwise, if there is exactly one answer and it is not empty
      reward_missing   otherwise

    The info holds `is_correct`, `has_format`, `has_think` and `is_truncated` (no end token), each 0
    or 1. Special tokens stand for no text. A completion of more than 8 bytes a token on average
    counts as one without an answer.

    Args:
        tokenizer: the policy's, with a chat template.
        problems: those to train on; see `countdown_data`. Each is tokenised here, a quarter of a
            millisecond or so each: give as many as will be drawn.
        held_out: those of `params.split` HELD_OUT; see `countdown_data.split`.
        system: the system message; None for chat templates that allow none.
        question: the user's message, with {numbers} and {target}.
        prefill: how the model's response begins, such as "<think>": it ends the prompt, and is
            graded as if the model had written it.
        max_completion: T, in tokens, end token included.
        max_prompt: the longest prompt that is allowed, in tokens.

    Raises:
        ConfigError: a tokenizer without `chat`, a question without its fields, no problem, a prompt
            that is too long.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        problems: Problems,
        held_out: Problems | None = None,
        *,
        system: str | None = SYSTEM,
        question: str = QUESTION,
        prefill: str = "",
        max_completion: int = 256,
        max_prompt: int | None = None,
    ):
        check_chat(tokenizer)
        if "{numbers}" not in question or "{target}" not in question:
            raise ConfigError(f"question={question!r}: expected {{numbers}} and {{target}} in it")
        self.system, self.question, self.prefill = system, question, prefill
        self.problems = problems if held_out is None else problems + held_out
        started = tokenizer.encode(prefill) if prefill else []
        super().__init__(
            tokenizer,
            [
                [
                    *tokenizer.chat(self.messages(numbers[numbers > 0].tolist(), int(target))),
                    *started,
                ]
                for numbers, target in zip(
                    self.problems.numbers, self.problems.targets, strict=True
                )
            ],
            len(problems),
            max_completion=max_completion,
            max_prompt=max_prompt,
        )
        self._numbers = jnp.asarray(self.problems.numbers, jnp.int32)
        self._targets = jnp.asarray(self.problems.targets, jnp.int32)
        self._started = np.frombuffer(prefill.encode(), np.uint8)
        self._token_bytes = tokenizer.token_bytes
        self._max_bytes = max_completion * min(self._token_bytes.table.shape[1], _BYTES_PER_TOKEN)

    @property
    def default_params(self) -> EnvParams:
        return EnvParams(data=self.table.digest)

    def messages(self, numbers: list[int], target: int) -> list[dict[str, str]]:
        """The conversation that asks for `target` from `numbers`."""
        asked = self.question.replace("{numbers}", str(numbers)).replace("{target}", str(target))
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": asked}]

    def judge(
        self,
        index: Int[Array, ""],
        tokens: Int[Array, "T"],
        is_said: Bool[Array, "T"],
        params: EnvParams,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        said, length = tokens_to_bytes(tokens, is_said, self._token_bytes, self._max_bytes)
        response = Text(jnp.concatenate([self._started, said]), self._started.size + length)
        verdict = grade_response(response, self._numbers[index], self._targets[index])
        reward_else = jnp.where(verdict.has_format, params.reward_wrong, params.reward_missing)
        reward = jnp.where(verdict.is_correct, params.reward_correct, reward_else)
        return reward, verdict._asdict()


def grade_response(text: Text, numbers: Int[Array, "M"], target: Int[Array, ""]) -> Verdict:
    """Grade a response with tags, inside a compiled program.

    The answer is inside the last `<answer>…</answer>` (`expression.find_answer`). White space of
    ASCII counts as spaces. Otherwise the grammar is that of `expression.grade`: no `=`, no `×`.
    A response that was cut (its length exceeds its bytes) is neither correct nor well-formed.

    Args:
        text: prefill and completion.
        numbers: of the problem, padded with zeros.
        target: of the problem.
    """
    is_white = (text.bytes >= ord("\t")) & (text.bytes <= ord("\r"))
    spaced = text._replace(bytes=jnp.where(is_white, jnp.uint8(SPACE), text.bytes))
    start, stop = find_answer(spaced.bytes, spaced.length)
    answer = cut(spaced, start, stop, ANSWER_BYTES)
    graded = grade(answer.bytes, answer.length, numbers, target)
    is_whole = text.length <= text.bytes.size
    is_single = _is_last(text, b"<answer>") & _is_last(text, b"</answer>")
    think_end = find(text, b"</think>", find(text, b"<think>"))
    return Verdict(
        is_correct=graded.is_correct & is_whole,
        has_format=graded.is_present & is_single & is_whole,
        has_think=think_end < start,
    )


def _is_last(text: Text, word: bytes) -> Bool[Array, ""]:
    """Whether the word does not occur again after it occurred."""
    return find(text, word, find(text, word) + 1) == text.bytes.size
