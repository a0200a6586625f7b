"""What all Countdown experiments share: the task, its settings, its warm start."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from experiments.common import ExperimentConfig, Setting
from jaxrl_llm.envs.countdown import (
    HELD_OUT,
    Countdown,
    EnvParams,
    check_params,
    countdown_params,
    sft_examples,
)
from jaxrl_llm.models.transformer import LanguageModel
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which Countdown problems, and what an answer is worth."""

    preset: Literal["small", "3to4", "3to6"] = "small"
    """small: 3 numbers up to 20, targets up to 100; 3to4: as the public data set; 3to6: harder."""
    reward_missing: float = 0.0
    """Reward without an answer."""
    reward_wrong: float = 0.1
    """Reward of a wrong answer."""
    reward_correct: float = 1.0
    """Reward of a correct answer."""

    def params(self, **overrides: Any) -> EnvParams:
        rewards = {k: v for k, v in vars(self).items() if k != "preset"}
        return countdown_params(self.preset, **rewards, **overrides)

    @property
    def solution_tokens(self) -> int:
        """Longest solution of n numbers, in tokens: n − 1 operators, n − 2 parentheses, the end."""
        return 4 * self.params().max_numbers - 4


# Stopped while it still learns: what is left to learn is reinforcement learning's to show.
WARM_START = SFTConfig(
    steps=180,
    examples=30_000,
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup=30, weight_decay=0.01),
)


@dataclass(frozen=True, kw_only=True)
class CountdownConfig(ExperimentConfig):
    """Reinforcement learning on Countdown, from a warm start."""

    task: TaskConfig = TaskConfig()
    """Problems and rewards."""
    sft: SFTConfig = WARM_START
    """The warm start; made once, then found again by its settings."""
    sampling: SamplingConfig = SamplingConfig(max_tokens=8, block=4)
    """How completions are drawn in training."""
    train: TrainConfig = TrainConfig(iterations=400, prompts=128, group_size=8)
    """Sizes and order of the updates."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, schedule="linear", b2=0.999)
    """Optimizer of the policy."""

    @property
    def _warm_tokens(self) -> int:
        return min(self.sampling.max_tokens, self.task.solution_tokens)

    @property
    def warm_start(self) -> dict[str, Any]:
        return super().warm_start | {"preset": self.task.preset, "max_tokens": self._warm_tokens}

    def setting(self) -> Setting:
        params, tokenizer = self.task.params(), arithmetic_tokenizer()
        env = Countdown(
            tokenizer, max_numbers=params.max_numbers, max_completion=self.sampling.max_tokens
        )
        check_params(params, env)
        held_out = dataclasses.replace(params, split=HELD_OUT)
        return Setting(env, params, held_out, LanguageModel(self.model, tokenizer.vocab_size))

    def examples(self, setting: Setting) -> Examples:
        return Examples(
            *sft_examples(
                setting.env, setting.env_params, self.sft.examples, self.sft_seed, self._warm_tokens
            )
        )
