"""The key/value cache of a decoding loop: explicit, one array pair per layer, grown in steps."""

import jax
import jax.numpy as jnp

from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.types import KeyValues


def empty_caches(config: ModelConfig, b: int, g: int) -> list[KeyValues]:
    """Caches `[B, K, G, 0, E]` of every layer; `grow` makes room."""
    empty = jnp.zeros((b, config.n_kv_heads, g, 0, config.head_size), config.dtype)
    return [KeyValues(empty, empty) for _ in range(config.layers)]


def grow(caches: list[KeyValues], size: int) -> list[KeyValues]:
    """The same caches with room for `size` positions.

    A loop attends to all of its cache, so its cost follows the cache's size: growing it from
    block to block reads what is filled, and copies each position a few times at most.
    """
    return jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[3]), (0, 0))), caches
    )
