"""The grader against Python's own parser and `fractions`, and against hand-made hostile texts."""

import ast
import itertools
import random
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs.expression import Grade, find_answer, grade, grade_tagged

ROOM = 64  # bytes of a text in a batch
ROWS = 2048
ALPHABET = b"0123456789+-*/() "
HOSTILE = b".=\x00\n\t,x^%_e:" + "٣−×".encode()
FUNCTIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
PRIMES = (32749, 32719, 32717, 32713)
NUMBERS = (3, 3, 8, 8)

grade_batch = jax.jit(jax.vmap(grade))
grade_tagged_batch = jax.jit(jax.vmap(grade_tagged))


def parse(text: bytes) -> tuple[list[int], Fraction] | None:
    """The literals and the value of a text, by Python's parser; None if it is wrong."""
    if set(text) - set(ALPHABET):
        return None
    literals = []

    def evaluate(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(value)):
                literals.append(value)
                return Fraction(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in FUNCTIONS:
                return FUNCTIONS[type(op)](evaluate(left), evaluate(right))
        raise SyntaxError

    try:
        value = evaluate(ast.parse(text.decode().strip(" "), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None
    return literals, value


def is_right(text: bytes, numbers: tuple[int, ...], target: int) -> bool:
    parsed = parse(text)
    used = sorted(n for n in numbers if n)
    return parsed is not None and sorted(parsed[0]) == used and parsed[1] == target


def grade_all(rows: list[tuple[bytes, tuple[int, ...], int]], grader=grade_batch) -> Grade:
    """Verdicts on (text, six numbers, target), in batches of one shape."""
    verdicts = []
    for start in range(0, len(rows), ROWS):
        batch = rows[start : start + ROWS]
        batch += [(b"", (0,) * 6, 0)] * (ROWS - len(batch))
        texts, numbers, targets = zip(*batch, strict=True)
        padded = b"".join(text[:ROOM].ljust(ROOM, b"\0") for text in texts)
        verdicts.append(
            grader(
                np.frombuffer(padded, np.uint8).reshape(ROWS, ROOM),
                np.array([len(text) for text in texts], np.int32),
                np.array(numbers, np.int32),
                np.array(targets, np.int32),
            )
        )
    return Grade(*(np.concatenate(parts)[: len(rows)] for parts in zip(*verdicts, strict=True)))


def grade_one(text: bytes | str, numbers=NUMBERS, target=24, grader=grade_batch) -> Grade:
    text = text.encode() if isinstance(text, str) else text
    padded = (*numbers, 0, 0, 0, 0, 0, 0)[:6]
    is_present, is_correct = grade_all([(text, padded, target)], grader)
    return Grade(bool(is_present[0]), bool(is_correct[0]))


def random_expression(rng: random.Random, numbers: list[int]) -> str:
    def space() -> str:
        return " " * (rng.random() < 0.1)

    if len(numbers) == 1:
        text = str(numbers[0])
    else:
        split = rng.randrange(1, len(numbers))
        left, right = numbers[:split], numbers[split:]
        operator = rng.choice("+-*/")
        text = random_expression(rng, left) + operator + random_expression(rng, right)
    n_parentheses = rng.choices((0, 1, 2), (4, 5, 1) if len(numbers) > 1 else (18, 1, 1))[0]
    return space() + "(" * n_parentheses + text + space() + ")" * n_parentheses


def mutate(rng: random.Random, text: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        byte = bytes([rng.choice(ALPHABET if rng.random() < 0.9 else HOSTILE)])
        other = rng.randrange(len(text) + 1)
        text = rng.choice(
            (
                text[:at] + byte + text[at:],
                text[:at] + byte + text[at + 1 :],
                text[:at] + text[at + 1 :],
                text[:at] + text[min(at, other) : max(at, other)] + text[at:],
            )
        )
    return text


def random_row(rng: random.Random) -> tuple[bytes, tuple[int, ...], int]:
    """A text, and as often as not the numbers and the target that make it correct, if any do."""
    if rng.random() < 0.1:
        text = bytes(rng.choices(ALPHABET, k=rng.randrange(0, 12)))
    else:
        limit = rng.choice((9, 20, 100))
        numbers = [rng.randint(1, limit) for _ in range(rng.randint(1, 6))]
        text = random_expression(rng, numbers).encode()
        text = mutate(rng, text) if rng.random() < 0.5 else text
    literals, value = parse(text) or ([int(n) for n in re.findall(rb"\d+", text)], Fraction(24))
    used = [n for n in literals if 1 <= n <= 100][:6]
    used += [0] * (6 - len(used))
    rng.shuffle(used)
    if rng.random() < 0.1:
        used[rng.randrange(6)] = rng.randint(0, 100)
    is_reachable = value.denominator == 1 and abs(value) <= 10**6
    target = int(value) if is_reachable else rng.choice((int(value) % 1000, rng.randint(0, 999)))
    if rng.random() < 0.1:
        target += rng.choice((-1, 1, *PRIMES))
    return text, tuple(used), target


def check_random_rows(seed: int, n: int) -> None:
    rng = random.Random(seed)
    n_right = n_fractional = 0
    for start in range(0, n, 16 * ROWS):
        rows = [random_row(rng) for _ in range(min(16 * ROWS, n - start))]
        expected = np.array([len(row[0]) <= ROOM and is_right(*row) for row in rows])
        graded = grade_all(rows)
        wrong = np.flatnonzero(graded.is_correct != expected)
        assert not wrong.size, [(rows[i], expected[i]) for i in wrong[:5]]
        is_present = np.array([bool(text[:ROOM].strip(b" ")) for text, _, _ in rows])
        np.testing.assert_array_equal(graded.is_present, is_present)
        n_right += expected.sum()
        n_fractional += sum(
            b"/" in text for (text, _, _), right in zip(rows, expected, strict=True) if right
        )
    assert 0.25 * n < n_right < 0.75 * n
    assert n_fractional > 0.02 * n


def test_thirty_thousand_random_and_mutated_texts_agree_with_fractions():
    check_random_rows(seed=0, n=30_000)


@pytest.mark.slow
def test_a_million_random_and_mutated_texts_agree_with_fractions():
    check_random_rows(seed=1, n=1_000_000)


def test_every_text_of_up_to_four_bytes_agrees_with_pythons_parser():
    rows = []
    for length in range(5):
        for chars in itertools.product(b"120+-*/() ", repeat=length):
            literals, value = parse(bytes(chars)) or ([1, 2], Fraction(3))
            rows.append((bytes(chars), tuple(literals + [0] * (6 - len(literals))), int(value)))
    expected = [is_right(*row) and 0 not in parse(row[0])[0] for row in rows]
    assert sum(expected) > 50
    np.testing.assert_array_equal(grade_all(rows).is_correct, expected)


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("8/(3-8/3)", NUMBERS, 24),
        (" 8 / ( 3 - 8 / 3 ) ", NUMBERS, 24),
        ("8/(3-8/3)", (0, 8, 3, 0, 8, 3), 24),  # slots in any order
        ("((((8))/(3-(8/3))))", NUMBERS, 24),
        ("7-2-1", (1, 2, 7), 4),  # and not 7−(2−1)
        ("64/8/4", (4, 8, 64), 2),  # and not 64/(8/4)
        ("8/4*2", (2, 4, 8), 4),  # and not 8/(4·2)
        ("1+2*3-4", (1, 2, 3, 4), 3),
        ("2-(3-(4-5))", (2, 3, 4, 5), -2),
        ("1/3+1/3+1/3", (1, 3, 1, 3, 1, 3), 1),
        ("3-3", (3, 3), 0),
        ("100", (100,), 100),
        ("5*(7-7)", (5, 7, 7), 0),
        ("(7-7)/(99*5*66+79)", (7, 7, 99, 5, 66, 79), 0),  # a divisor of 32749 is not zero
        ("999*999-999", (999, 999, 999), 997_002),
    ],
)
def test_a_right_answer_is_correct(text, numbers, target):
    assert grade_one(text, numbers, target) == Grade(True, True)


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("99**99**7*1", (99, 99, 7, 1), 99),
        ("99**1", (99, 1), 99),
        ("(99//2)", (99, 2), 49),
        ("1/0", (1,), 0),
        ("5+1/(2-2)", (5, 1, 2, 2), 5),
        ("5+1/(1/(2-2))", (5, 1, 1, 2, 2), 5),  # 1/∞ is not 0
        ("(2-2)/(3-3)", (2, 2, 3, 3), 0),
        ("1/(3-1/(1/3))", (1, 3, 1, 1, 3), 0),
        ("007", (7,), 7),
        ("7+0", (7,), 7),
        ("0", (), 0),
        ("1 2", (12,), 12),
        ("1 2", (1,), 1),
        ("1 2", (1, 2), 2),
        ("1 0+2", (10, 2), 12),
        ("2(3)", (2, 3), 6),
        ("(2)3", (2, 3), 6),
        ("(2)(3)", (2, 3), 6),
        ("-7", (7,), -7),
        ("+7", (7,), 7),
        ("3*-1", (3, 1), -3),
        ("3--1", (3, 1), 4),
        ("(-1+4)", (1, 4), 3),
        ("()", (), 0),
        ("7()", (7,), 7),
        ("1+", (1,), 1),
        ("*1", (1,), 1),
        ("1+*2", (1, 2), 3),
        ("1+(*2)", (1, 2), 3),
        ("(1+)2", (1, 2), 3),
        ("(1", (1,), 1),
        ("1)", (1,), 1),
        (")1(", (1,), 1),
        (")(", (), 0),
        ("1)+(2", (1, 2), 3),
        ("(1))+((2)", (1, 2), 3),
        ("4294967297", (1,), 1),  # 2³² + 1
        ("4294967303-2", (7, 2), 5),
        ("32750", (1,), 1),  # 1 modulo a prime of the grader
        ("10007", (7,), 7),
        ("1+2=3", (1, 2), 3),
        ("1+2=3", (1, 2, 3), 3),
        ("1.0+2", (1, 2), 3),
        ("1,2", (1, 2), 3),
        ("1_0", (10,), 10),
        ("1e1", (10,), 10),
        ("0x7", (7,), 7),
        ("1+2\n", (1, 2), 3),
        ("1+\t2", (1, 2), 3),
        ("٣", (3,), 3),  # Arabic-Indic three
        ("³", (3,), 3),
        ("2×3", (2, 3), 6),
        ("5−3", (5, 3), 2),  # minus sign, not hyphen
        (b"1+\x002", (1, 2), 3),
        (b"1+2\x00", (1, 2), 3),
        (b"\x001+2", (1, 2), 3),
        (b"\xb1+2", (1, 2), 3),  # 1 with the eighth bit set
        ("1+2", (1, 2, 3), 3),  # 3 is left out
        ("3", (1, 2, 3), 3),
        ("1+1+2", (1, 2), 4),  # 1 is used twice
        ("1+2", (1, 1, 2), 3),
        ("1+1", (1, 2), 2),
        ("1+2+2", (1, 1, 2), 5),
        ("1+2+3+4+5+6+7", (1, 2, 3, 4, 5, 6), 28),
        ("1+2+3+4+5+6+1", (1, 2, 3, 4, 5, 6), 22),
        ("12", (1, 2), 12),
        ("7/2", (7, 2), 3),
        ("8/(3-8/3)", NUMBERS, 23),
        ("__import__('os')", (1,), 1),
    ],
)
def test_a_wrong_answer_is_present_but_not_correct(text, numbers, target):
    assert grade_one(text, numbers, target) == Grade(True, False)


