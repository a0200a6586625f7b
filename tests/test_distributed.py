"""Several processes, over loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import eight_devices
import jax
import numpy as np
import pytest

from jaxrl_llm.distributed import agree, any_process, check, fetch, is_first, put
from jaxrl_llm.logging import read_rows
from jaxrl_llm.policy import Policy
from jaxrl_llm.types import ConfigError

TESTS = Path(__file__).parent


def start(devices: int, *line: object, **environment: object):
    """A process with so many devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_llm.distributed", *map(str, line)],
        env=os.environ
        | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
        | {name: str(value) for name, value in environment.items()},
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(*line: object):
    """Two processes with four devices each, which are told where they are."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = "--coordinator", address, "--processes", 2, "--timeout", 120, "--process-id"
    return [start(4, *common, i, *line) for i in (0, 1)]


def start_two_under_slurm(*line: object):
    """Two processes with four devices each, in the environment that srun makes."""
    common = {
        "SLURM_JOB_ID": os.getpid(),  # JAX makes a port of it
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_NTASKS": 2,
        "SLURM_LOCALID": 0,
    }
    return [start(4, "--timeout", 120, *line, **common, SLURM_PROCID=i) for i in (0, 1)]


def finish(*processes: subprocess.Popen) -> list[str]:
    """What they print, when they all end well."""
    printed = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_device(tmp_path, monkeypatch):
    """Two steps, then two more from the checkpoint; weights that both have parts of are saved."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    finish(*start_two("two_processes", parts, "4x2x1", 2))
    assert (parts / "checkpoints" / "2").is_dir()
    processes = start_two("two_processes", parts, "4x2x1", 4)
    expected = eight_devices.supervised(whole, "jit", 4)
    printed = finish(*processes)
    assert "8 cpu devices of 2 processes" in printed[0]
    assert "mesh" not in printed[1]  # the first one speaks
    rows = read_rows(parts / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for found, row in zip(rows, expected.history, strict=True):
        chex.assert_trees_all_close(found, row, rtol=1e-5, atol=1e-5)
    params = Policy.from_pretrained(parts / "policy").params
    chex.assert_trees_all_close(params, expected.params, atol=1e-5)


@pytest.mark.slow
def test_a_run_whose_process_was_killed_goes_on_to_the_same_bytes(tmp_path):
    """The documented command; the other process ends too, and both are started again."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    smoke = "experiments.grpo_countdown", "--smoke", "--parallel.fsdp", 2, "--run.root"
    finish(*start_two_under_slurm(*smoke, straight))
    processes = start_two(*smoke, killed)
    folder = killed / "grpo_countdown" / "smoke"
    while not (folder / "checkpoints" / "2").is_dir():
        time.sleep(0.05)
        assert all(process.poll() is None for process in processes)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].communicate()
    printed = processes[0].communicate(timeout=200)[0]
    assert processes[0].returncode == 1 and "start all processes again" in printed
    finish(*start_two(*smoke, killed))
    expected = straight / "grpo_countdown" / "smoke"
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    assert json.loads((folder / "summary.json").read_text())["processes"] == 2


def test_a_coordinator_that_cannot_be_reached_is_one_clear_line():
    line = "--coordinator", "localhost:9", "--processes", 2, "--process-id", 1, "--timeout", 2
    process = start(1, *line, "experiments.grpo_countdown")
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    (error,) = [line for line in printed.splitlines() if "error" in line]
    assert error.startswith("error: process 1: the 2 processes had not joined at localhost:9")


def test_without_an_environment_that_names_the_others_their_address_is_asked_for():
    printed = start(1, "experiments.grpo_countdown").communicate(timeout=60)[0]
    assert printed.startswith("error: cannot join other processes")
    assert "--coordinator HOST:PORT" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("host", 2, 0), "expected HOST:PORT"),
        (("host:port", 2, 0), "expected HOST:PORT"),
        ((":1234", 2, 0), "expected HOST:PORT"),
        (("host:70000", 2, 0), "expected HOST:PORT"),
        (("host:1234", 0, 0), "processes=0"),
        (("host:1234", 2, 2), "expected 0 to 1"),
        (("host:1234", 2, -1), "expected 0 to 1"),
    ],
)
def test_addresses_and_numbers_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(*settings)


def test_a_single_process_agrees_with_itself():
    assert is_first()
    assert any_process(True) and not any_process(False)
    found = object()
    assert agree(lambda: found) is found
    tree = {"w": np.arange(3.0), "key": jax.random.key(0)}
    placed = put(tree, jax.tree.map(lambda _: jax.devices()[0], tree))
    np.testing.assert_array_equal(fetch(placed)["w"], tree["w"])
