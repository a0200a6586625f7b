"""Test-wide settings, made before JAX starts."""

import os

# Tests compile much and compute little: LLVM need not optimise, and has less to compile without
# XLA's fusion emitters.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.rollout import Rollout, row_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.training import TrainConfig, init_state, make_iteration, scan_iterations
from jaxrl_llm.types import Completions, Prompts

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first, or the other workers wait for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_sharding.py")


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


@pytest.fixture(scope="session")
def toy() -> LanguageModel:
    """A language model that compiles and learns in seconds."""
    return LanguageModel(ModelConfig(width=16, layers=1, heads=2), vocab_size=8)


@pytest.fixture(scope="session")
def toy_params(toy):
    return jax.tree.map(lambda x: 2.0 * x, toy.init(jax.random.key(0)))


@pytest.fixture(scope="session")
def bandit(toy):
    """`bandit(reward_of)` is a rollout of three-token completions that needs no environment.

    `reward_of` maps tokens `[B, G, T]` to rewards `[B, G]`. The six prompts pose tasks 0, 0, 1, 1,
    2, 2: their last token is the task, and every other one is padded.
    """
    tokens = jnp.array([[0, 0], [7, 0], [0, 1], [7, 1], [0, 2], [7, 2]])
    prompts = Prompts(tokens, jnp.arange(2)[None, :] >= jnp.array([1, 0, 1, 0, 1, 0])[:, None])

    def of(reward_of=lambda tokens: (tokens == 5).mean(-1), *, group_size=8, temperature=1.0):
        def rollout(params, key):
            keys = jax.vmap(lambda k: row_keys(k, group_size))(row_keys(key, 6))
            config = SamplingConfig(max_tokens=3, temperature=temperature)
            completions = sample(params, toy, prompts, keys, config, eos_ids=(4,), pad_id=0)
            return Rollout(prompts, completions, reward_of(completions.tokens), {})

        return rollout

    return of


@pytest.fixture(scope="session")
def begin(toy, toy_params):
    """`begin(config, rollout, iterations)` returns a first state and the pure iteration."""

    def of(config, rollout, iterations, *, learning_rate=5e-3, **settings):
        mapped = {n: settings.pop(n) for n in ("temperature", "axis_name") if n in settings}
        sizes = {"prompts": 6, "group_size": 8, "microbatches": 1} | settings
        train = TrainConfig(iterations=iterations, **sizes)
        algorithm = make_algorithm(config, iterations=iterations)
        optimizer = make_optimizer(
            OptimizerConfig(learning_rate=learning_rate, warmup=5),
            train.updates,
            value_rate=config.value_rate,
        )
        state = init_state(
            jax.tree.map(jnp.copy, toy_params),
            optimizer,
            jax.random.key(0),
            model=toy,
            algorithm=algorithm,
            rollout_lag=train.rollout_lag,
        )
        step = make_iteration(rollout, toy, algorithm, optimizer, train, **mapped)
        return state, step

    return of


@pytest.fixture(scope="session")
def run(begin):
    """`run(config, rollout, iterations)` trains, and returns the last state and the metrics."""

    def of(config, rollout, iterations, **settings):
        state, step = begin(config, rollout, iterations, **settings)
        return jax.jit(scan_iterations(step, iterations))(state)

    return of


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Each module compiles its own; kept, they add up to gigabytes."""
    yield
    jax.clear_caches()
