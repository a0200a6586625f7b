"""The scanned sampling loop: G completions of each prompt, inside a compiled program."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl_llm.logprobs import select
from jaxrl_llm.models.cache import empty_caches, grow
from jaxrl_llm.models.transformer import Context, LanguageModel, Params
from jaxrl_llm.types import Completions, ConfigError, KeyValues, Prompts

MAX_WINDOWS = 8  # distinct cache sizes, each of which is compiled once


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn."""

    max_tokens: int = 16
    """Longest completion T, in tokens, end token included."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in scoring alike."""
    greedy: bool = False
    """Take the most likely token instead of drawing one."""
    top_k: int | None = None
    """Evaluation only: draw among the k most likely tokens."""
    top_p: float | None = None
    """Evaluation only: draw among the smallest set of tokens that holds this probability."""
    block: int = 8
    """Steps between two looks at whether every completion has ended."""

    def __post_init__(self):
        if self.max_tokens < 1 or self.block < 1:
            raise ConfigError(
                f"max_tokens={self.max_tokens}, block={self.block}: expected at least 1 of each"
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature}: expected > 0; for the most likely token set "
                "greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: expected a probability in (0, 1]")

    def check_for_training(self) -> None:
        """Raises ConfigError when the tokens would not be samples of the policy that is trained."""
        for name in ("greedy", "top_k", "top_p"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} in a training rollout: the tokens would come "
                    "from another distribution than the one whose log-probabilities are trained; "
                    f"leave {name} to evaluation"
                )


def keep_top_k(logits: Float[Array, "*b V"], k: int) -> Float[Array, "*b V"]:
    """−inf for all but the k largest logits (ties with the k-th stay)."""
    if k >= logits.shape[-1]:
        return logits
    threshold = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "*b V"], p: float) -> Float[Array, "*b V"]:
    """−inf outside the smallest set of most likely tokens whose probability reaches p.

    References:
        Holtzman et al. 2019 (nucleus sampling), https://arxiv.org/abs/1904.09751
    """
    descending = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(descending)
    before = jnp.cumsum(probabilities, -1) - probabilities
    threshold = jnp.where(before < p, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def inverse_cdf_sample(
    uniform: Float[Array, "*b"], logits: Float[Array, "*b V"]
) -> Int[Array, "*b"]:
    """The token at which the cumulative softmax passes `uniform`: one random number per draw.

    In float32, where uniforms are multiples of 2⁻²³: events rarer than about 1e-7 are not resolved.

    Args:
        uniform: numbers in [0, 1).
        logits: unnormalised log-probabilities; −inf is never drawn.
    """
    cumulative = jnp.cumsum(jax.nn.softmax(logits.astype(jnp.float32)), -1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1)


def draw(
    logits: Float[Array, "B G V"],
    row_keys: Key[Array, "B G"],
    t: int | Array,
    config: SamplingConfig,
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
    """One token per row, and its log-probability under softmax(logits / temperature).

    Each row draws from its own stream, fold_in(row key, t), so its tokens depend neither on the
    rows beside it nor on how the loop is cut into blocks.
    """
    scaled = logits / config.temperature
    if config.greedy:
        tokens = scaled.argmax(-1)
    else:
        kept = scaled if config.top_k is None else keep_top_k(scaled, config.top_k)
        kept = kept if config.top_p is None else keep_top_p(kept, config.top_p)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, t))))
        tokens = inverse_cdf_sample(uniform(row_keys), kept)
    return tokens, select(jax.nn.log_softmax(scaled), tokens)


class Loop(NamedTuple):
    """The carry of the sampling loop."""

    t: Int[Array, ""]  # the next position to sample
    token: Int[Array, "B G"]  # sampled at t − 1
    is_done: Bool[Array, "B G"]
    caches: list[KeyValues]  # positions < t − 1 are filled
    completions: Completions


