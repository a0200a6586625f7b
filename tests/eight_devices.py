"""Claims that hold on eight devices; `test_sharding.py` runs them in a process that has these."""

import collections
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.logging import RunFolder
from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.parallel import (
    SINGLE,
    Layout,
    ParallelConfig,
    make_layout,
    shard_rows,
    shardings,
)
from jaxrl_llm.rollout import Rollout, make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig, make_sft_step
from jaxrl_llm.trainer import RunConfig, train
from jaxrl_llm.training import (
    TrainConfig,
    init_state,
    make_draw,
    make_iteration,
)
from jaxrl_llm.types import Completions, Prompts


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


B, G, P, T, V, D = 16, 3, 5, 7, 40, 24
FAMILIES = {
    "llama": {"heads": 8, "kv_heads": 2, "head_width": 6},
    "qwen2": {"heads": 4, "kv_heads": 2, "qkv_bias": True},
    "qwen3": {"heads": 4, "qk_norm": True, "head_width": 8, "tie_embeddings": False},
}


def make_model(**settings):
    model = LanguageModel(ModelConfig(width=D, layers=2, mlp_width=56, **settings), V)
    return model, jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(0)))


MODEL, PARAMS = make_model(
    heads=4, kv_heads=2, head_width=6, qkv_bias=True, qk_norm=True, tie_embeddings=False
)


def ragged():
    """16 prompts of 1 to 5 tokens, with 3 completions of 0 to 7 tokens each."""
    keys = jax.random.split(jax.random.key(1), 5)
    real = jnp.arange(P)[None] >= (jnp.arange(B) % P)[:, None]
    prompts = Prompts(jnp.where(real, jax.random.randint(keys[0], (B, P), 3, V), 0), real)
    lengths = jax.random.randint(keys[1], (B, G), 0, T + 1)
    mask = jnp.arange(T)[None, None] < lengths[..., None]
    tokens = jnp.where(mask, jax.random.randint(keys[2], (B, G, T), 0, V), 0)
    logprobs = jnp.where(mask, -jax.random.uniform(keys[3], (B, G, T), maxval=4.0), 0.0)
    rewards = jax.random.uniform(keys[4], (B, G))
    return Rollout(prompts, Completions(tokens, mask, mask, logprobs), rewards, {})


RAGGED = ragged()


@functools.cache
def layout(name: str) -> Layout:
    """By name: jit, pmap-8, or data x fsdp x tensor."""
    if name == "jit":
        return SINGLE
    if name.startswith("pmap"):
        return make_layout(ParallelConfig(backend="pmap"), jax.devices()[: int(name[5:])])
    data, fsdp, tensor = map(int, name.split("x"))
    config = ParallelConfig(backend="mesh", data=data, fsdp=fsdp, tensor=tensor)
    return make_layout(config, jax.devices()[: data * fsdp * tensor])


def close(found, expected, tolerance=1e-5):
    """Of arrays wherever they lie."""
    found, expected = (jax.tree.map(np.asarray, bits(tree)) for tree in (found, expected))
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=tolerance)


def bits(tree):
    """Typed keys as the numbers that they are."""

    def one(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(one, tree)


def collectives(compiled) -> dict[str, set[tuple[int, ...]]]:
    """Shapes of what each kind of collective in a compiled program makes."""
    found = collections.defaultdict(set)
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for made, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        for shape in re.findall(r"\w+\[([\d,]*)\]", made):
            found[kind].add(tuple(int(n) for n in shape.split(",") if n))
    return dict(found)


def without_ones(shape):
    return tuple(sorted(n for n in shape if n > 1))


# One update from a fixed batch.


def given(prompts, axis_name):
    """A rollout of the fixed batch."""

    def rollout(params, key):
        if axis_name is None:
            return shard_rows(RAGGED)
        start = prompts * jax.lax.axis_index(axis_name)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, prompts), RAGGED)

    return rollout


AGGREGATIONS = "token", "sequence", "constant"


def by_any_aggregation():
    """An algorithm whose KL coefficient says which of its aggregations counts: one program."""
    configs = [
        PPOConfig(kl_in="loss", kl_coef=0.1, aggregation=how, whiten=True) for how in AGGREGATIONS
    ]
    algorithms = [make_algorithm(config, iterations=1) for config in configs]

    def loss(scores, batch, which):
        beta = jnp.float32(0.1)
        outs = [algorithm.loss(scores, batch, beta) for algorithm in algorithms]
        return jax.tree.map(lambda *xs: jnp.stack(xs)[which.astype(int)], *outs)

    return algorithms[0]._replace(loss=loss)


