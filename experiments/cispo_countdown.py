"""Claim: Truncated importance weights that cut no token's gradient learn Countdown.

CISPO (https://arxiv.org/abs/2506.13585) with two updates per rollout, so that its weights move. The
KL to the warm start is only logged.

Command   python -m experiments.cispo_countdown
Expected  sampled accuracy +23.0 points (seed 0), 95 % intervals apart
Time      about 3 minutes on 2 CPU cores, and one more for the warm start
"""

from dataclasses import dataclass

from experiments import cli
from experiments.common import run_experiment
from experiments.countdown import CountdownConfig
from jaxrl_llm.losses.family import CISPOConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """CISPO on Countdown."""

    algorithm: CISPOConfig = CISPOConfig(kl_in="monitor")
    train: TrainConfig = TrainConfig(
        iterations=200, prompts=128, group_size=8, minibatches=2, microbatches=2
    )
    """Sizes and order of the updates."""


def main(config: Config) -> bool:
    return run_experiment("cispo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
