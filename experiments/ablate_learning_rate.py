"""Claim F8: the learning rate must be tuned, or training is slow or unstable.

GRPO with four rates, each falling linearly to 0, and everything else equal.

Command   python -m experiments.ablate_learning_rate
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 11 minutes on 2 CPU cores, beside another program
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import ArmResult, Finding, StudyConfig, compared, run_study


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Learning rates."""

    rates: tuple[float, ...] = (1e-4, 8e-4, 3.2e-3, 1.28e-2)
    """Peak learning rates; the second is the one that the others are compared with."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_learning_rate", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {
        f"{rate:g}": config.with_base(optimizer={"learning_rate": rate}) for rate in config.rates
    }


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    slow, tuned, *_, fast = results
    return [
        compared("F8", f"a rate of {slow} learns less", results, slow, tuned, "<"),
        compared("F8", f"a rate of {fast} learns less", results, fast, tuned, "<"),
        compared(
            "F8",
            f"a rate of {fast} is less steady",
            results,
            fast,
            tuned,
            ">",
            figure="unsteadiness",
        ),
    ]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
