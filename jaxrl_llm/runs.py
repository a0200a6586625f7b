"""Runs as they lie on the disk, read to be compared, and grouped by their config."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.logging import config_diff, read_rows
from jaxrl_llm.plots import running_mean
from jaxrl_llm.types import ConfigError

_EVENTS, _NAMED_FIELDS = "events.out.tfevents.", 3
_WALL = tuple(f"time/{part}_seconds" for part in ("train", "evaluate", "compile", "checkpoint"))


class Series(NamedTuple):
    """One metric of one run, in the order of its steps."""

    steps: Float[np.ndarray, "N"]
    values: Float[np.ndarray, "N"]  # NaN where not finite


class Interval(NamedTuple):
    """A measured value; its limits are NaN where nothing is known of them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run, as far as its files say."""

    path: Path
    """Its folder."""
    name: str
    """The folder, seen from where the runs were looked for."""
    rows: list[dict[str, Any]]
    """Metrics: `step`, then tag → value."""
    config: dict[str, Any] = field(default_factory=dict)
    """Nested settings; empty when unknown."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Final figures and provenance; empty while the run is not finished."""

    def series(self, *metrics: str) -> Series:
        """The first of these metrics that the run has; empty when it has none."""
        for metric in metrics:
            found = {row["step"]: number(row[metric]) for row in self.rows if metric in row}
            if found:
                return Series(*np.array(sorted(found.items()), float).T)
        return Series(np.empty(0), np.empty(0))

    def setting(self, path: str) -> Any:
        """A setting by its dotted path, such as `algorithm.kl_target`; None when absent."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def seed(self) -> Any:
        """The seed of its config, None when unknown."""
        seed = self.setting("run.seed")
        return self.setting("seed") if seed is None else seed

    @cached_property
    def tags(self) -> frozenset[str]:
        """Every metric that some row has."""
        return frozenset().union(*self.rows) - {"step"}

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Transcripts: `step`, prompt, completion, reward."""
        rows = read_rows(self.path / "samples.jsonl")
        return [row for row in rows if _has_step(row)]

    @cached_property
    def seconds(self) -> float:
        """Wall-clock seconds of training, evaluation, compiling and saving, over all processes."""
        timing = read_rows(self.path / "timing.jsonl")
        spent = [number(row[name]) for row in timing for name in _WALL if name in row]
        return sum(spent) if spent else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Runs of one config, which differ by the seed; its place in the list decides its colour."""

    label: str
    runs: Sequence[Run]
    index: int

    @property
    def legend(self) -> str:
        """The label, with the number of seeds where there are several runs."""
        n_runs, n_seeds = len(self.runs), len({str(run.seed) for run in self.runs})
        if n_runs == 1:
            return self.label
        return f"{self.label} ({n_runs} {'seeds' if n_runs == n_seeds else 'runs, repeated seeds'})"


def number(value: Any) -> float:
    """`value` as a float; NaN when it is infinite or no number.

    >>> number("0.5"), number("Infinity"), number(None)
    (0.5, nan, nan)
    """
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return result if math.isfinite(result) else math.nan


def find_runs(root: str | Path) -> tuple[list[Run], dict[Path, str]]:
    """Read every run in a folder and below.

    Args:
        root: a folder of runs, or one run. A run is a folder with `metrics.jsonl`, or with
            TensorBoard event files.

    Returns:
        The runs, by path; and what was left out, folder → reason: whole runs that cannot be read,
        and parts of runs that can (a last line that is still being written).

    Raises:
        ConfigError: there is no run, or none that can be read.
    """
    root, runs, notes = Path(root), [], {}
    for path in _run_folders(root):
        try:
            rows, note = _read_metrics(path)
            config, broken = _read_object(path / "config.json")
            summary, _ = _read_object(path / "summary.json")
        except (OSError, ValueError) as error:
            notes[path] = str(error)
            continue
        name = path.relative_to(root).as_posix() if path != root else path.resolve().name
        runs.append(Run(path=path, name=name, rows=rows, config=config, summary=summary))
        if told := "; ".join(filter(None, (note, broken))):
            notes[path] = told
    if not runs:
        raise ConfigError(_nothing_found(root, notes))
    return runs, notes


def _run_folders(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(set(below) - {"checkpoints"})
        if any(name == "metrics.jsonl" or name.startswith(_EVENTS) for name in files):
            yield Path(folder)


def _nothing_found(root: Path, notes: dict[Path, str]) -> str:
    if notes:
        told = ", ".join(f"{path}: {reason}" for path, reason in notes.items())
        return f"none of the runs below {root.absolute()} can be read ({told})"
    state = "holds no run" if root.is_dir() else "is no folder"
    return (
        f"{root.absolute()} {state}; expected one with metrics.jsonl or TensorBoard event files "
        "in it or below: type the folder that the experiments wrote to, such as runs"
    )


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows of a run, and a note about an unfinished last line.

    Raises:
        ValueError: the rows cannot be read; says why.
    """
    file = path / "metrics.jsonl"
    if not file.exists():
        return _read_events(path), ""
    lines = file.read_bytes().split(b"\n")
    is_cut = bool(lines[-1]) and _parse(lines[-1]) is None
    rows = []
    for place, line in enumerate(lines[:-1] if is_cut else lines, start=1):
        if line.strip():
            if (row := _parse(line)) is None:
                raise ValueError(f"line {place} of {file.name} is no JSON row with a step")
            rows.append(row)
    if not rows:
        raise ValueError(f"{file.name} has no whole row")
    return rows, f"left out the unfinished last line of {file.name}" if is_cut else ""


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and _has_step(row) else None


