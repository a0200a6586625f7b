"""Runs compared: each chart is a function of groups of runs, drawn without a display.

A group has one colour in all charts. Where it has several runs, each is a thin line, their mean a
thick one, and the band goes from the lowest to the highest; a single run is a smoothed line over
its faint raw values.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from jaxrl_llm.runs import (
    Group,
    Interval,
    Run,
    Series,
    aligned,
    episodes,
    eval_names,
    first_stay,
    last_interval,
    max_drawdown,
    seed_spread,
    smoothed,
    trailing,
)

_GREY, _STYLES, _NAME_LENGTH = "#6b6b6b", ("-", "--", ":", "-."), 44
_PALETTE = "petroff8"  # tested for colour-vision deficiencies, https://arxiv.org/abs/2107.02270
_OUTCOMES = "succeeded", "failed", "malformed", "unknown", "redundant", "unnecessary"


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


# ---- the charts


def rewards(groups: Sequence[Group], smooth: int) -> Chart:
    """Mean reward of training."""
    quantity = Quantity(of=metric("reward/mean"), label="mean reward per completion")
    return _curves("Training reward", groups, [quantity], "reward/mean", smooth)


def lengths(groups: Sequence[Group], smooth: int) -> Chart:
    """Mean length of the completions."""
    quantity = Quantity(of=metric("rollout/length_mean"), label="mean length, tokens")
    return _curves("Length of completions", groups, [quantity], "rollout/length_mean", smooth)


def entropy(groups: Sequence[Group], smooth: int) -> Chart:
    """Entropy of the policy."""
    quantity = Quantity(of=metric("policy/entropy"), label="entropy, nats per token")
    return _curves("Entropy of the policy", groups, [quantity], "policy/entropy", smooth)


def kl_divergence(groups: Sequence[Group], smooth: int) -> Chart:
    """KL to the reference with its target, and the coefficient that steers it."""
    quantities = [
        Quantity(of=metric("kl/rollout", "policy/kl_k3"), label="KL, nats per token"),
        Quantity(of=metric("kl/coef"), label="β, per nat", title="coefficient"),
    ]
    needs = "kl/rollout or policy/kl_k3"
    chart = _curves("KL divergence to the reference", groups, quantities, needs, smooth)
    if chart.figure.axes:
        _draw_targets(chart.figure.axes[0], _with(groups, quantities[0].of)[0])
        _add_legend(chart.figure)
    return chart


def _draw_targets(axis: Axes, groups: Sequence[Group]) -> None:
    targets: dict[float, list[Group]] = {}
    for group in groups:
        target = group.runs[0].setting("algorithm.kl_target")
        if isinstance(target, int | float):
            targets.setdefault(float(target), []).append(group)
    for target, steered in targets.items():
        own = color(steered[0]) if len(targets) > 1 and len(steered) == 1 else _GREY
        axis.axhline(target, color=own, linestyle=(0, (6, 3)), label=f"KL target {target:g}")


def accuracy(groups: Sequence[Group]) -> Chart:
    """Held-out figures `eval/NAME`, with the intervals that the runs give them."""
    title = "Held-out accuracy"
    drawn, missing = _with(groups, lambda run: _any_eval(run), "eval/…")
    names = eval_names(run for group in drawn for run in group.runs)
    if not names:
        return _nothing(title, "eval/…", missing)
    figure, axes = _panels(title, len(names))
    for axis, name in zip(axes, names, strict=True):
        for group in _with(drawn, metric(f"eval/{name}"))[0]:
            _draw_evaluations(axis, group, name)
        _label_axis(
            axis, "fraction", _plain(name), "bars: 95 % interval; band: lowest to highest seed"
        )
    _add_legend(figure)
    told = [_told_end(drawn, metric(f"eval/{name}"), name) for name in names]
    return Chart(figure, title, f"{title}. {' '.join(told)}", missing)


def _any_eval(run: Run) -> Series:
    return run.series(*(f"eval/{name}" for name in eval_names([run])))


def _draw_evaluations(axis: Axes, group: Group, name: str) -> None:
    if len(group.runs) > 1:
        _draw_band(axis, group, [run.series(f"eval/{name}") for run in group.runs], marker="o")
        return
    run = group.runs[0]
    steps, values = run.series(f"eval/{name}")
    limits = [dict(zip(*run.series(f"eval/{name}{end}"), strict=True)) for end in ("_low", "_high")]
    low, high = (np.array([limit.get(step, np.nan) for step in steps]) for limit in limits)
    errors = np.clip(np.nan_to_num([values - low, high - values]), 0.0, None)
    axis.errorbar(
        steps, values, errors, label=_plain(group.legend), capsize=3, marker="o", **_line(group)
    )


def tool_usage(groups: Sequence[Group], smooth: int) -> Chart:
    """Calls per episode and how many succeed over training; what became of them at its end."""
    title, needs = "Tool calls", "rollout/calls"
    drawn, missing = _with(groups, metric(needs), needs)
    if not drawn:
        return _nothing(title, needs, missing)
    calls = Quantity(of=metric(needs), label="calls per episode", title="calls")
    success = Quantity(of=_success_rate, label="fraction of calls", title="calls that succeed")
    tags = frozenset().union(*(run.tags for group in drawn for run in group.runs))
    tools = sorted(tag.removeprefix(f"{needs}/") for tag in tags if tag.startswith(f"{needs}/"))
    columns = {"what became of them": {kind: f"calls_{kind}" for kind in _OUTCOMES}}
    if tools:
        columns["by tool"] = {tool: f"calls/{tool}" for tool in tools}
    figure, axes = _panels(title, 2 + len(columns), columns=2)
    for axis, quantity in zip(axes, (calls, success), strict=False):
        _draw_quantity(axis, drawn, quantity, smooth)
    for axis, (heading, names) in zip(axes[2:], columns.items(), strict=True):
        _draw_columns(axis, drawn, names, smooth)
        _label_columns(axis, heading)
    _add_legend(figure)
    told = _told_end(drawn, calls.of, calls.label), _told_end(drawn, success.of, success.title)
    return Chart(figure, title, f"{title}. {' '.join(told)}", missing)


def _success_rate(run: Run) -> Series:
    calls, succeeded = run.series("rollout/calls"), run.series("rollout/calls_succeeded")
    if not len(succeeded.steps):
        return succeeded
    steps, (n_calls, n_succeeded) = aligned([calls, succeeded])
    rate = np.full(len(steps), np.nan)
    return Series(steps, np.divide(n_succeeded, n_calls, out=rate, where=n_calls > 0))


def _draw_columns(axis: Axes, groups: Sequence[Group], names: dict[str, str], smooth: int) -> None:
    """One column per group at each name, from the last evaluation or else the last rollouts."""
    width = 0.8 / len(groups)
    for place, group in enumerate(groups):
        ends = [_over_runs(group, name, smooth) for name in names.values()]
        values, low, high = np.array(ends, float).reshape(-1, 3).T
        errors = np.clip(np.nan_to_num([values - low, high - values]), 0.0, None)
        x = np.arange(len(names)) + (place - (len(groups) - 1) / 2) * width
        axis.bar(x, values, width, color=color(group), label=_plain(group.legend))
        axis.errorbar(x, values, errors, fmt="none", ecolor="#333333", capsize=2, linewidth=1)
    labels = [_plain(name) for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=20 if len(names) > 3 else 0)


def _label_columns(axis: Axes, title: str) -> None:
    _label_axis(axis, "calls per episode", title, "at the end; bars: 95 % interval, or all seeds")
    axis.set_xlabel("")


def _over_runs(group: Group, name: str, smooth: int) -> Interval:
    """The run's own interval where the group has one run, else mean, lowest and highest."""
    ends = [_end(run, name, smooth) for run in group.runs]
    if len(ends) == 1:
        return ends[0]
    values = [end.value for end in ends if not math.isnan(end.value)]
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    return Interval(float(np.mean(values)), min(values), max(values))


