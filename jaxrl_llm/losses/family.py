"""The relatives: published algorithms that are other points of the same objective."""

from dataclasses import dataclass

from jaxrl_llm.logprobs import KLEstimator
from jaxrl_llm.losses.aggregate import Aggregation
from jaxrl_llm.losses.config import Advantage, AlgorithmConfig, KLPlace
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.losses.surrogate import RatioLevel, Surrogate


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(AlgorithmConfig):
    """GRPO without its two normalisations, by length and by standard deviation.

    References:
        Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783
    """

    advantage: Advantage = "group_centered"
    aggregation: Aggregation = "constant"
    kl_in: KLPlace = "none"


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(AlgorithmConfig):
    """Ratio and clip of whole sequences, by the geometric mean of their tokens' ratios.

    References:
        Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071
    """

    ratio: RatioLevel = "sequence_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_in: KLPlace = "none"


@dataclass(frozen=True, kw_only=True)
class CISPOConfig(AlgorithmConfig):
    """A truncated, detached importance weight on log π: every token keeps its gradient.

    References:
        MiniMax 2025 (M1), https://arxiv.org/abs/2506.13585
    """

    surrogate: Surrogate = "cispo"
    aggregation: Aggregation = "token"
    kl_in: KLPlace = "none"


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """REINFORCE on whole completions, against the mean of the others.

    References:
        Ahmadian et al. 2024 (RLOO), https://arxiv.org/abs/2402.14740
    """

    advantage: Advantage = "leave_one_out"
    surrogate: Surrogate = "unclipped"
    ratio: RatioLevel = "sequence"
    kl_in: KLPlace = "reward"
    kl_coef: float = 0.03
    kl_estimator: KLEstimator = "k1"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(AlgorithmConfig):
    """REINFORCE++: PPO's clip on whitened rewards-to-go, the KL in the reward, no value model.

    References:
        Hu et al. 2025 (REINFORCE++), https://arxiv.org/abs/2501.03262
    """

    advantage: Advantage = "reward_to_go"
    whiten: bool = True
    aggregation: Aggregation = "token"
    kl_in: KLPlace = "reward"
    kl_coef: float = 0.01
    kl_estimator: KLEstimator = "k1"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaselineConfig(AlgorithmConfig):
    """REINFORCE++-baseline: minus the group's mean, over the batch's deviation, k2 in the loss.

    Whitening, as published, also takes off the batch's mean, which moves groups of equal rewards a
    little off 0; `mask_dead_groups` leaves them out.

    References:
        Hu et al. 2025 (REINFORCE++), https://arxiv.org/abs/2501.03262
    """

    advantage: Advantage = "group_centered"
    whiten: bool = True
    aggregation: Aggregation = "token"
    kl_coef: float = 0.01
    kl_estimator: KLEstimator = "k2"


PRESETS: dict[str, type[AlgorithmConfig]] = {
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "dapo": DAPOConfig,
    "drgrpo": DrGRPOConfig,
    "gspo": GSPOConfig,
    "cispo": CISPOConfig,
    "rloo": RLOOConfig,
    "reinforcepp": ReinforcePPConfig,
    "reinforcepp_baseline": ReinforcePPBaselineConfig,
}
