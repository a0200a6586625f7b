"""The parts that comparing charts are made of.

A group has one colour in all charts. Where it has several runs, each is a thin line, their mean a
thick one, and the band goes from the lowest to the highest; a single run is a smoothed line over
its faint raw values, the outermost 1 % of which may lie outside the axes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from jaxrl_llm.runs import Group, Run, Series, aligned, smoothed

# Okabe and Ito's palette for all kinds of colour vision, https://jfly.uni-koeln.de/color/, without
# its yellow, which a thin line on white does not show.
_PALETTE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
_STYLES, _HATCHES = ("-", "--", ":", "-."), ("", "///", "...", "xxx")  # where colours repeat
_NAME_LENGTH, _SHOWN_PERCENTILES = 64, (0.5, 99.5)
GREY = "#6b6b6b"
SEEDS = "band: lowest to highest seed"


class Chart(NamedTuple):
    """A figure, and what one has to know of it without seeing it."""

    figure: Figure  # without axes when no run has what it shows
    title: str
    alt: str  # the figure in words
    missing: dict[Path, str]  # run → what it lacks to be drawn


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What one panel shows of each run, against the step."""

    of: Callable[[Run], Series]
    label: str
    """Label of the vertical axis, with the unit."""
    title: str = ""


def metric(*names: str) -> Callable[[Run], Series]:
    """The first of these metrics that a run has."""
    return lambda run: run.series(*names)


def color(group: Group) -> str:
    """The colour of a group; the same in all charts."""
    return _PALETTE[group.index % len(_PALETTE)]


