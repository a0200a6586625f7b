"""Meshes: what a person can get wrong, and, in a process of its own, eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxrl_llm.parallel import ParallelConfig, make_layout
from jaxrl_llm.types import ConfigError

CLAIMS = Path(__file__).with_name("eight_devices.py")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_claims_of_eight_devices_hold(which):
    """JAX has to be told before it starts that the CPU is to be eight devices."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    pytest_alone = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [*pytest_alone, "-m", which, CLAIMS],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rest_of_the_devices_goes_to_the_axis_of_minus_one():
    def sizes(devices, **settings):
        config = ParallelConfig(**settings).resolved(devices)
        return config.backend, config.data, config.fsdp, config.tensor

    assert sizes(1) == ("jit", 1, 1, 1)
    assert sizes(8) == ("mesh", 8, 1, 1)
    assert sizes(8, backend="jit") == ("jit", 1, 1, 1)
    assert sizes(8, backend="pmap") == ("pmap", 8, 1, 1)
    assert sizes(8, fsdp=2, tensor=2) == ("mesh", 2, 2, 2)
    assert sizes(8, data=2, fsdp=-1) == ("mesh", 2, 4, 1)
    assert sizes(1, backend="mesh") == ("mesh", 1, 1, 1)


def test_an_estimate_needs_no_devices():
    planned = ParallelConfig(data=4, fsdp=2, tensor=2).planned()
    assert (planned.data, planned.batch_parts, planned.weight_parts) == (4, 8, 4)
    assert ParallelConfig(fsdp=1024).planned().data == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": 3}, "do not multiply to the 8 devices"),
        ({"fsdp": 3}, "do not multiply to the 8 devices"),
        ({"data": 2, "fsdp": 2}, "do not multiply to the 8 devices"),
        ({"data": 16}, "do not multiply to the 8 devices"),
        ({"data": 0}, "at least 1"),
        ({"tensor": -2}, "at least 1"),
        ({"fsdp": -1}, "only one size can be −1"),
        ({"backend": "pmap", "fsdp": 2}, "pmap copies the weights"),
        ({"backend": "pmap", "tensor": 2}, "pmap copies the weights"),
        ({"backend": "jit", "data": 2}, "jit runs on one device"),
    ],
)
def test_axis_sizes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings).resolved(8)


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_several_processes_need_a_mesh(monkeypatch, backend):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="there are 2; set backend=mesh"):
        make_layout(ParallelConfig(backend=backend))


def test_heads_and_prompts_that_do_not_come_apart_are_refused():
    config = ParallelConfig(data=2, fsdp=2, tensor=2)
    config.check_heads(4, 2)
    config.check_rows(8, "prompts")
    with pytest.raises(ConfigError, match="3 key/value heads"):
        config.check_heads(6, 3)
    with pytest.raises(ConfigError, match="5 query heads"):
        config.check_heads(5, 5)
    with pytest.raises(ConfigError, match="6 prompts of a microbatch, .* a multiple of 4"):
        config.check_rows(6, "prompts of a microbatch")
