import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import profiling
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.profiling import Machine, Program, Workload, live_heap, peak_of, traced

CONFIG = ModelConfig(width=24, layers=3, heads=4, kv_heads=2, head_width=10, mlp_width=20)
VOCAB = 11
B, G, P, T = 3, 2, 5, 4


@pytest.fixture(scope="module")
def workload():
    return Workload(
        model=CONFIG,
        vocab=VOCAB,
        prompts=B,
        group_size=G,
        prompt_tokens=P,
        completion_tokens=T,
    )


@pytest.fixture(scope="module")
def weights():
    """Sizes of what a token is multiplied with: the matrices of the layers."""
    shapes = jax.eval_shape(LanguageModel(CONFIG, VOCAB).init, jax.random.key(0))
    matrices = [x for x in jax.tree.leaves(shapes["blocks"]) if x.ndim == 3]
    return sum(x.size for x in matrices)


def attention_flop(n_seen):
    """One query's scores and weighted values, two FLOP for each of E numbers, H heads, L layers."""
    return sum(2 * 2 * 10 for _ in itertools.product(range(3), range(4), range(n_seen)))


def test_prefill_is_every_weight_for_every_token_and_what_each_query_sees(workload, weights):
    expected = sum(
        2 * weights + attention_flop(n_seen=position + 1) for _ in range(B) for position in range(P)
    )
    assert workload.flops()["prefill"] == expected


def test_decoding_feeds_all_tokens_but_the_last_and_predicts_all(workload, weights):
    expected = 0
    for _ in range(B * G):
        for t in range(T):
            expected += 2 * 24 * VOCAB
            if t < T - 1:
                expected += 2 * weights + attention_flop(n_seen=P + t + 1)
    assert workload.flops()["decode"] == expected


def test_an_iteration_is_one_forward_pass_to_sample_and_three_to_learn(workload):
    flops = workload.flops()
    assert flops["score"] == flops["prefill"] + flops["decode"]
    assert flops["update"] == 3 * flops["score"]
    assert flops["iteration"] == flops["prefill"] + flops["decode"] + flops["update"]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_decoding_reads_weights_prompts_and_own_positions_at_every_step(weights, dtype, size):
    config = ModelConfig(**vars(CONFIG) | {"dtype": dtype})
    numbers = 24 * VOCAB  # the first token needs only the head
    for t in range(1, T):
        numbers += weights + 24 * VOCAB
        positions = B * P + B * G * t
        numbers += positions * 2 * 2 * 10 * 3  # keys and values, K, E, L
    workload = Workload(
        model=config, vocab=VOCAB, prompts=B, group_size=G, prompt_tokens=P, completion_tokens=T
    )
    assert workload.decode_bytes() == size * numbers


def test_tokens_are_the_prompts_once_and_the_sampled_ones(workload):
    assert workload.tokens == {
        "prefill": 15, "decode": 24, "score": 24, "update": 24, "iteration": 24
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("Tesla V100-SXM2-16GB", 125),
    ],
)
def test_a_device_is_found_by_most_of_its_words(kind, teraflops):
    assert peak_of(kind).flops == teraflops * 1e12


def test_memory_tells_two_kinds_of_a100_apart():
    small, large = peak_of("NVIDIA A100-SXM4-40GB"), peak_of("NVIDIA A100-SXM4-80GB")
    assert (small.bandwidth, large.bandwidth) == (1.555e12, 2.039e12)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40", "NVIDIA H1000", "TPU v50"])
def test_of_an_unknown_device_nothing_is_promised(kind):
    assert peak_of(kind) is None


def ticking(step):
    """A clock that advances by `step` seconds whenever it is looked at."""
    return lambda clock=itertools.count(0): step * next(clock)


def test_rates_are_work_over_the_time_of_one_run(monkeypatch):
    machine = Machine("float32", side=8, mebibytes=1)
    monkeypatch.setattr(profiling.time, "perf_counter", ticking(0.5))
    machine.run()
    assert machine.flops == 2 * 8**3 / 0.5
    assert machine.bandwidth == 2 * 2**20 / 0.5


def test_the_fastest_run_counts(monkeypatch):
    machine = Machine("float32", side=8, mebibytes=1)
    for step in (0.5, 0.25, 1.0):
        monkeypatch.setattr(profiling.time, "perf_counter", ticking(step))
        machine.run()
    assert machine.flops == 2 * 8**3 / 0.25
    assert machine.bandwidth == 2 * 2**20 / 0.25


def test_a_program_that_carries_goes_on_from_its_own_result():
    program = Program("count", lambda n, by: (n + by, n), jnp.int32(1), jnp.int32(3), carries=True)
    seen = [int(program.run()[1]) for _ in range(3)]
    assert seen == [1, 4, 7]
    assert len(program.seconds) == 3


def test_a_program_that_does_not_carry_starts_from_the_same_arguments():
    program = Program("count", lambda n: n + 1, jnp.int32(1))
    assert [int(program.run()) for _ in range(2)] == [2, 2]


def test_what_is_carried_is_held_once():
    array = jnp.zeros(1000)
    kept = Program("kept", lambda x: (x + 1, ()), array)
    carried = Program("carried", lambda x: (x + 1, ()), array, carries=True)
    assert (kept.peak_bytes, carried.peak_bytes) == (8000, 4000)


def test_a_trace_names_its_programs(tmp_path):
    program = Program("walk the dog", lambda n: n + 1, jnp.int32(1))
    with traced(tmp_path):
        program.run()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert b"walk the dog" in trace.read_bytes()


def test_without_a_folder_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(jax.profiler, "trace", None)
    with traced(None):
        pass


@pytest.mark.skipif(live_heap() is None, reason="needs glibc 2.33 or newer")
def test_the_live_heap_holds_what_is_allocated_and_not_what_is_freed():
    """Small blocks and large ones, which malloc maps one by one."""
    for n_blocks, size in ((20_000, 1_000), (2, 50_000_000)):
        before = live_heap()
        blocks = [bytearray(size) for _ in range(n_blocks)]
        held = live_heap() - before
        assert held == pytest.approx(n_blocks * size, rel=0.2)
        del blocks
        assert abs(live_heap() - before) < 0.1 * held