def sample(
    params: Params,
    model: LanguageModel,
    prompts: Prompts,
    row_keys: Key[Array, "B G"],
    config: SamplingConfig,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> Completions:
    """Draw G completions of each prompt.

    The prompt is run once. Steps are compiled in blocks; a block starts only while some row has
    not ended, and attends to a cache that is as long as what the block fills.

    Args:
        params: the policy's parameters.
        model: its functions.
        prompts: B left-padded prompts.
        row_keys: one random key per completion; the draw at t uses fold_in(row key, t).
        config: sampling settings; `config.max_tokens` is T.
        eos_ids: each of these ends a completion; it is kept and belongs to the loss.
        pad_id: written after the end. Masks come from the loop, never from ids, so `pad_id` may
            be an end id, and a sampled `pad_id` is a token like any other.

    Returns:
        Completions with log-probabilities under the sampling policy, at its temperature.
    """
    b, g = row_keys.shape
    t_max = config.max_tokens
    head = model.head(params)
    ends = jnp.asarray(eos_ids, jnp.int32)

    def emit(hidden, t, is_done, completions):
        """Sample position t and write it, unless the row has ended."""
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        token, logp = draw(logits, row_keys, t, config)
        token = jnp.where(is_done, pad_id, token).astype(jnp.int32)
        values = Completions(token, ~is_done, ~is_done, jnp.where(is_done, 0.0, logp))
        completions = jax.tree.map(
            lambda whole, value: jax.lax.dynamic_update_index_in_dim(whole, value, t, 2),
            completions,
            values,
        )
        is_end = (token[..., None] == ends.reshape(1, 1, -1)).any(-1)
        return token, is_done | is_end, completions

    empty = Completions(
        jnp.full((b, g, t_max), pad_id, jnp.int32),
        jnp.zeros((b, g, t_max), bool),
        jnp.zeros((b, g, t_max), bool),
        jnp.zeros((b, g, t_max), jnp.float32),
    )
    last, stacked_prefix = model.prefill(params, prompts)
    first = jnp.broadcast_to(last[:, None], (b, g, last.shape[-1]))
    token, is_done, completions = emit(first, 0, jnp.zeros((b, g), bool), empty)
    if t_max == 1:
        return completions

    layers = model.unstack(params)
    prefixes = [jax.tree.map(lambda x: x[i], stacked_prefix) for i in range(len(layers))]
    rotations = model.completion_rotation(prompts, t_max)

    def step(window: int, loop: Loop) -> Loop:
        slot = loop.t - 1
        context = Context(
            rotation=jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=2), rotations
            ),
            own_mask=(jnp.arange(window) <= slot)[None, None, None],
            prefix_mask=prompts.mask,
            write_at=slot,
        )
        hidden, caches = model.decode(params, layers, loop.token, prefixes, loop.caches, context)
        token, is_done, completions = emit(hidden, loop.t, loop.is_done, loop.completions)
        return Loop(loop.t + 1, token, is_done, caches, completions)

    def run_window(loop: Loop, begin: int, end: int) -> Loop:
        """Sample positions begin + 1 … end with a cache of `end` slots, block by block."""
        loop = loop._replace(caches=grow(loop.caches, end))

        def run_block(loop):
            length = min(config.block, end - begin)
            return jax.lax.scan(lambda c, _: (step(end, c), None), loop, length=length)[0]

        def is_running(loop):
            return (loop.t <= end) & ~loop.is_done.all()

        return jax.lax.while_loop(is_running, run_block, loop)

    loop = Loop(jnp.int32(1), token, is_done, empty_caches(model.config, b, g), completions)
    for begin, end in windows(t_max - 1, config.block):
        loop = run_window(loop, begin, end)
    return loop.completions


def windows(steps: int, block: int) -> list[tuple[int, int]]:
    """Cut `steps` into at most MAX_WINDOWS ranges of whole blocks, and a rest.

    >>> windows(15, 8)
    [(0, 8), (8, 15)]
    """
    whole = steps - steps % block
    size = -(-whole // (block * MAX_WINDOWS)) * block
    edges = list(range(0, whole, size)) if whole else []
    edges += [whole, steps] if steps % block else [whole]
    return list(zip(edges[:-1], edges[1:], strict=True))
