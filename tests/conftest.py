"""Test-wide settings, made before JAX starts."""

import os

# Tests compile much and compute little: LLVM need not optimise.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.types import Completions, Prompts

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    """A small model with every option on."""
    config = ModelConfig(
        width=32, layers=2, heads=4, kv_heads=2, qkv_bias=True, qk_norm=True, tie_embeddings=False
    )
    return LanguageModel(config, vocab_size=23)


@pytest.fixture(scope="session")
def params(model):
    """Initial weights, larger than usual so that the distributions are not flat."""
    return jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(0)))


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Five prompts of 1 to 9 tokens, left-padded with zeros."""
    mask = jnp.arange(9)[None, :] >= jnp.array([0, 1, 4, 7, 8])[:, None]
    tokens = jax.random.randint(jax.random.key(1), (5, 9), 3, 23)
    return Prompts(jnp.where(mask, tokens, 0), mask)


@pytest.fixture(scope="session")
def completions() -> Completions:
    """5 × 4 ragged completions of up to 7 tokens; one of them is empty."""
    lengths = jax.random.randint(jax.random.key(2), (5, 4), 1, 8).at[2, 1].set(0)
    mask = jnp.arange(7)[None, None, :] < lengths[..., None]
    tokens = jnp.where(mask, jax.random.randint(jax.random.key(3), (5, 4, 7), 0, 23), 0)
    logprobs = jnp.where(mask, -jax.random.uniform(jax.random.key(4), (5, 4, 7), maxval=4.0), 0.0)
    return Completions(tokens, mask, mask, logprobs)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Each module compiles its own; kept, they add up to gigabytes."""
    yield
    jax.clear_caches()
