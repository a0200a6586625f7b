"""How a model is asked for an answer, and where its answer is found."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.types import ConfigError

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|-?\.\d+")
_CHOICES = [re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for words in ("yes|no", "true|false")]
_AT_ONCE = re.compile(r"\W*\w+(?:[^\w ]|$)")
_LEAD = re.compile(r"^\W*(?:the )?(?:final )?answer(?: is|:| =)*\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """What is said around a question."""

    question: str = "{question}\n\nGive the final answer within <answer></answer> tags."
    """The user's message: {question}, or other fields that the question has. If it or the system
    message names <answer>, the strict answer stands within these tags, else it is all that is
    said."""
    system: str | None = None
    """The system message; None for none."""
    chat: bool = True
    """Ask through the tokenizer's chat template; False: the question alone is the prompt."""

    def __post_init__(self):
        if self.system is not None and not self.chat:
            raise ConfigError("ask: a system message without chat; expected one of them alone")

    @property
    def has_tags(self) -> bool:
        return "<answer>" in f"{self.question} {self.system}"

    def prompt(self, question: str, fields: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """Messages, or a text where `chat` is off.

        Raises:
            ConfigError: the question lacks a field.
        """
        given = {**fields, "question": question}
        try:
            asked = self.question.format_map(given)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"ask.question={self.question!r} cannot be filled in ({error!r}): expected "
                f"fields {', '.join(f'{{{name}}}' for name in sorted(given))}"
            ) from None
        if not self.chat:
            return asked
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": asked}]


# For a policy that writes nothing but an answer, such as one with the arithmetic tokenizer.
EXPRESSION = AskConfig(question="{expression}=", chat=False)


def strict_answer(text: str, has_tags: bool) -> str | None:
    """What stands within the last <answer></answer>, or the whole text; None for nothing.

    >>> strict_answer("<think>2</think> <answer> 42 </answer>", True)
    '42'
    """
    if has_tags:
        found = _TAGGED.findall(text)
        text = found[-1] if found else ""
    return text.strip() or None


def lenient_answer(text: str, has_tags: bool, reference: str) -> str | None:
    r"""The last number where the reference is a number, else the last line; None for nothing.

    Where the reference is yes or no, true or false, one of the two: with which the text begins, if
    a comma, a full stop or the like follows it, else the last. All is looked for within the strict
    answer, and in the whole text where there is none.

    >>> lenient_answer("So there are 1,234 of **them**.", True, "7")
    '1234'
    >>> lenient_answer("Let us see.\nThe answer is: **Friday**", True, "Monday")
    'Friday'
    >>> lenient_answer("no, not all writers are teachers.", True, "No")
    'No'
    """
    text = strict_answer(text, has_tags) or text
    for either in _CHOICES:
        if either.fullmatch(reference.strip()):
            begins = _AT_ONCE.match(text)
            found = (begins and either.findall(begins[0])) or either.findall(text)
            if not found:
                return None
            return reference if found[-1].lower() == reference.strip().lower() else found[-1]
    if _NUMBER.fullmatch(reference.strip()):
        found = _NUMBER.findall(text)
        return found[-1].replace(",", "") if found else None
    lines = [re.sub(r"</?\w+>", "", line).strip() for line in text.split("\n")]
    last = next(filter(None, reversed(lines)), "")
    return _LEAD.sub("", last).strip("*`$ ") or None


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, the first seen of several; None if there is none.

    >>> majority(["8", None, "7", "7", "8", None, None])
    '8'
    """
    votes = Counter(answer for answer in answers if answer is not None).most_common(1)
    return votes[0][0] if votes else None
