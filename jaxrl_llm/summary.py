"""What a finished run says of itself: figures before and after, curves, summary.json."""

import dataclasses
from typing import Any

from jaxrl_llm.logging import RunFolder, provenance, read_rows, write_summary
from jaxrl_llm.plots import Panel, plot_curves
from jaxrl_llm.trainer import RunResult
from jaxrl_llm.training import TrainConfig

Row = dict[str, Any]

PANELS = [
    Panel(metric="reward/mean", label="mean reward", smooth=10),
    Panel(metric="rollout/correct", label="accuracy", title="sampled accuracy", smooth=10),
    Panel(metric="eval/greedy", label="accuracy", title="greedy accuracy, held out"),
    Panel(metric="policy/entropy", label="nats per token", smooth=10),
    Panel(metric="policy/kl_k3", label="nats per token", title="KL to the reference", smooth=10),
    Panel(metric="reward/dead_groups", label="fraction", title="dead groups", smooth=10),
    Panel(metric="rollout/calls", label="per episode", title="tool calls", smooth=10),
    Panel(
        metric="rollout/calls_unnecessary",
        label="per episode",
        title="unnecessary calls",
        smooth=10,
    ),
    Panel(metric="kl/coef", label="β", title="KL coefficient"),
    Panel(metric="value/explained_variance", label="fraction", title="explained variance"),
    Panel(metric="rollout/rounds", label="rollouts", title="rollouts per iteration", smooth=10),
    Panel(metric="policy/jacobian_drift", label="relative", title="Jacobian drift", smooth=10),
]
MEASURED = {  # the evaluation that belongs into a panel
    "rollout/correct": "eval/sampled",
    "eval/greedy": "eval/greedy",
    "rollout/calls": "eval/calls",
    "rollout/calls_unnecessary": "eval/calls_unnecessary",
}


def summarize(
    experiment: str, folder: RunFolder, result: RunResult, seconds: float, sizes: TrainConfig
) -> Row:
    """Print before and after with intervals, draw the curves, write summary.json; returns it."""
    measured = [row for row in result.history if "eval/greedy" in row]
    before, after = measured[0], measured[-1]
    timing = read_rows(folder.timing)
    sampling = sampling_cost(result.history, timing, sizes)
    print(table(before, after))
    if sampling["extra_completions"]:
        print(
            f"dynamic sampling: {sampling['rounds_mean']:.2f} rollouts an iteration, "
            f"{sampling['extra_completions']:,} completions and about "
            f"{sampling['extra_seconds']:.0f} s more than with one; "
            f"{100 * sampling['filled']:.1f} % of the batch filled"
        )
    draw(experiment, folder, result.history, measured)

    def spent(*stages: str) -> float:
        """Seconds of the whole run, of all the processes it took."""
        return sum(row.get(f"time/{stage}_seconds", 0.0) for row in timing for stage in stages)

    summary: Row = {
        "experiment": experiment,
        "before": {k: v for k, v in before.items() if k.startswith("eval/")},
        "after": {k: v for k, v in after.items() if k.startswith("eval/")},
        "final": after,
        "iterations": result.iteration,
        "sampling": sampling,
        "training_seconds": spent("train", "evaluate"),
        "run_seconds": spent("train", "evaluate", "compile", "checkpoint"),
        "wall_seconds": seconds,
        "compile_seconds": result.compile_seconds,
        "compiled_memory_mb": result.peak_memory_mb,
    } | provenance()
    is_new = result.compile_seconds > 0  # otherwise the run was found finished
    if is_new or not folder.summary.exists():
        write_summary(folder, summary)
    print(f"{folder.path}: summary.json, plots/, metrics.jsonl, samples.jsonl, checkpoints/")
    print(
        f"wall time {seconds:.0f} s, compiling the iteration {result.compile_seconds:.0f} s of it"
    )
    return summary


def table(before: Row, after: Row) -> str:
    """Held-out figures with 95 % intervals; shares as points, counts as they are."""
    names = [
        name for name in before if name.startswith("eval/") and not name.endswith(("_low", "_high"))
    ]
    shares = ("greedy", "sampled", "pass@", "success", "answered")

    def cell(row: Row, name: str) -> str:
        return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"

    lines = ["held out               before RL               after RL                gain"]
    for name in names:
        short, gain = name.removeprefix("eval/"), after[name] - before[name]
        in_points = f"{100 * gain:+.1f} points" if short.startswith(shares) else f"{gain:+.3f}"
        lines.append(f"{short:<22} {cell(before, name):<23} {cell(after, name):<23} {in_points}")
    return "\n".join(lines)


def sampling_cost(rows: list[Row], timing: list[Row], sizes: TrainConfig) -> Row:
    """What was sampled, and how much of it dynamic sampling added.

    Seconds are estimated: the time of one iteration's rollouts, measured alone at each evaluation,
    shared out evenly among its rounds.
    """
    trained = [row for row in rows if "reward/mean" in row]
    rounds = [row.get("rollout/rounds", 1.0) for row in trained]
    alone = [row["time/rollout_seconds"] for row in timing if "time/rollout_seconds" in row]
    rollout_seconds = sum(alone) / max(len(alone), 1) * len(trained)
    per_round = sizes.prompts * sizes.group_size
    return {
        "rounds_mean": sum(rounds) / len(rounds),
        "rounds_max": max(rounds),
        "filled": sum(row.get("rollout/filled", 1.0) for row in trained) / len(trained),
        "completions": round(sum(rounds)) * per_round,
        "extra_completions": round(sum(rounds) - len(rounds)) * per_round,
        "rollout_seconds": rollout_seconds,
        "extra_seconds": rollout_seconds * (1.0 - len(rounds) / sum(rounds)),
    }


def draw(experiment: str, folder: RunFolder, rows: list[Row], measured: list[Row]) -> None:
    """plots/learning.png: reward and held-out accuracy on top, what explains them below."""

    def points(name: str) -> tuple[tuple[float, float, float, float], ...]:
        return tuple(
            (float(row["step"]), row[name], row[f"{name}_low"], row[f"{name}_high"])
            for row in measured
            if name in row
        )

    panels = [
        dataclasses.replace(
            panel, points=points(MEASURED.get(panel.metric, "")), points_label="held out, 95 %"
        )
        for panel in PANELS
        if len({row[panel.metric] for row in rows if panel.metric in row}) > 1
    ]
    plot_curves(rows, folder.plots / "learning.png", panels or PANELS[:1], title=experiment)