def plain(name: str) -> str:
    """A name as Matplotlib shows it as it is: no mathematics, not hidden, and not too long."""
    half = _NAME_LENGTH // 2
    short = name if len(name) <= _NAME_LENGTH else f"{name[:half]}…{name[-half:]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def line_style(group: Group) -> dict[str, Any]:
    """How the line of a group is drawn."""
    style = _STYLES[group.index // len(_PALETTE) % len(_STYLES)]
    return {"color": color(group), "linestyle": style, "linewidth": 1.8}


def hatch(group: Group) -> str:
    """What fills the bars of a group."""
    return _HATCHES[group.index // len(_PALETTE) % len(_HATCHES)]


def having(
    groups: Sequence[Group], of: Callable[[Run], Series], needs: str = ""
) -> tuple[list[Group], dict[Path, str]]:
    """The groups with only those runs that have a finite value; and the others, with the reason."""
    kept, missing = [], {}
    for group in groups:
        runs = [run for run in group.runs if np.isfinite(of(run).values).any()]
        missing |= {run.path: f"no {needs}" for run in group.runs if run not in runs}
        if runs:
            kept.append(replace(group, runs=runs))
    return kept, missing


def curves_chart(
    title: str,
    groups: Sequence[Group],
    quantities: Sequence[Quantity],
    needs: str,
    smooth: int,
    decorate: Callable[[Axes, Sequence[Group]], None] = lambda axis, groups: None,
) -> Chart:
    """One panel per quantity, where any run has it.

    Args:
        title: heading of the figure.
        groups: what to draw.
        quantities: what each panel shows; the first decides which runs are missing.
        needs: what those lack.
        smooth: rows in the running means.
        decorate: adds to the first panel.
    """
    drawn, missing = having(groups, quantities[0].of, needs)
    if not drawn:
        return nothing(title, needs, missing)
    shown = [quantity for quantity in quantities if having(drawn, quantity.of)[0]]
    figure, axes = panels(title, len(shown))
    for axis, quantity in zip(axes, shown, strict=True):
        draw_quantity(axis, drawn, quantity, smooth)
    decorate(axes[0], drawn)
    faint = "over faint raw values (outermost 1 % may be cut off)"
    add_legend(figure, drawn, f"mean of up to {smooth} iterations {faint}; {SEEDS}")
    told = told_end(drawn, quantities[0].of, quantities[0].label)
    return Chart(figure, title, f"{title}. {told}", missing)


def draw_quantity(axis: Axes, groups: Sequence[Group], quantity: Quantity, smooth: int) -> None:
    """The curves of all groups that have the quantity."""
    shown, raw = [], []
    for group in having(groups, quantity.of)[0]:
        curves = [quantity.of(run) for run in group.runs]
        means = [smoothed(curve, smooth) for curve in curves]
        shown += [values for _, values in means]
        if len(curves) > 1:
            draw_band(axis, group, means)
            continue
        raw.append(curves[0].values)
        axis.plot(*curves[0], color=color(group), alpha=0.25, linewidth=1)
        axis.plot(*means[0], label=plain(group.legend), **line_style(group))
    if raw:
        _fit(axis, np.concatenate(shown), np.concatenate(raw))
    label_axis(axis, quantity.label, quantity.title)


def _fit(axis: Axes, shown: np.ndarray, raw: np.ndarray) -> None:
    """Make room for the smoothed values and all raw ones but spikes, which would flatten them."""
    kept = np.concatenate([shown, np.nanpercentile(raw, _SHOWN_PERCENTILES)])
    low, high = np.nanmin(kept), np.nanmax(kept)
    if high > low:
        margin = 0.05 * (high - low)
        axis.set_ylim(low - margin, high + margin)


def draw_band(axis: Axes, group: Group, curves: Sequence[Series], marker: str = "") -> None:
    """Several seeds: thin lines, their mean, and the band from the lowest to the highest."""
    for curve in curves:
        axis.plot(*curve, color=color(group), alpha=0.45, linewidth=0.8)
    steps, values = aligned(curves)
    axis.fill_between(
        steps, values.min(0), values.max(0), color=color(group), alpha=0.18, linewidth=0
    )
    axis.plot(steps, values.mean(0), label=plain(group.legend), marker=marker, **line_style(group))


def told_end(groups: Sequence[Group], of: Callable[[Run], Series], label: str) -> str:
    """A sentence with the first and the last value of each group's first run."""
    ends = [(group.label, of(group.runs[0]).values) for group in groups]
    told = [f"{name} from {v[0]:.3g} to {v[-1]:.3g}" for name, v in ends if len(v)]
    return f"{label}: {', '.join(told)}."


def _new_figure(title: str, width: float, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def panels(title: str, n: int, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with n axes, at most so many side by side."""
    columns = min(n, 2 if n == 4 else columns)
    lines = math.ceil(n / columns)
    width = 7.6 if n == 1 else 4.8 * columns
    figure = _new_figure(title, width, 0.8 + 3.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for unused in axes[n:]:
        unused.remove()
    return figure, axes[:n]


def bar_panels(title: str, counts: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Panels side by side for horizontal bars, as high as the longest list of them."""
    figure = _new_figure(title, max(7.6, 5.6 * len(counts)), 1.6 + 0.32 * max(counts))
    return figure, figure.subplots(1, len(counts), squeeze=False).ravel().tolist()


def draw_bars(
    axis: Axes,
    names: Sequence[str],
    lengths: Sequence[float],
    groups: Sequence[Group],
    texts: Sequence[str],
):
    """Horizontal bars from top to bottom, each with its text at the end; returns the bars."""
    bars = axis.barh(
        range(len(names)),
        lengths,
        color=[color(group) for group in groups],
        hatch=[hatch(group) for group in groups],
        edgecolor="white",
    )
    axis.bar_label(bars, labels=list(texts), padding=3, fontsize=8.5)
    axis.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=8.5)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.grid(axis="x", alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return bars


def label_axis(axis: Axes, label: str, title: str, x_label: str = "iteration") -> None:
    """Labels with units, a heading, a grid."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(label)
    axis.set_title(title, loc="left", fontsize=10.5)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, groups: Sequence[Group], caption: str) -> None:
    """One legend for all panels, below them, in the order of the groups, under a caption."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    ranks = [plain(group.legend) for group in groups]
    labels = sorted(found, key=lambda label: ranks.index(label) if label in ranks else len(ranks))
    longest = max(map(len, labels), default=0)
    columns = min(len(labels), max(1, int(figure.get_figwidth() * 14 / (longest + 8))))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(
        [found[label] for label in labels],
        labels,
        title=caption,
        title_fontproperties={"size": 8},
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
    )


def nothing(title: str, needs: str, missing: dict[Path, str]) -> Chart:
    """A figure without axes that says why."""
    text = f"no run has {needs}"
    figure = _new_figure(title, 7.6, 1.6)
    figure.text(0.5, 0.35, text, ha="center", color=GREY)
    return Chart(figure, title, f"{title}: {text}.", missing)
