"""Claim: TODO

Todo:
Command   python -m experiments.ppo_countdown
Expected  TODO
Time      TODO
"""

from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig, run_countdown
from jaxrl_llm.losses.ppo import PPOConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """PPO on Countdown."""

    algorithm: PPOConfig = PPOConfig(kl_coef=0.001, entropy_coef=0.003)


def main(config: Config) -> bool:
    return run_countdown("ppo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
