"""Checkpoints come back bit for bit, or are passed over with one line."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.types import ConfigError


class Pool(NamedTuple):
    items: object
    count: object


@flax.struct.dataclass
class State:
    params: dict
    opt_state: object
    key: object
    pool: Pool
    host: dict


def make_state(seed: int = 0) -> State:
    """Every kind of leaf that a training state may have."""
    key = jax.random.key(seed)
    params = {
        "w": jax.random.normal(key, (3, 4)),
        "a/b": {"half": jax.random.normal(key, (5,), jnp.bfloat16)},
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]),
        "none": None,
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    pool = Pool((jnp.zeros((0, 3), jnp.int32), jnp.arange(4, dtype=jnp.uint32)), jnp.array(True))
    host = {"array": np.arange(6.0), "f32": np.float32(0.1), "int": 7, "float": 0.1, "flag": True}
    return State(params, optimizer.init(params), {"one": key, "many": keys}, pool, host)


def zeros_like(state: State) -> State:
    def zero(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                jnp.zeros_like(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        return jnp.zeros_like(x) if isinstance(x, jax.Array) else type(x)(np.asarray(x) * 0)

    return jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else zero(x), state)


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def small(value: float) -> dict:
    return {"w": jnp.full((4, 3), float(value)), "n": jnp.int32(value)}


def save_steps(folder: Path, *steps: int, **options) -> None:
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, small(step), extra={"step": step})


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    state = make_state()
    extra = {"pool": [1, 2.5], "name": "é", "none": None}
    with Checkpoints(tmp_path / "deep" / "checkpoints") as checkpoints:
        assert checkpoints.restore_latest(state) is None
        checkpoints.save(3, state, extra=extra)
        found = checkpoints.restore_latest(zeros_like(state))
    assert found.step == 3
    assert found.extra == extra
    assert_same_bits(found.state, state)


def test_an_abstract_template_and_another_process_lifetime_will_do(tmp_path):
    state = {"key": jax.random.key(5), "w": jnp.arange(6.0).reshape(2, 3), "e": jnp.zeros((2, 0))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore_latest(jax.eval_shape(lambda: state))
    assert (found.step, found.extra) == (0, {})
    assert_same_bits(found.state, state)


def test_the_sharding_is_the_templates(tmp_path):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    save_steps(tmp_path, 1)
    template = jax.tree.map(lambda x: jax.device_put(x, sharding), {"w": small(0)["w"]})
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore_latest(template | {"n": jnp.int32(0)})
    assert found.state["w"].sharding == sharding


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    advance = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = advance({str(i): jnp.zeros((300, 300)) for i in range(4)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(20):
            state = advance(state)
        found = checkpoints.restore_latest(state)
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(found.state))


def test_the_newest_k_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 10, 11, keep=3)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 10, 11]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "10", "11"}


def test_saving_a_step_again_keeps_what_is_there(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, small(1))
        checkpoints.save(4, small(2))
        assert checkpoints.restore_latest(small(0)).state["n"] == 1


def test_a_save_is_due_when_a_multiple_of_every_has_been_passed(tmp_path):
    with Checkpoints(tmp_path, every=10) as checkpoints:
        assert [step for step in (0, 4, 8) if checkpoints.is_due(step)] == []
        assert checkpoints.is_due(12)
        checkpoints.save(12, small(0))
        assert not checkpoints.is_due(16)
        assert checkpoints.is_due(20)
    with Checkpoints(tmp_path, every=10) as checkpoints:
        checkpoints.restore_latest(small(0))
        assert not checkpoints.is_due(16)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("garbage")


DAMAGES = {
    "one flipped bit in the arrays": lambda folder: flip_a_byte(largest_file(folder / "state")),
    "one flipped bit in extra": lambda folder: flip_a_byte(folder / "about.json"),
    "truncated": lambda folder: largest_file(folder).write_bytes(b""),
    "a file deleted": lambda folder: largest_file(folder / "state").unlink(),
    "digests deleted": lambda folder: (folder / "sha256.json").unlink(),
    "digests garbage": lambda folder: (folder / "sha256.json").write_bytes(b"\xff\x00"),
    "digests of another kind": lambda folder: (folder / "sha256.json").write_text("[]"),
    "empty folder": empty_the_folder,
    "not a folder": become_a_file,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_moved_aside_and_the_one_before_used(tmp_path, damage):
    save_steps(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "2")
    said = []
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        found = checkpoints.restore_latest(small(0))
        assert (found.step, found.extra) == (1, {"step": 1})
        assert_same_bits(found.state, small(1))
        assert len(said) == 1 and "\n" not in said[0]
        assert "step 2" in said[0] and "step 1" in said[0]
        assert (tmp_path / "2.damaged").exists() and checkpoints.steps() == [1]
        checkpoints.save(2, small(2))  # the resumed run comes by again
        assert checkpoints.restore_latest(small(0)).step == 2
    assert len(said) == 1


def test_a_second_damaged_checkpoint_of_a_step_does_not_replace_the_first(tmp_path):
    for _ in range(2):
        save_steps(tmp_path, 1, 2)
        empty_the_folder(tmp_path / "2")
        with Checkpoints(tmp_path, say=lambda _: None) as checkpoints:
            checkpoints.restore_latest(small(0))
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2.damaged", "2.damaged-2"}


def test_only_damaged_checkpoints_are_refused_and_left_where_they_are(tmp_path):
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        empty_the_folder(tmp_path / str(step))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match=r"no checkpoint in .*: mv "):
            checkpoints.restore_latest(small(0))
        assert checkpoints.steps() == [1, 2]


def test_another_models_checkpoint_is_refused_and_the_difference_named(tmp_path):
    save_steps(tmp_path, 1)
    template = {"w": jnp.zeros((4, 8)), "m": jnp.zeros(3)}
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ConfigError) as refusal:
        checkpoints.restore_latest(template)
    message = str(refusal.value)
    assert "['w'] is float32[4, 3] there and float32[4, 8] here" in message
    assert "['n'] is int32[] there and absent here" in message
    assert "['m'] is absent there and float32[3] here" in message
    assert "\n" not in message


def test_another_dtype_is_refused_instead_of_cast(tmp_path):
    save_steps(tmp_path, 1)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ConfigError, match="bfloat16"):
        checkpoints.restore_latest({"w": jnp.zeros((4, 3), jnp.bfloat16), "n": jnp.int32(0)})


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_failed_save_is_raised_by_the_next_call(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_llm.checkpoint._digests", lambda _: 1 / 0)
        checkpoints.save(1, small(1))
        with pytest.raises(ZeroDivisionError):
            checkpoints.wait()
    checkpoints.save(1, small(1))
    assert checkpoints.restore_latest(small(0)).step == 1
    checkpoints.close()


def test_orbax_is_quiet_and_others_are_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    before = list(logging.getLogger("absl").filters)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1))
        checkpoints.restore_latest(small(0))
        logging.getLogger("absl").info("mine")
    assert [r.getMessage() for r in caplog.records if r.name == "absl"] == ["mine"]
    assert logging.getLogger("absl").filters == before


def test_whatever_the_moment_of_a_kill_a_whole_checkpoint_lies_there(tmp_path):
    folder, moments, watched = tmp_path / "checkpoints", [], set()

    def photograph(event: str, args: tuple) -> None:
        """Copy the folder before each write, rename and removal of the thread that finishes."""
        is_change = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        is_change |= event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        thread = threading.current_thread()
        if is_change and thread in watched:
            watched.remove(thread)  # the copy is no moment
            moments.append(tmp_path / f"moment {len(moments)}")
            shutil.copytree(folder, moments[-1])
            watched.add(thread)

    sys.addaudithook(photograph)  # it cannot be removed, but it then watches nobody
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, small(1))
        checkpoints.wait()
        watched.update(t for t in threading.enumerate() if t.name.startswith("checkpoint"))
        checkpoints.save(2, small(2))
        checkpoints.wait()
        watched.clear()
    steps, said = [], []
    for moment in moments:
        with Checkpoints(moment, keep=1, say=said.append) as checkpoints:
            steps.append(checkpoints.steps()[-1])
            while found := checkpoints.restore_latest(small(0)):  # every one is whole
                assert_same_bits(found.state, small(found.step))
                shutil.rmtree(moment / str(found.step))
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert said == []


ENDLESS = """
import sys
import jax.numpy as jnp
from jaxrl_llm.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
for step in range(1, 100_000):
    checkpoints.save(step, {"w": jnp.full((4, 3), float(step)), "n": jnp.int32(step)})
    print(step, flush=True)
"""


@pytest.mark.parametrize("moment", [0.0, 0.03])
def test_killed_in_the_middle_of_saving_a_whole_checkpoint_remains(tmp_path, moment):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while int(process.stdout.readline()) < 3:
            pass
        time.sleep(moment)
        process.kill()
        started = 3 + len(process.stdout.read().split())
    said = []
    with Checkpoints(tmp_path, keep=1, say=said.append) as checkpoints:
        step, state, _ = checkpoints.restore_latest(small(0))
        assert started - 1 <= step <= started + 1
        assert (state["w"] == step).all() and state["n"] == step
        assert said == []
        assert all(path.name.isdigit() for path in tmp_path.iterdir())
