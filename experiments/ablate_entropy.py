"""Claim F7: an entropy bonus does not necessarily help PPO.

PPO with a value head at three weights of the bonus, per nat.

Command   python -m experiments.ablate_entropy
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 7 minutes on 2 CPU cores, beside another program
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import BASE, ArmResult, Finding, StudyConfig, compared, run_study
from jaxrl_llm.losses.ppo import PPOConfig

PPO_BASE = dataclasses.replace(
    BASE,
    algorithm=PPOConfig(kl_coef=0.001),
    train=dataclasses.replace(BASE.train, minibatches=2, microbatches=2),
)


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Entropy bonuses."""

    base: CountdownConfig = PPO_BASE
    """What all arms share; run and smoke of it are not read."""
    coefs: tuple[float, ...] = (0.0, 0.01, 0.1)
    """Weights of the bonus, per nat; the first is what the others are compared with."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_entropy", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {
        f"c = {coef:g}": config.with_base(algorithm={"entropy_coef": coef}) for coef in config.coefs
    }


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    """No help: a gain of less than half a point."""
    without, *others = results
    return [
        compared(
            "F7",
            f"a bonus of {name} gains less than 0.5 points",
            results,
            name,
            without,
            "<",
            bound=0.5,
        )
        for name in others
    ]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
