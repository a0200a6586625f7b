"""A policy measured on a suite of questions: prompts, completions, answers, scores."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxrl_llm.answers import AskConfig, lenient_answer, majority, strict_answer
from jaxrl_llm.envs.reasoning import EVAL_SEED, Options, draw_questions, scoring_pool
from jaxrl_llm.envs.single_turn import check_chat
from jaxrl_llm.evaluation import pass_at_k
from jaxrl_llm.grading import Grade
from jaxrl_llm.logging import write_json
from jaxrl_llm.masking import bucket_length, padded
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.policy import Policy
from jaxrl_llm.rollout import row_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.suites import SuiteResult, question_digest
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import Completions, ConfigError, Prompts

# Stands in, where there is no network, for the published sets (GSM8K, MATH, BBH, …) of a transfer
# table: word problems and arithmetic, then logic, then algorithms; all are drawn within seconds and
# none asks with more than about 300 tokens.
OFFLINE_SUITES = (
    "gsm_symbolic",
    "chain_sum",
    "basic_arithmetic",
    "countdown",
    "simple_equations",
    "knights_knaves",
    "syllogism",
    "letter_counting",
    "spell_backward",
    "number_filtering",
)


@dataclass(frozen=True)
class Suite:
    """Questions that a policy can be asked, and who grades its answers."""

    name: str
    """What its results are called."""
    questions: list[str]
    """Without what is said around them: two results are pairs if these are equal."""
    fields: list[dict[str, str]]
    """What else is known of each, for `AskConfig.question`; the same keys in all."""
    references: list[str]
    """A right answer to each; where it is a number, a number is looked for."""
    grade: Callable[[Iterable[tuple[str | None, int]]], list[Grade]]
    """Grades in [0, 1] of pairs (answer or None, number of its question)."""
    ask: AskConfig = AskConfig()
    """What is said around a question."""

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The token ids of each question as it is asked.

        Raises:
            ConfigError: the tokenizer cannot write them.
        """
        if self.ask.chat:
            check_chat(tokenizer)
        write: Any = tokenizer.chat if self.ask.chat else tokenizer.encode  # type: ignore
        try:
            return [
                write(self.ask.prompt(question, fields))
                for question, fields in zip(self.questions, self.fields, strict=True)
            ]
        except ConfigError as error:
            raise ConfigError(
                f"suite {self.name} cannot be asked of this policy: {error}; expected a tokenizer "
                "that knows its text, or an `ask` that says less"
            ) from None


def reasoning_suite(
    task: str,
    n: int = 100,
    *,
    seed: int = EVAL_SEED,
    options: Options | None = None,
    ask: AskConfig = AskConfig(),
    seconds: float = 5.0,
    workers: int = 1,
) -> Suite:
    """n held-out questions of a task of reasoning-gym, scored by the task itself.

    Args:
        task: its name, such as one of OFFLINE_SUITES; any of `envs.reasoning.tasks`.
        n: questions.
        seed: draws them.
        options: fields of the task's own config.
        ask: what is said around a question.
        seconds: longest time to grade an answer; after that it is worth 0.
        workers: processes that grade.

    Raises:
        ConfigError: see `envs.reasoning.draw_questions`.
    """
    drawn = draw_questions(task, n, seed=seed, held_out=True, options=options)
    pool = scoring_pool(task, options, seconds=seconds, workers=workers)
    return Suite(
        name=task,
        questions=[question.text for question in drawn],
        fields=[question.fields for question in drawn],
        references=[question.answer for question in drawn],
        grade=lambda calls: pool.grade((answer, drawn[i].entry) for answer, i in calls),
        ask=ask,
    )


def evaluate_suite(
    policy: Policy,
    suite: Suite,
    samples: int = 1,
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    batch: int = 32,
    seed: int = EVAL_SEED,
    answers: Path | None = None,
) -> SuiteResult:
    """Ask a policy all questions of a suite.

    One score in [0, 1] for each question and metric; "strict" takes the answer where it was asked
    for, "lenient" what `answers.lenient_answer` finds:

      greedy/strict, greedy/lenient    of the most likely completion
      greedy/answered                  it has an answer where it was asked for
      greedy/truncated                 it has no end within max_tokens

    and, with more than one sample, of S samples at the temperature:

      sampled/strict, sampled/lenient  the mean of their scores
      pass@S/strict, …                 any of them scores 1 (`evaluation.pass_at_k` at k = S)
      maj@S/strict, …                  the score of their most frequent answer, the first seen of
                                       several

    and "ungraded": one of its answers got 0 since to grade it took too long or failed. What a
    completion draws depends neither on the batch nor on other questions.

    Args:
        policy: its tokenizer must know the suite's text.
        suite: what is asked.
        samples: S.
        max_tokens: of a completion, end token included.
        temperature: of the samples.
        batch: questions at a time.
        seed: of the samples.
        answers: JSON file that gets, for each question, the texts of the greedy completion and of
            the samples beside the reference.

    Raises:
        ConfigError: the tokenizer cannot write the questions, or a number is too small.

    References:
        Chen et al. 2021 (pass@k), https://arxiv.org/abs/2107.03374
        Wang et al. 2022 (majority vote), https://arxiv.org/abs/2203.11171
    """
    if samples < 1:
        raise ConfigError(f"samples={samples}: expected at least 1; 1 is greedy alone")
    start = time.monotonic()
    prompts = suite.prompts(policy.tokenizer)
    sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, block=16)
    greedy = SamplingConfig(max_tokens=max_tokens, greedy=True, block=16)
    said = generate(policy, prompts, greedy, batch=batch, seed=seed)
    drawn = (
        generate(policy, prompts, sampling, samples=samples, batch=batch, seed=seed)
        if samples > 1
        else [[] for _ in prompts]
    )
    greedy_said = [row[0] for row in said]
    texts = [[completion.text for completion in row] for row in drawn]
    if answers is not None:  # first: they are what took the time
        asked = zip(suite.questions, suite.references, greedy_said, texts, strict=True)
        rows = [
            {"question": question, "reference": reference, "greedy": best.text, "sampled": others}
            for question, reference, best, others in asked
        ]
        write_json(answers, rows)
    scores = score_completions(suite, greedy_said, texts)
    return SuiteResult(
        suite.name,
        scores,
        [question_digest(question) for question in suite.questions],
        time.monotonic() - start,
    )


