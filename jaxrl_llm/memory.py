"""How much device memory training takes, by name, before anything is allocated or compiled.

Everything is counted from shapes: the state from `init_state`, the activations that an update keeps
from what differentiation itself would keep (`jax.vjp`), the rest from the sizes of arrays. An
iteration samples, scores and updates one after the other, so its peak is the state and the largest
of these phases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models import critic as critics
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.optimizer import OptimizerConfig, Trained, make_optimizer
from jaxrl_llm.parallel import ParallelConfig
from jaxrl_llm.sampling import MAX_WINDOWS, SamplingConfig, windows
from jaxrl_llm.trainer import peak_memory
from jaxrl_llm.training import TrainConfig, TrainState, init_state
from jaxrl_llm.types import Completions, KeyValues, Prompts

Rows = dict[str, float]  # bytes per device


@dataclass(frozen=True)
class Estimate:
    """Bytes per device. `str` of it is a table."""

    state: Rows
    """What stays from iteration to iteration."""
    phases: dict[str, Rows]
    """What is there beside it while the iteration is in that phase."""

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> float:
        """The state and the largest phase."""
        return sum(self.state.values()) + sum(self.phases[self.peak_phase].values())

    def __str__(self) -> str:
        lines = []
        for name, rows in {"state": self.state, **self.phases}.items():
            mark = "  <- peak" if name == self.peak_phase else ""
            lines.append(f"{name:<40}{readable(sum(rows.values())):>12}{mark}")
            lines += [f"  {row:<38}{readable(size):>12}" for row, size in rows.items() if size]
        return "\n".join([*lines, f"{'total per device':<40}{readable(self.total):>12}"])


def readable(size: float) -> str:
    """Bytes as MiB or GiB.

    >>> readable(3 * 2**29)
    '1.50 GiB'
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def estimate(
    model: LanguageModel,
    params: Params,
    *,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
    optimizer: OptimizerConfig,
    prompt_length: int,
    mesh: ParallelConfig = ParallelConfig(data=1),
    backend: str | None = None,
) -> Estimate:
    """Device memory of `training.make_iteration`, jitted with its state donated.

    Args:
        model: the policy's functions.
        params: its parameters or their shapes, adapters included.
        algorithm: which models there are, and what is scored.
        train: sizes of rollouts and updates.
        sampling: the longest completion.
        optimizer: types of its moments.
        prompt_length: P, padding included.
        mesh: devices that share the work, its sizes definite; what they exchange is not counted.
        backend: "cpu" computes bfloat16 in float32, and keeps what it has converted; by default
            JAX's own.

    Raises:
        ConfigError: the mesh does not divide the batch or the heads.
    """
    mesh.check_rows(train.microbatch, "prompts of a microbatch")
    mesh.check_heads(model.config.heads, model.config.n_kv_heads)
    params = jax.tree.map(lambda x: shaped(x.shape, x.dtype), params)
    state = _state_shapes(model, params, algorithm, train, optimizer)
    emulates = (backend or jax.default_backend()) == "cpu"
    plan = _Plan(model, state, algorithm, train, sampling, prompt_length, mesh, emulates)
    return Estimate(plan.state_rows(), plan.phases())


def compiled_memory(step: Callable[[TrainState], Any], state: Any) -> int:
    """Bytes that XLA plans for a step with its state donated, on the backend at hand.

    It compiles, which takes from seconds to minutes, and allocates nothing.

    Args:
        step: such as `scan_iterations(make_iteration(...), n)`.
        state: the state or its shapes.
    """
    return int(peak_memory(jax.jit(step, donate_argnums=0).lower(state).compile()))


def _state_shapes(
    model: LanguageModel,
    params: Params,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    optimizer: OptimizerConfig,
) -> TrainState:
    adam = make_optimizer(optimizer, train.updates, value_rate=algorithm.value_rate)
    functions = make_algorithm(algorithm, iterations=train.iterations)

    def init(params):
        key, lag = jax.random.key(0), train.rollout_lag
        return init_state(params, adam, key, model=model, algorithm=functions, rollout_lag=lag)

    return jax.eval_shape(init, params)


class _Kept(NamedTuple):
    """Bytes that a layer keeps for its backward pass."""

    mlp: float  # arrays as wide as the MLP
    scores: float  # of attention, own and prefix
    rest: float


