"""The host's side of a run: call the compiled iteration, log, evaluate, save, resume."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.distributed import any_process, is_first, wait_for_all
from jaxrl_llm.logging import Interrupt, MetricsLog, RunFolder, read_rows
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.parallel import SINGLE, Layout
from jaxrl_llm.rollout import Metrics
from jaxrl_llm.training import TrainState, attach, detach, scan_iterations
from jaxrl_llm.types import ConfigError

# These may change when a run is resumed: they decide no figure.
FREE_FIELDS = frozenset({"run.root", "run.keep", "run.quiet", "run.checkpoint_every"})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, and how often."""

    root: Path = Path("runs")
    """Folder that holds all runs, as ROOT/EXPERIMENT/NAME."""
    name: str = "default"
    """Name of this run; the same name and config again resumes it."""
    seed: int = 0
    """Seed of all randomness in training."""
    checkpoint_every: int = 50
    """Iterations between checkpoints (rounded up to whole calls)."""
    keep: int = 3
    """Newest checkpoints to keep."""
    quiet: bool = False
    """No progress bar."""

    def __post_init__(self):
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r}: expected a plain folder name, such as seed-1")
        if self.checkpoint_every < 1 or self.keep < 1:
            raise ConfigError("checkpoint_every and keep must be at least 1")


