"""Claim: Plain REINFORCE against the mean of the other samples learns Countdown.

RLOO (https://arxiv.org/abs/2402.14740): no clip, no value model, one update per rollout, the KL to
the warm start in the reward.

Command   python -m experiments.rloo_countdown
Expected  sampled accuracy +22.2 points (seed 0), 95 % intervals apart
Time      about 3 minutes on 2 CPU cores, and one more for the warm start
"""

from dataclasses import dataclass

from experiments import cli
from experiments.common import run_experiment
from experiments.countdown import CountdownConfig
from jaxrl_llm.losses.family import RLOOConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """RLOO on Countdown."""

    algorithm: RLOOConfig = RLOOConfig(kl_coef=0.001)
    train: TrainConfig = TrainConfig(iterations=200, prompts=128, group_size=8)
    """Sizes and order of the updates."""


def main(config: Config) -> bool:
    return run_experiment("rloo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
