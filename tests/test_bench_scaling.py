import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_scaling
from experiments.bench_scaling import END, Config, Moment
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError, Prompts


class Clockwork:
    """A program that takes 9 s the first time, then the times given; it notes its turns."""

    def __init__(self, name, times, turns):
        self.name, self.turns, self.seconds = name, turns, []
        self._next = iter([9.0, *times])

    def run(self):
        self.turns.append(self.name)
        self.seconds.append(next(self._next))


def test_programs_run_forth_and_back_and_the_first_turn_does_not_count():
    turns = []
    programs = {"a": Clockwork("a", [1.0, 2.0], turns), "b": Clockwork("b", [3.0, 4.0], turns)}
    assert bench_scaling.in_turn(programs, 2) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert "".join(turns) == "abbaab"


def test_ratios_are_of_the_pairs_of_a_turn():
    found = bench_scaling.ratios([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert found == {"ratio": 2.0, "low": 1.0, "high": 3.0}


BASE = bench.Config(prompts=4, group_size=2, completion_tokens=8, microbatches=2)


def test_one_size_is_multiplied_and_parts_of_the_gradient_keep_their_prompts():
    for axis, name in (("B", "prompts"), ("G", "group_size"), ("T", "completion_tokens")):
        grown = bench_scaling.multiplied(BASE, axis, 5)
        assert getattr(grown, name) == 5 * getattr(BASE, name)
        assert grown.train.microbatch == BASE.train.microbatch == 2
        sizes = {name: getattr(BASE, name), "microbatches": BASE.microbatches}
        assert dataclasses.replace(grown, **sizes) == BASE
    deep = bench_scaling.multiplied(BASE, "L", 5)
    assert deep.network.layers == 5 * BASE.network.layers
    assert dataclasses.replace(deep, network=BASE.network) == BASE


@pytest.mark.parametrize("axis", ["B", "G", "T", "L"])
def test_an_exponent_is_fitted_in_every_turn(axis):
    shapes = [bench_scaling.multiplied(BASE, axis, factor) for factor in (1, 2, 10)]
    powers = [0.5, 1.5, 1.25]
    seconds = {s: [f**p for p in powers] for s, f in zip(shapes, (1, 2, 10), strict=True)}
    found = bench_scaling.growth(axis, shapes, seconds)
    assert found["sizes"] == [found["sizes"][0] * factor for factor in (1, 2, 10)]
    np.testing.assert_allclose([found[n] for n in ("low", "exponent", "high")], [0.5, 1.25, 1.5])
    assert math.isclose(found["last_exponent"], 1.25)
    assert found["median"][2] == 10**1.25


def test_the_flop_grow_in_proportion_to_rows_and_a_little_faster_with_their_length():
    def flop_exponent(axis):
        shapes = [bench_scaling.multiplied(BASE, axis, factor) for factor in (1, 10)]
        return bench_scaling.growth(axis, shapes, {s: [1.0] for s in shapes})["flop_exponent"]

    assert math.isclose(flop_exponent("B"), 1.0)
    assert flop_exponent("G") < 1.0  # the prompts' prefill does not grow
    assert flop_exponent("L") < 1.0  # nor do the logits


def test_every_axis_has_its_panel(tmp_path):
    shapes = {axis: [bench_scaling.multiplied(BASE, axis, f) for f in (1, 10)] for axis in "BGTL"}
    result = {
        axis: bench_scaling.growth(axis, line, {line[0]: [1.0, 2.0], line[1]: [9.0, 8.0]})
        for axis, line in shapes.items()
    }
    bench_scaling.plot(result, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    for found in result.values():
        bench_scaling.SAYS["scaling"].format(**found)


T = 64


@pytest.fixture(scope="module")
def lengths():
    """Lengths `[B, G]` drawn by each of the endings."""
    config, vocab = ModelConfig(width=16, layers=1, heads=2), 64
    params = LanguageModel(config, vocab).init(jax.random.key(0))
    prompts = Prompts(jnp.ones((64, 2), int), jnp.ones((64, 2), bool))
    keys = jax.random.split(jax.random.key(1), (64, 16))
    sampling = SamplingConfig(max_tokens=T, block=16)

    @jax.jit
    def draw(logits):
        model = bench_scaling.Ending(config, vocab, logits)
        drawn = sample(params, model, prompts, keys, sampling, eos_ids=(END,), pad_id=5)
        return drawn.loss_mask.sum(-1)

    return {name: draw(jnp.float32(x)) for name, x in bench_scaling.endings(T, vocab).items()}


def test_completions_are_of_the_full_length_or_a_quarter_on_average(lengths):
    assert (lengths["full"] == T).all() and (lengths["all at a quarter"] == T // 4).all()
    assert lengths["uniform"].min() == 1 and lengths["uniform"].max() == T // 2 - 1
    for name in ("uniform", "geometric"):
        assert lengths[name].mean() == pytest.approx(T / 4, rel=0.1)


def test_uniform_lengths_are_spread_evenly_and_geometric_ones_have_no_memory(lengths):
    assert np.std(lengths["uniform"]) == pytest.approx(T / 2 / 12**0.5, rel=0.1)
    beyond = [(lengths["geometric"] > n).mean() for n in (8, 16, 24)]
    assert beyond[1] / beyond[0] == pytest.approx((1 - 4 / T) ** 8, rel=0.1)
    assert beyond[2] / beyond[1] == pytest.approx((1 - 4 / T) ** 8, rel=0.1)


def moments(*pairs):
    return [Moment(begin, end, 0) for begin, end in pairs]


def test_the_hosts_share_is_what_lies_between_calls():
    # Three calls of 2 s each, 0.5 s between them.
    found = bench_scaling.host_share(moments((0, 2), (2.5, 4.5), (5, 7)), 1, 50)
    assert found["share"] == 0.5 / 2.5
    assert found["share_with_saving"] == 1.0 / 7.0
    assert found["milliseconds"] == 500
    assert found["saving_seconds"] is None


def test_time_of_saving_is_told_apart():
    # In calls of 2, with a checkpoint every 3: after 4, 6 and 10 iterations, not after 2 and 8.
    begins = np.cumsum([0, 1.5, 8, 8, 1.5, 8])
    found = bench_scaling.host_share(moments(*((b, b + 1) for b in begins)), 2, 3)
    assert found["milliseconds"] == 500
    assert found["saving_seconds"] == 7
    assert found["share_with_saving"] == 22 / 28
    assert found["iteration_seconds"] == 0.5


def test_memory_is_compared_after_a_tenth_of_the_run_and_after_half(monkeypatch):
    held = [int(1e6) * n for n in [50, 51, 60, 61, 62, 63, 64, 65, 66, 70] * 2]
    monkeypatch.setattr(
        bench_scaling, "watch", lambda *_, **__: [Moment(0.0, 0.0, n, n // 2) for n in held]
    )
    config = Config(tiny=dataclasses.replace(Config().tiny, iterations_per_call=5))
    (figures,) = (found := bench_scaling.memory(config)).values()
    assert list(found) == ["10 to 100"]
    assert (figures["growth_mb"], figures["second_half_mb"]) == (70 - 51, 70 - 70)
    assert figures["largest_drop_mb"] == 70 - 50
    assert figures["allocated_growth_mb"] == (70 - 51) / 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(smoke=True, root=tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_every_call_of_a_run_is_watched(config):
    small = config.small()
    watched = bench_scaling.watch(small.network, small.hosted)
    assert len(watched) == small.hosted.iterations / small.hosted.iterations_per_call
    times = [time for one in watched for time in (one.begin, one.end)]
    assert times == sorted(times)
    assert all(2**20 < one.resident <= bench.resident_peak() for one in watched)


def test_a_part_measured_again_leaves_the_others(config, monkeypatch):
    again = iter([1, 2])
    monkeypatch.setitem(bench_scaling.PARTS, "host", lambda config: {"all": {"x": 0}})
    monkeypatch.setitem(bench_scaling.PARTS, "memory", lambda config: {"all": {"x": next(again)}})
    for part in ("host", "memory"):
        monkeypatch.setitem(bench_scaling.SAYS, part, "{x}")
    for part in ("memory", "host", "memory"):
        bench_scaling.main(dataclasses.replace(config, only=part, name="again"))
    results = json.loads((config.root / "bench_scaling" / "again" / "scaling.json").read_text())
    found = {part: x["result"]["all"]["x"] for part, x in results.items()}
    assert found == {"memory": 2, "host": 0}
    assert all({"config", "provenance"} < set(x) for x in results.values())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"factors": (2, 4)}, "expected 1 and at least one more"),
        ({"factors": (1, 1)}, "expected 1 and at least one more"),
        ({"seeds": 1}, "seeds=1"),
        ({"hosted": TrainConfig(iterations=19)}, "two calls at least"),
        ({"repeats": 0}, "repeats=0"),
        ({"name": "a/b"}, "plain folder name"),
        ({"sampled": bench.Config(completion_tokens=7)}, "at least 8"),
    ],
)
def test_what_cannot_be_timed_is_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        Config(**fields)


@pytest.mark.slow
@pytest.mark.slow
def test_all_parts_are_measured(config, capsys):
    bench_scaling.main(config)
    folder = config.root / "bench_scaling" / "smoke"
    results = json.loads((folder / "scaling.json").read_text())
    assert set(results) == set(bench_scaling.PARTS)
    assert results["lengths"]["result"]["all at a quarter"]["mean_length"] == 4
    assert (folder / "scaling.png").exists()
    assert "goal" in capsys.readouterr().out