@pytest.mark.parametrize("text", ["", " ", " " * ROOM])
def test_a_text_without_anything_but_spaces_is_not_present(text):
    assert grade_one(text) == Grade(False, False)
    assert grade_one(text, numbers=(), target=0) == Grade(False, False)


def test_a_text_that_was_cut_is_never_correct():
    assert grade_one("1+2".ljust(ROOM), (1, 2), 3) == Grade(True, True)
    assert grade_one("1+2".ljust(ROOM + 1), (1, 2), 3) == Grade(True, False)


@pytest.mark.parametrize("depth", [0, 1, 16, 500])
def test_parentheses_nest_to_any_depth_that_fits(depth):
    compiled = jax.jit(grade)

    def is_correct(text: str) -> bool:
        padded = jnp.array(np.frombuffer(text.encode().ljust(1024, b"\0"), np.uint8))
        return bool(compiled(padded, len(text), jnp.array(NUMBERS), 24).is_correct)

    inside = "8/" + "(" * depth + "(3-8/3)" + ")" * depth
    assert is_correct(inside)
    assert not is_correct(inside + "(")
    assert not is_correct(inside[:-1])


def test_a_miss_by_the_product_of_two_primes_is_noticed():
    for first, second in itertools.combinations(PRIMES, 2):
        assert not grade_one("7*3", (7, 3), 21 + first * second).is_correct
        assert not grade_one("7*3", (7, 3), 21 - first * second).is_correct
    for prime in PRIMES:
        assert not grade_one("7/3", (7, 3), 7 * pow(3, -1, prime) % prime).is_correct


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("21/244/799/937", (21, 244, 799, 937), 191_909),
        ("76/(197*407*613)", (76, 197, 407, 613), 713_177),
        ("6/371/385/631", (6, 371, 385, 631), 388_891),
        ("12/(127*509*611)", (12, 127, 509, 611), 886_607),
    ],
)
def test_a_miss_by_the_product_of_three_primes_is_noticed(text, numbers, target):
    value = parse(text.encode())[1]
    miss = target * value.denominator - value.numerator
    assert any(miss % np.prod(three, dtype=int) == 0 for three in itertools.combinations(PRIMES, 3))
    assert not grade_one(text, numbers, target).is_correct