class Measured(NamedTuple):
    """What an evaluation hands to the log."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


class Call(NamedTuple):
    """One compiled call that has ended."""

    before: int  # iterations
    done: int
    metrics: Metrics  # on the host, [iterations of the call]
    seconds: float


class RunResult(NamedTuple):
    """What `train` leaves in memory; the rest is in the folder."""

    params: Params
    history: list[dict[str, Any]]  # the rows of metrics.jsonl
    iteration: int
    is_complete: bool  # False after an interrupt
    compile_seconds: float  # spent by this process
    peak_memory_mb: float  # of one compiled call, by XLA's analysis


def train(
    folder: RunFolder,
    state: TrainState,
    make_step: Callable[[], Callable[[TrainState], tuple[TrainState, Metrics]]],
    *,
    run: RunConfig,
    total: int,
    per_call: int,
    evaluate: Callable[[Params], Measured] | None = None,
    evaluate_every: int = 0,
    stages: Mapping[str, Callable[[TrainState], Any]] | None = None,
    tokens_metric: str = "rollout/tokens",
    shown: Sequence[str] = ("reward/mean", "eval/sampled"),
    layout: Layout = SINGLE,
    open_log: Callable[[RunFolder, int], Any] = MetricsLog,
) -> RunResult:
    """Run the step that `make_step` returns until `total`, from the newest checkpoint on.

    Metrics of iteration i are row i + 1 (after i + 1 iterations); evaluations join the row they
    were made at, the first one row 0. Rows are written while the next call runs. Checkpoints are
    written after the rows they belong to, so a killed run resumes without a gap and without a
    repetition. SIGINT and SIGTERM save first, all processes of the run when one of them gets it.

    Args:
        folder: the run's folder.
        state: the state to begin with; it is donated, but for frozen weights (`training.detach`),
            which checkpoints leave out.
        make_step: returns the pure step function; called only if there is anything left to do.
        run: cadence of checkpoints.
        total: iterations of the whole run.
        per_call: iterations in one compiled call.
        evaluate: measures parameters; called before the first iteration, then every
            `evaluate_every`, and after the last.
        evaluate_every: iterations between evaluations (0: first and last only).
        stages: parts of the step, by name, that are also run and timed alone at every evaluation
            but the first, as `time/NAME_seconds`; what is left of an iteration is
            `time/rest_seconds`.
        tokens_metric: the metric that counts tokens, for tokens/s.
        shown: metrics on the progress bar.
        layout: over which devices the step runs; checkpoints and `evaluate` get the state that one
            device holds, or the mesh.
        open_log: what rows are written to, made like a `MetricsLog`; of a sweep, whose values have
            a leading axis, another.
    """
    timer = Timer()
    step = functools.cache(make_step)
    state, frozen = detach(layout.shard(state))
    calls: dict[int, Any] = {}
    stage_calls: dict[str, Any] = {}

    def compiled(length: int, state: TrainState):
        if length not in calls:
            call = scan_iterations(step(), length)

            def program(state: TrainState, frozen: Any):
                state, metrics = call(attach(state, frozen))
                return detach(state)[0], metrics

            with timer("compile"):
                calls[length] = layout.compile_step(program, state, frozen)
        return calls[length]

    def time_stages(state: TrainState, iteration_seconds: float) -> dict[str, float]:
        """Seconds of each stage, alone."""
        seconds = {}
        for name, stage in (stages or {}).items():
            if name not in stage_calls:
                with timer("compile"):
                    stage_calls[name] = layout.compile(stage, attach(state, frozen))
            start = time.perf_counter()
            jax.block_until_ready(stage_calls[name](attach(state, frozen)))
            seconds[f"time/{name}_seconds"] = time.perf_counter() - start
        if seconds:
            seconds["time/rest_seconds"] = iteration_seconds - sum(seconds.values())
        return seconds

    def params(state: TrainState) -> Params:
        return layout.first(attach(state, frozen).params)

    def is_evaluation_due(before: int, now: int) -> bool:
        crossed = evaluate_every and now // evaluate_every > before // evaluate_every
        return bool(crossed or now == total)

    with (
        Interrupt() as interrupt,
        Checkpoints(
            folder.checkpoints, keep=run.keep, every=run.checkpoint_every, say=tqdm.write
        ) as checkpoints,
    ):
        restored = checkpoints.restore_latest(state)
        if restored is not None:
            state = restored.state
        done = int(np.max(state.iteration))
        if layout is not SINGLE and is_first():
            tqdm.write(layout.describe(attach(state, frozen)))
        state, frozen = layout.replicate((state, frozen))
        with open_log(folder, done if restored is not None else -1) as log:
            if restored is None and evaluate is not None:
                with timer("evaluate"):
                    measured = evaluate(params(state))
                log.write(0, measured.metrics, timer.take())
                log.write_samples(0, measured.samples)
            figures: dict[str, str] = {}
            hidden = run.quiet or not is_first()
            bar = tqdm(total=total, initial=done, disable=hidden, unit="it", leave=False)

            def write(call: Call, measured_at: TrainState | None = None) -> None:
                """The rows of a call, with an evaluation of the state it left where one is due."""
                length = call.done - call.before
                tokens = float(np.sum(call.metrics.get(tokens_metric, 0)))
                timing = {
                    "time/iteration_seconds": call.seconds / length,
                    "time/tokens_per_second": tokens / call.seconds,
                }
                staged = {}
                rows: list[dict[str, Any]] = [
                    {name: x[i] for name, x in call.metrics.items()} for i in range(length)
                ]
                if evaluate is not None and measured_at is not None:
                    with timer("evaluate"):
                        measured = evaluate(params(measured_at))
                    rows[-1] |= measured.metrics
                    staged = time_stages(measured_at, call.seconds / length)
                    log.write_samples(call.done, measured.samples)
                for i, row in enumerate(rows, start=call.before + 1):
                    log.write(i, row, timing | (timer.take() | staged if i == call.done else {}))
                show(bar, figures, rows, shown, timing)

            unwritten: Call | None = None  # the newest call, whose rows are written during the next
            is_stopped = any_process(interrupt.requested)
            try:
                while done < total and not is_stopped:
                    length = min(per_call, total - done)
                    program = compiled(length, state)
                    begin = time.perf_counter()
                    state, running = program(state, frozen)
                    if unwritten:
                        ended, unwritten = unwritten, None
                        write(ended)
                    metrics = jax.device_get(layout.first(running))
                    seconds = time.perf_counter() - begin
                    timer.add("train", seconds)
                    unwritten = Call(done, done + length, metrics, seconds)
                    is_stopped = any_process(interrupt.requested)
                    is_measured = is_evaluation_due(done, done + length)
                    done += length
                    is_saved = checkpoints.is_due(done) or done == total or is_stopped
                    if is_measured or is_saved:
                        ended, unwritten = unwritten, None
                        write(ended, state if is_measured else None)
                    if is_saved:
                        with timer("checkpoint"):
                            log.sync()
                            checkpoints.save(done, layout.first(state))
            finally:  # also when a call or its compilation fails
                if unwritten:
                    write(unwritten)
            bar.close()
    wait_for_all("history")
    return RunResult(
        params=params(state),
        history=read_rows(folder.metrics),
        iteration=done,
        is_complete=done >= total,
        compile_seconds=timer.total.get("compile", 0.0),
        peak_memory_mb=max((peak_memory(call) for call in calls.values()), default=0.0) / 2**20,
    )


class Timer:
    """Adds up wall-clock seconds by name: `seconds` since the last `take`, `total` for good."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.total: dict[str, float] = {}
        self._running: list[tuple[str, float]] = []

    def __call__(self, name: str) -> "Timer":
        self._running.append((name, time.perf_counter()))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        name, start = self._running.pop()
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, spent: float) -> None:
        """Seconds that were measured elsewhere."""
        for ledger in (self.seconds, self.total):
            ledger[name] = ledger.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Seconds since the last call, as `time/NAME_seconds`."""
        taken = {f"time/{name}_seconds": spent for name, spent in self.seconds.items()}
        self.seconds = {}
        return taken


def peak_memory(compiled: Any) -> float:
    """Bytes that a compiled program needs: arguments, results and temporaries, aliases once."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def show(
    bar: tqdm,
    figures: dict[str, str],
    rows: Sequence[Mapping[str, Any]],
    shown: Sequence[str],
    timing: dict[str, float],
) -> None:
    """Advance the bar and put the newest figures on it; `figures` keeps those of earlier calls."""
    latest = {name: row[name] for row in rows for name in shown if name in row}
    figures.update({name.split("/")[0]: f"{np.mean(x):.3f}" for name, x in latest.items()})
    bar.set_postfix(figures | {"tok/s": f"{timing['time/tokens_per_second']:,.0f}"})
    bar.update(len(rows))


def count_parameters(params: Params) -> int:
    """Number of weights."""
    return sum(x.size for x in jax.tree.leaves(params))
