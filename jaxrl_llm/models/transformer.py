"""A decoder-only language model in Flax Linen that knows one thing others do not: groups.

Every array of activations is `[B, G, S, D]`: S positions of G completions of B prompts. A prompt is
run once, as a group of one, and its keys and values are the shared prefix that all its completions
attend to, in scoring (forward and backward) and in decoding. RMSNorm, rotary positions,
grouped-query attention and SwiGLU, with the options that Llama, Qwen2 and Qwen3 need.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import lora
from jaxrl_llm.models.attention import Backend, attend, choose_backend, fused_attend
from jaxrl_llm.parallel import gather_weight
from jaxrl_llm.types import Completions, ConfigError, KeyValues, Prompts

Params = Any  # a pytree of weights: float32 master weights, or frozen ones of bfloat16


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's rotary frequencies, for texts longer than those it was first trained on.

      f' = f · (s + (1 − s) / factor),   s = (N·f/2π − low) / (high − low), within [0, 1]

    Slow rotations, which turn fewer than `low` times within the N positions, slow down by `factor`;
    fast ones, of more than `high` turns, stay as they are. Llama 3.2 has factor 32.

    References:
        https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling
    """

    factor: float = 8.0
    """What slow rotations are divided by."""
    low_freq_factor: float = 1.0
    """Rotations with fewer turns within the original positions are slow."""
    high_freq_factor: float = 4.0
    """Rotations with more turns within the original positions stay."""
    original_max_position_embeddings: int = 8192
    """Positions N of the texts that the model was first trained on."""

    def __post_init__(self):
        sizes = (self.factor, self.low_freq_factor, self.original_max_position_embeddings)
        if min(sizes) <= 0 or self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(f"{self}: expected positive values, and high above low_freq_factor")

    def scaled(self, frequencies: Float[Array, "E/2"]) -> Float[Array, "E/2"]:
        """f' of each f, in radians per position."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = jnp.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of the language model."""

    width: int = 96
    """Model width D."""
    layers: int = 3
    """Number of blocks L."""
    heads: int = 4
    """Query heads H."""
    kv_heads: int | None = None
    """Key/value heads K, a divisor of H (default: H)."""
    head_width: int | None = None
    """Width E of one head, even (default: D / H)."""
    mlp_width: int | None = None
    """Hidden width of the SwiGLU layer (default: 3·D)."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are scaled (Llama 3.1 and 3.2)."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = True
    """Use the input embedding as output projection."""
    qkv_bias: bool = False
    """Bias in the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys per head (Qwen3)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matmuls; weights keep theirs."""
    attention: Backend = "auto"
    """xla shares prompts within groups; cudnn is fused, for bfloat16 on NVIDIA GPUs; auto: cudnn
    where it can be, but for sampling."""
    remat: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    scan_unroll: int = 1
    """Layers per turn of the compiled loop over layers: more is faster and slower to compile."""

    def __post_init__(self):
        for name in ("width", "layers", "heads", "kv_heads", "head_width", "mlp_width"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name}={size}: expected at least 1")
        if self.rope_theta <= 0.0 or self.norm_eps < 0.0:
            raise ConfigError(
                f"rope_theta={self.rope_theta}, norm_eps={self.norm_eps}: expected a base above 0, "
                "such as 10000, and 0 or more"
            )
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(
                f"width={self.width} is not a multiple of heads={self.heads}: set head_width too"
            )
        if self.heads % self.n_kv_heads:
            raise ConfigError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: "
                "each key/value head serves the same number of query heads"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_width={self.head_size} is odd: rotary positions need pairs")

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def mlp_size(self) -> int:
        return self.mlp_width or 3 * self.width


class Rotation(NamedTuple):
    """cos and sin of the rotary angles, for each position and each pair of a head."""

    cos: Float[Array, "B G S 1 E/2"]
    sin: Float[Array, "B G S 1 E/2"]


def rotation(positions: Int[Array, "B G S"], config: ModelConfig) -> Rotation:
    """Angles mθᵢ with θᵢ = base^(−2i/E), for positions m; θᵢ may be scaled.

    They are the same for all heads and layers, and kept from being fused into each: computing them
    again for every element that they rotate costs more than the attention.

    References:
        Su et al. 2021, eq. 15, https://arxiv.org/abs/2104.09864
    """
    frequencies = rotary_frequencies(config).reshape(1, 1, 1, 1, -1)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos_sin = jnp.cos(angles).astype(config.dtype), jnp.sin(angles).astype(config.dtype)
    return Rotation(*jax.lax.optimization_barrier(cos_sin))


def rotary_frequencies(config: ModelConfig) -> Float[Array, "E/2"]:
    """Radians per position of each pair of a head."""
    half = config.head_size // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return frequencies if config.rope_scaling is None else config.rope_scaling.scaled(frequencies)


def rotate(x: Float[Array, "B G S N E"], by: Rotation) -> Float[Array, "B G S N E"]:
    """Rotate the pairs (xᵢ, x_{i+E/2}), the layout of Llama's published weights."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * by.cos - second * by.sin, second * by.cos + first * by.sin], axis=-1
    )


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · scale, computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + self.eps)
        return (x32 * inverse * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Linear(nn.Module):
    """x·W (+ b) (+ its adapter, see `lora.py`), cast to x's type, accumulated in float32."""

    features: int
    use_bias: bool = False
    init_scale: float = 0.02

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(self.init_scale)
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        leading = x.shape[:-1]
        # As a matrix: for more axes XLA copies x·W's operands, transposed, in the backward pass.
        x = x.reshape(-1, x.shape[-1])

        def to_use(path, weight):
            return gather_weight(f"{self.name}/{path}", weight.astype(x.dtype))

        y = jnp.matmul(x, to_use("kernel", kernel), preferred_element_type=jnp.float32)
        if self.has_variable("params", "lora"):
            adapter: Any = self.get_variable("params", "lora")
            narrow = jnp.matmul(x, to_use("lora/a", adapter["a"]))
            y += adapter["scale"] * jnp.matmul(
                narrow, to_use("lora/b", adapter["b"]), preferred_element_type=jnp.float32
            )
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y += bias[None]
        return y.astype(x.dtype).reshape(*leading, -1)


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind a norm and added to the residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B G S D"],
        prefix: KeyValues | None,
        cache: KeyValues | None,
        context: "Context",
    ) -> tuple[Float[Array, "B G S D"], KeyValues]:
        config = self.config
        out_scale = 0.02 / (2 * config.layers) ** 0.5

        normed = RMSNorm(config.norm_eps, name="attention_norm")(x)
        queries, own = self.project(normed, context.rotation)
        if cache is not None:
            write_at = context.write_at
            assert write_at is not None
            own = jax.tree.map(
                lambda old, new: jax.lax.dynamic_update_slice_in_dim(
                    old, new.astype(old.dtype), write_at, axis=3
                ),
                cache,
                own,
            )
        attention = attend
        if queries.shape[-2] > 1 and self.backend() == "cudnn":
            attention = fused_attend
        mixed = attention(queries, own, context.own_mask, prefix, context.prefix_mask)
        b, _, _, g, s, _ = mixed.shape
        mixed = mixed.transpose(0, 3, 4, 1, 2, 5).reshape(b, g, s, -1)
        x += Linear(config.width, init_scale=out_scale, name="out")(mixed)

        normed = RMSNorm(config.norm_eps, name="mlp_norm")(x)
        gate = Linear(config.mlp_size, name="gate")(normed)
        up = Linear(config.mlp_size, name="up")(normed)
        x += Linear(config.width, init_scale=out_scale, name="down")(nn.silu(gate) * up)
        return x, own

    def backend(self) -> Backend:
        config, device = self.config, jax.local_devices()[0]
        return choose_backend(config.attention, config.dtype, config.head_size, device)

    def project(self, x, by):
        """Rotated queries `[B,K,R,G,S,E]` and own keys and values `[B,K,G,S,E]`."""
        config = self.config
        b, g, s, _ = x.shape

        def heads(name, count):
            y = Linear(count * config.head_size, config.qkv_bias, name=name)(x)
            return y.reshape(b, g, s, count, config.head_size)

        queries, keys = heads("query", config.heads), heads("key", config.n_kv_heads)
        if config.qk_norm:
            queries = RMSNorm(config.norm_eps, name="query_norm")(queries)
            keys = RMSNorm(config.norm_eps, name="key_norm")(keys)
        queries, keys = rotate(queries, by), rotate(keys, by)
        values = heads("value", config.n_kv_heads)
        queries = queries.reshape(b, g, s, config.n_kv_heads, -1, config.head_size)
        return queries.transpose(0, 3, 4, 1, 2, 5), KeyValues(
            keys.transpose(0, 3, 1, 2, 4), values.transpose(0, 3, 1, 2, 4)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every layer is told about the positions at hand."""

    rotation: Rotation
    own_mask: Bool[Array, "B G S U"]
    prefix_mask: Bool[Array, "B P"] | None = None
    write_at: Int[Array, ""] | None = None


class Transformer(nn.Module):
    """Embedding, L blocks under one scan, final norm; the blocks' parameters are stacked."""

    config: ModelConfig
    vocab_size: int

    def setup(self):
        config = self.config
        init = nn.initializers.normal(0.02)
        self.embedding = self.param("embedding", init, (self.vocab_size, config.width))
        if not config.tie_embeddings:
            self.head = self.param("head", init, (config.width, self.vocab_size))
        block = nn.remat(Block, prevent_cse=False) if config.remat else Block
        self.blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast),  # type: ignore[arg-type]
            length=config.layers,
            unroll=config.scan_unroll,
        )(config)
        self.final_norm = RMSNorm(config.norm_eps)

    def __call__(
        self, tokens: Int[Array, "B G S"], prefix: KeyValues | None, context: Context
    ) -> tuple[Float[Array, "B G S D"], KeyValues]:
        """Hidden states after the final norm, and every layer's own keys and values."""
        return self.backbone(self.embed(tokens), prefix, context)

    def embed(self, tokens):
        return gather_weight("embedding", self.embedding)[tokens].astype(self.config.dtype)

    def backbone(self, x, prefix, context):
        x, own = self.blocks(x, prefix, None, context)
        return self.final_norm(x), own


