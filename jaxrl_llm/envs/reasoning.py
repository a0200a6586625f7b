"""The tasks of reasoning-gym as environments: drawn by seed, rewarded by their own scorers."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm import graders
from jaxrl_llm.answers import AskConfig, strict_answer
from jaxrl_llm.envs.text_reward import TextRewardEnv
from jaxrl_llm.grading import GradingPool
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError

EVAL_SEED = 1_000_003
_DRAW_SECONDS = 3600.0

Options = Mapping[str, Any]  # fields of a task's own config


class Question(NamedTuple):
    """One question of a task."""

    text: str
    answer: str  # one that is right; "None" where the task has no single one
    fields: dict[str, str]  # what else is known, such as "expression"
    entry: str  # what its scorer takes


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """A task of reasoning-gym to train on."""

    task: str = "chain_sum"
    """Its name; there are a hundred, see `tasks`."""
    options: dict[str, int | float | str] = field(default_factory=dict)
    """Fields of the task's own config, such as max_terms 3; others have their defaults."""
    questions: int = 1000
    """Distinct training questions."""
    held_out: int = 256
    """Distinct questions for measurement, of which none can be a training question."""
    seed: int = 0
    """Draws the training questions."""
    eval_seed: int = EVAL_SEED
    """Draws the held-out questions."""
    ask: AskConfig = AskConfig()
    """What is said around a question."""
    reward_format: float = 0.1
    """Reward for an answer where it was asked for, right or wrong; the task's score is added."""
    seconds: float = 5.0
    """Longest time to grade one answer; after that it is worth nothing."""
    workers: int = 1
    """Processes that grade."""

    def __post_init__(self):
        if self.questions < 1 or self.held_out < 0:
            raise ConfigError(
                f"questions={self.questions}, held_out={self.held_out}: expected at least 1 and 0"
            )
        if self.seed < 0 or self.eval_seed < 0:
            raise ConfigError(f"seed={self.seed}, eval_seed={self.eval_seed}: expected 0 or more")


def tasks() -> list[str]:
    """The names of all tasks.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    return sorted(_registry())


def draw_questions(
    task: str, n: int, *, seed: int, held_out: bool, options: Options | None = None
) -> list[Question]:
    """The first n distinct questions of a seed, of one of two splits.

    A question belongs to a split by its text (`graders.is_held_out`), so no seed and no size makes
    a training question held out. They are drawn in a process of its own with fixed hashes, since
    some tasks iterate over sets: equal arguments give equal questions, everywhere.

    Raises:
        ConfigError: no such task or option, a value that the task refuses, or fewer than n distinct
            questions among 4 n + 16.
    """
    options = dict(options or {})
    check_task(task, options)
    with GradingPool(partial(graders.questions, task, options), seconds=_DRAW_SECONDS) as pool:
        drawn = pool.grade([(n, seed, held_out)])[0]
    if drawn.status != "ok":
        raise ConfigError(f"task {task} cannot be drawn with {options}: {drawn.problem}")
    if len(drawn.value) < n:
        raise ConfigError(
            f"task {task}: {len(drawn.value)} distinct questions in {4 * n + 16} draws of this "
            f"split; expected {n}: ask for fewer, or widen its options"
        )
    return [
        Question(each["question"], each["answer"], each["fields"], each["entry"])
        for each in drawn.value
    ]


def check_task(task: str, options: Options) -> None:
    """Raises ConfigError for a task or an option that reasoning-gym does not have."""
    registry = _registry()
    if task not in registry:
        raise ConfigError(f"no task {task!r} in reasoning-gym: {_nearest(task, registry)}")
    known = [name for name in registry[task][1].__dataclass_fields__ if name not in _OURS]
    for name in options:
        if name not in known:
            raise ConfigError(f"task {task} has no option {name!r}: {_nearest(name, known)}")


_OURS = ("seed", "size")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"expected {' or '.join(close)}" if close else f"expected one of {', '.join(known)}"


def _registry() -> dict[str, tuple[type, type]]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            "reasoning-gym is not installed: expected it here; type pip install reasoning-gym"
        ) from None
    return DATASETS


def scoring_pool(
    task: str, options: Options | None = None, *, seconds: float = 5.0, workers: int = 1
) -> GradingPool:
    """A pool that is called with (answer or None, `Question.entry`) and gives the task's score."""
    make = partial(graders.reasoning, task, dict(options or {}))
    return GradingPool(make, seconds=seconds, workers=workers)


def reasoning_env(
    tokenizer: Tokenizer,
    config: ReasoningConfig = ReasoningConfig(),
    *,
    max_completion: int = 256,
    max_prompt: int | None = None,
) -> TextRewardEnv:
    """An environment that asks the questions of a task, with training and held-out ones.

      reward = score of the strict answer, in [0, 1] + reward_format if there is such an answer

    The score is the task's own. `is_correct` holds for a score of 1; the info has `reward/score`
    and `reward/format`. An answer whose grading takes too long scores 0.

    Args:
        tokenizer: the policy's.
        config: the task.
        max_completion: T, in tokens, end token included.
        max_prompt: the longest prompt that is allowed, in tokens.

    Raises:
        ConfigError: see `draw_questions`; or the tokenizer cannot write the questions.
    """
    drawn = [
        draw_questions(config.task, n, seed=seed, held_out=held_out, options=config.options)
        for n, seed, held_out in (
            (config.questions, config.seed, False),
            (config.held_out, config.eval_seed, True),
        )
    ]
    training, held_out = (
        [{"prompt": config.ask.prompt(q.text, q.fields), "entry": q.entry} for q in questions]
        for questions in drawn
    )
    pool = scoring_pool(config.task, config.options, seconds=config.seconds, workers=config.workers)

    def answers(completions: Sequence[Any]) -> list[str | None]:
        texts = (said if isinstance(said, str) else said[0]["content"] for said in completions)
        return [strict_answer(text, config.ask.has_tags) for text in texts]

    def score(completions: Sequence[Any], entry: Sequence[str]) -> list[float]:
        calls = zip(answers(completions), entry, strict=True)
        return [grade.value for grade in pool.grade(calls)]

    def format(completions: Sequence[Any]) -> list[float]:
        return [float(answer is not None) for answer in answers(completions)]

    return TextRewardEnv(
        tokenizer,
        training,
        [score, format],
        [1.0, config.reward_format],
        held_out=held_out,
        max_completion=max_completion,
        max_prompt=max_prompt,
        correct_at=1.0 + config.reward_format,
    )
