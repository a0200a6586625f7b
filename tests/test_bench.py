import dataclasses
import itertools
import json
import statistics
import sys

import jax
import numpy as np
import pytest

from experiments import bench, bench_peers
from experiments.bench import Bench, Config
from experiments.bench_peers import Peer
from jaxrl_llm.profiling import PEAKS
from jaxrl_llm.types import ConfigError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(smoke=True, root=tmp_path_factory.mktemp("runs")).small()


@pytest.fixture(scope="module")
def small(config):
    return Bench(config)


@pytest.fixture(scope="module")
def phases(small):
    return small.phases()


@pytest.fixture(scope="module")
def iteration(small):
    return small.iteration()


@pytest.fixture(scope="module")
def updated(phases, iteration):
    """The policy after the first update, made by its parts and by the iteration."""
    (trained, _), _ = phases["update"].run()
    state, _ = iteration.run()
    return jax.tree.map(np.array, (trained.policy, state.params))  # copies: both are donated


@pytest.fixture(scope="module")
def result(small, phases, iteration, updated):
    """What is measured, with programs that are compiled once."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Bench, "phases", lambda self: dict(phases))
    patch.setattr(Bench, "iteration", lambda self: iteration)
    yield bench.measure(small)
    patch.undo()


@pytest.mark.slow
def test_the_phases_make_the_iteration(updated, small):
    by_parts, whole = updated
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), by_parts, whole)
    moved = jax.tree.map(lambda x, y: abs(x - y).max() > 1e-5, whole, small.params)
    assert any(jax.tree.leaves(moved))


def test_every_completion_is_of_full_length(phases, config):
    completions = phases["rollout"].run().completions
    assert completions.loss_mask.all()
    assert completions.tokens.shape == (4, 2, config.completion_tokens)


def test_every_phase_has_its_figures(result):
    assert set(result["phases"]) == {"prefill", "decode", "score", "update", "iteration"}
    for name, row in result["phases"].items():
        assert len(row["seconds"]) == 2
        assert row["median"] == statistics.median(row["seconds"])
        assert row["compile_seconds"] > 0
        assert row["peak_bytes"] > 0
        assert ("memory_floor" in row) == (name == "decode")
    assert result["resident_peak_bytes"] > 2**20


def test_decoding_is_the_rollout_without_the_prefill(result, phases):
    pairs = zip(phases["rollout"].seconds[-2:], phases["prefill"].seconds[-2:], strict=True)
    assert result["phases"]["decode"]["seconds"] == [whole - prefill for whole, prefill in pairs]


class Rates:
    flops, bandwidth = 1e6, 1e3


def test_the_floor_is_the_larger_one_of_work_and_traffic(config):
    workload = config.workload
    row = bench.figures(workload, Rates(), "decode", [3.0, 1.0, 2.0])
    assert row["matmul_floor"] == workload.flops()["decode"] / 1e6
    assert row["memory_floor"] == workload.decode_bytes() / 1e3
    assert row["floor"] == row["memory_floor"] > row["matmul_floor"]
    assert row["ratio_to_floor"] == 2.0 / row["floor"]
    assert row["min"] == 1.0
    assert row["tokens_per_second"] == 4 * 2 * 4 / 2.0


def test_on_an_accelerator_the_makers_promise_is_compared_with(config, monkeypatch):
    peak = PEAKS["NVIDIA H200"]
    monkeypatch.setattr(bench, "peak_of", lambda kind: peak)
    row = bench.figures(config.workload, Rates(), "decode", [2.0])
    assert row["mfu"] == config.workload.flops()["decode"] / 2.0 / peak.flops
    assert row["bandwidth_used"] == config.workload.decode_bytes() / 2.0 / peak.bandwidth
    assert "bandwidth_used" not in bench.figures(config.workload, Rates(), "update", [2.0])


def test_columns_that_no_row_has_are_left_out(result):
    lines = bench.table(result["phases"]).splitlines()
    assert "MFU" not in lines[0]
    assert "memory floor s" in lines[0]
    assert len({line.count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"group_size": 1}, "GRPO compares at least 2"),
        ({"microbatches": 5}, "make prompts a multiple of 5"),
        ({"repeats": 0}, "repeats=0"),
        ({"name": "a/b"}, "plain folder name"),
        ({"peer_microbatches": (0, 2)}, "peer_microbatches"),
        ({"network": dataclasses.replace(Config().network, qk_norm=True), "peer": "trl"}, "qk"),
    ],
)
def test_what_cannot_be_timed_is_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        Config(**fields)


# Peers. This one takes 100 s for the first step of a trainer, and then 4, 1 or 2 by microbatches.
FAKE = """
import json, sys
sizes = json.loads(sys.argv[1])
print("a library says hello", file=sys.stderr)
for line in sys.stdin:
    if line != "step\\n":
        given, first = json.loads(line), True
        says = {"settings": given, "parameters": sizes["vocab"], "versions": {"fake": "1.0"}}
    else:
        seconds = 100.0 if first else {1: 4.0, 2: 1.0, 4: 2.0}[given["microbatches"]]
        says, first = {"seconds": seconds, "resident_peak_bytes": 2**20}, False
    print(json.dumps(says), flush=True)
