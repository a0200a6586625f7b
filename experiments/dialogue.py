"""What all dialogue experiments share: the environment, its settings, the warm start."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.common import ExperimentConfig, Setting, fresh_setting
from jaxrl_llm.envs.demonstrations import demonstrations
from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DialogueConfig(ExperimentConfig):
    """Reinforcement learning on dialogues with tools, from a warm start."""

    reward: Literal["task_success", "tool_efficiency", "dialogue_quality"] = "tool_efficiency"
    """What an episode is worth, see jaxrl_llm/envs/rewards.py."""
    network: ModelConfig = ModelConfig(width=96, layers=3, heads=4)
    """The policy's shape and numerics."""
    sft: SFTConfig = SFTConfig(
        steps=275,
        batch=64,
        examples=6_000,
        steps_per_call=25,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup=30, weight_decay=0.01),
    )
    """The warm start, on dialogues of a demonstrator who wastes calls."""
    shown: tuple[float, float, float, float, float] = (0.35, 0.1, 0.1, 0.3, 0.15)
    """Shares of sums, lookups in one and in two hops, searches and plain questions in the warm
    start; the policy is trained and measured on equal ones."""
    sampling: SamplingConfig = SamplingConfig(max_tokens=73)
    """How dialogues are drawn in training."""
    train: TrainConfig = TrainConfig(iterations=100, prompts=32, group_size=8, microbatches=1)
    """Sizes and order of the updates."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, schedule="linear", b2=0.999)
    """Optimizer of the policy."""
    eval: EvalConfig = EvalConfig(problems=512, samples=2, every=50)
    """Measurement on fresh dialogues."""

    @property
    def warm_start(self) -> dict[str, Any]:
        return super().warm_start | {
            "max_tokens": self.sampling.max_tokens,
            "shown": self.shown,
        }

    def setting(self) -> Setting:
        env = DialogueEnv(self.reward, max_completion=self.sampling.max_tokens)
        params = env.default_params
        return fresh_setting(self.network, env, params, params)

    def examples(self, setting: Setting) -> Examples:
        weights = np.asarray(self.shown, np.float32)
        shown = demonstrations(
            setting.env,
            setting.env_params.replace(weights=weights),
            self.sft.examples,
            max_tokens=self.sampling.max_tokens,
            seed=self.sft_seed,
        )
        return Examples(*shown)
