"""Claim: an iteration costs at most in proportion to its sizes, and the host next to nothing.

Five measurements, each of programs that run in turn within one process, medians of several turns:
scaling   seconds of a GRPO iteration over a decade each of B prompts, G completions, T tokens of a
          completion and L layers, with the exponent of a fitted power law beside that of the FLOP;
lengths   seconds of sampling when completions end early, over those at full length;
host      time of the host between the device's calls within `trainer.train`, without evaluation;
memory    what a tiny run has allocated, which should stay flat, and its resident memory, which
          has what malloc keeps in it;
seeds     one iteration of several seeds under `jax.vmap`, over single ones one after the other.

Command   python -m experiments.bench_scaling
Expected  exponents about 1 or below; goals: lengths 0.4, host 2 %, seeds 0.8, memory flat
Time      minutes on 2 CPU cores; --only PART for one
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench, cli, grpo_countdown
from experiments.bench import Bench
from jaxrl_llm.chart_parts import panels
from jaxrl_llm.logging import RunFolder, provenance, write_json
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.profiling import Program, live_heap
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.trainer import RunConfig, train
from jaxrl_llm.training import TrainConfig, TrainState, init_state, make_iteration
from jaxrl_llm.types import ConfigError

Part = Literal["scaling", "lengths", "host", "memory", "seeds"]
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is timed."""

    only: Part | None = None
    """Measure this part; the result keeps what it holds of the others."""
    factors: tuple[int, ...] = (1, 2, 5, 10)
    """By which each size of the scaling is multiplied."""
    scaled: bench.Config = bench.Config(
        prompts=16,
        prompt_tokens=16,
        network=ModelConfig(width=64, layers=2, heads=4, mlp_width=256),
        microbatches=8,
    )
    """The smallest iteration of the scaling; parts of the gradient keep their number of prompts."""
    sampled: bench.Config = bench.Config(completion_tokens=64)
    """Sampling with different lengths."""
    network: ModelConfig = ModelConfig()
    """The policy of the runs on Countdown, which the other sizes are for."""
    hosted: TrainConfig = TrainConfig(iterations=100, prompts=32, group_size=8)
    """For the host's share; iterations_per_call is measured at its value and at 1."""
    tiny: TrainConfig = TrainConfig(
        iterations=500, prompts=8, group_size=4, microbatches=1, iterations_per_call=1
    )
    """For the resident memory."""
    seeds: int = 8
    """Runs under one vmap."""
    seed_prompts: tuple[int, ...] = (4, 16)
    """Prompts of an iteration under vmap; each is tried."""
    repeats: int = 5
    """Timed turns, after one that is not counted."""
    root: Path = Path("runs")
    """The result is written to ROOT/bench_scaling/NAME."""
    name: str = "default"
    """Name of the result."""
    smoke: bool = False
    """Tiny sizes, seconds; the result is called smoke."""

    def __post_init__(self):
        if len(set(self.factors)) < 2 or min(self.factors) != 1:
            raise ConfigError(f"factors={self.factors}: expected 1 and at least one more")
        if self.repeats < 1 or self.seeds < 2:
            raise ConfigError(
                f"repeats={self.repeats}, seeds={self.seeds}: expected at least 1 and 2"
            )
        if self.hosted.iterations < 2 * self.hosted.iterations_per_call:
            raise ConfigError("hosted.iterations: expected enough for two calls at least")
        if self.sampled.completion_tokens < 8:
            raise ConfigError(
                "sampled.completion_tokens: expected at least 8, a quarter of it is 2"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r}: expected a plain folder name, such as long")

    @property
    def folder(self) -> Path:
        return self.root / "bench_scaling" / self.name

    def small(self) -> "Config":
        """This config with tiny sizes."""
        tiny = dataclasses.replace(self.tiny, iterations=10, prompts=2, group_size=2)
        return dataclasses.replace(
            self,
            factors=(1, 2),
            scaled=dataclasses.replace(self.scaled.small(), microbatches=2),
            sampled=dataclasses.replace(self.sampled.small(), completion_tokens=16),
            network=ModelConfig(width=16, layers=1, heads=2),
            hosted=dataclasses.replace(tiny, iterations=4, iterations_per_call=2),
            tiny=tiny,
            seeds=2,
            seed_prompts=(4,),
            repeats=2,
            name="smoke" if self.name == "default" else self.name,
        )


def in_turn(programs: Mapping[Any, Program], repeats: int) -> dict[Any, list[float]]:
    """Seconds of all programs, forth and back, without those of the first turn."""
    for turn in range(repeats + 1):
        order = list(programs.values())
        for program in reversed(order) if turn % 2 else order:
            program.run()
    return {name: program.seconds[-repeats:] for name, program in programs.items()}


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> Result:
    """Of the pairs that a turn makes."""
    pairs = [x / y for x, y in zip(seconds, reference, strict=True)]
    return {"ratio": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}


