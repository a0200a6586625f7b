"""Runs as an axis: seeds and scalar hyper-parameters, trained together in one program."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.logging import MetricsLog, RunFolder, config_diff, read_rows
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.rollout import Metrics, RolloutFn
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.trainer import FREE_FIELDS, Measured, RunConfig
from jaxrl_llm.trainer import train as run_train
from jaxrl_llm.training import TrainConfig, TrainState, init_state, make_iteration
from jaxrl_llm.types import ConfigError

SCALARS = (  # what may differ between runs of one program, besides the seed
    "algorithm.kl_coef",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.entropy_coef",
    "optimizer.learning_rate",
    "sampling.temperature",
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one run of a sweep does."""

    seed: int = 0
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()


class Sweep(NamedTuple):
    """N runs as pure functions of a state whose leaves have a leading axis N."""

    init: Callable[[Params], TrainState]  # all begin with the same policy
    iteration: Callable[[TrainState], tuple[TrainState, Metrics]]  # metrics [N]


def make_sweep(
    arms: Sequence[Arm],
    make_rollout: Callable[[SamplingConfig], RolloutFn],
    model: LanguageModel,
    train: TrainConfig,
) -> Sweep:
    """The iterations of several runs as one, by `jax.vmap` over seeds and `SCALARS`.

    Run n equals the single run of `arms[n]` but for rounding. With a KL coefficient of 0 in some
    arms and not in others, those with 0 keep and log the KL too, and do not train it.

    Args:
        arms: N runs.
        make_rollout: the rollout with given sampling settings.
        model: the policy's functions.
        train: sizes, the same for all.

    Raises:
        ConfigError: the arms differ in what is compiled into a program.
    """
    values = differing(arms)
    # Whether there is a reference at all is the same for all.
    widest = max(arms, key=lambda arm: arm.algorithm.needs_reference)

    def parts(arm: Arm):
        algorithm = make_algorithm(
            arm.algorithm,
            iterations=train.iterations,
            needs_reference=widest.algorithm.needs_reference,
        )
        rate = arm.algorithm.value_rate
        return algorithm, make_optimizer(arm.optimizer, train.updates, value_rate=rate)

    def init(params: Params) -> TrainState:
        def first(arm: Arm) -> TrainState:
            algorithm, optimizer = parts(arm)
            key = jax.random.key(arm.seed)
            lag = train.rollout_lag
            return init_state(
                params, optimizer, key, model=model, algorithm=algorithm, rollout_lag=lag
            )

        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(first, arms))

    def one(state: TrainState, values: dict[str, Any]) -> tuple[TrainState, Metrics]:
        arm = with_values(widest, values)
        algorithm, optimizer = parts(arm)
        temperature = arm.sampling.temperature
        rollout = make_rollout(arm.sampling)
        step = make_iteration(rollout, model, algorithm, optimizer, train, temperature=temperature)
        return step(state)

    return Sweep(init, lambda state: jax.vmap(one)(state, values))


def differing(arms: Sequence[Arm]) -> dict[str, jax.Array]:
    """The scalars in which the arms differ, each as a vector `[N]`.

    >>> grpo = AlgorithmConfig()
    >>> arms = [Arm(algorithm=dataclasses.replace(grpo, entropy_coef=c)) for c in (0.0, 0.01)]
    >>> list(differing(arms))
    ['algorithm.entropy_coef']
    """
    if not arms:
        raise ConfigError("a sweep of no arms: expected at least one")
    first, *rest = [dataclasses.asdict(arm) for arm in arms]
    differ = {name for one in rest for name in config_diff(first, one)} - {"seed"}
    others = sorted(differ.difference(SCALARS))
    if others:
        raise ConfigError(
            f"arms differ in {', '.join(others)}, which is compiled into a program; within one "
            f"sweep only the seed and {', '.join(SCALARS)} may differ: make a sweep for each value"
        )
    return {
        name: jnp.array([attrgetter(name)(arm) for arm in arms], jnp.float32)
        for name in sorted(differ)
    }