"""


class Clockwork:
    """A program of ours that takes 9, 0.25, 0.5, 0.125 s."""

    compile_seconds = 1.0

    def __init__(self):
        self.seconds = []
        self._next = itertools.cycle([9.0, 0.25, 0.5, 0.125])

    def run(self):
        self.seconds.append(next(self._next))


@pytest.fixture
def fake_peer(tmp_path, config):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    sizes = bench_peers.sizes_of(config)
    with Peer([sys.executable, str(script)], sizes, tmp_path / "log") as peer:
        yield peer


@pytest.fixture
def compared(small, config, fake_peer, monkeypatch):
    ours = Bench(dataclasses.replace(config, repeats=3, peer_microbatches=(1, 2, 3, 4)))
    monkeypatch.setattr(ours, "iteration", Clockwork)
    return bench_peers.against(ours, fake_peer, "Fake")


def test_the_peers_best_number_of_microbatches_is_compared(compared):
    assert compared["peer"]["seconds_by_microbatches"] == {1: 4.0, 2: 1.0, 4: 2.0}
    assert compared["peer"]["microbatches"] == 2
    assert compared["peer"]["settings"] == {"microbatches": 2, "steps": 4}


def test_the_ratio_is_the_median_of_pairs_without_the_first(compared):
    assert compared["ratios"] == [4.0, 2.0, 8.0]
    assert compared["ratio"] == 4.0
    assert compared["rows"]["Fake"]["median"] == 1.0
    assert compared["rows"]["jaxrl_llm"]["median"] == 0.25


def test_the_table_says_what_was_compared(compared):
    text = bench_peers.table(compared)
    assert "Fake takes 4.00 times as long: median of 3 pairs from 2.00 to 8.00" in text
    assert "fake 1.0; 64 parameters; microbatches=2, steps=4" in text
    assert "1: 4.00 s, 2: 1.00 s, 4: 2.00 s" in text


def test_without_a_number_of_microbatches_that_fits_nothing_is_compared(config, fake_peer):
    ours = Bench(dataclasses.replace(config, peer_microbatches=(3,)))
    with pytest.raises(ConfigError, match=r"peer_microbatches=\(3,\): expected a divisor"):
        bench_peers.against(ours, fake_peer, "Fake")


def test_a_peer_that_ends_is_told_with_its_last_words(tmp_path, config):
    command = [sys.executable, "-c", "import sys; sys.exit('no such trainer')"]
    log = tmp_path / "log"
    with Peer(command, bench_peers.sizes_of(config), log) as peer:
        with pytest.raises(ConfigError, match="the peer has ended: no such trainer"):
            peer.start(1, 1)


def environment(cache, pip):
    """An environment whose Python is a shell script."""
    python = cache / "it" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho called >> {cache}/calls\n{pip}\n")
    python.chmod(0o755)
    return python


def test_an_environment_is_made_once_for_the_same_packages(tmp_path, capsys):
    python = environment(tmp_path, "exit 0")
    for packages in (["a==1"], ["a==1"], ["a==2"]):
        assert bench_peers.install("it", packages, tmp_path) == python
    assert (tmp_path / "calls").read_text().count("called") == 2
    assert capsys.readouterr().out.count("installing") == 2


def test_an_environment_that_cannot_be_made_is_told_with_the_reason(tmp_path):
    environment(tmp_path, "echo 'ERROR: No matching distribution found for a' >&2; exit 1")
    for _ in range(2):  # nothing is left that looks finished
        with pytest.raises(ConfigError, match="--peer it cannot be .*No matching distribution"):
            bench_peers.install("it", ["a"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(bench_peers.PEERS))
def test_peers_do_the_same_work(config, name):
    if not (bench_peers.CACHE / name / "installed").exists():
        pytest.skip(f"python -m experiments.bench --peer {name} has not installed it yet")
    ours = Bench(dataclasses.replace(config, peer=name))
    result = bench_peers.compare(ours)
    assert result["peer"]["parameters"] == result["parameters"]
    assert len(result["ratios"]) == config.repeats
    json.dumps(result["peer"])