@functools.cache
def updated(name: str):
    """(the compiled update, by aggregation: the parameters and metrics after it)."""
    on, algorithm = layout(name), by_any_aggregation()
    optimizer = optax.apply_if_finite(optax.sgd(1.0), 5)
    rollout = on.rollout(given, B, "float32")
    microbatches = 1 if on.config.batch_parts == 8 else 2
    sizes = TrainConfig(prompts=B, group_size=G, minibatches=2, microbatches=microbatches)
    step = make_iteration(rollout, MODEL, algorithm, optimizer, sizes, axis_name=on.axis_name)

    def begin(which):
        params = jax.tree.map(jnp.copy, on.shard(PARAMS))
        key = jax.random.key(0)
        state = init_state(params, optimizer, key, model=MODEL, algorithm=algorithm)
        kl = state.kl._replace(coef=jnp.float32(which))
        return on.replicate(on.shard(state.replace(kl=kl)))

    compiled = on.compile_step(step, begin(0))
    results = {}
    for which, how in enumerate(AGGREGATIONS):
        state, metrics = on.first(compiled(begin(which)))
        results[how] = jax.device_get((state.params, state.critic, metrics))
    return compiled, results


@pytest.mark.parametrize("name", ["pmap-8", slow("8x1x1"), slow("4x2x1"), "2x2x2", slow("1x8x1")])
def test_an_update_is_the_same_on_every_mesh(name):
    """Two steps of SGD with rate 1 in one: parameters move by their gradients."""
    for how in AGGREGATIONS:
        expected = updated("jit")[1][how]
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), expected[0], PARAMS)
        assert min(jax.tree.leaves(moved)) > 1e-4
        close(updated(name)[1][how], expected)
    losses = [float(updated("jit")[1][how][2]["loss"]) for how in AGGREGATIONS]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("name", ["pmap-8", slow("8x1x1")])
def test_data_parallel_updates_add_up_gradients_and_exchange_nothing_else(name):
    made = collectives(updated(name)[0])
    assert set(made) == {"all-reduce"}
    # A layer's, or all layers', perhaps transposed.
    weights = {x.shape for x in jax.tree.leaves(PARAMS)} | {(), (D,)}
    weights |= {x.shape[1:] for x in jax.tree.leaves(PARAMS["blocks"])}
    weights = {without_ones(shape) for shape in weights}
    assert {without_ones(shape) for shape in made["all-reduce"]} <= weights


