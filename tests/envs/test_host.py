"""The host solver against a brute force that shares nothing with it."""

import ast
import itertools
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from jaxrl_llm.envs import host
from jaxrl_llm.types import ConfigError


def value_of(node: ast.expr) -> Fraction:
    """The exact value of a parsed expression."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = value_of(node.left), value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    assert isinstance(node.op, ast.Div)
    return left / right


def is_solution(text: str, numbers: list[int], target: int) -> bool:
    assert re.fullmatch(r"[0-9+\-*/()]+", text)
    used = Counter(map(int, re.findall(r"\d+", text)))
    return used == Counter(numbers) and value_of(ast.parse(text, mode="eval").body) == target


def every_value(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """All values, negative ones too, by combining ordered pairs until one number is left."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        for result in [a + b, a - b, a * b] + ([a / b] if b else []):
            found |= every_value((*rest, result))
    return found


@pytest.mark.parametrize("count, n", [(2, 20), (3, 60), (4, 6)])
def test_the_solver_finds_exactly_the_targets_that_brute_force_finds(count, n):
    rng = random.Random(count)
    for _ in range(n):
        numbers = [rng.randint(1, 13) for _ in range(count)]
        reachable = every_value(tuple(map(Fraction, numbers)))
        solved = {target for target in range(1, 120) if host.solve(numbers, target)}
        assert solved == {value for value in reachable if value in range(1, 120)}


@pytest.mark.parametrize("numbers", [[2, 3, 5, 5, 7], [1, 1, 2, 2, 2]])
def test_with_five_numbers_the_backward_search_misses_nothing(numbers):
    # Every value of 5 numbers is u ∘ v for a part of 4 or 3 numbers and the rest.
    reachable = set()
    for size in (1, 2):
        for right in itertools.combinations(range(5), size):
            left = tuple(Fraction(numbers[i]) for i in range(5) if i not in right)
            rights = every_value(tuple(Fraction(numbers[i]) for i in right))
            for a, b in itertools.product(every_value(left), rights):
                reachable |= {a + b, a - b, b - a, a * b}
                reachable |= {a / b} if b else set()
                reachable |= {b / a} if a else set()
    for target in range(1, 150, 7):
        assert (host.solve(numbers, target) is not None) == (target in reachable)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_every_solution_uses_each_number_once_and_equals_the_target(count):
    rng = random.Random(count)
    n_solved = 0
    for _ in range(20):
        numbers, target = [rng.randint(1, 12) for _ in range(count)], rng.randint(1, 40)
        found = host.solutions(numbers, target)
        assert all(is_solution(text, numbers, target) for text in found)
        assert len(set(found)) == len(found)
        first = host.solve(numbers, target)
        assert first in found if found else first is None
        n_solved += bool(found)
    assert n_solved >= 3


def test_six_numbers_are_solved():
    numbers = [75, 50, 2, 3, 8, 7]
    text = host.solve(numbers, 812)
    assert text is not None and is_solution(text, numbers, 812)


def test_known_problems():
    assert host.solve([3, 3, 8, 8], 24) == "8/(3-8/3)"  # only through fractions
    assert host.solve([1, 1, 1, 1], 24) is None
    assert host.solve([1, 1, 1, 1, 1, 1], 100) is None
    assert host.solve([7], 7) == "7"
    assert host.solve([1, 1, 97, 89, 50], 50) is not None  # through 1−1 = 0


def test_solutions_are_distinct_up_to_order_grouping_and_moved_signs():
    assert host.solutions([2, 3, 4], 24) == ["4*3*2"]
    assert host.solutions([2, 3, 4], 9) == ["4+3+2"]
    assert host.solutions([3, 7, 12], 8) == ["12+3-7"]  # also 12-(7-3) and 3-7+12
    assert host.solutions([2, 3, 4], 20) == ["(3+2)*4"]
    # Also 6/(2/4), (6/2)*4, and the like.
    assert host.solutions([6, 4, 2], 12) == ["6*(4-2)", "6*4/2", "6+4+2"]


def test_solutions_through_zero_times_anything_are_listed():
    assert "5+(4+3+2)*(1-1)" in host.solutions([1, 1, 2, 3, 4, 5], 5)


@pytest.mark.parametrize(
    "numbers, target", [([], 5), ([1] * 7, 5), ([0, 1, 2], 3), ([-1, 2, 3], 4), ([1, 2, 3], 0)]
)
def test_hostile_problems_are_refused(numbers, target):
    with pytest.raises(ConfigError, match="expected 1 to 6 numbers"):
        host.solve(numbers, target)


def test_the_hash_ignores_order_and_padding_and_nothing_else():
    seen = set()
    for numbers in itertools.combinations_with_replacement(range(1, 21), 3):
        for target in range(1, 21):
            key = host.problem_key_hash(numbers, target)
            assert key == host.problem_key_hash([0, *numbers[::-1], 0, 0], target)
            seen.add(key)
    # 30,800 keys in 2³² places: 0.11 collisions expected.
    assert len(seen) >= 1540 * 20 - 2
    assert 0 <= min(seen) and max(seen) < 2**32


def test_one_key_in_eight_is_held_out():
    numbers = list(itertools.combinations_with_replacement(range(1, 21), 3))
    n_held_out = sum(host.split_of(n, target, 8) for n in numbers for target in (5, 50))
    expected, sd = len(numbers) * 2 / 8, (len(numbers) * 2 * 7 / 64) ** 0.5
    assert abs(n_held_out - expected) < 4 * sd
