"""Claim: how fast SmolLM2-135M samples and trains on a CPU, against transformers on torch.

Both sides have the architecture with random weights, and do the same work in turns: G completions
of each of B prompts, all of full length; and one AdamW step on all weights by the log-probabilities
of N × S tokens, all of which are fed and scored. The peer's choices are what is fastest for it:
its decoding reads weights of the given type, its updates keep float32 weights and use autocast for
bfloat16 (as we do), without gradient checkpointing, with the fused AdamW. The ratio is worth
something on a quiet machine only, where the load average stays near the number of cores.

Command   python -m experiments.bench_smollm2 --dtype both     seconds, tokens/s, ratios, floors
          python -m experiments.bench_smollm2 --phase update --microbatches 1 2 4   tunes us
Expected  2 CPU cores with AVX2: transformers takes 1.6 times as long to decode in float32, 7.6 in
          bfloat16 (which torch emulates there), and to update 0.5 and 10 times
Time      8 minutes for float32; where torch emulates bfloat16, 40 more; and its installation
"""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from experiments import bench, bench_peers, cli
from jaxrl_llm.logging import provenance, write_json
from jaxrl_llm.losses.aggregate import aggregate
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, Trained, make_optimizer
from jaxrl_llm.profiling import Machine, Program, Workload
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.trainer import count_parameters
from jaxrl_llm.training import make_update_step, score
from jaxrl_llm.types import Completions, ConfigError, LossOutput, Prompts

PRESET = PRESETS["smollm2-135m"]
PEER = bench_peers.PEERS["trl"]  # whose environment has transformers and torch
SCRIPT = bench_peers.SCRIPTS / "transformers_step.py"

Phase = Literal["decode", "update"]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is timed."""

    dtype: Literal["float32", "bfloat16", "both"] = "both"
    """Type of activations and matmuls."""
    phase: Literal["decode", "update", "both"] = "both"
    """What is timed."""
    prompts: int = 4
    """Decoding: prompts B."""
    group_size: int = 8
    """Decoding: completions of each prompt, G."""
    prompt_tokens: int = 64
    """Decoding: prompt length P."""
    completion_tokens: int = 32
    """Decoding: completion length T, of every completion."""
    sequences: int = 16
    """Update: sequences N."""
    sequence_tokens: int = 128
    """Update: tokens S of each sequence, all of which are scored."""
    microbatches: tuple[int, ...] = (1,)
    """Parts of our update's gradient that are tried; the fastest is compared."""
    peer_microbatches: tuple[int, ...] = (1,)
    """The same for the peer's."""
    network: ModelConfig = PRESET.shape or ModelConfig()
    """The policy; its dtype is replaced by those above."""
    vocab: int = PRESET.vocab_size
    """Vocabulary V."""
    repeats: int = 3
    """Timed pairs, after one that is not counted."""
    root: Path = Path("runs")
    """Results are written to ROOT/bench_smollm2/NAME."""
    name: str = "default"
    """Name of the results; earlier ones of that name are replaced, phase by phase."""
    smoke: bool = False
    """Tiny sizes, seconds; the results are called smoke."""

    def __post_init__(self):
        sizes = ("prompts", "group_size", "prompt_tokens", "completion_tokens", "sequence_tokens")
        for field in (*sizes, "sequences", "repeats"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: expected at least 1")
        for field in ("microbatches", "peer_microbatches"):
            parts = getattr(self, field)
            if not parts or min(parts) < 1 or any(self.sequences % n for n in parts):
                raise ConfigError(
                    f"{field}={parts}: expected divisors of sequences={self.sequences}"
                )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r}: expected a plain folder name, such as long")

    @property
    def folder(self) -> Path:
        return self.root / "bench_smollm2" / self.name

    def small(self) -> "Config":
        """This config with tiny sizes."""
        shape = dict(width=36, layers=2, heads=9, kv_heads=3, head_width=4, mlp_width=64)
        return dataclasses.replace(
            self,
            prompts=2,
            group_size=2,
            prompt_tokens=8,
            completion_tokens=4,
            sequences=4,
            sequence_tokens=8,
            microbatches=(1, 2),
            peer_microbatches=(1, 2),
            network=dataclasses.replace(self.network, **shape),
            vocab=64,
            repeats=2,
            name="smoke" if self.name == "default" else self.name,
        )


@dataclass(frozen=True)
class Case:
    """One phase in one type: what is compared at a time."""

    config: Config
    phase: Phase
    dtype: DType

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.dtype}"

    @property
    def network(self) -> ModelConfig:
        return dataclasses.replace(self.config.network, dtype=self.dtype)

    @property
    def workload(self) -> Workload:
        """An update's sequences are completions of prompts of one token."""
        c = self.config
        b, g, p, t = (c.prompts, c.group_size, c.prompt_tokens, c.completion_tokens)
        if self.phase == "update":
            b, g, p, t = c.sequences, 1, 1, c.sequence_tokens
        return Workload(
            model=self.network,
            vocab=c.vocab,
            prompts=b,
            group_size=g,
            prompt_tokens=p,
            completion_tokens=t,
        )

    @property
    def flops(self) -> float:
        """Of the phase's matmuls; decoding begins with the prompts, each computed once."""
        flops = self.workload.flops()
        return flops["update"] if self.phase == "update" else flops["prefill"] + flops["decode"]

    @property
    def bytes_read(self) -> float:
        """What decoding has to read at least; an update is not bound by that."""
        return self.workload.decode_bytes() if self.phase == "decode" else 0.0

    def choices(self, theirs: bool) -> tuple[int, ...]:
        """Numbers of microbatches to try."""
        config = self.config
        if self.phase == "decode":
            return (1,)
        return config.peer_microbatches if theirs else config.microbatches