@dataclass(frozen=True)
class _Plan:
    """The phases of one iteration."""

    model: LanguageModel
    state: TrainState
    algorithm: AlgorithmConfig
    train: TrainConfig
    sampling: SamplingConfig
    prompt_length: int
    mesh: ParallelConfig
    emulates_bfloat16: bool

    def state_rows(self) -> Rows:
        state, parts = self.state, self.mesh.weight_parts
        return {
            "parameters": nbytes(state.params) / parts,
            "reference parameters": nbytes(state.ref_params) / parts,
            "value model": nbytes(state.critic) / parts,
            "lagged policy": nbytes(state.lagged_params) / parts,
            "optimizer": nbytes(state.opt_state) / parts,
        }

    def phases(self) -> dict[str, Rows]:
        """What lives beside the state, phase by phase."""
        update = self.update_rows()
        logits, layer = self.logits_rows(), self.layer_rows()
        early: Rows = {}
        if self.train.microbatches == self.train.updates_per_rollout == 1:
            # XLA unrolls loops of one turn, and then nothing keeps it from making the buffers of
            # the update before it samples.
            early = {f"{name}, held early": size for name, size in update.items()}
            early.pop("output projection, held early")
        phases = {
            "rollout: weights": self.rollout_rows() | self.unstacking_rows() | early,
            "rollout: decoding": self.rollout_rows() | self.decoding_rows() | early,
        }
        if self.scores_rollout:
            phases["scoring"] = self.batch_rows() | self.scoring_rows() | early
        return phases | {"update: logits": update | logits, "update: layers": update | layer}

    @property
    def scores_rollout(self) -> bool:
        config = self.algorithm
        return bool(
            config.needs_reference
            or config.advantage == "gae"
            or config.importance_cap is not None
            or config.grad_reg_coeff
        )

    # Sizes on one device.

    @property
    def prompts(self) -> int:
        return self.train.prompts // self.mesh.batch_parts

    @property
    def microbatch(self) -> int:
        return self.prompts // (self.train.minibatches * self.train.microbatches)

    @property
    def compute_size(self) -> int:
        """Bytes of a number in the compute type."""
        return jnp.dtype(self.model.config.dtype).itemsize

    def cache(self, length: int, rows: int) -> float:
        """Keys and values of all layers."""
        config = self.model.config
        per_position = 2 * config.layers * config.n_kv_heads * config.head_size
        return self.compute_size * rows * length * per_position / self.mesh.tensor

    def logits(self, positions: int) -> float:
        return 4.0 * positions * self.model.vocab_size / self.mesh.tensor

    def head_copy(self) -> float:
        """The output projection where it is not a parameter as it is: transposed, and cast."""
        config, embedding = self.model.config, self.state.params["embedding"]
        copies = config.tie_embeddings + (self.compute_size != embedding.dtype.itemsize)
        return copies * self.compute_size * embedding.size / self.mesh.weight_parts

    # Rollout.

    def rollout_rows(self) -> Rows:
        return {
            "output projection": self.head_copy(),
            # All layers', as the prompt's pass leaves them, and each layer's own.
            "prompts' keys and values": 2 * self.cache(self.prompt_length, self.prompts),
        }

    def layer_weights(self) -> float:
        """One tree per layer, merged and cast, to decode with."""
        blocks = lora.without_adapters(self.state.params["blocks"])
        return self.compute_size * count(blocks) / self.mesh.weight_parts

    def unstacking_rows(self) -> Rows:
        """Layers are merged or cast all at once, and then cut apart projection by projection."""
        params, parts = self.state.params["blocks"], self.mesh.weight_parts
        blocks = lora.without_adapters(params)
        layers, first = self.layer_weights(), self.cache_windows()[0]
        caches = {"empty caches": self.cache(first, self.prompts * self.train.group_size)}
        if lora.has_adapters(params):
            whole = nbytes(blocks) / parts
        elif nbytes(blocks) != self.compute_size * count(blocks):
            whole = layers
        else:
            return caches | {"weights of each layer": layers}
        # Half, because what has been cut apart is free again.
        return caches | {"weights of all layers": whole, "weights of each layer": layers / 2}

    def cache_windows(self) -> list[int]:
        """Lengths to which caches grow."""
        steps = self.sampling.max_tokens - 1
        return [end for _, end in windows(steps, self.sampling.block, MAX_WINDOWS)] or [0]

    def decoding_rows(self) -> Rows:
        rows = self.prompts * self.train.group_size
        *_, before, last = 0, *self.cache_windows()
        return {
            "weights of each layer": self.layer_weights(),
            "completions' keys and values": self.cache(last, rows),
            # A cache grows by a copy, larger than that of the rows which go on alone; a step holds
            # logits, their cumulative sum, a comparison.
            "caches before they grow, or logits": max(
                self.cache(before, rows), 3 * self.logits(rows)
            ),
        }

    # Scoring before the updates: all prompts at once, forward only.

    def scoring_rows(self) -> Rows:
        positions = self.prompts * self.train.group_size * self.sampling.max_tokens
        # Scores are there at once; of what a backward pass would keep of the MLP half is, and of
        # the projections a quarter.
        kept = self.layer_residuals(self.prompts)
        layer = max(kept.mlp / 2, kept.scores + kept.rest / 4)
        logits = (3 if positions > self.chunk else 1) * self.logits(min(positions, self.chunk))
        return {
            "output projection": self.head_copy(),
            "prompts' keys and values": self.cache(self.prompt_length, self.prompts),
            "a layer's forward pass, or logits": max(layer, logits),
        }

    # Update.

    def batch_rows(self) -> Rows:
        """Tokens, masks, log-probabilities, advantages and the like, and a minibatch of them."""
        tokens = self.prompts * self.train.group_size * self.sampling.max_tokens
        width = self.model.config.width
        drift = (2 * self.compute_size + 4) * width if self.algorithm.grad_reg_coeff else 0
        return {"batch": tokens * (24 + drift) * (1 + 1 / self.train.minibatches)}

    def update_rows(self) -> Rows:
        trained = self.trained()
        blocks = [x for path, x in jax.tree.leaves_with_path(trained) if "blocks" in str(path)]
        accumulated = self.train.microbatches > 1
        # Prompt and completions are two passes over the layers, with a gradient each; so are
        # those of the Jacobian drift.
        passes = 4 if self.algorithm.grad_reg_coeff else 2
        gradients = nbytes(trained) * (1 + accumulated) + nbytes(blocks) * (passes - 1)
        return self.batch_rows() | {
            "gradients": gradients / self.mesh.weight_parts,
            "saved activations": self.saved_activations(),
            "output projection": self.head_copy() if self.is_chunked else 0,
        }

    def trained(self) -> Trained:
        return Trained(lora.partition(self.state.params)[0], self.state.critic)

    @property
    def chunk(self) -> int:
        """Positions whose logits exist at once in scoring."""
        defaults: Any = token_logprobs.__kwdefaults__
        return max(1, defaults["max_logits"] // self.model.vocab_size)

    @property
    def is_chunked(self) -> bool:
        return self.chunk < self.microbatch * self.train.group_size * self.sampling.max_tokens

    def logits_rows(self) -> Rows:
        """Log-softmax and entropy hold five arrays of logits; three where they are recomputed."""
        positions = self.microbatch * self.train.group_size * self.sampling.max_tokens
        held = 3 if self.is_chunked else 5
        return {"logits of a chunk": held * self.logits(min(positions, self.chunk))}

    def layer_rows(self) -> Rows:
        """What a layer has kept, with cotangents: first of its MLP, then of attention's scores."""
        kept = self.layer_residuals(self.microbatch)
        # Of six arrays kept of the MLP five are there at once, cotangents included, as fused;
        # adapters have products of their own, and twice as much.
        of_mlp = kept.mlp * (2 if lora.has_adapters(self.state.params) else 5 / 6)
        # Without recomputation the rest is among what was saved.
        waiting = kept.scores + kept.rest if self.model.config.remat else 0
        return {"a layer's backward pass": max(waiting + of_mlp, 2 * kept.scores + kept.rest / 2)}

    def saved_activations(self) -> float:
        """What the forward pass of one microbatch keeps for the backward pass."""

        def saved(params, critic, prompts, completions):
            changing, frozen = lora.partition(params)

            def forward(trained: Trained):
                policy = lora.combine(trained.policy, frozen)
                hidden = self.model.completion_hidden(policy, prompts, completions)
                value_t = tangent_t = None
                if trained.critic is not None:
                    value_t = critics.values(
                        trained.critic, self.model, prompts, completions, hidden
                    )
                if self.algorithm.grad_reg_coeff:
                    tangent_t = self.model.completion_tangent(
                        policy, prompts, completions, hidden, hidden
                    )
                return hidden, value_t, tangent_t

            given = params, critic, prompts, completions
            return residuals(forward, Trained(changing, critic), given=given)

        shapes = jax.eval_shape(
            saved, self.state.params, self.state.critic, *self.batch_shapes(self.microbatch)
        )
        return sum(map(self.activation_size, shapes))

    def layer_residuals(self, rows: int) -> "_Kept":
        """What one layer keeps of `rows` prompts' completions for its backward pass."""
        config = self.model.config
        prompts, completions = self.batch_shapes(rows)
        layer = jax.tree.map(lambda x: shaped(x.shape[1:], x.dtype), self.state.params["blocks"])
        shape = rows, config.n_kv_heads, self.prompt_length, config.head_size
        part = shaped(shape, config.dtype)
        shape = rows, self.train.group_size, max(self.sampling.max_tokens - 1, 1), config.width
        x = shaped(shape, config.dtype)

        def saved(layer, x, prefix, prompts, completions):
            context = self.model.completion_context(prompts, completions)
            changing, frozen = lora.partition(layer)

            def forward(changing, x, prefix):
                params: Any = {"params": lora.combine(changing, frozen)}

                def block(x):
                    return self.model.block.apply(params, x, prefix, None, context)[0]

                return jax.jvp(block, (x,), (x,)) if self.algorithm.grad_reg_coeff else block(x)

            return residuals(forward, changing, x, prefix, given=(layer, prompts, completions))

        shapes = jax.eval_shape(saved, layer, x, KeyValues(part, part), prompts, completions)
        lengths = self.prompt_length, max(self.sampling.max_tokens - 1, 1)
        mlp = scores = rest = 0.0
        for x in (x for x in shapes if x.dtype != bool):  # masks are made again where needed
            size = self.activation_size(x)
            if x.shape[-1:] == (config.mlp_size,):
                mlp += size
            elif x.ndim == 6 and x.shape[-1] in lengths:  # [B, K, R, G, S, U]
                scores += size
            else:
                rest += size
        return _Kept(mlp, scores, rest)

    def batch_shapes(self, rows: int) -> tuple[Prompts, Completions]:
        ids = shaped((rows, self.prompt_length), jnp.int32)
        shape = rows, self.train.group_size, max(self.sampling.max_tokens, 2)
        tokens = shaped(shape, jnp.int32)
        mask = shaped(shape, bool)
        logprobs = shaped(shape, jnp.float32)
        prompts = Prompts(ids, shaped(ids.shape, bool))
        return prompts, Completions(tokens, mask, mask, logprobs)

    def activation_size(self, x: Any) -> float:
        """Bytes on one device: weights that were cast, the residual stream, or shared heads."""
        is_wide = self.emulates_bfloat16 and x.dtype == jnp.bfloat16
        size = x.size * (4 if is_wide else x.dtype.itemsize)
        if x.shape in {weight.shape for weight in jax.tree.leaves(self.state.params)}:
            return size / self.mesh.weight_parts
        is_whole = x.shape[-1:] == (self.model.config.width,)
        return size if is_whole else size / self.mesh.tensor


def residuals(function: Callable[..., Any], *args: Any, given: Any = ()) -> list[Any]:
    """The arrays that the backward pass of a function needs, without those that are `given`."""
    _, backward = jax.vjp(function, *args)
    known = {id(x) for x in jax.tree.leaves((args, given))}
    return list({id(x): x for x in jax.tree.leaves(backward) if id(x) not in known}.values())


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    """The shape of an array, in its place."""
    return jax.ShapeDtypeStruct(shape, dtype)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def count(tree: Any) -> int:
    """Numbers in all arrays."""
    return sum(x.size for x in jax.tree.leaves(tree))