def with_values(config: Any, values: dict[str, Any]) -> Any:
    """A copy of a frozen config with fields set by path, unchecked: values may be traced.

    >>> arm = Arm(algorithm=AlgorithmConfig())
    >>> with_values(arm, {"algorithm.clip_low": 0.3}).algorithm.clip_low
    0.3
    """
    config = copy.copy(config)
    for path, value in values.items():
        name, _, rest = path.partition(".")
        value = with_values(getattr(config, name), {rest: value}) if rest else value
        object.__setattr__(config, name, value)
    return config


class SweepResult(NamedTuple):
    """What `train_sweep` leaves in memory; the rest is in the folders."""

    histories: list[list[dict[str, Any]]]  # of each run, the rows of its metrics.jsonl
    seconds: list[float]  # of training, an N-th of the program's for each run
    params: Params  # leaves [N, ...]
    is_complete: bool  # False after an interrupt


class SweepLog:
    """The logs of N runs as one: values `[N]` are dealt out, seconds shared evenly."""

    def __init__(self, folders: Sequence[RunFolder], step: int):
        self._logs = [MetricsLog(folder, step) for folder in folders]

    def write(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        share = {tag: value / len(self._logs) for tag, value in timing.items()}
        for n, log in enumerate(self._logs):
            log.write(step, {tag: values[n] for tag, values in metrics.items()}, share)

    def write_samples(self, step: int, samples: Sequence[Any]) -> None:
        for log, rows in zip(self._logs, samples, strict=True):
            log.write_samples(step, rows)

    def sync(self) -> None:
        for log in self._logs:
            log.sync()

    def __enter__(self) -> "SweepLog":
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.close()


def train_sweep(
    path: Path,
    runs: Mapping[str, Mapping[str, Any]],
    sweep: Sweep,
    params: Params,
    *,
    run: RunConfig,
    train: TrainConfig,
    evaluate: Callable[[Params], Measured],
) -> SweepResult:
    """Train all runs of a sweep by `trainer.train`; each logs to its own run folder.

    The folder of the sweep holds the checkpoints of all, and the folders of its runs, which are
    those of single runs without checkpoints. Policies are measured before training and after it.

    Args:
        path: the folder of the sweep.
        runs: N names of folders in it, each with the settings that its config.json holds.
        sweep: the N runs.
        params: the policy that all begin with.
        run: checkpoints and progress bar.
        train: sizes; `iterations_per_call` of the iterations are one compiled call.
        evaluate: measures the parameters of one run.
    """

    def evaluate_all(params: Params) -> Measured:
        are_equal = jax.tree.all(jax.tree.map(lambda x: bool((x == x[:1]).all()), params))
        ours = [jax.tree.map(lambda x, n=n: x[n], params) for n in range(len(runs))]
        found = [evaluate(ours[0])] * len(runs) if are_equal else list(map(evaluate, ours))
        names = found[0].metrics
        return Measured(
            {name: np.array([one.metrics[name] for one in found]) for name in names},  # type: ignore
            [one.samples for one in found],  # type: ignore
        )

    free = frozenset(f"runs.{name}.{field}" for name in runs for field in FREE_FIELDS)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(path, {"runs": dict(runs)}, free=free))
        folders = [
            stack.enter_context(RunFolder.open(path / name, config, free=FREE_FIELDS))
            for name, config in runs.items()
        ]
        result = run_train(
            folder,
            sweep.init(params),
            lambda: sweep.iteration,
            run=run,
            total=train.iterations,
            per_call=train.iterations_per_call,
            evaluate=evaluate_all,
            open_log=lambda _, step: SweepLog(folders, step),
        )
        timings = [read_rows(one.timing) for one in folders]
        return SweepResult(
            histories=[read_rows(one.metrics) for one in folders],
            seconds=[sum(row.get("time/train_seconds", 0.0) for row in rows) for rows in timings],
            params=result.params,
            is_complete=result.is_complete,
        )