class LanguageModel:
    """Pure functions of parameters around a `Transformer`; nothing else knows the module system.

    >>> model = LanguageModel(ModelConfig(width=32, layers=1), vocab_size=10)
    >>> params = model.init(jax.random.key(0))
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size
        self.module = Transformer(config, vocab_size)
        self.block = Block(config)
        if config.attention == "cudnn":
            self.block.backend()  # refuses where it cannot be

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters: normal(0.02), residual outputs scaled by 1/√(2L)."""
        prompt = Prompts(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))
        return self.module.init(key, prompt.tokens[:, None], None, self.prompt_context(prompt))[
            "params"
        ]

    def head(self, params: Params) -> Float[Array, "D V"]:
        """The output projection in the compute type."""
        name = "embedding" if self.config.tie_embeddings else "head"
        head = gather_weight(name, params[name].astype(self.config.dtype))
        return head.T if self.config.tie_embeddings else head

    def prefill(self, params: Params, prompts: Prompts) -> tuple[Float[Array, "B D"], KeyValues]:
        """Run every prompt once.

        Returns:
            The hidden state that predicts the first completion token, and the keys and values of
            all layers `[L, B, K, P, E]`.
        """
        out: Any = self.module.apply(
            {"params": params}, prompts.tokens[:, None], None, self.prompt_context(prompts)
        )
        hidden, own = out
        return hidden[:, 0, -1], jax.tree.map(lambda x: x[:, :, :, 0], own)

    def completion_hidden(
        self, params: Params, prompts: Prompts, completions: Completions
    ) -> Float[Array, "B G T D"]:
        """The hidden state that predicts each completion token (position t sees tokens < t)."""
        last, prefix = self.prefill(params, prompts)
        b, g, t = completions.tokens.shape
        last = jnp.broadcast_to(last[:, None, None], (b, g, 1, last.shape[-1]))
        if t == 1:
            return last
        hidden, _ = self.module.apply(
            {"params": params},
            completions.tokens[..., :-1],
            prefix,
            self.completion_context(prompts, completions),
        )
        return jnp.concatenate([last, hidden], axis=2)

    def embed(self, params: Params, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
        """Embeddings of tokens, in the compute type."""
        embedding = gather_weight("embedding", params["embedding"])
        return embedding[tokens].astype(self.config.dtype)

    def completion_tangent(
        self,
        params: Params,
        prompts: Prompts,
        completions: Completions,
        embeddings: Float[Array, "B G T D"],
        direction: Float[Array, "B G T D"],
    ) -> Float[Array, "B G T D"]:
        """J·u: how the hidden states that predict each token move with the embeddings before it.

        J is the derivative of `completion_hidden` with respect to the embeddings of the
        completion's tokens, taken at `embeddings`; one forward-mode product, in float32.
        """
        if embeddings.shape[2] == 1:  # which only the prompt predicts
            return jnp.zeros(embeddings.shape, jnp.float32)
        _, prefix = self.prefill(params, prompts)
        context = self.completion_context(prompts, completions)
        # Fused attention has no forward-mode derivative.
        module = Transformer(replace(self.config, attention="xla"), self.vocab_size)

        def hidden(x):
            return module.apply({"params": params}, x, prefix, context, method="backbone")[0]

        _, tangent = jax.jvp(hidden, (embeddings[:, :, :-1],), (direction[:, :, :-1],))
        return jnp.pad(tangent.astype(jnp.float32), ((0, 0), (0, 0), (1, 0), (0, 0)))

    def unstack(self, params: Params) -> list[Params]:
        """One tree of compute-type weights per layer, adapters merged, to decode many times."""
        merged = lora.merge(params["blocks"])
        blocks = jax.tree.map(lambda x: x.astype(self.config.dtype), merged)
        return [jax.tree.map(lambda x: x[i], blocks) for i in range(self.config.layers)]

    def decode(
        self,
        params: Params,
        layers: list[Params],
        tokens: Int[Array, "B G"],
        prefixes: list[KeyValues],
        caches: list[KeyValues],
        context: Context,
    ) -> tuple[Float[Array, "B G D"], list[KeyValues]]:
        """Feed one token per completion and write its keys and values at `context.write_at`.

        Layers are unrolled: slicing stacked weights and caches costs more here than it saves.
        """
        x = self.embed(params, tokens)[:, :, None]
        written = []
        for layer, prefix, cache in zip(layers, prefixes, caches, strict=True):
            x, cache = self.block.apply({"params": layer}, x, prefix, cache, context)
            written.append(cache)
        final_norm = RMSNorm(self.config.norm_eps)
        hidden: Any = final_norm.apply({"params": params["final_norm"]}, x)
        return hidden[:, :, 0], written

    def prompt_context(self, prompts: Prompts) -> Context:
        """A prompt is a group of one that attends to itself, causally."""
        p = prompts.tokens.shape[-1]
        causal = jnp.tril(jnp.ones((p, p), bool))[None]
        positions = jnp.maximum(jnp.cumsum(prompts.mask, -1) - 1, 0)
        return Context(
            rotation(positions[:, None], self.config), (causal & prompts.mask[:, None])[:, None]
        )

    def completion_context(self, prompts: Prompts, completions: Completions) -> Context:
        """For all completion tokens but the last, which predicts nothing, fed at once."""
        t = completions.tokens.shape[-1] - 1
        causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
        return Context(
            rotation=self.completion_rotation(prompts, t),
            own_mask=causal & completions.attention_mask[:, :, None, :-1],
            prefix_mask=prompts.mask,
        )

    def completion_rotation(self, prompts: Prompts, t: int) -> Rotation:
        """Positions count real tokens from the start of the prompt: the same for all of a group."""
        start = prompts.mask.sum(-1)[:, None, None]
        return rotation(start + jnp.arange(t)[None, None], self.config)
