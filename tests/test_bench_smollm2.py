import dataclasses
import itertools
import json
import math
import sys

import jax
import numpy as np
import pytest

from experiments import bench_peers
from experiments import bench_smollm2 as bench
from experiments.bench_smollm2 import Case, Config, Ours
from jaxrl_llm.models.transformer import LanguageModel
from jaxrl_llm.trainer import count_parameters
from jaxrl_llm.types import ConfigError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(smoke=True, root=tmp_path_factory.mktemp("runs")).small()


@pytest.fixture(scope="module")
def params(config):
    return LanguageModel(config.network, config.vocab).init(jax.random.key(0))


@pytest.fixture(scope="module")
def updated(config, params):
    """Weights and metrics after an update in one part and in two."""
    ours = Ours(Case(config, "update", "float32"), params)

    def update(microbatches):
        (trained, _), metrics = ours.program(microbatches).run()
        return jax.tree.map(np.array, (trained.policy, metrics))

    return {n: update(n) for n in (1, 2)}


def test_the_shape_is_that_of_smollm2():
    """134,515,008 parameters, as its model card has it."""
    config = Config()
    model = LanguageModel(config.network, config.vocab)
    assert count_parameters(jax.eval_shape(model.init, jax.random.key(0))) == 134_515_008


def test_an_update_counts_every_token_of_every_sequence(config):
    """Of S + 1 tokens all but the last are fed, each of S is scored; backward is twice forward."""
    case = Case(config, "update", "float32")
    weights = 2 * 36 * (9 * 4 + 3 * 4) + 3 * 36 * 64  # of a layer: q, o, k, v; gate, up, down
    fed = 2 * 8 * 2 * weights  # 2 layers, S = 8, 2 FLOP
    pairs = 8 * 9 / 2 * 4 * 36 * 2  # each token sees itself and those before; scores and mixing
    head = 8 * 2 * 36 * 64
    assert case.flops == 3 * 4 * (fed + pairs + head)
    assert case.bytes_read == 0


def test_decoding_begins_with_the_prompts(config):
    case = Case(config, "decode", "float32")
    flops = case.workload.flops()
    assert case.flops == flops["prefill"] + flops["decode"]
    assert case.bytes_read == case.workload.decode_bytes()
    halved = dataclasses.replace(case, dtype="bfloat16")
    assert halved.bytes_read == case.bytes_read / 2


def test_every_completion_is_of_full_length(config, params):
    completions = Ours(Case(config, "decode", "float32"), params).program(1).run()
    assert completions.tokens.shape == (2, 2, 4)
    assert completions.loss_mask.all()


def test_all_weights_are_trained_on_every_token(updated, params):
    policy, metrics = updated[1]
    moved = jax.tree.map(lambda x, y: abs(x - y).max() > 1e-6, policy, params)
    assert all(jax.tree.leaves(moved))
    assert metrics["loss"] == pytest.approx(math.log(64), abs=0.05)  # fresh weights know nothing


def test_parts_of_the_gradient_make_the_same_update(updated):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *updated.values()
    )


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["decode-float32", "update-float32", "decode-bfloat16", "update-bfloat16"]),
        ({"phase": "update"}, ["update-float32", "update-bfloat16"]),
        ({"dtype": "bfloat16"}, ["decode-bfloat16", "update-bfloat16"]),
    ],
)
def test_cases_are_phases_in_types(fields, names):
    assert [case.name for case in bench.cases(Config(**fields))] == names


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"microbatches": (3,)}, "microbatches=.*divisors of sequences=16"),
        ({"peer_microbatches": ()}, "peer_microbatches=.*divisors"),
        ({"repeats": 0}, "repeats=0"),
        ({"sequence_tokens": 0}, "sequence_tokens=0"),
        ({"name": "a/b"}, "plain folder name"),
    ],
)
def test_what_cannot_be_timed_is_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        Config(**fields)


