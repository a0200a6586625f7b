"""Claim F3: the effect of the KL coefficient β is not monotonic.

GRPO with the KL to the warm start in the loss, at three coefficients and without.

Command   python -m experiments.ablate_kl_coef
Expected  RESULTS.md: means with intervals over 5 seeds, and the verdict
Time      about 8 minutes on 2 CPU cores, beside another program
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from experiments import cli
from experiments.countdown import CountdownConfig
from experiments.study import ArmResult, Finding, StudyConfig, difference, run_study
from jaxrl_llm.statistics import Verdict, verdict


@dataclass(frozen=True, kw_only=True)
class Config(StudyConfig):
    """KL coefficients."""

    coefs: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    """β, per nat, in rising order."""


def main(config: Config) -> bool:
    config = config.resolved()
    return run_study("ablate_kl_coef", config, arms(config), findings, __doc__)


def arms(config: Config) -> dict[str, CountdownConfig]:
    return {f"β = {coef:g}": config.with_base(algorithm={"kl_coef": coef}) for coef in config.coefs}


def findings(results: Mapping[str, ArmResult]) -> list[Finding]:
    names = list(results)
    steps = {
        f"{after} − {before}, points": difference(results, after, before)
        for before, after in itertools.pairwise(names)
    }
    pairs = [difference(results, b, a) for a, b in itertools.combinations(names, 2)]
    goes_up = any(verdict(effect, ">") == "supported" for effect in pairs)
    goes_down = any(verdict(effect, "<") == "supported" for effect in pairs)
    directions = {verdict(effect, ">") for effect in steps.values()}
    said: Verdict = "not resolved"
    if goes_up and goes_down:
        said = "supported"
    elif len(directions) == 1 and "not resolved" not in directions:  # every step the same way
        said = "contradicted"
    return [Finding("F3", "accuracy both rises and falls with β", steps, said)]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
