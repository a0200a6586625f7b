"""Every axis on which the algorithms of this family differ, as one config; presets are defaults."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.logprobs import KLEstimator
from jaxrl_llm.losses.aggregate import Aggregation
from jaxrl_llm.losses.surrogate import RatioLevel, Surrogate
from jaxrl_llm.types import ConfigError

Advantage = Literal["group_normalized", "group_centered", "leave_one_out", "reward_to_go", "gae"]
KLPlace = Literal["loss", "reward", "monitor", "none"]
GROUP_RELATIVE = ("group_normalized", "group_centered", "leave_one_out")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The axes: any combination that can work does, the others are refused with the way out.

    Numbers such as 2402.03300 are arXiv identifiers. Each option names, in brackets, the choices or
    options that it belongs to, where it does not matter for all.
    """

    advantage: Advantage = "group_normalized"
    """What a completion is compared with. group_normalized: its group's mean, in units of the
    group's standard deviation (GRPO, 2402.03300); group_centered: the mean (Dr. GRPO,
    2503.20783); leave_one_out: the mean of the others (RLOO, 2402.14740); reward_to_go: nothing
    (REINFORCE); gae: a value model (PPO, 1506.02438)."""
    advantage_ddof: int = 1
    """Degrees of freedom taken off the group's standard deviation, 0 or 1 (group_normalized)."""
    advantage_eps: float = 1e-6
    """Added to the group's standard deviation, in units of the reward (group_normalized)."""
    whiten: bool = False
    """Standardise the advantages over all tokens of the batch (PPO; REINFORCE++, 2501.03262)."""
    gamma: float = 1.0
    """Discount per token (gae, reward_to_go)."""
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation, in [0, 1] (gae)."""

    surrogate: Surrogate = "clipped"
    """clipped: PPO's (1707.06347); unclipped: ratio × advantage; cispo: truncated detached weight
    on log π, upper bound only (2506.13585)."""
    ratio: RatioLevel = "token"
    """Importance ratio of each token; of the whole sequence (RLOO); or of the sequence to the
    power 1/length (sequence_mean: GSPO, 2507.18071)."""
    clip_low: float = 0.2
    """ε_low: the ratio's lower clip is 1 − ε_low (clipped)."""
    clip_high: float = 0.2
    """ε_high: the ratio's upper clip is 1 + ε_high (clipped, cispo); above clip_low it is DAPO's
    clip-higher (2503.14476)."""
    dual_clip: float | None = None
    """c > 1: bounds the loss at c·|advantage| for negative advantages (1912.09729)."""
    importance_cap: float | None = None
    """C ≥ 1: weigh stale tokens by min(π_old/π_behavior, C), with π_old scored before the updates
    (truncated importance correction, 1802.01561; see train.rollout_lag)."""
    aggregation: Aggregation = "sequence"
    """Average of the per-token losses: token (PPO, DAPO), sequence (GRPO), constant (Dr. GRPO)."""

    kl_in: KLPlace = "loss"
    """Where the KL to the reference policy enters: the loss (GRPO), each token's reward (PPO,
    RLOO), only the log (monitor), or nowhere. No reference is kept for none, nor for kl_coef 0."""
    kl_coef: float = 0.0
    """β: weight of that KL, per nat; with a linear schedule its final, with an adaptive one its
    first value."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html). As a loss k1 does nothing on
    average, k2 has the reverse KL's gradient, k3 the forward KL's."""
    kl_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """β over training: constant; linear from 0 to kl_coef; adaptive towards kl_target (1909.08593).
    linear with a kl_target is steered under the ramp."""
    kl_target: float | None = None
    """KL to the reference, in nats per token, that β is steered to, such as 0.01 (none: off)."""
    kl_horizon: float = 10.0
    """Iterations over which a fully clipped error changes β by 20 % (kl_target)."""

    entropy_coef: float = 0.0
    """Weight of an entropy bonus, per nat (PPO's c₂)."""
    grad_reg_coeff: float = 0.0
    """Weight of the penalty on changes of the hidden states' Jacobian since the rollout, such as
    0.05 (0: off). It needs several updates per rollout, or stale rollouts."""
    mask_dead_groups: bool = False
    """Give groups of equal rewards no weight, so that not even their KL is trained."""
    dynamic_sampling: bool = False
    """Sample again until every group has rewards that differ (DAPO, 2503.14476)."""
    max_sampling_rounds: int = 4
    """Rollouts per iteration at most, the first included; groups still missing then get no weight
    (dynamic_sampling)."""
    overlong_cache: int = 0
    """L_cache, in tokens: completions lose up to overlong_penalty over the last L_cache tokens
    before sampling.max_tokens (DAPO's soft overlong penalty, 2503.14476; 0: off)."""
    overlong_penalty: float = 1.0
    """Largest loss for length, in units of the reward (overlong_cache)."""

    value_model: Literal["head", "separate"] = "head"
    """A head on the policy's hidden states, or a transformer of its own, which begins as a copy of
    the policy; either predicts 0 at first (gae)."""
    value_coef: float = 0.1
    """c₁: weight of the value loss (gae)."""
    value_clip: float | None = 0.2
    """Moves of a value beyond this, in units of the return, earn nothing (gae; none: off)."""
    value_rate: float = 1.0
    """Learning rate of the value model, in units of the policy's (gae)."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, float) and math.isnan(value):  # no comparison would notice
                raise ConfigError(f"{name}={value}: expected a number")
        if not 0.0 <= self.clip_low < 1.0 or self.clip_high < 0.0:
            raise ConfigError(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected "
                "0 <= clip_low < 1 and clip_high >= 0, for example 0.2 and 0.2"
            )
        if self.kl_coef < 0.0:
            raise ConfigError(
                f"kl_coef={self.kl_coef}: a negative coefficient pushes the policy away from the "
                "reference; use 0 to switch the term off"
            )
        for name in ("kl_coef", "entropy_coef", "grad_reg_coeff", "value_coef", "value_rate"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 0 or more, and finite")
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number in [0, 1]")
        for name in ("kl_target", "kl_horizon", "value_clip", "advantage_eps"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ConfigError(f"{name}={value}: expected a number above 0")
        if self.advantage_ddof not in (0, 1):
            raise ConfigError(f"advantage_ddof={self.advantage_ddof}: expected 0 or 1")
        if self.overlong_cache < 0 or self.overlong_penalty < 0:
            raise ConfigError("overlong_cache and overlong_penalty: expected 0 or more")
        self._check_surrogate()
        self._check_kl()

    def _check_surrogate(self):
        if self.dual_clip is not None and (self.dual_clip <= 1.0 or self.surrogate != "clipped"):
            raise ConfigError(
                f"dual_clip={self.dual_clip} with surrogate={self.surrogate}: expected a number "
                "above 1 and surrogate=clipped; leave dual_clip out"
            )
        if self.importance_cap is not None and self.importance_cap < 1.0:
            raise ConfigError(
                f"importance_cap={self.importance_cap}: fresh tokens have weight 1, so the cap "
                "must be at least 1, for example 2"
            )
        if self.dynamic_sampling and self.max_sampling_rounds < 2:
            raise ConfigError(
                f"max_sampling_rounds={self.max_sampling_rounds} with dynamic_sampling: nothing "
                "would be sampled again; set at least 2, or use mask_dead_groups"
            )

    def _check_kl(self):
        is_steered = self.kl_target is not None or self.kl_schedule != "constant"
        if self.kl_in in ("none", "monitor") and self.kl_coef > 0.0:
            raise ConfigError(
                f"kl_coef={self.kl_coef} with kl_in={self.kl_in}: the KL would not be trained; "
                "set kl_in=loss or kl_in=reward, or kl_coef=0"
            )
        if is_steered and not self.trains_kl:
            raise ConfigError(
                f"kl_target={self.kl_target}, kl_schedule={self.kl_schedule} without a reference "
                f"(kl_in={self.kl_in}, kl_coef={self.kl_coef}): there is no KL to steer; set "
                "kl_in=loss and kl_coef to the largest (linear) or first (adaptive) coefficient"
            )
        if self.kl_schedule == "adaptive" and self.kl_target is None:
            raise ConfigError(
                "kl_schedule=adaptive needs a distance to steer to: set kl_target, for example 0.01"
            )
        if self.kl_schedule == "constant" and self.kl_target is not None:
            raise ConfigError(
                f"kl_target={self.kl_target} with kl_schedule=constant: the target would change "
                "nothing; set kl_schedule=adaptive or linear, or leave kl_target out"
            )

    @property
    def trains_kl(self) -> bool:
        """Whether the KL to the reference enters the objective."""
        return self.kl_in in ("loss", "reward") and self.kl_coef > 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether a copy of the first policy is kept."""
        return self.trains_kl or self.kl_in == "monitor"

    def check_sizes(
        self, *, group_size: int, updates_per_rollout: int, rollout_lag: int, max_tokens: int
    ) -> None:
        """Refuse what cannot work together with these sizes.

        Args:
            group_size: completions per prompt, G.
            updates_per_rollout: epochs × minibatches.
            rollout_lag: iterations between sampling and training.
            max_tokens: longest completion, T.

        Raises:
            ConfigError: with the way out.
        """
        if group_size == 1 and self.advantage in GROUP_RELATIVE:
            raise ConfigError(
                f"group_size=1 with advantage={self.advantage}: it compares the completions of one "
                "prompt, so it needs at least 2; set group_size=8, or advantage=gae or "
                "reward_to_go"
            )
        if group_size == 1 and (self.dynamic_sampling or self.mask_dead_groups):
            raise ConfigError(
                "group_size=1 with dynamic_sampling or mask_dead_groups: a group of one has equal "
                "rewards and would always be left out; set group_size=8, or switch them off"
            )
        if self.grad_reg_coeff > 0 and updates_per_rollout == 1 and rollout_lag == 0:
            raise ConfigError(
                f"grad_reg_coeff={self.grad_reg_coeff} with one update per fresh rollout: the "
                "Jacobian cannot have moved yet and the penalty is always 0; set train.epochs=2 "
                "(or more minibatches), or grad_reg_coeff=0"
            )
        if self.overlong_cache >= max_tokens:
            raise ConfigError(
                f"overlong_cache={self.overlong_cache} is not below max_tokens={max_tokens}: every "
                "completion would be penalised; the paper's share is a fifth of max_tokens"
            )