def cases(config: Config) -> Iterator[Case]:
    """What the config asks for."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    phases: tuple[Phase, ...] = ("decode", "update")
    for dtype in dtypes:
        for phase in phases:
            if config.dtype in (dtype, "both") and config.phase in (phase, "both"):
                yield Case(config, phase, dtype)


# Our side


class Ours(NamedTuple):
    """Our program of a case."""

    case: Case
    params: Any

    def program(self, microbatches: int) -> Program:
        model = LanguageModel(self.case.network, self.case.config.vocab)
        if self.case.phase == "decode":
            return decode_program(self.case, model, self.params)
        return update_program(self.case, model, self.params, microbatches)


def random_prompts(case: Case) -> Prompts:
    sizes = case.workload
    shape = (sizes.prompts, sizes.prompt_tokens)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab)
    return Prompts(tokens, jnp.ones(shape, bool))


def decode_program(case: Case, model: LanguageModel, params: Any) -> Program:
    """Prompts and sampling, with log-probabilities; float32 weights are cast within."""
    sizes = case.workload
    settings = SamplingConfig(max_tokens=sizes.completion_tokens)
    keys = jax.random.split(jax.random.key(2), (sizes.prompts, sizes.group_size))

    def decode(params, prompts, keys):
        return sample(params, model, prompts, keys, settings, eos_ids=(), pad_id=0)

    return Program("decode", decode, params, random_prompts(case), keys)


def update_program(case: Case, model: LanguageModel, params: Any, microbatches: int) -> Program:
    """Forward, backward, and AdamW on all weights, which are a copy of `params`."""
    sizes = case.workload
    optimizer = make_optimizer(OptimizerConfig(), 10_000)

    def objective(trained: Trained, part) -> LossOutput:
        prompts, completions = part
        scores = score(trained.policy, model, prompts, completions)
        loss = aggregate(-scores.logp_t, completions.loss_mask, "token")
        return LossOutput(loss, {}, {}, {})

    step = make_update_step(objective, optimizer, microbatches=microbatches)

    def update(carry, batch):
        trained, opt_state = carry
        trained, opt_state, metrics = step(trained, opt_state, batch)
        return (trained, opt_state), metrics

    shape = (sizes.prompts, 1, sizes.completion_tokens)
    tokens = jax.random.randint(jax.random.key(3), shape, 0, sizes.vocab)
    real = jnp.ones(shape, bool)
    batch = random_prompts(case), Completions(tokens, real, real, jnp.zeros(shape))
    trained: Any = Trained(jax.tree.map(jnp.copy, params))
    carry = trained, optimizer.init(trained)
    return Program("update", update, carry, batch, carries=True)


# Both sides


def peer_sizes(case: Case) -> dict[str, Any]:
    """What the peer is told, in the words of `bench_peers`."""
    network, sizes = case.network, case.workload
    shape = ("width", "layers", "heads", "tie_embeddings", "rope_theta", "norm_eps", "dtype")
    return {
        "phase": case.phase,
        "prompts": sizes.prompts,
        "group_size": sizes.group_size,
        "prompt_tokens": sizes.prompt_tokens,
        "completion_tokens": sizes.completion_tokens,
        "vocab": sizes.vocab,
        "matmul_side": matmul_side(case.config),
        "threads": len(os.sched_getaffinity(0)),
        "network": {name: getattr(network, name) for name in shape}
        | {
            "kv_heads": network.n_kv_heads,
            "head_width": network.head_size,
            "mlp_width": network.mlp_size,
        },
    }


def matmul_side(config: Config) -> int:
    """Of the square matrices of the matmul whose rate gives the floor, on both sides."""
    return 256 if config.smoke else 2048


def tune(
    seconds_of: Callable[[int], float], choices: Sequence[int]
) -> tuple[int, dict[int, float]]:
    """The fastest number of microbatches, and what was tried: nothing where there is no choice."""
    if len(choices) == 1:
        return choices[0], {}
    tried = {}
    for n in choices:
        tried[n] = seconds_of(n)
        print(f"{n} microbatches: {tried[n]:.1f} s", flush=True)
    return min(tried, key=lambda n: tried[n]), tried


def compare(case: Case, program_of: Callable[[int], Any], peer: bench_peers.Peer) -> dict[str, Any]:
    """Tune both sides, then let them take turns; returns what the case's file holds.

    Args:
        case: what is compared.
        program_of: our program for a number of microbatches.
        peer: the other side.
    """

    def our_seconds(n: int) -> float:
        program = program_of(n)
        for _ in range(2):
            program.run()
        return program.seconds[-1]

    def their_seconds(n: int) -> float:
        return bench_peers.tune(peer, (n,))[n]

    config = case.config
    best, tried = tune(our_seconds, case.choices(theirs=False))
    peer_best, peer_tried = tune(their_seconds, case.choices(theirs=True))
    reset_resident_peak()
    program = program_of(best)
    machine = Machine(case.dtype, side=matmul_side(config), mebibytes=16 if config.smoke else 256)
    told = peer.start(peer_best, config.repeats + 1)
    theirs = []
    for _ in range(config.repeats + 1):
        machine.run()
        program.run()
        theirs.append(peer.step())
    seconds = {"jaxrl_llm": program.seconds[1:], "transformers": [x["seconds"] for x in theirs[1:]]}
    rows = {name: figures(case, machine, times) for name, times in seconds.items()}
    rows["jaxrl_llm"] |= {
        "compile_seconds": program.compile_seconds,
        "resident_peak_bytes": bench.resident_peak(),
    }
    rows["transformers"]["resident_peak_bytes"] = theirs[-1]["resident_peak_bytes"]
    pairs = [t / o for o, t in zip(*seconds.values(), strict=True)]
    return {
        "phase": case.phase,
        "dtype": case.dtype,
        "config": dataclasses.asdict(config) | {"root": str(config.root)},
        "matmul_flops": machine.flops,
        "memory_bandwidth": machine.bandwidth,
        "microbatches": best,
        "seconds_by_microbatches": tried,
        "peer": told | {"microbatches": peer_best, "seconds_by_microbatches": peer_tried},
        "rows": rows,
        "ratio": statistics.median(pairs),
        "ratios": pairs,
        "load_average": os.getloadavg()[0],
        "provenance": provenance(),
    }


def figures(case: Case, machine: Machine, seconds: list[float]) -> dict[str, Any]:
    """What one side's times amount to; the floors are those of XLA's matmul and copy."""
    median = statistics.median(seconds)
    floors = {"matmul_floor": case.flops / machine.flops}
    if case.bytes_read:
        floors["memory_floor"] = case.bytes_read / machine.bandwidth
    sizes = case.workload
    return {
        "median": median,
        "min": min(seconds),
        "seconds": seconds,
        "tokens_per_second": sizes.completion_rows * sizes.completion_tokens / median,
        **floors,
        "ratio_to_floor": median / max(floors.values()),
    }


def reset_resident_peak() -> None:
    """Let the most memory held be that of what comes; only Linux can, elsewhere it is a no-op."""
    counter = Path("/proc/self/clear_refs")
    if counter.exists():
        counter.write_text("5")


# What is told


def table(results: dict[str, dict[str, Any]]) -> str:
    """Both sides of every case that has been measured, the ratios, and how the sides were set."""
    rows = {
        f"{name}, {side}": row
        for name, result in results.items()
        for side, row in result["rows"].items()
    }
    return "\n".join([bench.table(rows), "", *(told(*item) for item in results.items())])


def told(name: str, result: dict[str, Any]) -> str:
    """A case in words."""
    peer, ratios = result["peer"], result["ratios"]

    def tuning(side):
        tried = ", ".join(f"{n}: {s:.1f} s" for n, s in side["seconds_by_microbatches"].items())
        return f"{side['microbatches']}" + (f" (tried {tried})" if tried else "")

    parts = ""
    if result["phase"] == "update":
        parts = f"; microbatches {tuning(result)}, transformers {tuning(peer)}"
    versions = ", ".join(f"{library} {version}" for library, version in peer["versions"].items())
    settings = ", ".join(f"{setting}={value}" for setting, value in peer["settings"].items())
    return (
        f"{name}: transformers takes {result['ratio']:.2f} times as long, median of {len(ratios)} "
        f"pairs from {min(ratios):.2f} to {max(ratios):.2f}; large matmuls: XLA "
        f"{result['matmul_flops'] / 1e9:,.3g} GFLOP/s, torch {peer['matmul_flops'] / 1e9:,.3g}"
        f"{parts}; load average {result['load_average']:.1f}; {versions}; {settings}"
    )


def main(config: Config) -> None:
    config = config.small() if config.smoke else config
    # What was compiled earlier would be found again, and compiling would not be measured.
    jax.config.update("jax_enable_compilation_cache", False)
    python = bench_peers.install("trl", PEER.packages)
    config.folder.mkdir(parents=True, exist_ok=True)
    params = LanguageModel(config.network, config.vocab).init(jax.random.key(0))
    print(f"{count_parameters(params):,} parameters, random")
    for case in cases(config):
        log = config.folder / f"{case.name}.log"
        with bench_peers.Peer([str(python), str(SCRIPT)], peer_sizes(case), log) as peer:
            result = compare(case, Ours(case, params).program, peer)
        write_json(config.folder / f"{case.name}.json", result)
        print(told(case.name, result), flush=True)
    files = sorted(config.folder.glob("*-*.json"))
    text = table({file.stem: json.loads(file.read_text()) for file in files})
    (config.folder / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\n{config.folder}")


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
