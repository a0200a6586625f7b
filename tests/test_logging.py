"""What a run leaves behind survives kills, refusals and resumption."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl_llm import logging
from jaxrl_llm.logging import (
    Interrupt,
    MetricsLog,
    RunFolder,
    config_diff,
    provenance,
    read_rows,
    write_summary,
)
from jaxrl_llm.plots import Panel, plot_curves, running_mean
from jaxrl_llm.types import ConfigError

CONFIG = {"seed": 1, "rate": 3e-4, "model": {"width": 64, "layers": 3}, "iterations": 100}


def every_byte(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


def run_python(code: str, *arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


# ---- the folder


def test_a_new_folder_holds_its_config_and_the_same_config_resumes_it(tmp_path):
    with RunFolder.open(tmp_path / "countdown" / "a", CONFIG) as folder:
        assert not folder.is_resumed
        assert json.loads((folder.path / "config.json").read_text()) == CONFIG
    before = every_byte(tmp_path)
    with RunFolder.open(tmp_path / "countdown" / "a", CONFIG) as folder:
        assert folder.is_resumed
    assert every_byte(tmp_path) == before


def test_tuples_and_paths_in_a_config_do_not_count_as_changes(tmp_path):
    config = {"sizes": (1, 2), "data": Path("some/file"), "nothing": None, "cap": float("inf")}
    for is_resumed in (False, True):
        with RunFolder.open(tmp_path, config) as folder:
            assert folder.is_resumed == is_resumed


def test_another_config_is_refused_with_both_values_and_nothing_changes(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    before = every_byte(tmp_path)
    other = {"seed": 2, "model": {"width": 96, "layers": 3}, "rate": 3e-4, "iterations": 100}
    with pytest.raises(ConfigError) as refusal:
        RunFolder.open(tmp_path, other)
    message = str(refusal.value)
    assert "seed was 1, now 2" in message and "model.width was 64, now 96" in message
    assert "layers" not in message and "rate" not in message
    assert "--run.name" in message and "\n" not in message
    assert every_byte(tmp_path) == before
    RunFolder.open(tmp_path, CONFIG).close()  # and the refusal holds no lock


def test_a_config_can_be_taken_back_by_who_made_it_and_by_no_other(tmp_path):
    first = RunFolder.open(tmp_path, CONFIG)
    first.close()
    resumed = RunFolder.open(tmp_path, CONFIG)
    resumed.close()
    resumed.forget()
    assert (tmp_path / "config.json").exists()
    first.forget()
    with RunFolder.open(tmp_path, CONFIG | {"seed": 2}) as folder:
        assert not folder.is_resumed


def test_added_and_removed_fields_are_differences():
    assert config_diff({"a": {"b": 1, "c": None}}, {"a": {"b": 1, "d": "x"}, "e": {"f": 2}}) == {
        "a.c": ("null", "absent"),
        "a.d": ("absent", '"x"'),
        "e": ("absent", '{"f": 2}'),
    }
    assert config_diff({"a": {"b": 1}}, {"a": 3}) == {"a": ('{"b": 1}', "3")}


def test_free_fields_may_change_and_every_earlier_config_is_kept(tmp_path):
    free = frozenset({"iterations", "model"})
    configs = [CONFIG, CONFIG | {"iterations": 200}, CONFIG | {"model": {"width": 9}}]
    for config in configs:
        RunFolder.open(tmp_path, config, free=free).close()
    names = ["config.1.json", "config.2.json", "config.json"]
    assert [json.loads((tmp_path / name).read_text()) for name in names] == configs
    with pytest.raises(ConfigError, match="seed was 1, now 5"):
        RunFolder.open(tmp_path, configs[-1] | {"seed": 5, "iterations": 1}, free=free)
    assert not (tmp_path / "config.3.json").exists()


def test_a_foreign_folder_is_refused_and_nothing_changes(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = every_byte(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunFolder.open(tmp_path, CONFIG)
    assert every_byte(tmp_path) == before


def test_a_folder_left_by_a_run_killed_at_its_very_start_is_taken(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.tmp").write_text('{"se')
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert not folder.is_resumed


def test_a_config_that_is_not_json_is_refused_and_nothing_changes(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_text('{"seed": 1')
    before = every_byte(tmp_path)
    with pytest.raises(ConfigError, match="not JSON"):
        RunFolder.open(tmp_path, CONFIG)
    assert every_byte(tmp_path) == before


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_is_refused_and_left_alone(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write a run to"):
        RunFolder.open(tmp_path / place, CONFIG)
    assert every_byte(tmp_path) == {"file": b"mine"}


def test_an_unwritable_folder_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, whom no mode stops
    with pytest.raises(ConfigError, match="Permission denied"):
        RunFolder.open(tmp_path, CONFIG)


HOLD = """
import sys, time
from jaxrl_llm.logging import RunFolder
folder = RunFolder.open(sys.argv[1], {})
print("locked", flush=True)
time.sleep(60)
"""


def test_two_live_processes_cannot_write_one_folder_and_sigkill_frees_it(tmp_path):
    with run_python(HOLD, str(tmp_path)) as other:
        assert other.stdout.readline() == "locked\n"
        before = every_byte(tmp_path)
        with pytest.raises(ConfigError, match="another process is writing"):
            RunFolder.open(tmp_path, {})
        assert every_byte(tmp_path) == before
        other.kill()
    RunFolder.open(tmp_path, {}).close()


# ---- the metrics


def write_steps(folder: RunFolder, resumed: int, steps: range) -> None:
    with MetricsLog(folder, resumed) as log:
        for step in steps:
            metrics = {"reward/mean": np.float32(step) / 3, "kl": jnp.float32(step) / 7}
            log.write(step, metrics, {"time/seconds": 0.5})
            log.write_samples(step, [{"text": f"é{step}", "reward": 1.0}])
            log.sync()


def test_float32_metrics_come_back_exactly_under_sorted_tags(tmp_path):
    values = np.float32([0.1, 1 / 3, 1e-45, 3.4e38])
    with RunFolder.open(tmp_path, {}) as folder, MetricsLog(folder, -1) as log:
        log.write(0, dict(zip("dbca", values, strict=True)) | {"n": np.int32(7)})
        (row,) = read_rows(folder.metrics)
    assert list(row) == ["step", "a", "b", "c", "d", "n"]
    found = np.array([row[tag] for tag in "dbca"])
    assert found.astype(np.float32).tobytes() == values.tobytes()
    assert isinstance(row["n"], int)
    assert not (tmp_path / "timing.jsonl").read_bytes()


def test_non_finite_metrics_are_valid_json_that_float_reads(tmp_path):
    with RunFolder.open(tmp_path, {}) as folder, MetricsLog(folder, -1) as log:
        log.write(0, {"a": jnp.nan, "b": -jnp.inf, "c": np.float32(np.inf)})
        write_summary(folder, {"best": math.nan, "interval": (0.5, jnp.float32(np.inf))})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(folder.metrics.read_text(), parse_constant=refuse)
    assert math.isnan(float(row["a"]))
    assert (float(row["b"]), float(row["c"])) == (-math.inf, math.inf)
    summary = json.loads(folder.summary.read_text(), parse_constant=refuse)
    assert summary == {"best": "NaN", "interval": [0.5, "Infinity"]}


@pytest.mark.parametrize("half_a_line", [b'{"step": 4, "rew', b'{"step": 4}', b"\0\0"])
def test_a_resumed_run_leaves_the_bytes_of_an_uninterrupted_one(tmp_path, half_a_line):
    with RunFolder.open(tmp_path / "straight", {}) as folder:
        write_steps(folder, -1, range(10))
        straight = [p.read_bytes() for p in (folder.metrics, folder.samples, folder.timing)]
    with RunFolder.open(tmp_path / "killed", {}) as folder:
        write_steps(folder, -1, range(8))
        for path in (folder.metrics, folder.samples, folder.timing):
            with path.open("ab") as file:
                file.write(half_a_line)
        write_steps(folder, 4, range(5, 10))
        assert [p.read_bytes() for p in (folder.metrics, folder.samples, folder.timing)] == straight


def test_a_run_that_starts_again_from_the_beginning_keeps_no_row(tmp_path):
    with RunFolder.open(tmp_path, {}) as folder:
        write_steps(folder, -1, range(3))
        MetricsLog(folder, -1).close()
        assert read_rows(folder.metrics) == read_rows(folder.samples) == []


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.8e9)  # resumed within the second
    with RunFolder.open(tmp_path, {}) as folder:
        write_steps(folder, -1, range(6))
        (events,) = tmp_path.glob("events.*")
        with events.open("ab") as file:
            file.write(b"\x20\x00\x00")  # killed in the middle of an event
        write_steps(folder, 2, range(3, 8))
    board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert sorted(board.Tags()["scalars"]) == ["kl", "reward/mean", "time/seconds"]
    for tag, unit in (("reward/mean", 1 / 3), ("kl", 1 / 7), ("time/seconds", None)):
        scalars = board.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(8))
        if unit is not None:
            assert np.allclose([s.value for s in scalars], np.arange(8) * unit)


KILLED = """
import os, signal, sys
from jaxrl_llm.logging import MetricsLog, RunFolder
log = MetricsLog(RunFolder.open(sys.argv[1], {}), -1)
for step in range(50):
    log.write(step, {"a": step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_row_that_has_been_written_survives_sigkill(tmp_path):
    with run_python(KILLED, str(tmp_path)) as process:
        assert process.wait() == -signal.SIGKILL
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(50))
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in board.Scalars("a")] == list(range(50))


