"""Claim F4: dynamic sampling does not help DAPO, and costs about a quarter more time.

DAPO with and without it, at equal updates; then with it at equal rollouts and at equal time, that
is with as many iterations as the measured rollouts, or seconds, per iteration allow.

Command   python -m experiments.ablate_dynamic_sampling
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 10 minutes on 2 CPU cores
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import (
    BASE,
    ArmResult,
    Finding,
    StudyConfig,
    compared,
    report,
    run_arms,
)
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.statistics import paired_difference, verdict

DAPO_BASE = dataclasses.replace(BASE, algorithm=DAPOConfig(kl_in="monitor", overlong_cache=2))
OFF, ON = "off", "on"
ROLLOUTS, TIME = "on, equal rollouts", "on, equal time"


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Dynamic sampling."""

    base: CountdownConfig = DAPO_BASE
    """What all arms share; run and smoke of it are not read."""
    together: int = 1
    """Runs in one compiled program; more than one share the time of the slowest."""


def main(config: Config) -> bool:
    config, name = config.resolved(), "ablate_dynamic_sampling"
    first = run_arms(name, config, arms(config))
    if first is None:
        return False
    rest = run_arms(
        name,
        config,
        {
            ROLLOUTS: shortened(config, first, "completions"),
            TIME: shortened(config, first, "seconds"),
        },
    )
    if rest is None:
        return False
    report(name, config, first | rest, findings(first | rest), __doc__ or "")
    return True


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {
        name: config.with_base(algorithm={"dynamic_sampling": name == ON}) for name in (OFF, ON)
    }


def shortened(config: Config, first: Mapping[str, ArmResult], figure: str) -> CountdownConfig:
    """With dynamic sampling, as many iterations as cost what the run without it did."""
    share = float(np.mean(first[OFF].figures[figure]) / np.mean(first[ON].figures[figure]))
    on = arms(config)[ON]
    iterations = max(1, round(min(1.0, share) * on.train.iterations))
    return dataclasses.replace(on, train=dataclasses.replace(on.train, iterations=iterations))


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    helps = [
        compared("F4", f"{name}, it does not help", results, treated, OFF, "<")
        for name, treated in (
            ("at equal updates", ON),
            ("at equal rollouts", ROLLOUTS),
            ("at equal time", TIME),
        )
    ]
    cost = paired_difference(
        100.0 * results[ON].figures["seconds"] / results[OFF].figures["seconds"],
        np.full(len(results[OFF].figures["seconds"]), 100.0),
    )
    more = Finding(
        "F4",
        "an iteration takes at least a quarter more time",
        {"time, per cent": cost},
        verdict(cost, ">", 25.0),
    )
    return [*helps, more]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
