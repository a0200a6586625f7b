import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.memory import compiled_memory, estimate, readable
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.parallel import ParallelConfig
from jaxrl_llm.rollout import Rollout, row_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.training import TrainConfig, init_state, make_iteration, scan_iterations
from jaxrl_llm.types import ConfigError, Prompts

SMALL = ModelConfig(width=96, layers=3, heads=4, kv_heads=2, mlp_width=300)
SMOLLM2_135M = ModelConfig(width=576, layers=30, heads=9, kv_heads=3, mlp_width=1536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a run; sizes are such that a few seconds compile it."""

    config: ModelConfig = SMALL
    vocab: int = 1000
    rank: int = 0  # of the adapters; 0: none
    algorithm: AlgorithmConfig = GRPOConfig(kl_coef=0.0)
    train: TrainConfig = TrainConfig(prompts=8, group_size=4, microbatches=2)
    tokens: int = 17
    prompt_length: int = 16
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def model(self):
        return LanguageModel(self.config, self.vocab)

    @property
    def sampling(self):
        return SamplingConfig(max_tokens=self.tokens, block=self.tokens)

    def params(self):
        """Shapes only."""

        def init():
            params = self.model.init(jax.random.key(0))
            if self.rank == 0:
                return params
            return lora.add_adapters(params, lora.LoRAConfig(rank=self.rank), jax.random.key(0))

        return jax.eval_shape(init)

    def estimate(self, params=None, **mesh):
        return estimate(
            self.model,
            self.params() if params is None else params,
            algorithm=self.algorithm,
            train=self.train,
            sampling=self.sampling,
            optimizer=self.optimizer,
            prompt_length=self.prompt_length,
            mesh=ParallelConfig(**{"data": 1} | mesh),
        )

    def compiled(self):
        """XLA's own figure for two iterations."""
        train, model = self.train, self.model
        algorithm = make_algorithm(self.algorithm, iterations=train.iterations)
        optimizer = make_optimizer(
            self.optimizer, train.updates, value_rate=self.algorithm.value_rate
        )

        def rollout(params, key):
            shape = train.prompts, self.prompt_length
            tokens = jax.random.randint(key, shape, 0, self.vocab)
            prompts = Prompts(tokens, jnp.ones(shape, bool))
            keys = jax.vmap(lambda k: row_keys(k, train.group_size))(row_keys(key, train.prompts))
            drawn = sample(params, model, prompts, keys, self.sampling, eos_ids=(1,), pad_id=0)
            return Rollout(prompts, drawn, (drawn.tokens == 5).mean(-1), {})

        def begin(params):
            return init_state(
                params,
                optimizer,
                jax.random.key(0),
                model=model,
                algorithm=algorithm,
                rollout_lag=train.rollout_lag,
            )

        step = make_iteration(rollout, model, algorithm, optimizer, train)
        return compiled_memory(scan_iterations(step, 2), jax.eval_shape(begin, self.params()))


def with_remat(config):
    return dataclasses.replace(config, remat=True)


def in_bfloat16(config):
    return dataclasses.replace(config, dtype="bfloat16")


FAST = {
    "all weights": Case(),
    "adapters, remat, many logits": Case(config=with_remat(SMALL), rank=8, vocab=4000),
}

SLOW = {
    "many tokens, few logits": Case(config=with_remat(SMALL), vocab=64, tokens=129),
    "separate value model": Case(
        config=with_remat(SMALL), algorithm=PPOConfig(value_model="separate")
    ),
    "whole batch scored, microbatches of one": Case(
        config=with_remat(SMALL),
        vocab=64,
        tokens=65,
        train=TrainConfig(prompts=16, group_size=4, microbatches=16),
        algorithm=GRPOConfig(kl_coef=0.1),
    ),
    "SmolLM2, adapters, remat": Case(
        config=with_remat(SMOLLM2_135M),
        vocab=49152,
        rank=16,
        train=TrainConfig(prompts=8, group_size=8, microbatches=4),
        tokens=97,
        prompt_length=64,
    ),
    "SmolLM2, all weights, one microbatch": Case(
        config=with_remat(SMOLLM2_135M),
        vocab=49152,
        tokens=33,
        train=TrainConfig(prompts=4, group_size=4, microbatches=1),
        optimizer=OptimizerConfig(first_moment="bfloat16"),
    ),
    "SmolLM2, bfloat16": Case(
        config=in_bfloat16(with_remat(SMOLLM2_135M)), vocab=49152, rank=8, tokens=33
    ),
    "Jacobian drift": Case(
        algorithm=GRPOConfig(grad_reg_coeff=0.1),
        train=TrainConfig(prompts=8, group_size=4, microbatches=4, epochs=2),
    ),
    "stale rollouts, minibatches": Case(
        algorithm=GRPOConfig(kl_coef=0.1, importance_cap=2.0),
        train=TrainConfig(prompts=8, group_size=4, microbatches=1, minibatches=2, rollout_lag=1),
    ),
    "untied head, biases": Case(
        config=ModelConfig(
            width=160, layers=4, heads=5, kv_heads=5, tie_embeddings=False, qkv_bias=True
        ),
        vocab=5000,
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in FAST.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_the_estimate_agrees_with_the_compiled_program(case):
    assert case.estimate().total == pytest.approx(case.compiled(), rel=0.15)


def test_an_iteration_holds_no_logits_of_all_positions_at_a_large_vocabulary():
    train = TrainConfig(prompts=8, group_size=8, microbatches=2)
    config = ModelConfig(width=16, layers=1, heads=2)
    case = Case(config=config, vocab=150_000, train=train, tokens=33, prompt_length=8)
    one_buffer = 4 * 8 * 8 * 33 * 150_000
    assert case.compiled() < one_buffer / 2


def test_the_state_is_counted_to_the_byte():
    n = sum(x.size for x in jax.tree.leaves(Case().params()))
    state = Case().estimate().state
    assert state["parameters"] == 4 * n
    assert 8 * n <= state["optimizer"] < 8 * n + 100
    assert state["reference parameters"] == state["value model"] == state["lagged policy"] == 0

    rich = Case(
        algorithm=PPOConfig(value_model="separate", kl_coef=0.1),
        train=TrainConfig(prompts=8, group_size=4, microbatches=2, rollout_lag=1),
        optimizer=OptimizerConfig(first_moment="bfloat16"),
    )
    state = rich.estimate().state
    assert state["reference parameters"] == state["lagged policy"] == 4 * n
    n_critic = n + SMALL.width + 1
    assert state["value model"] == 4 * n_critic
    trained = n + n_critic
    assert 6 * trained <= state["optimizer"] < 6 * trained + 100


def test_adapters_need_no_reference_and_no_optimizer_of_the_frozen_weights():
    case = Case(rank=8, algorithm=GRPOConfig(kl_coef=0.1))
    params = case.params()
    n_adapters = sum(x.size for x in jax.tree.leaves(lora.partition(params)[0]))
    state = case.estimate().state
    assert state["reference parameters"] == 0
    assert 8 * n_adapters <= state["optimizer"] < 8 * n_adapters + 100


def test_the_total_is_the_state_and_the_largest_phase():
    counted = Case().estimate()
    phases = {name: sum(rows.values()) for name, rows in counted.phases.items()}
    assert counted.total == sum(counted.state.values()) + max(phases.values())
    assert phases[counted.peak_phase] == max(phases.values())


def test_the_table_names_every_row_and_marks_the_peak():
    counted = Case().estimate()
    table = str(counted)
    for name, rows in {"state": counted.state, **counted.phases}.items():
        assert name in table
        assert all(row in table for row, size in rows.items() if size)
    (marked,) = (line for line in table.splitlines() if "peak" in line)
    assert marked.startswith(counted.peak_phase)
    assert table.splitlines()[-1].endswith(readable(counted.total))


def test_arrays_and_their_shapes_are_the_same_and_nothing_is_allocated():
    case = Case(rank=8)
    before = len(jax.live_arrays())
    of_shapes = case.estimate()
    assert len(jax.live_arrays()) == before
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), case.params())
    assert case.estimate(arrays) == of_shapes


def test_remat_keeps_one_array_per_layer_and_pass():
    rows = [
        Case(config=config).estimate().phases["update: layers"]["saved activations"]
        for config in (SMALL, with_remat(SMALL))
    ]
    # The input of each layer, for 4 prompts of 16 tokens and 4 × 4 completions of 16.
    inputs = 4 * SMALL.layers * (4 * 16 + 4 * 4 * 16) * SMALL.width
    assert inputs < rows[1] < 2.5 * inputs
    assert rows[0] > 5 * rows[1]


def test_batches_are_shared_along_data_and_weights_along_fsdp_and_tensor():
    case = Case()
    whole = case.estimate()

    def of(mesh, row, phase=None):
        counted = case.estimate(**mesh)
        ours, all_of_it = (x.state if phase is None else x.phases[phase] for x in (counted, whole))
        return ours[row] / all_of_it[row]

    caches = "completions' keys and values", "rollout: decoding"
    assert of({"data": 2}, "parameters") == 1
    assert of({"fsdp": 2}, "parameters") == of({"tensor": 2}, "optimizer") == 1 / 2
    assert of({"data": 2, "fsdp": 2}, *caches) == 1 / 4
    assert of({"tensor": 2}, *caches) == 1 / 2
    assert of({"data": 4}, "saved activations", "update: layers") == pytest.approx(1 / 4, rel=0.02)
    tensor = of({"tensor": 2}, "saved activations", "update: layers")
    assert 1 / 2 < tensor < 3 / 4  # the residual stream is whole on each device
    assert of({"tensor": 2}, "logits of a chunk", "update: logits") == 1 / 2


@pytest.mark.parametrize(
    "mesh, named", [({"data": 3}, "4 prompts"), ({"tensor": 4}, "2 key/value"), ({"fsdp": 0}, "1")]
)
def test_a_mesh_that_divides_nothing_is_refused(mesh, named):
    with pytest.raises(ConfigError, match=named):
        Case().estimate(**mesh)
