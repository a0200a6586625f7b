"""Supervised fine-tuning: the warm start that gives reinforcement learning something to reward."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from jaxrl_llm.losses.aggregate import aggregate
from jaxrl_llm.masking import masked_sum
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.optimizer import OptimizerConfig, Trained, skipped_updates
from jaxrl_llm.parallel import shard_rows
from jaxrl_llm.rollout import Metrics, own_rows
from jaxrl_llm.training import TrainState, make_update_step, score
from jaxrl_llm.types import Completions, ConfigError, LossOutput, Prompts


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """How the warm start is trained."""

    steps: int = 300
    """Optimizer steps; 0: no supervised training."""
    batch: int = 256
    """Examples per step."""
    examples: int = 50_000
    """Distinct drawn problems, each with one of its solutions."""
    microbatches: int = 1
    """Parts in which each step's gradient is accumulated."""
    steps_per_call: int = 50
    """Steps inside one compiled call."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=2e-3, warmup=30, schedule="cosine", weight_decay=0.01
        )
    )
    """Optimizer settings."""

    def __post_init__(self):
        if min(self.batch, self.microbatches, self.steps_per_call) < 1 or self.steps < 0:
            raise ConfigError(
                "sft: batch, microbatches and steps_per_call must be positive, steps not negative"
            )
        if self.batch > self.examples or self.batch % self.microbatches:
            raise ConfigError(
                f"sft: batch={self.batch} must be at most examples={self.examples} and a multiple "
                f"of microbatches={self.microbatches}"
            )


class Examples(NamedTuple):
    """Prompts with the completion that should follow, or several of them, end token included."""

    prompts: Prompts
    tokens: Int[Array, "N *G T"]
    mask: Bool[Array, "N *G T"]  # the tokens to learn
    attention_mask: Bool[Array, "N *G T"] | None = None  # the real ones, where there are others


def sft_loss(params: Params, model: LanguageModel, examples: Examples) -> LossOutput:
    """Cross-entropy of the completion's tokens, in nats: −Σ log π(token) / number of tokens."""
    is_real = examples.mask if examples.attention_mask is None else examples.attention_mask
    tokens, mask, is_real = (
        x.reshape(len(x), -1, x.shape[-1]) for x in (examples.tokens, examples.mask, is_real)
    )
    completions = Completions(tokens, mask, is_real, jnp.zeros(tokens.shape))
    scores = score(params, model, examples.prompts, completions)
    means = {"sft/entropy": masked_sum(scores.entropy_t, mask)}
    return LossOutput(aggregate(-scores.logp_t, mask, "token"), means, {}, {})


def make_sft_step(
    model: LanguageModel,
    examples: Examples,
    optimizer: optax.GradientTransformation,
    config: SFTConfig,
    *,
    axis_name: str | None = None,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """One step on a random batch of `examples`: the analogue of `training.make_iteration`.

    Mapped over `axis_name`, each device takes its part of the batch.
    """
    n = len(examples.tokens)

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        changing, frozen = lora.partition(state.params)
        update = make_update_step(
            lambda trained, batch: sft_loss(lora.combine(trained.policy, frozen), model, batch),
            optimizer,
            microbatches=config.microbatches,
            axis_name=axis_name,
        )
        # Epoch by epoch: every example once, in an order of the epoch's own.
        per_epoch = n // config.batch
        epoch, place = state.iteration // per_epoch, state.iteration % per_epoch
        order = jax.random.permutation(jax.random.fold_in(state.key, epoch), n)
        chosen = jax.lax.dynamic_slice_in_dim(order, place * config.batch, config.batch)
        chosen = shard_rows(own_rows(chosen, axis_name))
        batch = jax.tree.map(lambda x: jnp.asarray(x)[chosen], examples)
        trained, opt_state, metrics = update(Trained(changing), state.opt_state, batch)
        metrics["optimizer/skipped_updates"] = skipped_updates(opt_state)
        tokens = batch.mask.sum()
        metrics["sft/tokens"] = tokens if axis_name is None else jax.lax.psum(tokens, axis_name)
        params = lora.combine(trained.policy, frozen)
        changed = dict(params=params, opt_state=opt_state, iteration=state.iteration + 1)
        return dataclasses.replace(state, **changed), metrics

    return step
