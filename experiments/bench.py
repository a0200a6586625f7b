"""Claim: how near a GRPO iteration and its phases come to what this machine can do, and to others.

Sampling, scoring and updating are timed in turn within one process, and beside them one large
matmul and one large copy, which give the floors: the FLOP of the phase's matmuls at the rate of the
large one, and for decoding also the bytes that have to be read at the bandwidth of the copy. Every
completion is of full length, because no token ends one. With --peer the same iteration is made in
turn by another project's trainer, in an environment of its own that this command installs.

Command   python -m experiments.bench                  seconds, tokens/s, ratio to the floor
          python -m experiments.bench --peer trl       against TRL's GRPOTrainer
          python -m experiments.bench --peer tunix     against Tunix's GRPOLearner
Expected  on 2 CPU cores, with layers unrolled and 8 microbatches, TRL takes 2.2 (10 + 16 tokens),
          5.4 (64 + 16) and 2.4 times (64 + 64) as long, Tunix 2.9, 7.5 and 4.2 times
Time      about a minute; with a peer several, and its installation the first time
"""

import dataclasses
import platform
import resource
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from experiments import cli
from jaxrl_llm.logging import provenance, write_json
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig, Trained, make_optimizer
from jaxrl_llm.profiling import Machine, Program, Workload, peak_of, traced
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.trainer import count_parameters
from jaxrl_llm.training import TrainConfig, init_state, make_iteration, make_update_step, score
from jaxrl_llm.types import Batch, ConfigError, Prompts


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is timed."""

    prompts: int = 32
    """Prompts per iteration, B."""
    group_size: int = 16
    """Completions per prompt, G."""
    prompt_tokens: int = 64
    """Prompt length P."""
    completion_tokens: int = 16
    """Completion length T, of every completion."""
    vocab: int = 64
    """Vocabulary V."""
    network: ModelConfig = ModelConfig(width=128, layers=4, heads=4, mlp_width=512)
    """The policy (default: 1.05 M parameters at V = 64)."""
    microbatches: int = 16
    """Parts of the update's gradient."""
    repeats: int = 7
    """Timed turns, after one that is not counted."""
    peer: Literal["trl", "tunix"] | None = None
    """Time this trainer in turn with ours."""
    peer_microbatches: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Parts of the peer's gradient that are tried; the fastest is compared."""
    trace: bool = False
    """Write a jax.profiler trace of one more turn, for TensorBoard or Perfetto."""
    root: Path = Path("runs")
    """The result is written to ROOT/bench/NAME."""
    name: str = "default"
    """Name of the result; an earlier one of that name is replaced."""
    smoke: bool = False
    """Tiny sizes, seconds; the result is called smoke."""

    def __post_init__(self):
        for field in ("prompts", "prompt_tokens", "completion_tokens", "vocab", "repeats"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: expected at least 1")
        if self.group_size < 2:
            raise ConfigError(f"group_size={self.group_size}: GRPO compares at least 2")
        if not self.peer_microbatches or min(self.peer_microbatches) < 1:
            raise ConfigError(
                f"peer_microbatches={self.peer_microbatches}: expected numbers of at least 1"
            )
        if self.peer is not None and self.network != self.comparable:
            raise ConfigError(
                "with --peer the network is a plain Llama: leave out qkv_bias, qk_norm, "
                "rope_scaling and remat"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r}: expected a plain folder name, such as long")
        self.train  # noqa: B018  (refuses microbatches that do not divide the prompts)

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(
            prompts=self.prompts, group_size=self.group_size, microbatches=self.microbatches
        )

    @property
    def comparable(self) -> ModelConfig:
        """The network as peers can have it too."""
        plain = dict(qkv_bias=False, qk_norm=False, rope_scaling=None, remat=False)
        return dataclasses.replace(self.network, **plain)

    @property
    def workload(self) -> Workload:
        return Workload(
            model=self.network,
            vocab=self.vocab,
            prompts=self.prompts,
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )

    @property
    def folder(self) -> Path:
        return self.root / "bench" / self.name

    def small(self) -> "Config":
        """This config with tiny sizes."""
        return dataclasses.replace(
            self,
            prompts=4,
            group_size=2,
            prompt_tokens=8,
            completion_tokens=4,
            network=dataclasses.replace(self.network, width=32, layers=2, heads=2, mlp_width=64),
            microbatches=2,
            peer_microbatches=(2,),
            repeats=2,
            name="smoke" if self.name == "default" else self.name,
        )


class Endless(NamedTuple):
    """An environment of random prompts, and a tokenizer, in which nothing ends a completion.

    The reward is the share of odd tokens.
    """

    vocab: int
    prompt_tokens: int
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0

    def reset_env(self, key, params):
        tokens = jax.random.randint(key, (self.prompt_tokens,), 0, self.vocab)
        return Prompts(tokens, jnp.ones(tokens.shape, bool)), ()

    def step_env(self, key, state, action, params):
        return (), state, (action % 2).mean(dtype=jnp.float32), jnp.bool_(True), {}


class Bench:
    """Our side: the phases of an iteration as programs."""

    def __init__(self, config: Config):
        self.config = config
        self.model = LanguageModel(config.network, config.vocab)
        self.params = self.model.init(jax.random.key(0))
        self.optimizer = make_optimizer(OptimizerConfig(), 10_000)
        self.algorithm = make_algorithm(GRPOConfig(kl_coef=0.0), iterations=10_000)
        env: Any = Endless(config.vocab, config.prompt_tokens)
        self.rollout = make_rollout(
            env,
            None,
            self.model,
            env,
            SamplingConfig(max_tokens=config.completion_tokens),
            prompts=config.prompts,
            group_size=config.group_size,
        )

    def iteration(self) -> Program:
        """A rollout and one GRPO update of it."""
        step = make_iteration(
            self.rollout, self.model, self.algorithm, self.optimizer, self.config.train
        )
        return Program("iteration", step, self.state(), carries=True)

    def phases(self) -> dict[str, Program]:
        """Every part of the iteration alone; the rollout includes the prefill."""
        state = self.state()
        key = jax.random.split(jax.random.fold_in(state.key, 0), 3)[0]  # the first iteration's
        rollout = Program("rollout", self.rollout, self.params, key)
        rolled = rollout.run()
        prompts, completions = rolled.prompts, rolled.completions
        batch = Batch(prompts, completions, old_logp_t=completions.logprobs)
        batch = self.algorithm.advantages(batch, rolled.rewards, jnp.float32(0), None)

        def objective(trained, part):
            scores = score(trained.policy, self.model, part.prompts, part.completions)
            return self.algorithm.loss(scores, part, jnp.float32(0))

        step = make_update_step(objective, self.optimizer, microbatches=self.config.microbatches)

        def update(carry, batch):
            trained, opt_state, metrics = step(*carry, batch)
            return (trained, opt_state), metrics

        return {
            "prefill": Program("prefill", self.model.prefill, self.params, prompts),
            "rollout": rollout,
            "score": Program(
                "score",
                lambda *args: score(args[0], self.model, *args[1:]).logp_t,
                self.params,
                prompts,
                completions,
            ),
            "update": Program(
                "update", update, (Trained(state.params), state.opt_state), batch, carries=True
            ),
        }

    def state(self):
        """A fresh state, of arrays of its own."""
        params = jax.tree.map(jnp.copy, self.params)
        return init_state(params, self.optimizer, jax.random.key(2), algorithm=self.algorithm)


def measure(bench: Bench) -> dict[str, Any]:
    """Time all programs in turn; returns what result.json holds."""
    config = bench.config
    machine = make_machine(config)
    programs = bench.phases() | {"iteration": bench.iteration()}

    def turn():
        machine.run()
        for program in programs.values():
            program.run()

    for _ in range(config.repeats + 1):
        turn()
    seconds = {name: program.seconds[-config.repeats :] for name, program in programs.items()}
    seconds["decode"] = [
        whole - prefill
        for whole, prefill in zip(seconds.pop("rollout"), seconds["prefill"], strict=True)
    ]
    programs["decode"] = programs.pop("rollout")
    with traced(config.folder / "trace" if config.trace else None):
        if config.trace:
            turn()
    phases = {
        name: figures(config.workload, machine, name, seconds[name])
        | {
            "compile_seconds": programs[name].compile_seconds,
            "peak_bytes": programs[name].peak_bytes,
        }
        for name in config.workload.flops()
    }
    return described(bench, machine) | {"phases": phases}


def make_machine(config: Config) -> Machine:
    """What the floors are measured with: large for the kind of machine."""
    if config.smoke:
        return Machine(config.network.dtype, side=256, mebibytes=16)
    is_cpu = jax.default_backend() == "cpu"
    return Machine(
        config.network.dtype, side=2048 if is_cpu else 8192, mebibytes=256 if is_cpu else 2048
    )


def figures(
    workload: Workload, machine: Machine, phase: str, seconds: list[float]
) -> dict[str, Any]:
    """What the times of a phase amount to."""
    median = statistics.median(seconds)
    flops = workload.flops()[phase]
    floors = {"matmul_floor": flops / machine.flops}
    used = {}
    peak = peak_of(jax.devices()[0].device_kind)
    if peak is not None:
        used["mfu"] = flops / median / peak.flops
    if phase == "decode":
        floors["memory_floor"] = workload.decode_bytes() / machine.bandwidth
        if peak is not None:
            used["bandwidth_used"] = workload.decode_bytes() / median / peak.bandwidth
    floor = max(floors.values())
    return {
        "median": median,
        "min": min(seconds),
        "seconds": seconds,
        "tokens_per_second": workload.tokens[phase] / median,
        **floors,
        "floor": floor,
        "ratio_to_floor": median / floor,
        **used,
    }


def described(bench: Bench, machine: Machine) -> dict[str, Any]:
    """What was measured, where, and with which memory."""
    return {
        "config": dataclasses.asdict(bench.config) | {"root": str(bench.config.root)},
        "parameters": count_parameters(bench.params),
        "matmul_flops": machine.flops,
        "memory_bandwidth": machine.bandwidth,
        "resident_peak_bytes": resident_peak(),
        "provenance": provenance(),
    }


def resident_peak() -> int:
    """The most memory that this process has held."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def header(result: dict[str, Any]) -> str:
    """Sizes, and the machine's rates."""
    c, origin = result["config"], result["provenance"]
    return (
        f"{result['parameters']:,} parameters, {c['network']['dtype']}, {c['prompts']} prompts × "
        f"{c['group_size']} completions, {c['prompt_tokens']} + {c['completion_tokens']} tokens, "
        f"{c['microbatches']} microbatches\n"
        f"{origin['device']} of {origin['cpus']} cores: matmul "
        f"{result['matmul_flops'] / 1e9:,.0f} GFLOP/s, copy "
        f"{result['memory_bandwidth'] / 1e9:,.0f} GB/s; most memory held by the process "
        f"{result['resident_peak_bytes'] / 2**20:,.0f} MiB"
    )


COLUMNS = (
    ("median s", "median", "{:.4f}", 1),
    ("min s", "min", "{:.4f}", 1),
    ("tokens/s", "tokens_per_second", "{:,.0f}", 1),
    ("matmul floor s", "matmul_floor", "{:.4f}", 1),
    ("memory floor s", "memory_floor", "{:.4f}", 1),
    ("median / floor", "ratio_to_floor", "{:.2f}", 1),
    ("MFU %", "mfu", "{:.1f}", 100),
    ("bandwidth %", "bandwidth_used", "{:.1f}", 100),
    ("compile s", "compile_seconds", "{:.1f}", 1),
    ("peak MiB", "peak_bytes", "{:,.0f}", 2**-20),
    ("resident MiB", "resident_peak_bytes", "{:,.0f}", 2**-20),
)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, one line per phase; columns that no phase has are left out."""
    columns = [c for c in COLUMNS if any(c[1] in row for row in rows.values())]
    cells = [["", *(c[0] for c in columns)]]
    for name, row in rows.items():
        told = [
            text.format(scale * row[field]) if field in row else ""
            for _, field, text, scale in columns
        ]
        cells.append([name, *told])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def main(config: Config) -> None:
    config = config.small() if config.smoke else config
    # What was compiled earlier would be found again, and nothing would be measured.
    jax.config.update("jax_enable_compilation_cache", False)
    if config.peer is None:
        file = config.folder / "result.json"
        result = measure(Bench(config))
        print(header(result), table(result["phases"]), sep="\n\n")
    else:
        from experiments import bench_peers

        file = config.folder / f"{config.peer}.json"
        result = bench_peers.compare(Bench(config))
        print(header(result), bench_peers.table(result), sep="\n\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result)
    print(f"\n{file}")
    if config.trace:
        print(f"{config.folder / 'trace'}: open it with tensorboard --logdir, or in Perfetto")


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
