"""Traces: what they say is true, and their answers are right."""

import re
from fractions import Fraction

import numpy as np
import pytest

from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown_traces import derivations, trace
from jaxrl_llm.types import ConfigError

PROBLEMS = [([19, 5, 3], 42), ([7, 9, 18], 81), ([6, 15, 10], 75), ([2, 3, 4, 5], 29), ([8, 2], 4)]


def traces(max_failures=3, n=40):
    choice = np.random.default_rng(0)
    for numbers, target in PROBLEMS:
        for _ in range(n):
            yield numbers, target, trace(numbers, target, max_failures, choice)


def steps(line):
    return re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", line)


def apply(left, operator, right):
    left, right = Fraction(int(left)), Fraction(int(right))
    if operator in "+-":
        return left + right if operator == "+" else left - right
    return left * right if operator == "*" else left / right


def test_every_step_is_true_arithmetic():
    for _, _, text in traces():
        for left, operator, right, value in steps(text):
            assert apply(left, operator, right) == int(value)


def test_every_line_uses_each_number_once_and_says_whether_it_is_the_target():
    for numbers, target, text in traces():
        lines = text.splitlines()[1:-2]
        for line in lines:
            left = sorted(numbers)
            for a, _, b, value in steps(line):
                left.remove(int(a))
                left.remove(int(b))
                left.append(int(value))
            assert len(left) == 1
            assert line.endswith(" yes" if left[0] == target else " no")
        assert [line.endswith(" yes") for line in lines] == [False] * (len(lines) - 1) + [True]


def test_the_answer_is_one_that_the_solver_knows():
    for numbers, target, text in traces():
        answer = re.fullmatch(r"(?s)<think>\n.*\n</think>\n<answer>(.*)</answer>", text).group(1)
        assert re.fullmatch(r"[\d+*/()-]+", answer)
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", answer))  # digits and operators only
        assert value == target
        assert sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)


def test_the_number_of_failures_is_uniform_up_to_its_bound():
    choice = np.random.default_rng(1)
    counts = np.bincount([trace([19, 5, 3], 42, 2, choice).count(" no") for _ in range(3000)])
    assert len(counts) == 3
    assert np.abs(counts / 3000 - 1 / 3).max() < 0.035  # four standard errors


def test_failures_near_the_target_are_tried_more_often():
    choice = np.random.default_rng(1)
    first = [trace([19, 5, 3], 42, 1, choice).splitlines()[1] for _ in range(2000)]
    tried = [int(steps(line)[-1][3]) for line in first if line.endswith(" no")]
    near = sum(abs(value - 42) <= 6 for value in tried)
    far = sum(abs(value - 42) > 60 for value in tried)
    reached = {term.value for term in derivations((19, 5, 3))} - {42}
    is_rarer = sum(abs(v - 42) <= 6 for v in reached) <= sum(abs(v - 42) > 60 for v in reached)
    assert is_rarer and near > 3 * far


def test_derivations_reach_every_value_of_whole_steps():
    """Against the solver: each target that it solves in whole steps, and no other."""
    numbers = (3, 4, 10)
    reached = {term.value for term in derivations(numbers)}
    for target in range(1, 130):
        found = host.solutions(numbers, target)
        assert (target in reached) <= bool(found)
    assert {120, 70, 42, 17, 43, 2}.issubset(reached)  # by hand: 3·4·10, (3+4)·10, 3·(10+4), ...


def test_what_has_no_solution_has_no_trace():
    assert trace([1, 1, 1], 50, 3, np.random.default_rng(0)) is None


def test_five_numbers_are_refused():
    with pytest.raises(ConfigError, match="traces of 5 numbers: expected 1 to 4"):
        derivations((1, 2, 3, 4, 5))