AXES = {"B": "prompts", "G": "group_size", "T": "completion_tokens", "L": "layers"}


def multiplied(base: bench.Config, axis: str, factor: int) -> bench.Config:
    """The iteration with one size multiplied, and as many prompts to a part of the gradient."""
    if axis == "L":
        layers = factor * base.network.layers
        return dataclasses.replace(base, network=dataclasses.replace(base.network, layers=layers))
    sizes = {AXES[axis]: factor * getattr(base, AXES[axis])}
    if axis == "B":
        sizes["microbatches"] = factor * base.microbatches
    return dataclasses.replace(base, **sizes)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """n of the power law cost = c·sizeⁿ that fits best.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def scaling(config: Config) -> Result:
    """Seconds of an iteration against each of its sizes."""
    shapes = {
        axis: [multiplied(config.scaled, axis, factor) for factor in sorted(config.factors)]
        for axis in AXES
    }
    distinct = dict.fromkeys(shape for line in shapes.values() for shape in line)
    seconds = in_turn({shape: Bench(shape).iteration() for shape in distinct}, config.repeats)
    return {axis: growth(axis, line, seconds) for axis, line in shapes.items()}


def growth(
    axis: str, shapes: Sequence[bench.Config], seconds: Mapping[bench.Config, list[float]]
) -> Result:
    """How the time of an iteration grows along an axis."""
    sizes = [
        shape.network.layers if axis == "L" else getattr(shape, AXES[axis]) for shape in shapes
    ]
    medians = [statistics.median(seconds[shape]) for shape in shapes]
    exponents = [exponent(sizes, turn) for turn in zip(*(seconds[s] for s in shapes), strict=True)]
    return {
        "sizes": sizes,
        "median": medians,
        "ends": f"{sizes[0]} to {sizes[-1]}: from {medians[0]:.3f} to {medians[-1]:.3f} s",
        "seconds": [seconds[shape] for shape in shapes],
        "exponent": statistics.median(exponents),
        "low": min(exponents),
        "high": max(exponents),
        "last_exponent": exponent(sizes[-2:], medians[-2:]),
        "flop_exponent": exponent(sizes, [s.workload.flops()["iteration"] for s in shapes]),
    }


def plot(result: Result, path: Path) -> None:
    """One panel per axis, and the line that a proportional cost would follow."""
    from matplotlib.ticker import LogLocator

    names = {"B": "prompts B", "G": "completions per prompt G", "T": "tokens T", "L": "layers L"}
    figure, axes = panels("Cost of a GRPO iteration", len(AXES))
    for axis, (name, found) in zip(axes, result.items(), strict=True):
        sizes, medians = np.array(found["sizes"]), np.array(found["median"])
        axis.plot(sizes, medians[0] * sizes / sizes[0], "--", color="#6b6b6b", label="exponent 1")
        turns = np.array(found["seconds"])
        errors = np.abs(np.stack([turns.min(1), turns.max(1)]) - medians)
        label = f"measured: {found['exponent']:.2f} (FLOP: {found['flop_exponent']:.2f})"
        axis.errorbar(sizes, medians, errors, fmt="o-", color="#1f5fa8", capsize=3, label=label)
        axis.set(xscale="log", yscale="log", xlabel=names[name], ylabel="seconds per iteration")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


END = 0  # the token that ends a completion


class Ending(LanguageModel):
    """A language model whose completions end at each position with a given probability.

    Its hidden states have one more number, which the head adds to the end token's logit.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, logits: jax.Array):
        super().__init__(config, vocab_size)
        self.logits = logits  # [T]: added at position t

    def head(self, params):
        head = super().head(params)
        end = jax.nn.one_hot(jnp.array([END]), self.vocab_size, dtype=head.dtype)
        return jnp.concatenate([head, end])

    def prefill(self, params, prompts):
        hidden, prefix = super().prefill(params, prompts)
        return self.told(hidden, 0), prefix

    def decode(self, params, layers, tokens, prefixes, caches, context):
        hidden, caches = super().decode(params, layers, tokens, prefixes, caches, context)
        return self.told(hidden, context.write_at + 1), caches

    def told(self, hidden, t):
        """The hidden states of position t with that number."""
        logit = jnp.broadcast_to(self.logits[t], (*hidden.shape[:-1], 1))
        return jnp.append(hidden, logit.astype(hidden.dtype), -1)


