"""Claim: PPO, GRPO and DAPO each raise held-out sampled accuracy by at least 15 points.

All start from the same warm start and are measured on the same 1,024 held-out problems. Each arm is
the run of its own experiment, with its settings, in its own folder: what is finished is found
again, what was interrupted goes on.

Command   python -m experiments.compare_algorithms
          python -m experiments.compare_algorithms --seeds 5     means with intervals over seeds
Expected  sampled accuracy +22.8 (PPO), +27.0 (GRPO), +25.0 (DAPO) for seed 0; over 5 seeds, with
          fewer iterations: ablate_algorithm
Time      about 12 minutes on 2 CPU cores for each seed
"""

import dataclasses
import importlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments import cli, results
from jaxrl_llm.logging import read_rows, write_json
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.plots import Arm, plot_arms
from jaxrl_llm.statistics import mean_over_seeds, paired_difference
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Several algorithms on Countdown, one after the other."""

    arms: tuple[str, ...] = ("ppo", "grpo", "dapo")
    """Experiments to run, each as experiments.ARM_countdown."""
    seeds: int = 1
    """Runs of every arm, with seeds from run.seed on; with several, also means over seeds."""
    run: RunConfig = RunConfig()
    """Where the runs and the comparison write."""
    smoke: bool = False
    """Tiny sizes, to see that everything works."""

    def __post_init__(self):
        if self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds}: expected at least 1")
        known = [name for name in PRESETS if find_spec(module_name(name))]
        unknown = sorted(set(self.arms) - set(known))
        if unknown or not self.arms:
            raise ConfigError(
                f"arms: no experiment for {', '.join(unknown) or 'an empty list'}; "
                f"expected some of {', '.join(known)}"
            )


def module_name(arm: str) -> str:
    return f"experiments.{arm}_countdown"


def main(config: Config) -> bool:
    rows, arms = [], []
    for name in config.arms:
        module = importlib.import_module(module_name(name))
        whole = module.Config(run=config.run, smoke=config.smoke).resolved().run.name
        for seed in range(config.run.seed, config.run.seed + config.seeds):
            print(f"\n{name}, seed {seed}")
            run_name = whole if seed == config.run.seed else f"{whole}-seed-{seed}"
            run = dataclasses.replace(config.run, seed=seed, name=run_name)
            if module.main(module.Config(run=run, smoke=config.smoke)) is False:
                return False
            folder = run.root / f"{name}_countdown" / run_name
            summary = json.loads((folder / "summary.json").read_text())
            rows.append({"algorithm": name, "seed": seed} | summary)
            arms.append(measured_arm(name if config.seeds == 1 else f"{name}, {seed}", folder))
    folder = config.run.root / "compare_algorithms" / whole
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(rows)
    if config.seeds > 1:
        table += f"\n{over_seeds(rows)}"
    print(f"\n{table}")
    (folder / "table.md").write_text(table)
    write_json(folder / "table.json", rows)
    plot_arms(arms, folder / "accuracy.png", title="Countdown, held-out problems")
    print(f"{folder}: table.md, table.json, accuracy.png")
    return True


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per algorithm: accuracy before and after with 95 % intervals, and what it cost."""

    def cell(figures: dict[str, float], name: str) -> str:
        low, high = figures[f"{name}_low"], figures[f"{name}_high"]
        return f"{figures[name]:.3f} [{low:.3f}, {high:.3f}]"

    lines = [
        "| algorithm | seed | sampled, before | sampled, after | gain, points | greedy, after "
        "| completions | rollouts per iteration | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = row["before"], row["after"]
        gain = 100 * (after["eval/sampled"] - before["eval/sampled"])
        cost = row["sampling"]
        lines.append(
            f"| {row['algorithm']} | {row['seed']} | {cell(before, 'eval/sampled')} "
            f"| {cell(after, 'eval/sampled')} | {gain:+.1f} | {cell(after, 'eval/greedy')} "
            f"| {cost['completions']:,} | {cost['rounds_mean']:.2f} "
            f"| {row['run_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def over_seeds(rows: list[dict[str, Any]]) -> str:
    """One line per algorithm: means over seeds with 95 % intervals, and pairs with the first."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        after, before = row["after"]["eval/sampled"], row["before"]["eval/sampled"]
        gains.setdefault(row["algorithm"], []).append(100 * (after - before))
    first = next(iter(gains))
    lines = [f"| algorithm | seeds | gain, points | more than {first} |", "|---|---|---|---|"]
    for name, values in gains.items():
        gain = results.interval(mean_over_seeds(np.array(values))[:3], "+.1f")
        more = paired_difference(np.array(values), np.array(gains[first]))
        told = "–" if name == first else results.interval(more[:3], "+.1f")
        lines.append(f"| {name} | {len(values)} | {gain} | {told} |")
    return "\n".join(lines) + "\n"


def measured_arm(name: str, folder: Path) -> Arm:
    """Held-out sampled accuracy of a run, against iterations and seconds."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "eval/sampled" in row]
    seconds, total = {}, 0.0
    for row in read_rows(folder / "timing.jsonl"):
        total += row.get("time/train_seconds", 0.0)
        seconds[row["step"]] = total
    figures = [
        (row["step"], seconds[row["step"]])
        + tuple(row[f"eval/sampled{end}"] for end in ("", "_low", "_high"))
        for row in rows
    ]
    return Arm(name, *(list(column) for column in zip(*figures, strict=True)))


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
