"""What all Countdown experiments share: the task, its settings, its warm start."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from experiments import chat_countdown
from experiments.chat_countdown import ChatConfig
from experiments.common import ExperimentConfig, Setting, fresh_setting
from jaxrl_llm.envs.countdown import (
    HELD_OUT,
    Countdown,
    EnvParams,
    check_params,
    countdown_params,
    sft_examples,
)
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError


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

    def __post_init__(self):
        rewards = {name: value for name, value in vars(self).items() if name != "preset"}
        others = self.reward_missing, self.reward_wrong
        if not all(map(math.isfinite, rewards.values())) or self.reward_correct <= max(others):
            told = ", ".join(f"{name}={value}" for name, value in rewards.items())
            raise ConfigError(
                f"{told}: expected numbers of which a correct answer's is the largest, for example "
                "0, 0.1 and 1"
            )

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

    model: str = "tiny"
    """tiny: fresh weights, shaped by network.*; or a pretrained model: the name of a preset such as
    smollm2-135m or of the Hugging Face hub, a folder, or a GGUF file. All defaults depend on it."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of a pretrained model's weights; adapters are float32."""
    chat: ChatConfig = ChatConfig()
    """How a pretrained model is asked."""
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

    @classmethod
    def for_model(cls, model: str) -> Self:
        """The defaults for a model."""
        if model == "tiny":
            return cls()
        algorithm = dataclasses.replace(cls().algorithm, kl_coef=0.0, entropy_coef=0.0)
        # The warm start teaches the form. A reward for it would be found first, by any answer at
        # once, and in groups without a right answer it is all there is to gain.
        task = TaskConfig(reward_wrong=0.0)
        run = RunConfig(name=Path(model).name)
        settings = chat_countdown.settings(model)
        return cls(model=model, algorithm=algorithm, task=task, run=run, **settings)

    def __post_init__(self):
        if self.model == "tiny" and self.chat != ChatConfig():
            raise ConfigError("chat.* is for pretrained models: add --model, such as smollm2-135m")

    def defaults(self) -> Self:
        return self.for_model(self.model)

    def small(self) -> Self:
        return super().small() if self.model == "tiny" else chat_countdown.small(self)

    @property
    def _warm_tokens(self) -> int:
        return min(self.sampling.max_tokens, self.task.solution_tokens)

    @property
    def warm_start(self) -> dict[str, Any]:
        described = super().warm_start | {"preset": self.task.preset}
        if self.model == "tiny":
            return described | {"max_tokens": self._warm_tokens}
        asked = {"chat": dataclasses.asdict(self.chat), "max_tokens": self.sampling.max_tokens}
        return described | asked | {"model": self.model, "weights": self.weights}

    def outline(self) -> tuple[LanguageModel, Params, int]:
        return super().outline() if self.model == "tiny" else chat_countdown.outline(self)

    def setting(self) -> Setting:
        if self.model != "tiny":
            return chat_countdown.setting(self)
        params, tokenizer = self.task.params(), arithmetic_tokenizer()
        env = Countdown(
            tokenizer, max_numbers=params.max_numbers, max_completion=self.sampling.max_tokens
        )
        check_params(params, env)
        return fresh_setting(self.network, env, params, dataclasses.replace(params, split=HELD_OUT))

    def examples(self, setting: Setting) -> Examples:
        if self.model != "tiny":
            return chat_countdown.examples(self, setting)
        return Examples(
            *sft_examples(
                setting.env, setting.env_params, self.sft.examples, self.sft_seed, self._warm_tokens
            )
        )