def _has_step(row: dict[str, Any]) -> bool:
    step = row.get("step")
    return isinstance(step, int | float) and math.isfinite(number(step))


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Scalars of TensorBoard event files, those that TensorFlow 2 writes as tensors included."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ValueError(
            "has TensorBoard event files only; to read them: pip install 'tensorboard>=2.21'"
        ) from error
    events = EventAccumulator(str(path), {"scalars": 0, "tensors": 0}).Reload()
    rows: dict[float, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": event.step})[tag] = event.value
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            if (array := make_ndarray(event.tensor_proto)).size == 1:
                rows.setdefault(event.step, {"step": event.step})[tag] = array.item()
    if not rows:
        raise ValueError("its TensorBoard event files hold no scalar")
    return [rows[step] for step in sorted(rows)]


def _read_object(file: Path) -> tuple[dict[str, Any], str]:
    """A JSON object and a note: empty and why, when the file holds none."""
    if not file.exists():
        return {}, ""
    try:
        value = json.loads(file.read_bytes())
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value, ""
    return {}, f"{file.name} is no JSON object, so the run is a group of its own"


def group_runs(runs: Iterable[Run], root_name: str = "runs") -> list[Group]:
    """Put runs together that have the same config but for `run.*` (seed, name, folder) and `seed`.

    A run without a config is a group of its own. A group of several runs is named by the folder
    that they share, and by the settings in which it differs from others of that name.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        shared = _shared_config(run)
        key = json.dumps(shared, sort_keys=True) if shared else str(run.path)
        members.setdefault(key, []).append(run)
    labels = _labels(list(members.values()), root_name)
    return [
        Group(label=label, runs=tuple(group), index=index)
        for index, (label, group) in enumerate(zip(labels, members.values(), strict=True))
    ]


def _shared_config(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in ("run", "seed")}


def _labels(groups: list[list[Run]], root_name: str) -> list[str]:
    labels = [_common_name(runs, root_name) for runs in groups]
    counts = Counter(labels)
    for label in (label for label, count in counts.items() if count > 1):
        places = [i for i, other in enumerate(labels) if other == label]
        for place, told in zip(places, _differences([groups[i][0] for i in places]), strict=True):
            labels[place] = f"{label}, {told}"
    return labels


def _common_name(runs: list[Run], root_name: str) -> str:
    if len(runs) == 1:
        return runs[0].name
    shared = os.path.commonpath([run.name for run in runs])
    return shared or str(runs[0].summary.get("experiment") or root_name)


def _differences(runs: list[Run]) -> list[str]:
    """What tells each run from the others, as `field=value, …`; some fields stand for many."""
    configs = [_shared_config(run) for run in runs]
    paths = sorted({path for config in configs for path in config_diff(configs[0], config)})
    shown = paths[:_NAMED_FIELDS]
    told = [
        ", ".join(f"{path.split('.')[-1]}={_plain(run.setting(path))}" for path in shown)
        for run in runs
    ]
    is_ambiguous = len(set(told)) < len(told)
    return [f"{text} #{i}" if is_ambiguous else text for i, text in enumerate(told, start=1)]


def _plain(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


# ---- what is compared


def smoothing_width(n: int, smooth: int) -> int:
    """Rows in a running mean over n rows: `smooth`, and a fifth of the run at most."""
    return max(1, min(smooth, n // 5))


def smoothed(series: Series, smooth: int) -> Series:
    """The centred running mean."""
    n = len(series.values)
    return (
        series._replace(values=running_mean(series.values, smoothing_width(n, smooth)))
        if n
        else series
    )


def trailing(series: Series, smooth: int) -> Series:
    """The mean of each value and those before it: what was known at that step."""
    n = len(series.values)
    width = smoothing_width(n, smooth)
    # Shifted by half a window, the centred mean ends where it was centred.
    late = np.concatenate([np.full((width - 1) // 2, np.nan), series.values])
    return series._replace(values=running_mean(late, width)[:n] if n else late)


def aligned(curves: Sequence[Series]) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "R N"]]:
    """The steps that all R curves have, and the values of each there."""
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    return steps, np.stack([values[np.isin(at, steps)] for at, values in curves])


def final_reward(run: Run, smooth: int) -> float:
    """Mean of the last rewards; NaN without any."""
    values = trailing(run.series("reward/mean"), smooth).values
    return float(values[-1]) if len(values) else math.nan


def episodes(run: Run) -> Float[np.ndarray, "N"] | None:
    """Completions sampled up to each row of `reward/mean`; None when the config does not tell.

      iterations × train.prompts × train.group_size × rollout/rounds

    The rounds of dynamic sampling are 1 where they are not logged.
    """
    steps, _ = run.series("reward/mean")
    per_round = number(run.setting("train.prompts")) * number(run.setting("train.group_size"))
    if math.isnan(per_round):
        return None
    rounds = dict(zip(*run.series("rollout/rounds"), strict=True))
    drawn = [rounds.get(step, 1.0) for step in steps]
    return np.cumsum(np.diff(steps, prepend=0.0) * drawn) * per_round


def first_stay(values: Float[np.ndarray, "N"], threshold: float) -> int | None:
    """Index of the first value from which on none is below the threshold; None without one.

    >>> first_stay(np.array([0.0, 0.9, 0.1, 0.6, 0.8]), 0.5)
    3
    """
    below = np.flatnonzero(~(values >= threshold))  # NaN is below
    start = int(below[-1]) + 1 if len(below) else 0
    return start if start < len(values) else None


def max_drawdown(values: Float[np.ndarray, "N"]) -> float:
    """Largest fall from an earlier peak, max over s ≤ t of v_s − v_t; NaN values are skipped.

    >>> max_drawdown(np.array([0.0, 3.0, 1.0, 5.0, 4.0]))
    2.0
    """
    known = values[np.isfinite(values)]
    return float(np.max(np.maximum.accumulate(known) - known, initial=0.0))


def seed_spread(runs: Sequence[Run], smooth: int) -> float:
    """Standard deviation of the reward over runs at the last step that all have; NaN for one."""
    if len(runs) < 2:
        return math.nan
    steps, values = aligned([trailing(run.series("reward/mean"), smooth) for run in runs])
    return float(np.std(values[:, -1], ddof=1)) if len(steps) else math.nan


def eval_names(runs: Iterable[Run]) -> list[str]:
    """Names of the held-out figures, `eval/NAME`, without their limits and without tool calls."""
    tags = frozenset().union(*(run.tags for run in runs))
    names = [tag.removeprefix("eval/") for tag in sorted(tags) if tag.startswith("eval/")]
    limits = {f"{name}{end}" for name in names for end in ("_low", "_high")}
    return [name for name in names if name not in limits and not name.startswith("calls")]


def last_interval(run: Run, metric: str) -> Interval:
    """The last value of a metric with its `_low` and `_high`; NaN where there is none."""
    rows = [row for row in run.rows if metric in row]
    row = max(rows, key=lambda row: number(row["step"]), default={})
    return Interval(*(number(row.get(f"{metric}{end}")) for end in ("", "_low", "_high")))