def _end(run: Run, name: str, smooth: int) -> Interval:
    if f"eval/{name}" in run.tags:
        return last_interval(run, f"eval/{name}")
    values = trailing(run.series(f"rollout/{name}"), smooth).values
    return Interval(float(values[-1]) if len(values) else math.nan, math.nan, math.nan)


class Efficiency(NamedTuple):
    """What a run needed to reach the threshold."""

    group: Group
    run: Run
    episodes: float | None  # completions sampled; None when the threshold was not reached
    total: float  # completions sampled in the whole run


def default_threshold(runs: Iterable[Run], smooth: int) -> float:
    """Halfway between the first and the best running mean of the reward, over all runs.

    The first is the mean over runs; NaN when no run has a reward.
    """
    means = [trailing(run.series("reward/mean"), smooth).values for run in runs]
    means = [values[np.isfinite(values)] for values in means]
    means = [values for values in means if len(values)]
    if not means:
        return math.nan
    first = float(np.mean([values[0] for values in means]))
    return (first + max(float(values.max()) for values in means)) / 2


def efficiencies(
    groups: Sequence[Group], threshold: float, smooth: int
) -> tuple[list[Efficiency], dict[Path, str]]:
    """Episodes until the running mean of the reward stays at or above the threshold, per run.

    The running mean is over the last rows, and has to stay there until the run's last row.
    Returns also the runs that cannot be counted, with the reason.
    """
    drawn, missing = _with(groups, metric("reward/mean"), "reward/mean")
    found = []
    for group in drawn:
        for run in group.runs:
            spent = episodes(run)
            if spent is None:
                missing[run.path] = "no train.prompts and train.group_size in config.json"
                continue
            start = first_stay(trailing(run.series("reward/mean"), smooth).values, threshold)
            needed = None if start is None else float(spent[start])
            found.append(Efficiency(group, run, needed, float(spent[-1])))
    return found, missing


