"""Claims F5, F6: token-level losses favour long completions, sequence-level losses short ones.

GRPO with each of the three averages over tokens: of all tokens, of each completion first, and over
a constant.

Command   python -m experiments.ablate_loss_aggregation
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      2.5 to 8 minutes on 2 CPU cores
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import ArmResult, Finding, StudyConfig, compared, run_study

AVERAGES = ("token", "sequence", "constant")


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """Averages of the loss."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_loss_aggregation", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {name: config.with_base(algorithm={"aggregation": name}) for name in AVERAGES}


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    token, sequence, constant = AVERAGES
    return [
        _lengths("F5", "token-level completions are longer", results, token, sequence, ">"),
        _lengths("F6", "sequence-level completions are shorter", results, sequence, constant, "<"),
    ]


_lengths = partial(compared, figure="length", unit="tokens")


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