def test_provenance_names_the_machine_and_can_be_written(tmp_path):
    found = provenance()
    assert found["versions"].keys() >= {"jax", "flax", "optax"}
    assert found["device"] and found["devices"] >= 1 and found["cpus"] >= 1
    assert found["start"].endswith("+00:00")
    assert found["commit"] is None or len(found["commit"]) == 40
    with RunFolder.open(tmp_path, {}) as folder:
        write_summary(folder, found)
        assert json.loads(folder.summary.read_text()) == found


# ---- plots


def test_the_running_mean_matches_a_loop():
    x = np.random.default_rng(0).normal(size=20)
    x[[0, 7, 8, 9]] = np.nan
    for width in (1, 2, 3, 8, 41):
        low, high = width // 2, (width - 1) // 2
        windows = [x[max(0, i - low) : i + high + 1] for i in range(20)]
        known = [w[~np.isnan(w)] for w in windows]
        expected = [w.mean() if len(w) else np.nan for w in known]
        assert np.allclose(running_mean(x, width), expected, equal_nan=True), width


def test_a_figure_is_drawn_from_the_file_with_gaps_and_missing_metrics(tmp_path):
    rows = [{"step": i, "a": "NaN" if i == 3 else i / 10} for i in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    panels = [
        Panel(metric="a", label="a (nats)", smooth=3, baseline=0.2),
        Panel(metric="absent", label="b", smooth=3, points=[(0, 0.0, 1e-18, 0.1)], limits=(0, 1)),
        Panel(metric="absent", label="c", smooth=3),
    ]
    figure = tmp_path / "plots" / "curves.png"
    plot_curves(tmp_path / "metrics.jsonl", figure, panels, title="Reward")
    assert figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no panel"):
        plot_curves(rows, figure, [])


# ---- signals

WAIT = """
import signal, sys, time
from jaxrl_llm.logging import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    try:
        while not interrupt.requested:
            time.sleep(0.005)
        print("asked", flush=True)
        time.sleep(60 if sys.argv[1] == "wait" else 0)
    except KeyboardInterrupt:
        print("forced", flush=True)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def test_termination_is_asked_for_and_the_handlers_are_restored():
    with run_python(WAIT, "go") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "asked\nTrue\n"
    assert process.returncode == 0


def test_a_second_interrupt_does_not_wait():
    with run_python(WAIT, "wait") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "forced\nTrue\n"


def test_termination_after_an_interrupt_still_lets_the_run_save():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert interrupt.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_machines_of_one_name_differ_by_their_vector_instructions(tmp_path):
    """A sum of eight numbers at a time is not the sum of sixteen at a time."""

    def named(text):
        (tmp_path / "cpuinfo").write_text(text)
        return logging._cpu_model(tmp_path / "cpuinfo")

    core = "processor\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2{}\n\n"
    assert named(core.format(0, " avx2") + core.format(1, " avx2")) == "AMD EPYC, avx2"
    assert named(core.format(0, " avx2 avx512f")) == "AMD EPYC, avx2, avx512f"
    assert named(core.format(0, "")) == "AMD EPYC"
    assert named("processor\t: 0\nFeatures\t: fp asimd\n").endswith(", asimd")