def endings(t: int, vocab: int) -> dict[str, np.ndarray]:
    """Logits `[T]` of the end by name of the lengths: all t tokens, or about a quarter on average.

    Uniform lengths are at most half of t; geometric ones have no memory, and are cut off at t. The
    other tokens' logits are taken to be 0, as they nearly are with fresh weights.
    """
    n = np.arange(1, t + 1)  # the length if it ends here
    probabilities = {
        "full": 0 * n,
        "all at a quarter": 1.0 * (n >= t // 4),
        "uniform": 1 / np.maximum(t // 2 - n, 1),
        "geometric": 0 * n + 4 / t,
    }
    with np.errstate(divide="ignore"):
        return {
            name: np.clip(np.log(vocab - 1) + np.log(p) - np.log1p(-p), -1e3, 1e3)
            for name, p in probabilities.items()
        }


def lengths(config: Config) -> Result:
    """Seconds of sampling, the prompts' prefill included, against the lengths of completions."""
    sizes = config.sampled
    t, env = sizes.completion_tokens, bench.Endless(sizes.vocab, sizes.prompt_tokens, (END,))

    def roll(logits, params, key):
        rollout = make_rollout(
            env,
            None,
            Ending(sizes.network, sizes.vocab, logits),
            env,
            SamplingConfig(max_tokens=t),
            prompts=sizes.prompts,
            group_size=sizes.group_size,
        )
        return rollout(params, key).completions

    params = LanguageModel(sizes.network, sizes.vocab).init(jax.random.key(0))
    programs = {
        name: Program(name, roll, jnp.asarray(logits, jnp.float32), params, jax.random.key(1))
        for name, logits in endings(t, sizes.vocab).items()
    }
    seconds = in_turn(programs, config.repeats)
    return {
        name: {
            "mean_length": float((n := program.run().loss_mask.sum(-1)).mean()),
            "longest": int(n.max()),
            "median": statistics.median(seconds[name]),
        }
        | ratios(seconds[name], seconds["full"])
        for name, program in programs.items()
    }


class Moment(NamedTuple):
    """One compiled call, as the host sees it."""

    begin: float  # seconds
    end: float  # its results are there
    resident: int  # bytes held by the process then
    allocated: int | None = None  # those in use


@dataclass
class Call:
    """A compiled step that notes its moments."""

    compiled: Any
    moments: list[Moment]
    counts_heap: bool  # which takes milliseconds

    def __call__(self, *args):
        begin = time.perf_counter()
        results = jax.block_until_ready(self.compiled(*args))
        end = time.perf_counter()
        heap = live_heap() if self.counts_heap else None
        self.moments.append(Moment(begin, end, resident(), heap))
        return results

    def memory_analysis(self):
        return self.compiled.memory_analysis()


class Watch:
    """The layout of one device, whose compiled steps note when they run."""

    def __init__(self, counts_heap: bool):
        self.moments: list[Moment] = []
        self.counts_heap = counts_heap

    def __getattr__(self, name):
        return getattr(SINGLE, name)

    def describe(self, state):
        return "watched"

    def compile_step(self, program, *args):
        return Call(SINGLE.compile_step(program, *args), self.moments, self.counts_heap)


def resident() -> int:
    """Bytes of memory that this process holds; where the system does not tell, the most so far."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return bench.resident_peak()
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def countdown(network: ModelConfig, sizes: TrainConfig):
    """GRPO on Countdown as in its experiment, from fresh weights: (state of a seed, iteration)."""
    config = grpo_countdown.Config(network=network, train=sizes)
    env, env_params, _, model, _ = config.setting()
    algorithm = make_algorithm(config.algorithm, iterations=sizes.iterations)
    optimizer = make_optimizer(config.optimizer, sizes.updates)
    rollout = make_rollout(
        env,
        env_params,
        model,
        env.tokenizer,
        config.sampling,
        prompts=sizes.prompts,
        group_size=sizes.group_size,
    )

    def state(seed: int) -> TrainState:
        init_key, key = jax.random.split(jax.random.key(seed))
        return init_state(model.init(init_key), optimizer, key, algorithm=algorithm)

    return state, make_iteration(rollout, model, algorithm, optimizer, sizes)


def watch(network: ModelConfig, sizes: TrainConfig, counts_heap: bool = False) -> list[Moment]:
    """The moments of a whole run without evaluation, which logs and saves as usual."""
    start, step = countdown(network, sizes)
    layout: Any = Watch(counts_heap)
    with tempfile.TemporaryDirectory() as path, RunFolder.open(path, {}) as folder:
        run = train(
            folder,
            start(0),
            lambda: step,
            run=RunConfig(quiet=True),
            total=sizes.iterations,
            per_call=sizes.iterations_per_call,
            layout=layout,
        )
    if not run.is_complete:
        raise KeyboardInterrupt
    return layout.moments


def host(config: Config) -> Result:
    """The host's share of a run's time, in long calls and in calls of one iteration."""
    found = {}
    for per_call in sorted({config.hosted.iterations_per_call, 1}, reverse=True):
        sizes = dataclasses.replace(config.hosted, iterations_per_call=per_call)
        found[str(per_call)] = host_share(
            watch(config.network, sizes), per_call, RunConfig().checkpoint_every
        )
    return found


def host_share(moments: Sequence[Moment], per_call: int, checkpoint_every: int) -> Result:
    """Of the time from the first call to the last one; saving told apart, by when it is due."""
    gaps, saving = [], []
    for i, (one, following) in enumerate(zip(moments[:-1], moments[1:], strict=True)):
        done = per_call * (i + 1)
        crossed = done // checkpoint_every > (done - per_call) // checkpoint_every
        (saving if crossed else gaps).append(following.begin - one.end)
    calls = [one.end - one.begin for one in moments]
    gap, call = statistics.median(gaps), statistics.median(calls)
    between = sum(gaps) + sum(saving)
    return {
        "iteration_seconds": call / per_call,
        "milliseconds": 1e3 * gap,
        "share": gap / (gap + call),
        "saving_seconds": statistics.median(saving) if saving else None,
        "share_with_saving": between / (between + sum(calls)),
        "calls": len(calls),
    }


def memory(config: Config) -> Result:
    """Memory after every call of a run, and what came after its first tenth."""
    moments = watch(config.network, config.tiny, counts_heap=True)
    held = [one.resident / 1e6 for one in moments]
    used = [one.allocated / 1e6 for one in moments if one.allocated is not None]
    early = len(held) // 10
    found = {
        "allocated_mb": used,
        "allocated_growth_mb": used[-1] - used[early - 1] if used else math.nan,
        "growth_mb": held[-1] - held[early - 1],
        "second_half_mb": held[-1] - held[len(held) // 2 - 1],
        # One large return to the system would hide any growth.
        "largest_drop_mb": max(x - y for x, y in itertools.pairwise(held[early - 1 :])),
        "at_end_mb": held[-1],
        "resident_mb": held,
    }
    n = config.tiny.iterations_per_call
    return {f"{early * n} to {len(held) * n}": found}


def seeds(config: Config) -> Result:
    """An iteration of several seeds at once, over as many single ones."""
    return {str(prompts): seeds_of(config, prompts) for prompts in config.seed_prompts}


def seeds_of(config: Config, prompts: int) -> Result:
    """The same at one size."""
    start, step = countdown(config.network, TrainConfig(prompts=prompts, group_size=8))
    states = [start(seed) for seed in range(config.seeds)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    together = Program("vmap", jax.vmap(step), stacked, carries=True)
    single = Program("single", step, states[0], carries=True)
    for _ in range(config.repeats + 1):
        together.run()
        for _ in range(config.seeds):
            single.run()
    one_by_one = np.array(single.seconds).reshape(-1, config.seeds).sum(1).tolist()
    whole = together.seconds[1:]
    return {
        "vmap": statistics.median(whole),
        "single": statistics.median(one_by_one[1:]),
    } | ratios(whole, one_by_one[1:])


PARTS: dict[Part, Callable[[Config], Result]] = dict(
    scaling=scaling, lengths=lengths, host=host, memory=memory, seeds=seeds
)

SAYS: dict[Part, str] = {
    "scaling": "{ends}, exponent {exponent:.2f} ({low:.2f} to {high:.2f}; of the last step "
    "{last_exponent:.2f}; of the FLOP {flop_exponent:.2f}), goal: at most 1",
    "lengths": "mean {mean_length:.1f}, longest {longest}: {median:.3f} s, of full length "
    "{ratio:.2f} ({low:.2f} to {high:.2f}), goal: at most 0.4",
    "host": "iterations of {iteration_seconds:.3f} s a call: {milliseconds:.1f} ms between calls, "
    "{share:.2%} of the time, with checkpoints {share_with_saving:.2%}, goal: below 2 %",
    "memory": "iterations in: allocated {allocated_growth_mb:+.1f} MB; resident {growth_mb:+.1f} "
    "MB, in the second half {second_half_mb:+.1f} MB, of {at_end_mb:.0f} MB; at once up to "
    "{largest_drop_mb:.1f} MB returned, goal: flat",
    "seeds": "prompts: vmap {vmap:.3f} s, one by one {single:.3f} s, ratio {ratio:.2f} ({low:.2f} "
    "to {high:.2f}), goal: at most 0.8",
}


def main(config: Config) -> None:
    config = config.small() if config.smoke else config
    config.folder.mkdir(parents=True, exist_ok=True)
    file = config.folder / "scaling.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    described = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    for part in [config.only] if config.only else PARTS:
        found = PARTS[part](config)
        results[part] = {"result": found, "config": described, "provenance": provenance()}
        write_json(file, results)
        print(part, *(f"{k} {SAYS[part].format(**x)}" for k, x in found.items()), sep="\n  ")
        if part == "scaling":
            plot(found, config.folder / "scaling.png")
    print(f"\n{file}")


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