class Completion(NamedTuple):
    """What a policy said."""

    text: str
    n_tokens: int  # the end token included
    is_truncated: bool  # there was no end token


def score_completions(
    suite: Suite, greedy: Sequence[Completion], sampled: Sequence[Sequence[str]]
) -> dict[str, list[float]]:
    """The scores of `evaluate_suite` for what was said to each question."""
    has_tags = suite.ask.has_tags

    def strict(text: str, i: int) -> str | None:
        del i
        return strict_answer(text, has_tags)

    def lenient(text: str, i: int) -> str | None:
        return lenient_answer(text, has_tags, suite.references[i])

    numbers = range(len(suite.questions))
    readers = {"strict": strict, "lenient": lenient}
    best = {kind: [read(greedy[i].text, i) for i in numbers] for kind, read in readers.items()}
    drawn = {
        kind: [[read(text, i) for text in sampled[i]] for i in numbers]
        for kind, read in readers.items()
    }
    # Equal answers to a question are graded once.
    pairs = list(
        dict.fromkeys(
            (answer, i)
            for kind in readers
            for i in numbers
            for answer in (best[kind][i], *drawn[kind][i], majority(drawn[kind][i]))
        )
    )
    grades = dict(zip(pairs, suite.grade(pairs), strict=True))

    def values(kind: str) -> dict[str, list[float]]:
        found = {f"greedy/{kind}": [grades[best[kind][i], i].value for i in numbers]}
        k = len(sampled[0])
        if k > 1:
            scores = np.array([[grades[a, i].value for a in drawn[kind][i]] for i in numbers])
            found[f"sampled/{kind}"] = scores.mean(1).tolist()
            found[f"pass@{k}/{kind}"] = pass_at_k(scores >= 1.0, k).tolist()
            found[f"maj@{k}/{kind}"] = [grades[majority(drawn[kind][i]), i].value for i in numbers]
        return found

    lost = {i for (_, i), grade in grades.items() if grade.status != "ok"}
    return {
        **values("strict"),
        **values("lenient"),
        "greedy/answered": [float(answer is not None) for answer in best["strict"]],
        "greedy/truncated": [float(said.is_truncated) for said in greedy],
        "ungraded": [float(i in lost) for i in numbers],
    }


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    samples: int = 1,
    batch: int = 32,
    seed: int = 0,
) -> list[list[Completion]]:
    """Completions of prompts of any lengths, through few compiled shapes.

    Prompts go into buckets of `bucket_length` and are run `batch` at a time; a last batch that is
    not full has the next power of two.

    Args:
        policy: who completes.
        prompts: token ids.
        sampling: how.
        samples: of each prompt.
        batch: prompts at a time.
        seed: prompt i draws sample g with fold_in(fold_in(key(seed), i), g).

    Raises:
        ConfigError: a number below 1, or an empty prompt.
    """
    if samples < 1 or batch < 1 or not all(map(len, prompts)):
        raise ConfigError(
            f"samples={samples}, batch={batch}, shortest prompt {min(map(len, prompts))}: expected "
            "at least 1 of each"
        )
    tokenizer, key = policy.tokenizer, jax.random.key(seed)
    run = partial(
        _run,
        model=policy.model,
        samples=samples,
        sampling=sampling,
        eos_ids=tuple(tokenizer.eos_ids),
        pad_id=tokenizer.pad_id,
    )
    said: list[list[Completion]] = [[] for _ in prompts]
    for length, members in _buckets(prompts).items():
        for first in range(0, len(members), batch):
            chosen = members[first : first + batch]
            rows = min(batch, 1 << (len(chosen) - 1).bit_length())
            # Rows that fill up repeat the last one, and what they say is dropped.
            index = np.array([*chosen, *chosen[-1:] * (rows - len(chosen))])
            batched = padded([prompts[i] for i in index], length, tokenizer.pad_id)
            completions = jax.device_get(run(policy.params, batched, key, index))
            for row, i in enumerate(chosen):
                said[i] = [
                    _read(tokenizer, tokens[mask].tolist())
                    for tokens, mask in zip(
                        completions.tokens[row], completions.loss_mask[row], strict=True
                    )
                ]
    return said


@partial(jax.jit, static_argnames=("model", "samples", "sampling", "eos_ids", "pad_id"))
def _run(
    params: Params,
    prompts: Prompts,
    key: Key[Array, ""],
    index: Int[Array, "B"],
    *,
    model: LanguageModel,
    samples: int,
    sampling: SamplingConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> Completions:
    keys = jax.vmap(lambda i: row_keys(jax.random.fold_in(key, i), samples))(index)
    return sample(params, model, prompts, keys, sampling, eos_ids=eos_ids, pad_id=pad_id)


def _buckets(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, ids in enumerate(prompts):
        found.setdefault(bucket_length(len(ids)), []).append(i)
    return found


def _read(tokenizer: Tokenizer, ids: list[int]) -> Completion:
    """Of the sampled ids, of which the last one ends the completion or was cut off."""
    is_ended = bool(ids) and ids[-1] in tokenizer.eos_ids
    return Completion(tokenizer.decode(ids[: len(ids) - is_ended]), len(ids), not is_ended)