def test_the_widest_integers_that_are_promised_stay_exact():
    assert grade_one("100*100*100", (100,) * 3, 10**6).is_correct
    assert grade_one("100*100*100*100/100+100", (100,) * 6, 10**6 + 100).is_correct
    assert not grade_one("100*100*100*100/100+100", (100,) * 6, 10**6 + 99).is_correct
    assert grade_one("100/100/100*100+100-99", (100,) * 5 + (99,), 2).is_correct
    assert not grade_one("100+100/(100*100*100*99)", (100,) * 5 + (99,), 100).is_correct


def test_bytes_after_the_length_are_ignored():
    text = jnp.array(np.frombuffer(b"1+2)*(/x", np.uint8))
    verdict = jax.jit(grade)(text, jnp.int32(3), jnp.array([1, 2, 0]), 3)
    assert verdict == Grade(True, True)


@pytest.mark.parametrize("numbers", [(3,), (9, 8, 7), (9, 8, 7, 6, 5)])
def test_any_count_of_numbers_can_be_asked_for(numbers):
    text = jnp.array(np.frombuffer("+".join(map(str, numbers)).encode(), np.uint8))
    verdict = jax.jit(grade)(text, text.size, jnp.array(numbers), sum(numbers))
    assert verdict.is_correct
    assert not jax.jit(grade)(text, text.size, jnp.array(numbers), sum(numbers) + 1).is_correct


