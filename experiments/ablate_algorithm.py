"""Claim: PPO, GRPO and DAPO each raise held-out sampled accuracy, and GRPO does as well as PPO.

Equal prompts, completions and iterations for all; DAPO with and without dynamic sampling, which
samples more. `compare_algorithms` trains each for as long as its own experiment does, with one
seed.

Command   python -m experiments.ablate_algorithm
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 10 minutes on 2 CPU cores, beside another program
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import ArmResult, Finding, StudyConfig, compared, run_study
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.statistics import paired_difference, verdict

PPO, GRPO, DAPO, WITHOUT = "PPO", "GRPO", "DAPO", "DAPO without dynamic sampling"
ALGORITHMS: dict[str, AlgorithmConfig] = {
    PPO: PPOConfig(kl_coef=0.001, entropy_coef=0.003),
    GRPO: GRPOConfig(kl_coef=0.001, entropy_coef=0.003),
    DAPO: DAPOConfig(kl_in="monitor", overlong_cache=2),
    WITHOUT: DAPOConfig(kl_in="monitor", overlong_cache=2, dynamic_sampling=False),
}


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Algorithms."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_algorithm", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {
        name: dataclasses.replace(config.base, algorithm=algorithm)
        for name, algorithm in ALGORITHMS.items()
    }


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    said = []
    for name, arm in results.items():
        gain = paired_difference(100 * arm.figures["sampled"], 100 * arm.figures["before"])
        effects = {"gain, points": gain}
        said.append(Finding("F1", f"{name} learns (the task only)", effects, verdict(gain, ">")))
    return [
        *said,
        compared("F1", "GRPO is at least as good as PPO", results, GRPO, PPO, ">"),
        compared("F4", "DAPO is better without dynamic sampling", results, WITHOUT, DAPO, ">"),
    ]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
