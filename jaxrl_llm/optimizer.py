"""AdamW for policies and value models."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import optax
from jaxtyping import Array, Int

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW behind gradient clipping, with a warm-up."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup: int = 10
    """Updates over which the rate rises from 0; Adam's first steps are large without it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stay, or fall to 0 at the last update."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.99
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's ε."""
    first_moment: Literal["float32", "bfloat16"] = "float32"
    """Type in which Adam's first moment is kept: bfloat16 takes half the memory. The second moment
    stays float32: an update moves it by a factor of about 1 ± (1 − b2), which is less than bfloat16
    resolves (2⁻⁸) with b2 near 1, so it would stand still."""

    def __post_init__(self):
        if not 0.0 < self.learning_rate < math.inf:
            raise ConfigError(
                f"learning_rate={self.learning_rate}: expected a number above 0, such as 3e-4; a "
                "negative one would unlearn what is rewarded"
            )
        for name in ("clip_norm", "eps"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number above 0")
        for name in ("warmup", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 0 or more")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number in [0, 1)")


def make_schedule(config: OptimizerConfig, total: int) -> optax.Schedule:
    """Learning rate of each of `total` updates."""
    rest = max(total - config.warmup, 1)
    peak = config.learning_rate
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]
    # From 1/warmup, not from 0: the first update should not be thrown away.
    warmup = optax.linear_schedule(peak / max(config.warmup, 1), peak, max(config.warmup - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup])


class Trained(NamedTuple):
    """The parameters that an update changes."""

    policy: Params
    critic: Params | None = None


def make_optimizer(
    config: OptimizerConfig, total: int, *, value_rate: float = 1.0
) -> optax.GradientTransformation:
    """AdamW; an update with a non-finite gradient is skipped, counted, and changes no moment.

    Args:
        config: its settings.
        total: updates of the whole run, at which a falling rate ends.
        value_rate: learning rate of `Trained.critic`, in units of the policy's.
    """

    def scale_critic(updates: Any, params: Any) -> Any:
        return updates._replace(critic=jax.tree.map(lambda x: value_rate * x, updates.critic))

    inner = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, total),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=config.first_moment,
        ),
        optax.identity() if value_rate == 1.0 else optax.stateless(scale_critic),
    )
    return optax.apply_if_finite(inner, max_consecutive_errors=2**31 - 2)


def skipped_updates(opt_state: Any) -> Int[Array, ""]:
    """How many updates have been skipped for a non-finite gradient."""
    return opt_state.total_notfinite
