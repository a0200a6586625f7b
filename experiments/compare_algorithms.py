"""Claim: PPO, GRPO and DAPO each raise held-out sampled accuracy by at least 15 points.

All start from the same warm start and are measured on the same 1,024 held-out problems. Each arm is
the run of its own experiment, with its settings, in its own folder: what is finished is found
again, what was interrupted goes on.

Command   python -m experiments.compare_algorithms
Expected  sampled accuracy +22.8 (PPO), +27.0 (GRPO), +25.0 (DAPO), seed 0, 95 % intervals apart
Time      about 12 minutes on 2 CPU cores
"""

import importlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments import cli
from jaxrl_llm.logging import read_rows, write_json
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.plots import Arm, plot_arms
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Several algorithms on Countdown, one after the other."""

    arms: tuple[str, ...] = ("ppo", "grpo", "dapo")
    """Experiments to run, each as experiments.ARM_countdown."""
    run: RunConfig = RunConfig()
    """Where the runs and the comparison write."""
    smoke: bool = False
    """Tiny sizes, to see that everything works."""

    def __post_init__(self):
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
        print(f"\n{name}")
        module = importlib.import_module(module_name(name))
        chosen = module.Config(run=config.run, smoke=config.smoke)
        if module.main(chosen) is False:
            return False
        arm = chosen.resolved()
        folder = arm.run.root / f"{name}_countdown" / arm.run.name
        rows.append({"algorithm": name} | json.loads((folder / "summary.json").read_text()))
        arms.append(measured_arm(name, folder))
    folder = arm.run.root / "compare_algorithms" / arm.run.name
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(rows)
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
        "| algorithm | sampled, before | sampled, after | gain, points | greedy, after "
        "| completions | rollouts per iteration | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = row["before"], row["after"]
        gain = 100 * (after["eval/sampled"] - before["eval/sampled"])
        cost = row["sampling"]
        lines.append(
            f"| {row['algorithm']} | {cell(before, 'eval/sampled')} "
            f"| {cell(after, 'eval/sampled')} | {gain:+.1f} | {cell(after, 'eval/greedy')} "
            f"| {cost['completions']:,} | {cost['rounds_mean']:.2f} "
            f"| {row['run_seconds']:.0f} |"
        )
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
