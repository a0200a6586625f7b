import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.logging import MetricsLog, RunFolder, read_rows
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.trainer import Measured, RunConfig, train
from jaxrl_llm.training import TrainState
from jaxrl_llm.types import ConfigError


def walk(state):
    """A step whose every figure depends on all earlier ones and on the run's key."""
    noise = jax.random.normal(jax.random.fold_in(state.key, state.iteration), (3,))
    params = {"w": 0.9 * state.params["w"] + noise}
    metrics = {"loss": jnp.sin(params["w"]).sum(), "rollout/tokens": jnp.float32(7)}
    return state.replace(params=params, iteration=state.iteration + 1), metrics


def start():
    return TrainState(
        params={"w": jnp.zeros(3)},
        opt_state=(),
        ref_params=None,
        key=jax.random.key(3),
        iteration=jnp.int32(0),
    )


def go(path, total=20, make_step=lambda: walk, stages=None, **settings):
    run = RunConfig(quiet=True, **{"checkpoint_every": 4, "keep": 2} | settings)
    with RunFolder.open(path, {"total": 20}) as folder:
        return train(
            folder,
            start(),
            make_step,
            run=run,
            total=total,
            per_call=2,
            evaluate=lambda params: Measured(
                {"eval/first": float(params["w"][0])}, [{"w": float(params["w"][1])}]
            ),
            evaluate_every=6,
            stages=stages,
        )


def files(path):
    return (path / "metrics.jsonl").read_bytes(), (path / "samples.jsonl").read_bytes()


def test_rows_are_numbered_by_finished_iterations_and_evaluations_join_theirs(tmp_path):
    result = go(tmp_path / "run")
    assert [row["step"] for row in result.history] == list(range(21))
    measured = [row["step"] for row in result.history if "eval/first" in row]
    assert measured == [0, 6, 12, 18, 20]
    assert "loss" not in result.history[0]
    assert all("loss" in row for row in result.history[1:])
    # the figures are those of the plain loop
    state, rows = start(), []
    for _ in range(20):
        state, metrics = jax.jit(walk)(state)
        rows.append(float(metrics["loss"]))
    np.testing.assert_allclose([r["loss"] for r in result.history[1:]], rows, rtol=1e-6)
    timing = read_rows(tmp_path / "run" / "timing.jsonl")
    assert [row["step"] for row in timing] == list(range(21))
    assert all(row["time/tokens_per_second"] > 0 for row in timing[1:])


@pytest.mark.parametrize("stop", [2, 4, 10, 18])
def test_a_run_in_two_parts_leaves_the_same_bytes_as_in_one(tmp_path, stop):
    whole = go(tmp_path / "whole")
    first = go(tmp_path / "parts", total=stop)
    assert first.iteration == stop
    # total=stop measured at its end; a run that goes on must not keep that measurement's row twice
    parts = go(tmp_path / "parts")
    np.testing.assert_array_equal(whole.params["w"], parts.params["w"])
    steps = [row["step"] for row in parts.history]
    assert steps == list(range(21))
    losses = [[row.get("loss") for row in result.history] for result in (whole, parts)]
    assert losses[0] == losses[1]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import jax
import test_trainer as toy

def make_step():
    def kill(i):
        if int(i) == {at}:
            os.kill(os.getpid(), signal.{name})
    def step(state):
        jax.debug.callback(kill, state.iteration)
        return toy.walk(state)
    return step

