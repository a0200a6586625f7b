"""Claim: the numbers in RESULTS.md are what this code measures.

Checks that RESULTS.md says what results/*.json say, that the intervals and verdicts follow from the
figures of the seeds, and that the chosen arms come out the same when they are trained again: bit
for bit on the platform and versions that made them, within the interval elsewhere, or at least so
that the intervals of both overlap: each is but an estimate. Times are not compared, nor arms whose
length was derived from times.

Command   python -m experiments.verify_results
Expected  "the same" for every number; exit status 1 when one is not
Time      1 to 3 minutes on 2 CPU cores
"""

import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import cli, results
from experiments.study import StudyConfig, run_arms, settings
from jaxrl_llm.logging import config_hash, provenance
from jaxrl_llm.statistics import mean_over_seeds
from jaxrl_llm.types import ConfigError

RERUN = ("before", "sampled", "greedy", "length", "entropy", "unsteadiness", "rounds")
SAME = ("versions", "python", "device", "cpu", "cpus")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to run again."""

    arms: tuple[str, ...] = ("ablate_loss_aggregation/token",)
    """EXPERIMENT/ARM, or an EXPERIMENT for all its arms."""
    all: bool = False
    """All arms of all experiments: about as long as the study took."""
    results: Path = results.FOLDER
    """Folder of the records; RESULTS.md lies beside it."""
    root: Path | None = None
    """Folder that keeps the runs, to go on after an interrupt; by default one that is removed."""


def main(config: Config) -> bool:
    records = results.read(config.results)
    if not records:
        raise ConfigError(f"{config.results} has no *.json; expected the published records")
    wrong = check_page(config.results, records)
    ablations = {name: record for name, record in records.items() if "arms" in record}
    for name, record in ablations.items():
        wrong += check_statistics(name, record)
    chosen = select(ablations, tuple(ablations) if config.all else config.arms)
    with tempfile.TemporaryDirectory() as scratch:
        root = config.root or Path(scratch)
        for name, labels in chosen.items():
            wrong += check_arms(name, records[name], labels, root)
    print(f"\n{wrong} numbers or texts differ" if wrong else "\nall the same")
    if wrong:
        sys.exit(1)
    return True


def check_page(folder: Path, records: Mapping[str, Any]) -> int:
    page = folder.parent / results.PAGE.name
    differs = not page.exists() or page.read_text() != results.page(records)
    print(f"{page.name}: {'DIFFERS from what the records say' if differs else 'the same'}")
    return int(differs)


def check_statistics(name: str, record: Mapping[str, Any]) -> int:
    """Means and intervals from the figures of the seeds, findings from those."""
    wrong = 0
    for label, arm in record["arms"].items():
        for figure, told in arm["estimates"].items():
            again = mean_over_seeds(np.array(arm["figures"][figure]))[:3]
            if not np.allclose(again, told, rtol=1e-12, atol=0.0):
                print(f"{name}, {label}, {figure}: DIFFERS, {told} from figures with {again}")
                wrong += 1
    arms = {label: Recorded(arm["figures"]) for label, arm in record["arms"].items()}
    findings = importlib.import_module(f"experiments.{name}").findings(arms)
    for finding, told in zip(findings, record["findings"], strict=True):
        if str(finding) != told["told"]:
            print(f"{name}: DIFFERS, {told['told']!r} where the figures say {str(finding)!r}")
            wrong += 1
    print(f"{name}: intervals and verdicts {'DIFFER' if wrong else 'the same'}")
    return wrong


class Recorded:
    """The figures of an arm as they were recorded, in place of an `ArmResult`."""

    def __init__(self, figures: Mapping[str, list[float]]):
        self.figures = {name: np.array(values) for name, values in figures.items()}

    def estimate(self, figure: str):
        return mean_over_seeds(self.figures[figure])


def select(records: Mapping[str, Any], wanted: tuple[str, ...]) -> dict[str, list[str]]:
    """Experiment → labels of the arms to run again.

    Raises:
        ConfigError: no such record.
    """
    chosen: dict[str, list[str]] = {}
    for path in wanted:
        name, _, label = path.partition("/")
        if name not in records:
            raise ConfigError(f"no record of {name}: expected one of {', '.join(records)}")
        if "arms" not in records[name]:
            raise ConfigError(f"{name} has no arms to train again: run its command in RESULTS.md")
        known = list(records[name]["arms"])
        if label and label not in known:
            raise ConfigError(f"{name} has no arm {label!r}: expected one of {', '.join(known)}")
        chosen.setdefault(name, []).extend([label] if label else known)
    return chosen


def check_arms(
    name: str,
    record: Mapping[str, Any],
    labels: list[str],
    root: Path,
    default: StudyConfig | None = None,
) -> int:
    """Train arms again, by default those of the study, and compare what every seed came to."""
    module = importlib.import_module(f"experiments.{name}")
    chosen: StudyConfig = default or module.Config()
    config = dataclasses.replace(
        chosen,
        seeds=record["seeds"],
        run=dataclasses.replace(chosen.run, root=root, name="verify"),
    ).resolved()
    arms = {label: arm for label, arm in module.arms(config).items() if label in labels}
    for label in labels:
        if label not in arms:
            print(f"{name}, {label}: not run again, its length was derived from a time")
    here, there = provenance(), record["provenance"]
    differing = [part for part in SAME if here[part] != there[part]]
    told = f"another {', '.join(differing)}" if differing else "the same platform and versions"
    print(f"{name}: on {told}")
    trained = run_arms(name, config, arms) or {}
    wrong = 0
    for label, arm in trained.items():
        recorded = record["arms"][label]
        if config_hash(settings(arm.config)) != recorded["config_hash"]:
            print(f"  {label}: DIFFERS in its settings from what was recorded")
            wrong += 1
        for figure in RERUN:
            ours, theirs = arm.figures[figure], np.array(recorded["figures"][figure])
            said = "the same" if np.array_equal(ours, theirs) else "DIFFERS"
            if said == "DIFFERS" and differing:
                low, high = bounds(figure, recorded["figures"])
                lowest, highest = bounds(figure, arm.figures)
                if np.isnan(low):
                    said = "no interval was recorded"
                elif low <= ours.mean() <= high:
                    said = "within the interval"
                elif low <= highest and lowest <= high:
                    said = "intervals overlap"
            print(f"  {label}, {figure}: {ours.mean():.4f}, recorded {theirs.mean():.4f}: {said}")
            wrong += said == "DIFFERS"
    return wrong


def bounds(figure: str, figures: Mapping[str, Any]) -> tuple[float, float]:
    """The interval over seeds; for the one policy that all begin with, over problems, or NaN."""
    if figure == "before":
        limits = (figures.get(f"before{end}", [np.nan])[0] for end in ("_low", "_high"))
        return next(limits), next(limits)
    return mean_over_seeds(np.array(figures[figure]))[1:3]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
