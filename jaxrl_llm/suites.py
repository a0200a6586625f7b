"""Scores of a policy on a set of questions, and what training changed, question by question."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxrl_llm.evaluation import mean_over_problems
from jaxrl_llm.logging import provenance, write_json
from jaxrl_llm.types import ConfigError

_RESAMPLES = 9999


@dataclass(frozen=True)
class SuiteResult:
    """What one policy scored on one suite.

    Raises:
        ConfigError: no question, a metric without one score for each, or scores outside [0, 1].
    """

    suite: str
    """Its name."""
    scores: dict[str, list[float]]
    """Of each metric, one score in [0, 1] for each question."""
    questions: list[str]
    """A digest of each question (`question_digest`), which says whether two results are pairs."""
    seconds: float
    """Wall time of the measurement."""

    def __post_init__(self):
        n = len(self.questions)
        if not n:
            raise ConfigError(f"suite {self.suite}: no questions; expected at least one")
        for name, values in self.scores.items():
            if len(values) != n:
                raise ConfigError(
                    f"suite {self.suite}: {len(values)} scores of {name} for {n} questions; "
                    "expected one for each"
                )
            if not all(0.0 <= value <= 1.0 for value in values):
                raise ConfigError(f"suite {self.suite}: a score of {name} is not within [0, 1]")

    def of(self, metric: str) -> Float[np.ndarray, "N"]:
        """The scores of one metric.

        Raises:
            ConfigError: there is no such metric.
        """
        if metric not in self.scores:
            raise ConfigError(
                f"suite {self.suite} has no metric {metric!r}: expected one of "
                f"{', '.join(self.scores)}"
            )
        return np.array(self.scores[metric], float)


def question_digest(question: str) -> str:
    """16 hexadecimal digits that stand for a question."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def save_result(path: str | Path, result: SuiteResult, provenance: Mapping[str, Any]) -> None:
    """Write a result as JSON, with where it came from; what the file held is replaced at once.

    Args:
        path: of the file; its folder is made.
        result: what `load_result` reads.
        provenance: such as `logging.provenance()` and the settings; kept, not read back.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(result) | {"provenance": dict(provenance)})


def load_result(path: str | Path) -> SuiteResult:
    """A result that `save_result` wrote.

    Raises:
        ConfigError: there is no such file, or it is none.
    """
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        return SuiteResult(**{f.name: held[f.name] for f in dataclasses.fields(SuiteResult)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no result ({error!r}): expected a file that suites.save_result wrote"
        ) from None


def kept_result(
    path: Path, measure: Callable[[], SuiteResult], about: Mapping[str, Any]
) -> SuiteResult:
    """The result in a file, or else one that is measured and written there.

    Args:
        path: of the file.
        measure: makes the result.
        about: what is kept with it beside its provenance, such as the settings.
    """
    if not path.is_file():
        save_result(path, measure(), provenance() | about)
    return load_result(path)


def stages_record(
    experiment: str, columns: Sequence[tuple[str, Sequence[SuiteResult]]]
) -> dict[str, Any]:
    """The numbers behind a `comparison_table`, with where they came from."""
    return {
        "experiment": experiment,
        "provenance": provenance(),
        "stages": {
            stage: [dataclasses.asdict(result) for result in results] for stage, results in columns
        },
    }


class Difference(NamedTuple):
    """A mean difference over n questions, its 95 % interval, and how likely chance alone is."""

    value: float
    low: float
    high: float
    p_value: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.2g}"


def paired(base: SuiteResult, trained: SuiteResult, metric: str) -> Difference:
    """The mean of trained − base over the questions that both were asked.

    The interval is the BCa bootstrap's over questions. Where all differences are the same value c
    there is nothing to resample: it is [c − u(1+c), c + u(1−c)] for u = 1 − 0.025^(1/n), as a share
    of more than u of other differences, whatever they are in [−1, 1], would have shown up with
    97.5 %. The p-value, two-sided, is McNemar's exact one where all scores are 0 or 1, else a
    permutation test's, which flips signs. Both draw from a fixed seed.

    Raises:
        ConfigError: other suites, other questions, or no such metric.

    References:
        Efron 1987 (BCa), https://doi.org/10.1080/01621459.1987.10478410
        McNemar 1947, https://doi.org/10.1007/BF02295996
    """
    if base.suite != trained.suite or base.questions != trained.questions:
        raise ConfigError(
            f"results of {base.suite} ({len(base.questions)} questions) and {trained.suite} "
            f"({len(trained.questions)}) are no pairs: expected the same questions in the same "
            "order; measure both with the same suite, size and seed"
        )
    before, after = base.of(metric), trained.of(metric)
    difference = after - before
    low, high = _interval(difference)
    return Difference(float(difference.mean()), low, high, _p_value(before, after), len(difference))


def _interval(difference: Float[np.ndarray, "N"]) -> tuple[float, float]:
    """Of the mean, 95 %."""
    n, c = len(difference), float(difference[0])
    if np.ptp(difference) == 0:
        u = 1.0 - 0.025 ** (1.0 / n)
        return c - u * (1.0 + c), c + u * (1.0 - c)
    interval = stats.bootstrap(
        (difference,), np.mean, n_resamples=_RESAMPLES, rng=np.random.default_rng(0)
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _p_value(before: Float[np.ndarray, "N"], after: Float[np.ndarray, "N"]) -> float:
    if np.isin([before, after], (0.0, 1.0)).all():
        n_won, n_lost = int((after > before).sum()), int((after < before).sum())
        return float(stats.binomtest(n_won, n_won + n_lost).pvalue) if n_won + n_lost else 1.0
    if len(before) < 2:  # both signs are as likely
        return 1.0
    test = stats.permutation_test(
        (after, before),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def comparison_table(columns: Sequence[tuple[str, Sequence[SuiteResult]]]) -> str:
    """A Markdown table: a line for each suite and metric, a column for each policy.

    A cell is the mean over questions with its 95 % interval (`evaluation.mean_over_problems`), and
    from the second column on the paired difference to the first (`paired`). What a column lacks is
    a dash.

    Args:
        columns: of each its label and its results, of which no two are of one suite.

    Raises:
        ConfigError: no column, two results of one suite in one, or other questions than the first.
    """
    if not columns:
        raise ConfigError("no columns: expected pairs of a label and a list of results")
    by_suite = [_by_suite(label, results) for label, results in columns]
    lines = list(
        dict.fromkeys(
            (suite, metric)
            for results in by_suite
            for suite, result in results.items()
            for metric in result.scores
        )
    )
    header = ["suite", "metric", "n", *(label for label, _ in columns)]
    rows = [header, ["---"] * len(header)]
    for suite, metric in lines:
        found = [
            result if (result := results.get(suite)) and metric in result.scores else None
            for results in by_suite
        ]
        n = next(len(result.questions) for result in found if result)
        cells = [_cell(found[0] if i else None, result, metric) for i, result in enumerate(found)]
        rows.append([suite, metric, str(n), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _by_suite(label: str, results: Sequence[SuiteResult]) -> dict[str, SuiteResult]:
    found = {result.suite: result for result in results}
    if len(found) != len(results):
        raise ConfigError(f"column {label}: two results of one suite; expected one of each")
    return found


def _cell(first: SuiteResult | None, result: SuiteResult | None, metric: str) -> str:
    if result is None:
        return "–"
    value = str(mean_over_problems(result.of(metric)))
    return value if first is None else f"{value}; {paired(first, result, metric)}"
