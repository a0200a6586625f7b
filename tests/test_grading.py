"""Graders in processes of their own: what hangs, dies or raises costs one answer."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import graders_for_tests
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import grading
from jaxrl_llm.grading import GradingPool, math_pool
from jaxrl_llm.types import ConfigError


@pytest.fixture(scope="module")
def pool():
    with GradingPool(graders_for_tests.made, seconds=0.7, workers=2) as pool:
        yield pool


def test_what_hangs_costs_one_answer_and_order_is_kept(pool):
    pool.grade([("0",)] * 2)  # has started
    start = time.monotonic()
    grades = pool.grade([("0.5",), ("hang",), ("1",), ("compute",), ("0",), ("0.75",)])
    assert [grade.value for grade in grades] == [0.5, 0.0, 1.0, 0.0, 0.0, 0.75]
    assert [grade.status for grade in grades] == ["ok", "timed_out", "ok", "timed_out", "ok", "ok"]
    assert grades[1].problem == "no grade after 0.7 s"
    assert time.monotonic() - start < 60.0


def test_what_dies_raises_or_exits_costs_one_answer(pool):
    grades = pool.grade([("die",), ("raise",), ("exit",), ("1",)])
    assert [grade.status for grade in grades] == ["failed"] * 3 + ["ok"]
    assert [grade.problem for grade in grades[:2]] == [
        "the process of the grader ended",
        "ZeroDivisionError: division by zero",
    ]
    assert grades[2].problem.startswith("SystemExit")
    assert grades[3].value == 1.0


def test_a_process_is_replaced_only_when_it_is_lost():
    with GradingPool(graders_for_tests.made, seconds=0.5) as pool:
        first, again = pool.grade([("pid",), ("pid",)])
        *_, after = pool.grade([("raise",), ("pid",)])
        assert first == again == after
        *_, other = pool.grade([("hang",), ("pid",)])
        assert other.status == "ok" and other.value != first.value
        assert not Path(f"/proc/{first.value}").exists()
    assert not Path(f"/proc/{other.value}").exists()


def test_a_process_that_ends_between_two_calls_costs_nothing():
    with GradingPool(graders_for_tests.made) as pool:
        pid = pool.grade([("pid",)])[0].value
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert pool.grade([("1",)]) == [grading.Grade(1.0)]


def test_a_large_request_to_a_process_that_ends_costs_one_answer(pool):
    grades = pool.grade([("die",), ("0" * 10**6 + "1",), ("1",)])
    assert [grade.value for grade in grades] == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_a_process_outlives_a_long_pause():
    with GradingPool(graders_for_tests.made, seconds=1.0) as pool:
        before = pool.grade([("pid",)])
        time.sleep(12.0)  # its own alarm, for when the pool is gone, is set to 11 s
        assert pool.grade([("pid",)]) == before


def test_what_graders_print_is_no_grade(pool):
    assert pool.grade([("print",), ("1",)]) == [grading.Grade(0.25), grading.Grade(1.0)]


def test_graders_see_no_keys_and_hash_alike(pool, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    with GradingPool(graders_for_tests.made) as fresh:
        secret, hashed = fresh.grade([("secret",), ("hash",)])
        assert secret.value is None
        assert hashed.value == pool.grade([("hash",)])[0].value


@pytest.mark.skipif(sys.platform != "linux", reason="needs Landlock")
def test_graders_write_no_files(pool):
    from jaxrl_llm.envs.host_tools import files_are_protected

    if not files_are_protected():
        pytest.skip("this kernel has no Landlock")
    assert "PermissionError" in pool.grade([("write",)])[0].problem


def test_answers_are_graded_within_a_compiled_program(pool):
    def score(x):
        return np.array([g.value for g in pool.grade((str(v),) for v in x.tolist())], np.float32)

    program = jax.jit(
        lambda x: 2 * jax.pure_callback(score, jax.ShapeDtypeStruct((2,), x.dtype), x)
    )
    np.testing.assert_array_equal(program(jnp.array([0.25, 0.5])), [0.5, 1.0])


def test_graders_that_cannot_be_made_are_refused():
    with GradingPool(graders_for_tests.unmakeable) as pool:
        with pytest.raises(ConfigError, match="cannot be made: ImportError: no module named tri"):
            pool.grade([("1",)])
    with pytest.raises(ConfigError, match="no function that other processes can import"):
        GradingPool(lambda: float)
    with pytest.raises(ConfigError, match="no function that other processes can import"):
        GradingPool(partial(max, lambda: 0))
    for wrong in ({"seconds": 0.0}, {"workers": 0}):
        with pytest.raises(ConfigError, match="expected > 0 and at least 1"):
            GradingPool(graders_for_tests.made, **wrong)


def test_a_grader_of_the_program_itself_is_refused():
    program = """
from jaxrl_llm.grading import GradingPool
from jaxrl_llm.types import ConfigError
def made(): return float
try: GradingPool(made)
except ConfigError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "made is defined in the program itself" in done.stdout


def test_graders_end_with_the_program():
    program = """
import sys; sys.path.insert(0, "tests")
import graders_for_tests
from jaxrl_llm.grading import GradingPool
pool = GradingPool(graders_for_tests.made)
print(pool.grade([("pid",)])[0].value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_equal_expressions_are_equal_however_they_are_written():
    pytest.importorskip("math_verify")
    equal = [
        ("0.5", r"\frac{1}{2}"),
        ("1+x^2", "x^2+1"),
        ("1,000", "1000"),
        (r"\sqrt2", r"\sqrt{2}"),
    ]
    other = [("0.51", r"\frac{1}{2}"), ("x^2-1", "x^2+1"), ("100", "1000"), (None, "1"), ("", "1")]
    with math_pool(seconds=20.0) as pool:
        assert [grade.value for grade in pool.grade(equal + other)] == [1.0] * 4 + [0.0] * 5


def test_without_math_verify_nothing_else_compares(monkeypatch):
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "math-verify\[antlr4_13_2\]"'):
        math_pool()
