import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models import lora
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.rollout import Rollout, row_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.training import TrainConfig, init_state, make_iteration, score
from jaxrl_llm.types import Completions, ConfigError, Prompts

B, G, P, T, V = 4, 4, 5, 6, 17
MODEL = LanguageModel(ModelConfig(width=16, layers=2, heads=2, qkv_bias=True), V)
CONFIG = LoRAConfig(rank=3, alpha=6.0, targets=("query", "down"))
BASE = MODEL.init(jax.random.key(0))
FRESH = lora.add_adapters(BASE, CONFIG, jax.random.key(1))
PROMPTS = Prompts(
    jax.random.randint(jax.random.key(2), (B, P), 3, V),
    jnp.arange(P)[None] >= jnp.arange(B)[:, None],
)
TOKENS = jax.random.randint(jax.random.key(3), (B, G, T), 3, V)
EVERYWHERE = jnp.ones((B, G, T), bool)
COMPLETIONS = Completions(TOKENS, EVERYWHERE, EVERYWHERE, jnp.zeros((B, G, T)))


@pytest.fixture(scope="module")
def adapted():
    """Adapters that have learned something, whatever it is."""
    return jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        lora.partition(FRESH)[0],
    )


@pytest.fixture(scope="module")
def policy(adapted):
    return lora.combine(adapted, lora.partition(FRESH)[1])


SCORE = jax.jit(lambda params: score(params, MODEL, PROMPTS, COMPLETIONS).logp_t)


def test_fresh_adapters_change_nothing():
    np.testing.assert_array_equal(SCORE(FRESH), SCORE(BASE))


def test_an_adapted_projection_is_its_equation(policy):
    inputs = np.random.default_rng(0).normal(size=(7, 16)).astype(np.float32)
    layer = jax.tree.map(lambda x: np.asarray(x[1]), policy["blocks"]["query"])
    low_rank = layer["lora"]["a"] @ layer["lora"]["b"]
    expected = inputs @ (layer["kernel"] + 6.0 / 3 * low_rank)
    merged = lora.merge(policy)["blocks"]["query"]["kernel"][1]
    np.testing.assert_allclose(inputs @ np.asarray(merged), expected, rtol=1e-4, atol=1e-5)
    assert low_rank.std() > 0.1


def test_merged_is_unmerged(policy):
    merged = lora.merge(policy)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, BASE)
    np.testing.assert_allclose(SCORE(merged), SCORE(policy), atol=2e-5)
    assert np.abs(SCORE(policy) - SCORE(BASE)).max() > 0.01


def test_only_the_chosen_projections_are_adapted(policy):
    changed = {
        name
        for name in lora.PROJECTIONS
        if not (
            lora.merge(policy)["blocks"][name]["kernel"] == BASE["blocks"][name]["kernel"]
        ).all()
    }
    assert changed == {"query", "down"}
    assert lora.config_of(policy) == CONFIG and lora.config_of(BASE) is None
    chex.assert_trees_all_equal(lora.without_adapters(policy), BASE)


def test_the_sampler_and_the_scorer_are_the_same_adapted_policy(policy):
    keys = jax.vmap(lambda k: row_keys(k, G))(row_keys(jax.random.key(5), B))
    draw = jax.jit(
        lambda params: sample(
            params, MODEL, PROMPTS, keys, SamplingConfig(max_tokens=T), eos_ids=(2,), pad_id=0
        )
    )
    drawn = draw(policy)
    scored = score(policy, MODEL, PROMPTS, drawn).logp_t
    gap = jnp.where(drawn.loss_mask, scored - drawn.logprobs, 0.0)
    assert jnp.abs(gap).max() <= 1e-5


@pytest.fixture(scope="module")
def trained():
    """Three iterations of GRPO that rewards token 7, from fresh adapters."""
    algorithm = make_algorithm(GRPOConfig(kl_coef=0.01), iterations=3)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup=0), 3)
    keys = jax.vmap(lambda k: row_keys(k, G))(row_keys(jax.random.key(6), B))

    def rollout(params, key):
        drawn = sample(
            params, MODEL, PROMPTS, keys, SamplingConfig(max_tokens=T), eos_ids=(2,), pad_id=0
        )
        rewards = (drawn.tokens == 7).mean(-1) + (drawn.tokens > 8).mean(-1)
        return Rollout(PROMPTS, drawn, rewards, {"is_correct": rewards})

    config = TrainConfig(iterations=3, prompts=B, group_size=G, microbatches=1)
    step = jax.jit(make_iteration(rollout, MODEL, algorithm, optimizer, config))
    states = [init_state(FRESH, optimizer, jax.random.key(7), model=MODEL, algorithm=algorithm)]
    metrics = []
    for _ in range(3):
        state, measured = step(states[-1])
        states.append(state)
        metrics.append(measured)
    return states, metrics


def test_training_changes_the_adapters_and_nothing_else(trained):
    first, last = trained[0][0].params, trained[0][-1].params
    chex.assert_trees_all_equal(lora.without_adapters(last), BASE)
    for path in (("query", "a"), ("query", "b"), ("down", "a"), ("down", "b")):
        before, after = (p["blocks"][path[0]]["lora"][path[1]] for p in (first, last))
        assert (before != after).any()
    chex.assert_trees_all_equal(
        first["blocks"]["query"]["lora"]["scale"], last["blocks"]["query"]["lora"]["scale"]
    )


def test_the_reference_is_the_base_and_is_not_kept_twice(trained):
    states, metrics = trained
    assert all(state.ref_params is None for state in states)
    # Fresh adapters are the reference itself; trained ones are not.
    assert metrics[0]["kl/rollout"] < 1e-10
    assert metrics[2]["kl/rollout"] > 1e-7


def test_the_optimizer_keeps_moments_for_adapters_only(trained):
    n_trained = sum(x.size for x in jax.tree.leaves(lora.partition(FRESH)[0]))
    moments = optax.tree.get(trained[0][-1].opt_state, "mu")
    assert sum(x.size for x in jax.tree.leaves(moments)) == n_trained


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(targets=("query", "q_proj")), "q_proj"),
        (dict(targets=()), "none"),
        (dict(rank=0), "rank=0"),
        (dict(alpha=0.0), "alpha=0"),
    ],
)
def test_adapters_that_cannot_work_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        LoRAConfig(**settings)


def test_adapters_on_adapters_are_refused():
    with pytest.raises(ConfigError, match="already"):
        lora.add_adapters(FRESH, dataclasses.replace(CONFIG, rank=1), jax.random.key(0))
