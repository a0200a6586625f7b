"""Countdown on the host: an exact solver that shares no code with the compiled environment.

Pure Python on exact rationals. It checks that drawn problems are solvable, and writes the
solutions that a policy is warm-started on.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from jaxrl_llm.types import ConfigError

MAX_NUMBERS = 6
_LOOKUP_SIZE = 3  # up to here every expression is listed; beyond, the target is searched backwards
_UINT32 = 0xFFFFFFFF

Term = tuple[Fraction, str]  # a value and how it is written


class Expression(NamedTuple):
    """A sum of signed terms or a product of factors and divisors, flattened and sorted.

    Sums hold no sums and products no products, and both are sorted, so expressions that differ
    only by commutativity, associativity or a moved parenthesis are written alike.
    """

    value: Fraction
    text: str
    operator: str  # "+" a sum, "*" a product, "" a number
    direct: tuple[Term, ...]  # added, or multiplied
    inverse: tuple[Term, ...]  # subtracted, or divided by


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression that uses each of `numbers` exactly once and equals `target`, or None.

    The search is exhaustive over the exact rationals: None means that no solution exists. It may
    take a second for six numbers.

    >>> solve([3, 3, 8, 8], 24)
    '8/(3-8/3)'

    Raises:
        ConfigError: not 1 to 6 positive numbers, or a target below 1.
    """
    found = next(_expressions(*_checked(numbers, target)), None)
    return None if found is None else found.text


def solutions(numbers: Sequence[int], target: int) -> list[str]:
    """All distinct solutions, sorted; no two are equal up to commutativity or associativity.

    Intermediate values are never negative: by moving signs, every solution can be written so.
    Milliseconds up to four numbers (cached up to three); seconds for six.

    >>> solutions([2, 3, 4], 20)
    ['(3+2)*4']

    Raises:
        ConfigError: not 1 to 6 positive numbers, or a target below 1.
    """
    return sorted({found.text for found in _expressions(*_checked(numbers, target))})


def problem_key_hash(numbers: Sequence[int], target: int) -> int:
    """A 32-bit hash of the key (target, sorted numbers), whatever the order of the numbers.

      h = m(Σᵢ m(nᵢ) + m(256·target)) mod 2³²,   m the 32-bit finalizer of MurmurHash3

    m(0) = 0, so zeros that pad the numbers change nothing. The compiled twin is
    `countdown.problem_key_hash`.
    """
    total = sum(_mix(int(number)) for number in numbers) + _mix(int(target) << 8)
    return _mix(total & _UINT32)


def split_of(numbers: Sequence[int], target: int, held_out_every: int) -> int:
    """0 when the problem belongs to the training split, 1 when it is held out."""
    return int(problem_key_hash(numbers, target) % held_out_every == 0)


def _mix(word: int) -> int:
    word ^= word >> 16
    word = word * 0x85EBCA6B & _UINT32
    word ^= word >> 13
    word = word * 0xC2B2AE35 & _UINT32
    return word ^ word >> 16


def _checked(numbers: Sequence[int], target: int) -> tuple[tuple[int, ...], Fraction]:
    ordered = tuple(sorted(int(number) for number in numbers))
    if not 1 <= len(ordered) <= MAX_NUMBERS or ordered[0] < 1 or target < 1:
        raise ConfigError(
            f"cannot solve numbers={list(ordered)}, target={target}: expected 1 to {MAX_NUMBERS} "
            "numbers and a target, all at least 1"
        )
    return ordered, Fraction(int(target))


def _expressions(numbers: tuple[int, ...], target: Fraction) -> Iterator[Expression]:
    """Every expression of `numbers` that equals `target`, repeated if found in several ways.

    The last step is left ∘ right = target. For every value that the smaller side can take, the
    larger side has a known target of its own.
    """
    if len(numbers) <= _LOOKUP_SIZE:
        yield from _by_value(numbers).get(target, {}).values()
        return
    for left_numbers, right_numbers in _divisions(numbers):
        for right_value, rights in _by_value(right_numbers).items():
            for left_value in _partners(left_numbers, right_value, target):
                for left in _expressions(left_numbers, left_value):
                    for right in rights.values():
                        yield from (e for e in _combine(left, right) if e.value == target)


@lru_cache(maxsize=2048)  # holds all that three numbers up to 20 need
def _by_value(numbers: tuple[int, ...]) -> dict[Fraction, dict[str, Expression]]:
    """All expressions of a few numbers, by value and by text."""
    found: dict[Fraction, dict[str, Expression]] = defaultdict(dict)
    if len(numbers) == 1:
        value, text = Fraction(numbers[0]), str(numbers[0])
        found[value][text] = Expression(value, text, "", ((value, text),), ())
    for left_numbers, right_numbers in _divisions(numbers):
        for left in _flat(_by_value(left_numbers)):
            for right in _flat(_by_value(right_numbers)):
                for result in _combine(left, right):
                    found[result.value][result.text] = result
    return dict(found)


def _flat(by_value: dict[Fraction, dict[str, Expression]]) -> Iterator[Expression]:
    return (expression for same in by_value.values() for expression in same.values())


@lru_cache(maxsize=4096)
def _divisions(numbers: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ways to part sorted numbers in two, the larger part first, without repetition."""
    places = range(len(numbers))
    parts = {
        (
            tuple(numbers[i] for i in places if i not in right),
            tuple(numbers[i] for i in right),
        )
        for size in range(1, len(numbers) // 2 + 1)
        for right in combinations(places, size)
    }
    return sorted(parts, key=lambda pair: (len(pair[1]), pair))


def _partners(
    left_numbers: tuple[int, ...], right: Fraction, target: Fraction
) -> set[Fraction] | list[Fraction]:
    """The values v ≥ 0 for which v ∘ right or right ∘ v can be `target`."""
    if right == 0 == target:  # 0 · v: every v will do; a 0 needs two numbers, so few are left
        return list(_by_value(left_numbers))
    values = {target - right, target + right, right - target, target * right}
    if right != 0:
        values.add(target / right)
    if target != 0:
        values.add(right / target)
    return {value for value in values if value >= 0}


def _combine(a: Expression, b: Expression) -> Iterator[Expression]:
    """a + b, |a − b|, a · b, a / b and b / a."""
    large, small = (a, b) if a.value >= b.value else (b, a)
    yield _join("+", a.value + b.value, large, small)
    yield _join("+", large.value - small.value, large, small, inverted=True)
    yield _join("*", a.value * b.value, large, small)
    for over, under in ((a, b), (b, a)):
        if under.value != 0:
            yield _join("*", over.value / under.value, over, under, inverted=True)


def _join(
    operator: str, value: Fraction, a: Expression, b: Expression, *, inverted: bool = False
) -> Expression:
    a_direct, a_inverse = _terms(a, operator)
    b_direct, b_inverse = _terms(b, operator)
    if inverted:
        b_direct, b_inverse = b_inverse, b_direct
    direct = tuple(sorted(a_direct + b_direct, reverse=True))
    inverse = tuple(sorted(a_inverse + b_inverse, reverse=True))
    opposite = {"+": "-", "*": "/"}[operator]
    text = operator.join(text for _, text in direct)
    text += "".join(opposite + text for _, text in inverse)
    return Expression(value, text, operator, direct, inverse)


def _terms(expression: Expression, operator: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """The terms that `expression` contributes to a sum ("+") or a product ("*")."""
    if expression.operator in ("", operator):
        return expression.direct, expression.inverse
    text = f"({expression.text})" if operator == "*" else expression.text
    return ((expression.value, text),), ()
