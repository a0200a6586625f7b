"""Claim: a policy of 0.37 million parameters solves a part of Countdown as the public data pose it.

3 or 4 numbers up to 99 and targets up to 999, as in Jiayi-Pan/Countdown-Tasks-3to4: a longer warm
start on worked-out solutions, then GRPO for as long as it pays. How small can a Countdown solver
be? The summary and plots/learning.png of the run say how far this one gets.

Command   python -m experiments.countdown_3to4
Expected  RESULTS.md, one seed
Time      about 20 minutes on 2 CPU cores
"""

import dataclasses
from dataclasses import dataclass

from experiments import cli
from experiments.common import run_experiment
from experiments.countdown import WARM_START, CountdownConfig, TaskConfig
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import SFTConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config(CountdownConfig):
    """The longer recipe."""

    task: TaskConfig = TaskConfig(preset="3to4")
    """Problems and rewards."""
    sft: SFTConfig = dataclasses.replace(
        WARM_START,
        steps=1000,
        examples=40_000,
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup=30, schedule="cosine", weight_decay=0.01
        ),
    )
    """The warm start; made once, then found again by its settings."""
    sampling: SamplingConfig = SamplingConfig(max_tokens=12, block=4)
    """How completions are drawn in training."""
    algorithm: GRPOConfig = GRPOConfig(kl_coef=0.001, entropy_coef=0.003)
    train: TrainConfig = TrainConfig(iterations=400, prompts=128, group_size=8, microbatches=8)
    """Sizes and order of the updates."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, schedule="linear", b2=0.999)
    """Optimizer of the policy."""
    eval: EvalConfig = EvalConfig(every=100)
    """Measurement on held-out problems."""


def main(config: Config) -> bool:
    return run_experiment("countdown_3to4", config.resolved())


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