result = toy.go(toy.Path({path!r}), make_step=make_step)
print(result.iteration, result.is_complete)
"""


def run_killed(path, at, name):
    program = textwrap.dedent(KILLED).format(
        tests=str(Path(__file__).parent), at=at, path=str(path), name=name
    )
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("at", [9, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 15))])
def test_a_run_killed_by_kill_9_and_started_again_leaves_the_same_bytes(tmp_path, at):
    go(tmp_path / "whole")
    died = run_killed(tmp_path / "killed", at, "SIGKILL")
    assert died.returncode == -signal.SIGKILL
    resumed = go(tmp_path / "killed")
    assert resumed.is_complete
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_run_asked_to_stop_saves_where_it_is_and_goes_on_from_there(tmp_path, name):
    go(tmp_path / "whole")
    stopped = run_killed(tmp_path / "stopped", 9, name)
    assert stopped.returncode == 0, stopped.stderr
    iteration, is_complete = stopped.stdout.split()
    assert is_complete == "False"
    assert 10 <= int(iteration) < 20
    assert (tmp_path / "stopped" / "checkpoints" / iteration).is_dir()
    go(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_stages_are_timed_alone_at_every_evaluation_but_the_first(tmp_path):
    def slow(state):
        jax.debug.callback(lambda: time.sleep(0.1), ordered=True)
        return state.params["w"] + 1

    go(tmp_path / "run", stages={"slow": slow, "quick": lambda state: 2 * state.params["w"]})
    timing = read_rows(tmp_path / "run" / "timing.jsonl")
    measured = [row for row in timing if "time/slow_seconds" in row]
    assert [row["step"] for row in measured] == [6, 12, 18, 20]
    for row in measured:
        assert row["time/slow_seconds"] >= 0.1
        assert row["time/quick_seconds"] > 0
        parts = ("slow", "quick", "rest")
        total = sum(row[f"time/{part}_seconds"] for part in parts)
        np.testing.assert_allclose(total, row["time/iteration_seconds"], rtol=1e-6)
    # Timing a stage leaves the run as it is.
    go(tmp_path / "plain")
    assert files(tmp_path / "run") == files(tmp_path / "plain")


def test_without_stages_nothing_is_left_over(tmp_path):
    go(tmp_path / "run")
    timing = read_rows(tmp_path / "run" / "timing.jsonl")
    assert not any("time/rest_seconds" in row for row in timing)


def test_rows_are_written_while_the_next_call_runs_and_before_what_needs_them(tmp_path):
    events = []

    class Told:
        def __getattr__(self, name):
            return getattr(SINGLE, name)

        def describe(self, state):
            return "told"

        def compile_step(self, program, *args):
            compiled = SINGLE.compile_step(program, *args)

            def call(*args):
                events.append("call")
                return compiled(*args)

            call.memory_analysis = compiled.memory_analysis
            return call

    class ToldLog(MetricsLog):
        def write(self, step, *args):
            events.append(step)
            super().write(step, *args)

        def sync(self):
            events.append("save")
            super().sync()

    def evaluate(params):
        events.append("evaluate")
        return Measured({}, [])

    with RunFolder.open(tmp_path / "run", {}) as folder:
        train(
            folder,
            start(),
            lambda: walk,
            run=RunConfig(quiet=True, checkpoint_every=6),
            total=11,
            per_call=2,
            evaluate=evaluate,
            evaluate_every=4,
            layout=Told(),
            open_log=ToldLog,
        )
    assert events == [
        *("evaluate", 0, "call", "call", 1, 2, "evaluate", 3, 4),
        *("call", 5, 6, "save", "call", "evaluate", 7, 8),
        *("call", "call", 9, 10, "evaluate", 11, "save"),
    ]


def test_rows_are_written_also_when_the_next_call_does_not_compile(tmp_path, monkeypatch):
    compile_step, n_compiled = type(SINGLE).compile_step, itertools.count()

    def once(self, *args):
        if next(n_compiled):
            raise RuntimeError("no memory")
        return compile_step(self, *args)

    monkeypatch.setattr(type(SINGLE), "compile_step", once)
    with pytest.raises(RuntimeError, match="no memory"):
        go(tmp_path / "run", total=9, checkpoint_every=100)  # four calls of 2, and one of 1
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == list(range(9))


def test_a_finished_run_is_not_run_again(tmp_path):
    first = go(tmp_path / "run")
    before = files(tmp_path / "run")

    def forbidden():
        raise AssertionError("there was nothing left to do")

    second = go(tmp_path / "run", make_step=forbidden)
    assert second.is_complete
    assert files(tmp_path / "run") == before
    np.testing.assert_array_equal(first.params["w"], second.params["w"])


def test_a_damaged_newest_checkpoint_costs_only_what_came_after_the_one_before(tmp_path, capsys):
    go(tmp_path / "whole")
    go(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "20"
    next(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 0).write_bytes(b"")
    go(tmp_path / "run")
    assert "checkpoint damaged: step 20" in capsys.readouterr().out
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.parametrize("settings", [{"name": "a/b"}, {"name": ""}, {"checkpoint_every": 0}])
def test_run_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        RunConfig(**settings)