@pytest.mark.parametrize("name", [slow("4x2x1"), slow("1x8x1"), "2x2x2"])
def test_weights_in_parts_are_gathered_layer_by_layer_and_no_activations_are(name):
    made = collectives(updated(name)[0])
    tensor = layout(name).config.tensor
    matrices = {x.shape[-2:] for x in jax.tree.leaves(PARAMS) if x.ndim >= 2}
    matrices |= {(m // tensor, n) for m, n in matrices} | {(m, n // tensor) for m, n in matrices}
    assert made["all-gather"] and set(made) == {"all-gather", "all-reduce"}
    for shape in made["all-gather"]:
        assert shape[-2:] in matrices and shape[:-2] in ((), (1,))
    summed = [shape for shape in made["all-reduce"] if len(shape) > 3]
    # The tensor axis adds up partial sums of activations; the others do not.
    assert bool(summed) == (tensor > 1)


@pytest.mark.slow
def test_the_devices_of_a_mesh_score_their_own_positions_in_chunks():
    hidden = jax.random.normal(jax.random.key(0), (B, G, T, D))
    head = jax.random.normal(jax.random.key(1), (D, V))
    tokens = RAGGED.completions.tokens

    def scored(hidden, most=10 * V):
        logp, entropy = token_logprobs(hidden, head, tokens, max_logits=most)
        return logp.sum() + (entropy**2).sum(), (logp, entropy)

    gradient = jax.grad(scored, has_aux=True)
    expected = gradient(hidden, most=10**9)
    on = layout("4x2x1")
    compiled = on.compile(lambda hidden: gradient(shard_rows(hidden)), hidden)
    close(compiled(hidden), expected)
    assert not collectives(compiled)
    assert f"f32[1,10,{V}]" in compiled.as_text()


# Rollouts.


class Echo:
    """An environment whose prompts are drawn, and whose reward counts a token."""

    def reset_env(self, key, params):
        real = jnp.arange(P) >= jax.random.randint(key, (), 0, P)
        tokens = jax.random.randint(jax.random.fold_in(key, 1), (P,), 3, V)
        return Prompts(jnp.where(real, tokens, 0), real), tokens[-1]

    def step_env(self, key, state, tokens, params):
        reward = jnp.minimum((tokens % 5 == 0).sum(), 2).astype(jnp.float32)
        info = {"is_correct": reward > 0, "noise": jax.random.uniform(key) + state}
        return None, state, reward, True, info


class Tokens:
    """End tokens of a vocabulary."""

    eos_ids, pad_id = (1, 2, 5, 7), 0


def drawing(on: Layout, *, rounds: int):
    sampling = SamplingConfig(max_tokens=13, block=6)

    def make(prompts, axis_name):
        sizes = {"prompts": prompts, "group_size": G, "axis_name": axis_name}
        return make_rollout(Echo(), None, MODEL, Tokens(), sampling, **sizes)

    rollout = on.rollout(make, B, "float32")
    config = DAPOConfig(max_sampling_rounds=rounds)
    return rollout, make_draw(rollout, make_algorithm(config, iterations=1), on.axis_name)


@functools.cache
def drawn(name: str):
    """(compiled, (batch, metrics)) of dynamic sampling."""
    on = layout(name)
    draw = drawing(on, rounds=3)[1]
    args = on.shard(PARAMS), jax.random.key(5)
    if on.mesh is not None:
        args = args[0], on.shard(args[1])
    args = on.replicate(args)
    compiled = on.compile(draw, *args)
    rolled, metrics = compiled(*args)
    if on.axis_name:
        rolled = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rolled)
        metrics = on.first(metrics)
    return compiled, jax.device_get((rolled, metrics))


@pytest.mark.parametrize("name", ["pmap-8", slow("8x1x1"), slow("4x2x1"), slow("2x2x2")])
def test_problems_and_completions_do_not_depend_on_the_devices(name):
    expected, metrics = drawn("jit")[1]
    lengths = expected.completions.loss_mask.sum(-1)
    assert lengths.min() < 4 and lengths.max() == 13  # devices leave the loop at different times
    assert 1 < metrics["rollout/rounds"] <= 3 and metrics["reward/dead_groups"] > 0
    rolled = drawn(name)[1][0]
    np.testing.assert_array_equal(rolled.prompts.tokens, expected.prompts.tokens)
    np.testing.assert_array_equal(rolled.completions.tokens, expected.completions.tokens)
    close(drawn(name)[1], (expected, metrics))


@functools.cache
def measured(name: str):
    on = layout(name)
    rollout = drawing(on, rounds=2)[0]
    return jax.device_get(on.evaluate(rollout)(PARAMS, jax.random.key(6)))


@pytest.mark.parametrize("name", [slow("pmap-2"), slow("2x1x1")])
def test_evaluations_draw_the_same_on_two_devices(name):
    found, expected = measured(name), measured("jit")
    np.testing.assert_array_equal(found.completions.tokens, expected.completions.tokens)
    close(found, expected)


def test_sampling_gathers_weights_once_and_lets_every_device_end_alone():
    """Within the sampling loop nothing is exchanged."""
    on = layout("4x2x1")
    rollout = drawing(on, rounds=2)[0]
    made = collectives(on.compile(rollout, on.shard(PARAMS), on.shard(jax.random.key(5))))
    assert set(made) == {"all-gather"}
    assert made["all-gather"] <= {x.shape for x in jax.tree.leaves(PARAMS)}


# States.


def full_state(on: Layout):
    """Policy, reference, value model, moments, and the policy that lags."""
    config = PPOConfig(value_model="separate", kl_coef=0.1)
    algorithm = make_algorithm(config, iterations=1)
    adam = make_optimizer(OptimizerConfig(first_moment="bfloat16"), 10, value_rate=2.0)
    params = jax.tree.map(jnp.copy, on.shard(PARAMS))
    key = jax.random.key(0)
    return init_state(params, adam, key, model=MODEL, algorithm=algorithm, rollout_lag=1)


def test_a_state_is_born_in_parts_and_moments_lie_with_their_parameters():
    on = layout("2x2x2")
    born = full_state(on)
    state = on.shard(born)
    query = ("blocks", "query", "kernel")

    def leaf(tree):
        return functools.reduce(lambda node, name: node[name], query, tree)

    moments = [x for path, x in jax.tree.leaves_with_path(state.opt_state) if has(path, *query)]
    assert len(moments) == 4  # two of the policy's, two of the value model's
    of_policy = [leaf(x) for x in (state.params, state.ref_params, state.lagged_params)]
    for x in [*moments, *of_policy, leaf(state.critic["trunk"])]:
        assert x.sharding.shard_shape(x.shape) == (2, D // 2, 4 * 6 // 2)
    large = [x for x in jax.tree.leaves(born) if x.size > 200]
    assert len(large) > 50 and not any(x.is_fully_replicated for x in large)
    assert state.critic["head"]["kernel"].is_fully_replicated
    assert state.key.is_fully_replicated
    names = {"mesh: data 2 × fsdp 2 × tensor 2", "8 cpu devices", "MiB of state on each"}
    assert all(name in on.describe(state) for name in names)


def has(path, *names):
    return tuple(key.key for key in path if hasattr(key, "key") and key.key in names) == names


def test_axes_that_do_not_divide_a_dimension_are_left_out():
    on = layout("1x8x1")
    params = on.shard({"embedding": jnp.zeros((5, 24)), "head": jnp.zeros((12, 5))})
    assert params["embedding"].sharding.shard_shape((5, 24)) == (5, 3)
    assert params["head"].is_fully_replicated


def test_weights_are_drawn_in_parts_and_the_same(tmp_path):
    on = layout("2x2x2")
    params = on.init(MODEL.init, jax.random.key(0))
    close(params, MODEL.init(jax.random.key(0)), 1e-7)
    kernel = params["blocks"]["down"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 28, 12)
    # A file's tensors have no axis of layers.
    placed = on.place(("blocks", "down", "kernel"), np.ones((56, 24), np.float32))
    assert placed.sharding.shard_shape(placed.shape) == (28, 12)


@pytest.mark.parametrize("name", ["jit", slow("1x2x1"), "2x1x2", slow("1x4x1")])
def test_a_checkpoint_of_eight_devices_is_restored_on_fewer(saved, name):
    folder, state = saved
    on = layout(name)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore_latest(on.shard(full_state(on)))
    chex.assert_trees_all_equal(*(jax.device_get(bits(x)) for x in (restored.state, state)))
    if on.mesh is not None:
        wanted = jax.tree.leaves(shardings(state, on.mesh))
        for x, sharding in zip(jax.tree.leaves(restored.state), wanted, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, on = tmp_path_factory.mktemp("checkpoints"), layout("2x2x2")
    state = on.shard(full_state(on))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state)
    return folder, state


def supervised(path, name: str, total: int):
    """Supervised training of adapters up to a step, from where the folder's run stands."""
    completions = RAGGED.completions
    examples = Examples(RAGGED.prompts, completions.tokens, completions.loss_mask)
    config = SFTConfig(steps=4, batch=8, examples=B)
    optimizer = make_optimizer(config.optimizer, config.steps)
    policy = lora.add_adapters(PARAMS, lora.LoRAConfig(rank=2), jax.random.key(1))
    on = layout(name)
    with RunFolder.open(path, {}) as folder:
        return train(
            folder,
            init_state(jax.tree.map(jnp.copy, on.shard(policy)), optimizer, jax.random.key(2)),
            lambda: make_sft_step(MODEL, examples, optimizer, config, axis_name=on.axis_name),
            run=RunConfig(quiet=True),
            total=total,
            per_call=2,
            tokens_metric="sft/tokens",
            layout=on,
        )


@pytest.mark.slow
def test_a_run_goes_on_with_another_backend_as_if_it_had_stayed(tmp_path):
    """Two steps under pmap, and two over a mesh."""
    whole = supervised(tmp_path / "whole", "jit", 4)
    supervised(tmp_path / "parts", "pmap-8", 2)
    parts = supervised(tmp_path / "parts", "2x2x2", 4)
    assert [row["step"] for row in parts.history] == [row["step"] for row in whole.history]
    for found, expected in zip(parts.history, whole.history, strict=True):
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    close(parts.params, whole.params, 1e-4)


# Model families.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, slow(2)])
def test_every_family_computes_the_same_with_its_heads_and_layers_in_parts(family, rank):
    model, params = make_model(**FAMILIES[family])
    if rank:
        params = lora.add_adapters(params, lora.LoRAConfig(rank=rank), jax.random.key(1))
        params = jax.tree.map(lambda x: x + 0.02, params)
    on = layout("2x2x2")
    sharded = on.shard(params)
    gate = sharded["blocks"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (2, D // 2, 28)

    def forward(params):
        prompts, completions = shard_rows((RAGGED.prompts, RAGGED.completions))
        hidden = model.completion_hidden(params, prompts, completions)
        return jnp.matmul(hidden, model.head(params))

    close(on.compile(forward, sharded)(sharded), forward(params), 2e-5)
