"""Runs compared: each chart is a function of groups of runs, drawn without a display."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from jaxrl_llm.chart_parts import (
    GREY,
    SEEDS,
    Chart,
    Quantity,
    add_legend,
    bar_panels,
    color,
    curves_chart,
    draw_band,
    draw_bars,
    draw_quantity,
    hatch,
    having,
    label_axis,
    line_style,
    metric,
    nothing,
    panels,
    plain,
    told_end,
)
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

_OUTCOMES = "succeeded", "failed", "malformed", "unknown", "redundant", "unnecessary"


def rewards(groups: Sequence[Group], smooth: int) -> Chart:
    """Mean reward of training."""
    quantity = Quantity(of=metric("reward/mean"), label="mean reward per completion")
    return curves_chart("Training reward", groups, [quantity], "reward/mean", smooth)


def lengths(groups: Sequence[Group], smooth: int) -> Chart:
    """Mean length of the completions."""
    quantity = Quantity(of=metric("rollout/length_mean"), label="mean length, tokens")
    return curves_chart("Length of completions", groups, [quantity], "rollout/length_mean", smooth)


def entropy(groups: Sequence[Group], smooth: int) -> Chart:
    """Entropy of the policy."""
    quantity = Quantity(of=metric("policy/entropy"), label="entropy, nats per token")
    return curves_chart("Entropy of the policy", groups, [quantity], "policy/entropy", smooth)


def kl_divergence(groups: Sequence[Group], smooth: int) -> Chart:
    """KL to the reference with its target, and the coefficient that steers it."""
    quantities = [
        Quantity(of=metric("kl/rollout", "policy/kl_k3"), label="KL, nats per token"),
        Quantity(of=metric("kl/coef"), label="β, per nat", title="coefficient"),
    ]
    title, needs = "KL divergence to the reference", "kl/rollout or policy/kl_k3"
    return curves_chart(title, groups, quantities, needs, smooth, _draw_targets)


def _draw_targets(axis: Axes, groups: Sequence[Group]) -> None:
    targets: dict[float, list[Group]] = {}
    for group in groups:
        target = group.runs[0].setting("algorithm.kl_target")
        if isinstance(target, int | float):
            targets.setdefault(float(target), []).append(group)
    for target, steered in targets.items():
        own = color(steered[0]) if len(targets) > 1 and len(steered) == 1 else GREY
        axis.axhline(target, color=own, linestyle=(0, (6, 3)), label=f"KL target {target:g}")
        low, high = axis.get_ylim()
        axis.set_ylim(low, max(high, 1.1 * target))


def accuracy(groups: Sequence[Group]) -> Chart:
    """Held-out figures `eval/NAME`, with the intervals that the runs give them."""
    title = "Held-out evaluation"
    drawn, missing = having(groups, lambda run: _any_eval(run), "eval/…")
    names = eval_names(run for group in drawn for run in group.runs)
    if not names:
        return nothing(title, "eval/…", missing)
    figure, axes = panels(title, len(names))
    for axis, name in zip(axes, names, strict=True):
        for group in having(drawn, metric(f"eval/{name}"))[0]:
            _draw_evaluations(axis, group, name)
        found = [run.series(f"eval/{name}").values for group in drawn for run in group.runs]
        is_fraction = not (np.concatenate(found) > 1).any()
        label_axis(axis, "fraction" if is_fraction else "mean per episode", plain(name))
    add_legend(figure, drawn, f"bars of single runs: 95 % interval; {SEEDS}")
    told = [told_end(drawn, metric(f"eval/{name}"), name) for name in names]
    return Chart(figure, title, f"{title}. {' '.join(told)}", missing)


def _any_eval(run: Run) -> Series:
    return run.series(*(f"eval/{name}" for name in eval_names([run])))


def _draw_evaluations(axis: Axes, group: Group, name: str) -> None:
    if len(group.runs) > 1:
        draw_band(axis, group, [run.series(f"eval/{name}") for run in group.runs], marker="o")
        return
    run = group.runs[0]
    steps, values = run.series(f"eval/{name}")
    limits = [dict(zip(*run.series(f"eval/{name}{end}"), strict=True)) for end in ("_low", "_high")]
    low, high = (np.array([limit.get(step, np.nan) for step in steps]) for limit in limits)
    errors = np.clip(np.nan_to_num([values - low, high - values]), 0.0, None)
    axis.errorbar(
        steps, values, errors, label=plain(group.legend), capsize=3, marker="o", **line_style(group)
    )


def tool_usage(groups: Sequence[Group], smooth: int) -> Chart:
    """Calls per episode and how many succeed over training; what became of them at its end."""
    title, needs = "Tool calls", "rollout/calls"
    drawn, missing = having(groups, metric(needs), needs)
    if not drawn:
        return nothing(title, needs, missing)
    calls = Quantity(of=metric(needs), label="calls per episode", title="calls")
    success = Quantity(of=_success_rate, label="fraction of calls", title="calls that succeed")
    tags = frozenset().union(*(run.tags for group in drawn for run in group.runs))
    tools = sorted(tag.removeprefix(f"{needs}/") for tag in tags if tag.startswith(f"{needs}/"))
    columns = {"what became of them": {kind: f"calls_{kind}" for kind in _OUTCOMES}}
    if tools:
        columns["by tool"] = {tool: f"calls/{tool}" for tool in tools}
    figure, axes = panels(title, 2 + len(columns), columns=2)
    for axis, quantity in zip(axes, (calls, success), strict=False):
        draw_quantity(axis, drawn, quantity, smooth)
    for axis, (heading, names) in zip(axes[2:], columns.items(), strict=True):
        _draw_columns(axis, drawn, names, smooth)
        label_axis(axis, "calls per episode", heading, x_label="")
    add_legend(
        figure,
        drawn,
        f"curves: mean of up to {smooth} iterations, {SEEDS}; columns: at the end, "
        "bars: 95 % interval of single runs, lowest to highest seed of others",
    )
    told = told_end(drawn, calls.of, calls.label), told_end(drawn, success.of, success.title)
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
        axis.bar(
            x,
            values,
            width,
            label=plain(group.legend),
            color=color(group),
            hatch=hatch(group),
            edgecolor="white",
        )
        axis.errorbar(x, values, errors, fmt="none", ecolor="#333333", capsize=2, linewidth=1)
    labels = [plain(name) for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=20 if len(names) > 3 else 0)


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
    drawn, missing = having(groups, metric("reward/mean"), "reward/mean")
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
        return nothing(title, "reward/mean with train.prompts and train.group_size", missing)
    figure, axes = bar_panels(title, [len(found)])
    names = [item.run.name for item in found]
    lengths = [item.total if item.episodes is None else item.episodes for item in found]
    texts = ["not reached" if item.episodes is None else f"{item.episodes:,.0f}" for item in found]
    bars = draw_bars(axes[0], names, lengths, [item.group for item in found], texts)
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
    drawn, missing = having(groups, of, "reward/mean")
    if not drawn:
        return nothing(title, "reward/mean", missing)
    owned = [(group, run) for group in drawn for run in group.runs]
    figure, (left, right) = bar_panels(title, [len(drawn), len(owned)])
    spreads = [seed_spread(group.runs, smooth) for group in drawn]
    told = [
        f"{x:.3g}" if len(g.runs) > 1 else "one run" for g, x in zip(drawn, spreads, strict=True)
    ]
    draw_bars(left, [group.legend for group in drawn], np.nan_to_num(spreads).tolist(), drawn, told)
    left.set_xlabel("standard deviation of the final\nmean reward over seeds")
    falls = [max_drawdown(smoothed(of(run), smooth).values) for _, run in owned]
    fallen = [f"{fall:.3g}" for fall in falls]
    draw_bars(right, [run.name for _, run in owned], falls, [g for g, _ in owned], fallen)
    right.set_xlabel("largest drawdown of the\nsmoothed mean reward")
    spoken = [f"{g.label}: {text}" for g, text in zip(drawn, told, strict=True)]
    dropped = [f"{run.name}: {text}" for (_, run), text in zip(owned, fallen, strict=True)]
    alt = f"Seed spread: {', '.join(spoken)}. Largest drawdown: {', '.join(dropped)}."
    return Chart(figure, title, alt, missing)
