"""Claim: TODO

Todo:
Command   python -m experiments.grpo_countdown
Expected  TODO
Time      TODO
"""

from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig, run_countdown
from jaxrl_llm.losses.grpo import GRPOConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """GRPO on Countdown."""

    algorithm: GRPOConfig = GRPOConfig(kl_coef=0.001, entropy_coef=0.003)


def main(config: Config) -> bool:
    return run_countdown("grpo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
