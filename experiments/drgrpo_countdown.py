"""Claim: GRPO learns Countdown without its two normalisations too.

Dr. GRPO (https://arxiv.org/abs/2503.20783) neither divides advantages by the group's standard
deviation nor losses by the completion's length. The KL to the warm start is only logged.

Command   python -m experiments.drgrpo_countdown
Expected  sampled accuracy +21.9 points (seed 0), 95 % intervals apart
Time      about 3 minutes on 2 CPU cores, and one more for the warm start
"""

from dataclasses import dataclass

from experiments import cli
from experiments.common import run_experiment
from experiments.countdown import CountdownConfig
from jaxrl_llm.losses.family import DrGRPOConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """Dr. GRPO on Countdown."""

    algorithm: DrGRPOConfig = DrGRPOConfig(kl_in="monitor")
    train: TrainConfig = TrainConfig(iterations=200, prompts=128, group_size=8)
    """Sizes and order of the updates."""


def main(config: Config) -> bool:
    return run_experiment("drgrpo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