def sample_efficiency(groups: Sequence[Group], smooth: int, threshold: float | None) -> Chart:
    """A bar per run: the episodes of `efficiencies`, dashed over all of them when not reached."""
    title = "Sample efficiency"
    if threshold is None:
        threshold = default_threshold([run for g in groups for run in g.runs], smooth)
    found, missing = efficiencies(groups, threshold, smooth)
    if not found:
        return _nothing(title, "reward/mean with train.prompts and train.group_size", missing)
    figure, axes = _bars(title, [len(found)])
    names = [item.run.name for item in found]
    lengths = [item.total if item.episodes is None else item.episodes for item in found]
    texts = ["not reached" if item.episodes is None else f"{item.episodes:,.0f}" for item in found]
    bars = _draw_bars(axes[0], names, lengths, [item.group for item in found], texts)
    for bar in (bar for bar, item in zip(bars, found, strict=True) if item.episodes is None):
        bar.set(facecolor="none", edgecolor=bar.get_facecolor(), linestyle="--")
    label = f"episodes until the mean reward stays at or above {threshold:.3g}"
    axes[0].set_xlabel(label)
    axes[0].xaxis.set_major_formatter("{x:,.0f}")
    told = ", ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return Chart(figure, title, f"{title}, {label}. {told}.", missing)


def stability(groups: Sequence[Group], smooth: int) -> Chart:
    """Spread of the final reward over the seeds of each group, and each run's largest drawdown."""
    title, of = "Stability", metric("reward/mean")
    drawn, missing = _with(groups, of, "reward/mean")
    if not drawn:
        return _nothing(title, "reward/mean", missing)
    owned = [(group, run) for group in drawn for run in group.runs]
    figure, (left, right) = _bars(title, [len(drawn), len(owned)])
    spreads = [seed_spread(group.runs, smooth) for group in drawn]
    told = [
        f"{x:.3g}" if len(g.runs) > 1 else "one run" for g, x in zip(drawn, spreads, strict=True)
    ]
    _draw_bars(
        left, [group.legend for group in drawn], np.nan_to_num(spreads).tolist(), drawn, told
    )
    left.set_xlabel("standard deviation of the final\nmean reward over seeds")
    falls = [max_drawdown(smoothed(of(run), smooth).values) for _, run in owned]
    fallen = [f"{fall:.3g}" for fall in falls]
    _draw_bars(right, [run.name for _, run in owned], falls, [g for g, _ in owned], fallen)
    right.set_xlabel("largest drawdown of the smoothed reward")
    spoken = [f"{g.label}: {text}" for g, text in zip(drawn, told, strict=True)]
    dropped = [f"{run.name}: {text}" for (_, run), text in zip(owned, fallen, strict=True)]
    alt = f"Seed spread: {', '.join(spoken)}. Largest drawdown: {', '.join(dropped)}."
    return Chart(figure, title, alt, missing)


# ---- the parts that they are made of


def color(group: Group) -> str:
    """The colour of a group; after eight of them the line style tells colours apart."""
    palette: Any = matplotlib.color_sequences[_PALETTE]
    return palette[group.index % len(palette)]


