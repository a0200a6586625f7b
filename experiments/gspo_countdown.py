"""Claim: Ratio and clip of whole sequences learn Countdown as those of tokens do.

GSPO (https://arxiv.org/abs/2507.18071) with two updates per rollout, so that its ratios move. The
KL to the warm start is only logged.

Command   python -m experiments.gspo_countdown
Expected  sampled accuracy +22.8 points (seed 0), 95 % intervals apart
Time      about 3 minutes on 2 CPU cores, and one more for the warm start
"""

from dataclasses import dataclass

from experiments import cli
from experiments.common import run_experiment
from experiments.countdown import CountdownConfig
from jaxrl_llm.losses.family import GSPOConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """GSPO on Countdown."""

    algorithm: GSPOConfig = GSPOConfig(kl_in="monitor")
    train: TrainConfig = TrainConfig(
        iterations=200, prompts=128, group_size=8, minibatches=2, microbatches=2
    )
    """Sizes and order of the updates."""


def main(config: Config) -> bool:
    return run_experiment("gspo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