# This peer takes 100 s for a first step, and then 4 or 1 by microbatches.
FAKE = """
import json, sys
sizes = json.loads(sys.argv[1])
for line in sys.stdin:
    if line != "step\\n":
        given, first = json.loads(line), True
        says = {"settings": {"phase": sizes["phase"]}, "parameters": 1, "matmul_flops": 2e9}
        says |= {"versions": {"fake": "1.0"}}
    else:
        seconds = 100.0 if first else {1: 4.0, 2: 1.0}[given["microbatches"]]
        says, first = {"seconds": seconds, "resident_peak_bytes": 3 * 2**20}, False
    print(json.dumps(says), flush=True)
"""


class Clockwork:
    """A program of ours that takes 9, 0.25, 0.5, 0.125 s, and by 1 s longer in two parts."""

    compile_seconds = 1.0

    def __init__(self, microbatches):
        self.seconds = []
        self._next = itertools.cycle(x + microbatches - 1 for x in (9.0, 0.25, 0.5, 0.125))

    def run(self):
        self.seconds.append(next(self._next))


def compared(case, folder):
    script = folder / "fake.py"
    script.write_text(FAKE)
    sizes = bench.peer_sizes(case)
    with bench_peers.Peer([sys.executable, str(script)], sizes, folder / "log") as peer:
        return bench.compare(case, Clockwork, peer)


@pytest.fixture(scope="module")
def update(config, tmp_path_factory):
    config = dataclasses.replace(config, repeats=3)
    return compared(Case(config, "update", "float32"), tmp_path_factory.mktemp("update"))


def test_both_sides_are_compared_at_their_best(update):
    assert update["seconds_by_microbatches"] == {1: 0.25, 2: 1.25}
    assert update["microbatches"] == 1
    assert update["peer"]["seconds_by_microbatches"] == {1: 4.0, 2: 1.0}
    assert update["peer"]["microbatches"] == 2


def test_the_ratio_is_the_median_of_pairs_without_the_first(update):
    assert update["ratios"] == [4.0, 2.0, 8.0]
    assert update["ratio"] == 4.0
    ours, theirs = update["rows"]["jaxrl_llm"], update["rows"]["transformers"]
    assert (ours["median"], theirs["median"]) == (0.25, 1.0)
    assert (ours["tokens_per_second"], theirs["tokens_per_second"]) == (4 * 8 / 0.25, 4 * 8)
    assert theirs["resident_peak_bytes"] == 3 * 2**20
    assert ours["matmul_floor"] == theirs["matmul_floor"] > 0
    assert "memory_floor" not in ours


def test_decoding_has_no_microbatches_to_choose(config, tmp_path):
    result = compared(Case(config, "decode", "float32"), tmp_path)
    assert result["seconds_by_microbatches"] == {}
    assert result["rows"]["transformers"]["seconds"] == [4.0, 4.0]
    assert result["rows"]["jaxrl_llm"]["memory_floor"] > 0


def test_the_table_says_what_was_compared(update):
    text = bench.table({"update-float32": json.loads(json.dumps(update))})
    assert "| update-float32, transformers |" in text
    assert "transformers takes 4.00 times as long, median of 3 pairs from 2.00 to 8.00" in text
    assert "torch 2; microbatches 1 (tried 1: 0.2 s, 2: 1.2 s), transformers 2 (tried" in text
    assert f"load average {update['load_average']:.1f}; fake 1.0; phase=update" in text


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "update"])
def test_the_peer_has_the_same_network(config, params, phase, tmp_path):
    python = bench_peers.CACHE / "trl" / "bin" / "python"
    if not python.exists():
        pytest.skip("python -m experiments.bench_smollm2 has not installed it yet")
    case = Case(config, phase, "bfloat16")
    command = [str(python), str(bench.SCRIPT)]
    with bench_peers.Peer(command, bench.peer_sizes(case), tmp_path / "log") as peer:
        assert peer.start(2, 1)["parameters"] == count_parameters(params)
        assert peer.step()["seconds"] > 0