def _plain(name: str) -> str:
    """A name as Matplotlib shows it as it is: no mathematics, not hidden, and not too long."""
    half = _NAME_LENGTH // 2
    short = name if len(name) <= _NAME_LENGTH else f"{name[:half]}…{name[-half:]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def _line(group: Group) -> dict[str, Any]:
    palette = matplotlib.color_sequences[_PALETTE]
    return {
        "color": color(group),
        "linestyle": _STYLES[group.index // len(palette) % len(_STYLES)],
        "linewidth": 1.8,
    }


def _with(
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


def _curves(
    title: str, groups: Sequence[Group], quantities: Sequence[Quantity], needs: str, smooth: int
) -> Chart:
    """One panel per quantity, where any run has it; the first decides which runs are missing."""
    drawn, missing = _with(groups, quantities[0].of, needs)
    if not drawn:
        return _nothing(title, needs, missing)
    shown = [quantity for quantity in quantities if _with(drawn, quantity.of)[0]]
    figure, axes = _panels(title, len(shown))
    for axis, quantity in zip(axes, shown, strict=True):
        _draw_quantity(axis, drawn, quantity, smooth)
    _add_legend(figure)
    told = _told_end(drawn, quantities[0].of, quantities[0].label)
    return Chart(figure, title, f"{title}. {told}", missing)


def _draw_quantity(axis: Axes, groups: Sequence[Group], quantity: Quantity, smooth: int) -> None:
    for group in _with(groups, quantity.of)[0]:
        curves = [quantity.of(run) for run in group.runs]
        means = [smoothed(curve, smooth) for curve in curves]
        if len(curves) > 1:
            _draw_band(axis, group, means)
            continue
        axis.plot(*curves[0], color=color(group), alpha=0.25, linewidth=1)
        axis.plot(*means[0], label=_plain(group.legend), **_line(group))
    caption = f"mean of up to {smooth} iterations; band: lowest to highest seed"
    _label_axis(axis, quantity.label, quantity.title, caption)


def _draw_band(axis: Axes, group: Group, curves: Sequence[Series], marker: str = "") -> None:
    for curve in curves:
        axis.plot(*curve, color=color(group), alpha=0.45, linewidth=0.8)
    steps, values = aligned(curves)
    axis.fill_between(
        steps, values.min(0), values.max(0), color=color(group), alpha=0.18, linewidth=0
    )
    axis.plot(steps, values.mean(0), label=_plain(group.legend), marker=marker, **_line(group))


def _told_end(groups: Sequence[Group], of: Callable[[Run], Series], label: str) -> str:
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


def _panels(title: str, n: int, columns: int = 3) -> tuple[Figure, list[Axes]]:
    columns = min(n, 2 if n == 4 else columns)
    lines = math.ceil(n / columns)
    width = 7.6 if n == 1 else 4.8 * columns
    figure = _new_figure(title, width, 0.8 + 3.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for unused in axes[n:]:
        unused.remove()
    return figure, axes[:n]


def _bars(title: str, counts: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Panels side by side for horizontal bars, as high as the longest list of them."""
    figure = _new_figure(title, max(7.6, 5.6 * len(counts)), 1.6 + 0.32 * max(counts))
    return figure, figure.subplots(1, len(counts), squeeze=False).ravel().tolist()


def _draw_bars(
    axis: Axes,
    names: Sequence[str],
    lengths: Sequence[float],
    groups: Sequence[Group],
    texts: Sequence[str],
):
    bars = axis.barh(range(len(names)), lengths, color=[color(group) for group in groups])
    axis.bar_label(bars, labels=list(texts), padding=3, fontsize=8.5)
    axis.set_yticks(range(len(names)), [_plain(name) for name in names], fontsize=8.5)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.grid(axis="x", alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return bars


def _label_axis(axis: Axes, label: str, title: str, caption: str) -> None:
    axis.set_xlabel("iteration")
    axis.set_ylabel(label)
    heading = f"{title}\n" if title else ""
    axis.set_title(heading, loc="left", fontsize=10.5)
    axis.set_title(caption, loc="right", fontsize=7.5, color=_GREY)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure) -> None:
    """One legend of all panels, below them."""
    for legend in list(figure.legends):
        legend.remove()
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    longest = max(map(len, found), default=0)
    columns = max(1, int(figure.get_figwidth() * 11 / (longest + 8)))
    if found:
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside lower center",
            ncols=min(columns, len(found)),
            frameon=False,
            fontsize=8.5,
        )


def _nothing(title: str, needs: str, missing: dict[Path, str]) -> Chart:
    """A figure without axes that says why."""
    text = f"no run has {needs}"
    figure = _new_figure(title, 7.6, 1.6)
    figure.text(0.5, 0.35, text, ha="center", color=_GREY)
    return Chart(figure, title, f"{title}: {text}.", missing)
