"""Claim: what cannot be seen on a CPU is right on this device: one command, five minutes at most.

For an accelerator that nobody has tried yet. It compares the attention backends, measures how far
sampled and scored log-probabilities lie apart at each precision of matmuls, looks whether a run's
state is donated, and times the phases of an iteration, with the shares of the device's peak rates
that they reach, and a profile.

Command   python -m experiments.device_check
Expected  no line that begins with "wrong"
Time      below five minutes on a GPU or a TPU; --smoke: a minute on a CPU
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import bench, cli
from jaxrl_llm.logging import RunFolder, provenance, write_json
from jaxrl_llm.models.attention import attend, choose_backend, fused_attend
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.profiling import Program
from jaxrl_llm.trainer import RunConfig, train
from jaxrl_llm.training import make_iteration, score
from jaxrl_llm.types import KeyValues

# The largest gap between sampled and scored log-probabilities, in nats.
GAPS = {"float32 highest": 1e-4, "float32 high": 1e-2, "float32 default": 0.1, "bfloat16": 0.3}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is checked."""

    network: ModelConfig = ModelConfig(
        width=768, layers=12, heads=12, mlp_width=2048, dtype="bfloat16"
    )
    """The policy (default: 0.11 billion parameters)."""
    vocab: int = 32_000
    """Vocabulary V."""
    prompts: int = 16
    """Prompts B."""
    group_size: int = 8
    """Completions per prompt G."""
    prompt_tokens: int = 128
    """Prompt length P."""
    completion_tokens: int = 128
    """Completion length T."""
    root: Path = Path("runs")
    """The result is written to ROOT/device_check."""
    smoke: bool = False
    """Tiny sizes, for a CPU."""

    def small(self) -> "Config":
        """This config with tiny sizes."""
        network = ModelConfig(width=64, layers=2, heads=2, mlp_width=128, dtype="bfloat16")
        sizes = dict(prompts=4, group_size=4, prompt_tokens=9, completion_tokens=8, vocab=50)
        return dataclasses.replace(self, network=network, **sizes)

    def bench(self, **network: Any) -> bench.Bench:
        """The iteration, for a network with some fields changed."""
        shared = ("vocab", "prompts", "group_size", "prompt_tokens", "completion_tokens", "root")
        return bench.Bench(
            bench.Config(
                network=dataclasses.replace(self.network, **network),
                microbatches=min(4, self.prompts),
                repeats=5,
                trace=True,
                smoke=self.smoke,
                name="device_check",
                **{name: getattr(self, name) for name in shared},
            )
        )


def check_attention(config: Config) -> dict[str, Any]:
    """Seconds forward and backward of each backend, and how far cuDNN's results are from XLA's."""
    heads, e = config.network.heads, config.network.head_size
    b, g, p, t = config.prompts, config.group_size, config.prompt_tokens, config.completion_tokens
    shapes = (b, heads, 1, g, t, e), (b, heads, g, t, e), (b, heads, g, t, e)
    shapes += (b, heads, p, e), (b, heads, p, e)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, pk, pv = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    own_mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, g, t, t))
    prefix_mask = jnp.arange(p)[None] >= (jnp.arange(b) % p)[:, None]

    def program(name, function):
        def total(q, own, prefix):
            out = function(q, own, own_mask, prefix, prefix_mask)
            return (out.astype(jnp.float32) ** 2).sum(), out

        gradient = jax.grad(total, (0, 1, 2), has_aux=True)
        return Program(name, gradient, q, KeyValues(k, v), KeyValues(pk, pv))

    backends = {"xla": attend}
    if choose_backend("auto", "bfloat16", e, jax.devices()[0]) == "cudnn":
        backends["cudnn"] = fused_attend
    programs = {name: program(name, function) for name, function in backends.items()}
    results = {}
    for _ in range(6):
        results = {name: each.run() for name, each in programs.items()}
    found = {
        name: {"seconds": statistics.median(each.seconds[1:]), "peak_bytes": each.peak_bytes}
        for name, each in programs.items()
    }
    for name, result in results.items():
        found[name]["difference"] = difference(result, results["xla"])
    return found


def difference(found: Any, expected: Any) -> float:
    """The largest, relative to the largest value of each array."""

    def one(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.abs(x - y).max() / jnp.abs(y).max()

    return max(float(x) for x in jax.tree.leaves(jax.tree.map(one, found, expected)))


def check_precision(config: Config) -> dict[str, float]:
    """The largest |sampled − scored| log-probability, for each way to compute."""
    gaps = {}
    for name in GAPS:
        dtype, _, precision = name.partition(" ")
        timed = config.bench(dtype=dtype)

        @jax.jit
        def gap(params, key, timed=timed):
            rolled = timed.rollout(params, key)
            scores = score(params, timed.model, rolled.prompts, rolled.completions)
            return jnp.abs(scores.logp_t - rolled.completions.logprobs).max()

        with jax.default_matmul_precision(precision or None):
            gaps[name] = float(gap(timed.params, jax.random.key(0)))
    return gaps


def check_run(config: Config) -> bool:
    """Whether a run's state is donated to its first call."""
    timed = config.bench()
    state = timed.state()
    step = make_iteration(
        timed.rollout, timed.model, timed.algorithm, timed.optimizer, timed.config.train
    )
    with RunFolder.open(config.root / "device_check" / "run", {}) as folder:
        run = RunConfig(quiet=True)
        train(folder, state, lambda: step, run=run, total=2, per_call=1)
    return all(x.is_deleted() for x in jax.tree.leaves(state) if x.size > 1000)


def main(config: Config) -> None:
    config = config.small() if config.smoke else config
    folder = config.root / "device_check"
    device = jax.devices()[0]
    print(f"{jax.device_count()} × {device.device_kind}, JAX {jax.__version__}")
    result: dict[str, Any] = {"provenance": provenance()}

    def told(is_right: bool, line: str) -> None:
        print(("right: " if is_right else "wrong: ") + line)

    result["attention"] = attention = check_attention(config)
    for name, row in attention.items():
        line = f"attention by {name}: {1e3 * row['seconds']:.2f} ms, {row['peak_bytes'] >> 20} MiB"
        told(row["difference"] < 0.05, f"{line}, {row['difference']:.1e} from XLA's")
    result["gaps"] = gaps = check_precision(config)
    for name, gap in gaps.items():
        told(gap < GAPS[name], f"{name}: sampled and scored log-probs are {gap:.1e} nats apart")
    result["is_donated"] = check_run(config)
    told(result["is_donated"], "a run's state is donated")
    result["bench"] = measured = bench.measure(config.bench())
    print(bench.header(measured), bench.table(measured["phases"]), sep="\n\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "result.json", result)
    print(
        f"\n{folder / 'result.json'}, profile: {config.root / 'bench' / 'device_check' / 'trace'}"
    )


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
