"""Claim: TODO

Todo:
Command   python -m experiments.dapo_countdown
Expected  TODO
Time      TODO
"""

from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig, run_countdown
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.sampling import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """DAPO on Countdown."""

    algorithm: DAPOConfig = DAPOConfig(kl_in="monitor", overlong_cache=2)
    sampling: SamplingConfig = SamplingConfig(max_tokens=10, block=3)


def main(config: Config) -> bool:
    return run_countdown("dapo_countdown", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