def test_the_work_does_not_depend_on_the_text():
    program = jax.make_jaxpr(grade_tagged)(jnp.zeros(16, jnp.uint8), 3, jnp.zeros(6, jnp.int32), 1)
    assert not re.search(r"\b(while|cond|scan|callback)\b", str(program))


@pytest.mark.parametrize(
    ("text", "is_present", "is_correct"),
    [
        ("<answer>8/(3-8/3)</answer>", True, True),
        ("so <answer> 8/(3-8/3) </answer> it is.", True, True),
        ("8/(3-8/3)", False, False),  # no tags
        ("<answer>8/(3-8/3)", False, False),  # never closed
        ("8/(3-8/3)</answer>", False, False),  # never opened
        ("</answer>8/(3-8/3)<answer>", False, False),
        ("<answer></answer>", False, False),
        ("<answer>  </answer>", False, False),
        ("<answer>8</answer>/(3-8/3)", True, False),
        ("<answer>1</answer><answer>8/(3-8/3)</answer>", True, True),  # the last counts
        ("<answer>8/(3-8/3)</answer><answer>1</answer>", True, False),
        ("<answer>8/(3-8/3)</answer><answer></answer>", False, False),
        ("<answer>8/(3-8/3)</answer><answer>1", True, True),  # the last is not complete
        ("<answer>8/(3-8/3)</answer>1</answer>", True, True),
        ("<answer>1<answer>8/(3-8/3)</answer></answer>", True, True),  # the innermost
        ("<answer>8/(3-8/3)<answer>1</answer></answer>", True, False),
        ("<Answer>8/(3-8/3)</Answer>", False, False),
        ("<answer >8/(3-8/3)</answer>", False, False),
        ("<answer>8/(3-8/3)</answer", False, False),
        ("<<answer>8/(3-8/3)</answer>>", True, True),
        ("<answer>8/(3-8/3)=24</answer>", True, False),
        ("<answer>8/(3-8/3)</answer>".ljust(ROOM + 1), True, False),  # cut
    ],
)
def test_the_last_complete_tagged_answer_is_graded(text, is_present, is_correct):
    verdict = grade_one(text, grader=grade_tagged_batch)
    assert verdict == Grade(is_present, is_correct)


def test_tags_after_the_length_are_ignored():
    text = jnp.array(np.frombuffer(b"<answer>1+2</answer><answer>4</answer>", np.uint8))
    numbers = jnp.array([1, 2, 0])
    assert jax.jit(grade_tagged)(text, len("<answer>1+2</answer>"), numbers, 3).is_correct
    assert not jax.jit(grade_tagged)(text, text.size, numbers, 3).is_correct
    assert not jax.jit(grade_tagged)(text, len("<answer>1+2</answer"), numbers, 3).is_present


def test_the_answer_that_is_found_is_the_last_match_of_a_regular_expression():
    rng = random.Random(0)
    pieces = [b"<answer>", b"</answer>", b"<answer", b"answer>", b"/", b"<", b"1+2", b" ", b"x"]
    weights = (4, 4, 1, 1, 1, 1, 3, 1, 1)
    texts = [b"".join(rng.choices(pieces, weights, k=rng.randrange(9)))[:ROOM] for _ in range(ROWS)]
    padded = b"".join(text.ljust(ROOM, b"\0") for text in texts)
    starts, ends = jax.jit(jax.vmap(find_answer))(
        np.frombuffer(padded, np.uint8).reshape(ROWS, ROOM),
        np.array([len(text) for text in texts]),
    )
    n_found = 0
    for text, start, end in zip(texts, starts.tolist(), ends.tolist(), strict=True):
        matches = list(re.finditer(rb"<answer>((?:(?!</?answer>).)*)</answer>", text))
        assert (start, end) == (matches[-1].span(1) if matches else (0, 0)), text
        n_found += bool(matches)
    assert 0.2 * ROWS < n_found < 0.8 * ROWS
