"""Learning curves as figures, drawn without a display."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from scipy import stats

from jaxrl_llm.logging import read_rows
from jaxrl_llm.types import ConfigError

_CURVE, _POINTS, _GREY = "#1f5fa8", "#c8501e", "#6b6b6b"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One metric against the step."""

    metric: str
    """Tag of the metric in the rows."""
    label: str
    """Label of the vertical axis, with the unit."""
    title: str = ""
    """Heading of the panel; the metric's tag when empty."""
    smooth: int = 1
    """Width of the centred running mean, in rows; above 1 it is drawn over the faint raw curve."""
    baseline: float | None = None
    """Height of a dashed line, for instance the value before training."""
    baseline_label: str = "baseline"
    """What the legend calls the dashed line."""
    points: Sequence[tuple[float, float, float, float]] = ()
    """Evaluations (step, value, low, high), drawn with error bars from low to high."""
    points_label: str = "evaluation, 95 % interval"
    """What the legend calls the points."""
    curve_label: str = "training"
    """What the legend calls the curve."""
    limits: tuple[float, float] | None = None
    """Range of the vertical axis; chosen from the data when None."""


def plot_curves(
    rows: str | Path | Sequence[Mapping[str, Any]],
    path: str | Path,
    panels: Sequence[Panel],
    *,
    title: str = "",
    step_label: str = "iteration",
) -> None:
    """Draw one panel per metric and write the figure.

    Args:
        rows: a `metrics.jsonl`, or its rows. Rows without a panel's metric are skipped by it.
        path: where the figure goes; its ending chooses the format. Folders are made.
        panels: what to draw, left to right and top to bottom, three to a line.
        title: heading of the figure.
        step_label: label of the horizontal axis.

    Raises:
        ConfigError: no panel was asked for.
    """
    if not panels:
        raise ConfigError("plot_curves was given no panel; expected at least one Panel(...)")
    if isinstance(rows, str | Path):
        rows = read_rows(rows)
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    lines = math.ceil(len(panels) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(4.8 * columns, 3.5 * lines), layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, axis in zip(panels, axes, strict=False):
        _draw(axis, rows, panel, step_label)
    for unused in axes[len(panels) :]:
        unused.remove()
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@dataclass(frozen=True)
class Arm:
    """Measurements of one run, to be compared with those of others."""

    label: str
    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def plot_arms(
    arms: Sequence[Arm], path: str | Path, *, title: str = "", label: str = "sampled accuracy"
) -> None:
    """Draw all arms with their intervals, against iterations and against training time."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03)
    figure = Figure(figsize=(9.6, 3.8), layout=layout)
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for arm, marker in zip(arms, itertools.cycle("os^Dv<>P"), strict=False):
        values, low, high = map(np.asarray, (arm.values, arm.lows, arm.highs))
        errors = np.maximum((values - low, high - values), 0.0)
        for axis, x in ((by_step, arm.steps), (by_time, arm.seconds)):
            axis.errorbar(
                x, values, errors, marker=marker, markersize=4.5, capsize=3, label=arm.label
            )
    by_step.set_ylabel(label)
    by_step.set_xlabel("iteration")
    by_time.set_xlabel("training time, s")
    for axis in (by_step, by_time):
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    by_time.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_bands(
    curves: Mapping[str, Mapping[str, Float[np.ndarray, "n steps"]]],
    path: str | Path,
    *,
    title: str = "",
    smooth: float = 0.1,
) -> None:
    """Draw what several seeds of several arms did: means, and bands of their 95 % t intervals.

    Args:
        curves: label of a panel → label of an arm → one row per seed, one column per iteration.
        path: where the figure goes; its ending chooses the format. Folders are made.
        title: heading of the figure.
        smooth: width of the running mean that is taken of every seed, in runs.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03)
    figure = Figure(figsize=(4.8 * len(curves), 4.0), layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(curves), squeeze=False)[0]
    for axis, (label, arms) in zip(axes, curves.items(), strict=True):
        for name, values in arms.items():
            width = max(1, round(smooth * values.shape[1]))
            smoothed = np.stack([running_mean(seed, width) for seed in values.astype(float)])
            n, mean = len(smoothed), smoothed.mean(0)
            half = stats.t.ppf(0.975, n - 1) * smoothed.std(0, ddof=1) / np.sqrt(n)
            steps = np.arange(1, values.shape[1] + 1)
            (line,) = axis.plot(steps, mean, linewidth=1.6, label=name)
            axis.fill_between(
                steps, mean - half, mean + half, color=line.get_color(), alpha=0.18, linewidth=0
            )
        axis.set_xlabel("iteration")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False
    )
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw(axis: Axes, rows: Sequence[Mapping[str, Any]], panel: Panel, step_label: str) -> None:
    found = [(row["step"], float(row[panel.metric])) for row in rows if panel.metric in row]
    steps, values = np.array(found, float).reshape(-1, 2).T
    values = np.where(np.isfinite(values), values, np.nan)
    if len(steps):
        label = panel.curve_label
        if panel.smooth > 1:
            axis.plot(steps, values, color=_CURVE, alpha=0.25, linewidth=1)
            values = running_mean(values, panel.smooth)
            label += f", mean of {panel.smooth}"
        axis.plot(steps, values, color=_CURVE, linewidth=1.8, label=label)
    if panel.baseline is not None:
        axis.axhline(
            panel.baseline, color=_GREY, linestyle="--", linewidth=1.2, label=panel.baseline_label
        )
    if panel.points:
        x, y, low, high = np.array(panel.points, float).T
        axis.errorbar(
            x,
            y,
            np.maximum((y - low, high - y), 0.0),
            color=_POINTS,
            fmt="o",
            markersize=4.5,
            capsize=3,
            linewidth=1.4,
            label=panel.points_label,
            zorder=3,
        )
    axis.set_title(panel.title or panel.metric, fontsize=11)
    axis.set_xlabel(step_label)
    axis.set_ylabel(panel.label)
    if panel.limits is not None:
        axis.set_ylim(*panel.limits)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    labelled, _ = axis.get_legend_handles_labels()
    if len(labelled) > 1 or (labelled and panel.smooth > 1):
        axis.legend(frameon=False, fontsize=8.5)


def running_mean(x: Float[np.ndarray, "N"], width: int) -> Float[np.ndarray, "N"]:
    """Mean over the `width` values around each one, fewer at the ends; NaN values are skipped.

    >>> running_mean(np.array([0.0, 3.0, 6.0]), 3).tolist()
    [1.5, 3.0, 4.5]
    """
    window = np.ones(width)
    is_known = np.isfinite(x)
    middle = slice((width - 1) // 2, (width - 1) // 2 + len(x))
    total = np.convolve(np.where(is_known, x, 0.0), window)[middle]
    count = np.convolve(is_known.astype(float), window)[middle]
    return np.divide(total, count, out=np.full(len(x), np.nan), where=count > 0)
