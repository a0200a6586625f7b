"""Claim F2: larger groups make GRPO more accurate and steadier.

Groups of 2 to 32 completions at equal completions an iteration: twice the group, half the problems.

Command   python -m experiments.ablate_group_size
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 10 minutes on 2 CPU cores, beside another program
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import ArmResult, Finding, StudyConfig, compared, run_study
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Group sizes."""

    groups: tuple[int, ...] = (2, 8, 32)
    """Completions per problem, smallest first; they divide base.train.prompts × group_size."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_group_size", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    train = config.base.train
    total = train.prompts * train.group_size
    for size in config.groups:
        if size < 2 or total % (size * train.microbatches):
            raise ConfigError(
                f"groups: {size} completions of each problem do not make {total} in "
                f"{train.microbatches} microbatches; expected sizes of at least 2 that divide it"
            )
    return {
        f"G = {size}": config.with_base(train={"group_size": size, "prompts": total // size})
        for size in config.groups
    }


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    small, *_, large = results
    return [
        compared("F2", "the largest groups are more accurate", results, large, small, ">"),
        compared(
            "F2",
            "the largest groups are steadier",
            results,
            large,
            small,
            "<",
            figure="unsteadiness",
        ),
    ]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
