"""An exact grader of arithmetic expressions, inside a compiled program.

Grammar, with the usual precedence, left associative, spaces allowed between tokens:

    sum     = product { ("+" | "-") product }
    product = operand { ("*" | "/") operand }
    operand = literal | "(" sum ")"
    literal = digit from 1 to 9, then any digits

Nothing else: no unary minus, `//`, `**`, `=`, leading zeros, juxtaposition, or other white space.
Division is exact over the rationals, and dividing by zero is wrong. Parentheses nest to any depth.

There is no stack and no loop over bytes. Rules on neighbouring tokens and a count of parentheses
decide whether a text is well-formed; an operator's depth and kind give its rank, and taking the
highest rank first, from the left, is the order of evaluation. The work depends on the shapes
alone, so no answer can take longer than another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

# Rationals are kept as numerator and denominator modulo these, unreduced. Zero in all of them is
# zero, because the integers that are tested are smaller than the product, 1.147e18:
# |num| + |den| of a literal a is a + 1; of x + y, x − y, x · y and x / y it is at most the product
# of that of x and that of y (expand (|p| + |q|)(|r| + |s|): every term needed is in it). So a value
# made of a₁ … a_M, once each, has |num| + |den| <= Π(aᵢ + 1), and
# |num − target · den| <= max(|target|, 1) · Π(aᵢ + 1). Texts with other literals are wrong anyway.
# Two products of residues must fit int32, hence primes below 2¹⁵.
_PRIMES = np.array([[32749], [32719], [32717], [32713]], np.int32)

_MORE_DIGITS = 3  # read after the first: a literal of four digits or more is no number of up to 999
_SPACE = ord(" ")
_OPENING, _CLOSING = b"<answer>", b"</answer>"


class Grade(NamedTuple):
    """The verdict on one text."""

    is_present: Bool[Array, ""]  # there is at least one byte that is no space
    is_correct: Bool[Array, ""]  # well-formed, with the right numbers and the right value


class _Tokens(NamedTuple):
    """A text's literals and the operators between them, when it is well-formed.

    Unused slots hold the literal 0 and the operator + outside all parentheses, which changes
    nothing: they read as `… + 0 + 0`.
    """

    is_well_formed: Bool[Array, ""]  # and no more than M literals
    literals: Int[Array, "M"]
    operators: Int[Array, "M-1"]  # 4 · depth + 2 · (is * or /) + (is - or /)


def grade(
    text: UInt8[Array, "N"],
    length: Int[Array, ""],
    numbers: Int[Array, "M"],
    target: Int[Array, ""],
) -> Grade:
    """Whether a text is an expression that makes `target` of `numbers`, each used exactly once.

    Exact while every number is at most 999 and max(|target|, 1) · Π(numberᵢ + 1) < 1.147e18: six
    numbers up to 100 or four up to 999, with targets up to one million. Pure; `vmap` it over rows.

    Args:
        text: the bytes; those from `length` on are ignored.
        length: how many bytes there are. More than N means that the text was cut: never correct.
        numbers: positive, in any order, repetitions allowed; 0 marks an unused slot.
        target: an integer.
    """
    char = jnp.where(jnp.arange(text.size) < length, text, _SPACE).astype(jnp.int32)
    tokens = _tokenize(char, numbers.size)
    is_used = _is_same_multiset(tokens.literals, numbers)
    is_equal = _is_value(tokens, target)
    return Grade(
        is_present=(char != _SPACE).any(),
        is_correct=tokens.is_well_formed & is_used & is_equal & (length <= text.size),
    )


def grade_tagged(
    text: UInt8[Array, "N"],
    length: Int[Array, ""],
    numbers: Int[Array, "M"],
    target: Int[Array, ""],
) -> Grade:
    """`grade`, of what stands between the tags that `find_answer` finds.

    Nothing is present when there are no such tags, or only spaces between them.
    """
    start, end = find_answer(text, length)
    at = jnp.arange(text.size)
    inside = jnp.where((at >= start) & (at < end), text, jnp.uint8(_SPACE))
    return grade(inside, length, numbers, target)


def find_answer(
    text: UInt8[Array, "N"], length: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Where the answer stands: inside the last `<answer>…</answer>` with no such tag inside.

    Of two answers the last counts; of nested ones the innermost; tags without a partner are
    skipped, so `<answer>1</answer><answer>2` answers 1. Tags are matched byte by byte.

    Returns:
        The positions of the first byte of the answer and of the first one after it; 0 and 0 when
        there is none.
    """
    at = jnp.arange(text.size)
    text = jnp.where(at < length, text, 0)
    is_opening, is_closing = _starts(text, _OPENING), _starts(text, _CLOSING)
    follows_opening = _latest(is_opening, is_opening | is_closing)
    end = jnp.where(is_closing & follows_opening, at, 0).max()
    start = jnp.where(is_opening & (at < end), at + len(_OPENING), 0).max()
    return start, end


def _tokenize(char: Int[Array, "N"], max_numbers: int) -> _Tokens:
    is_digit = (char >= ord("0")) & (char <= ord("9"))
    is_open, is_close = char == ord("("), char == ord(")")
    is_product = (char == ord("*")) | (char == ord("/"))
    is_inverse = (char == ord("-")) | (char == ord("/"))
    is_operator = is_product | is_inverse | (char == ord("+"))
    is_space = char == _SPACE
    is_literal = is_digit & ~_shift(is_digit, 1)  # at its first digit

    ends_operand = is_digit | is_close
    follows_operand = _latest(ends_operand, ~is_space)
    depth = jnp.cumsum(is_open.astype(jnp.int32) - is_close)
    n_literals = jnp.cumsum(is_literal)
    is_known = is_digit | is_open | is_close | is_operator | is_space
    is_misplaced = jnp.where(
        is_literal | is_open, follows_operand, (is_operator | is_close) & ~follows_operand
    )
    has_leading_zero = is_literal & (char == ord("0"))
    is_fine = is_known & ~is_misplaced & ~has_leading_zero & (depth >= 0)
    is_complete = (depth[-1] == 0) & (ends_operand | (is_space & follows_operand))[-1]

    # An operator's slot is that of the literal before it.
    is_slot = n_literals[None, :] == jnp.arange(1, max_numbers + 1)[:, None]
    literal = jnp.where(is_literal, _read_literals(char - ord("0"), is_digit), 0)
    operator = jnp.where(is_operator, 4 * depth + 2 * is_product + is_inverse, 0)
    return _Tokens(
        is_well_formed=is_fine.all() & is_complete & (n_literals[-1] <= max_numbers),
        literals=jnp.where(is_slot, literal[None, :], 0).sum(axis=1),
        operators=jnp.where(is_slot[:-1], operator[None, :], 0).sum(axis=1),
    )


def _read_literals(digit: Int[Array, "N"], is_digit: Bool[Array, "N"]) -> Int[Array, "N"]:
    """The literal that starts at each place, from its first four digits."""
    value, continues = digit, is_digit
    for step in range(1, _MORE_DIGITS + 1):
        continues &= _shift(is_digit, -step)
        value = jnp.where(continues, 10 * value + _shift(digit, -step), value)
    return value


def _is_same_multiset(a: Int[Array, "M"], b: Int[Array, "M"]) -> Bool[Array, ""]:
    """Both are equally long: it is enough that what is in `a` is as often in `b`."""
    n_in_a = (a[:, None] == a[None, :]).sum(axis=1)
    n_in_b = (a[:, None] == b[None, :]).sum(axis=1)
    return (n_in_a == n_in_b).all()


def _is_value(tokens: _Tokens, target: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether a well-formed text equals the target, without dividing by zero."""
    num = jnp.broadcast_to(tokens.literals[None, :], (_PRIMES.size, tokens.literals.size))
    den = jnp.ones_like(num)
    operators, is_defined = tokens.operators, jnp.array(True)
    while operators.size:
        at = jnp.arange(operators.size)
        first = jnp.argmax(operators >> 1)  # the leftmost of the highest rank
        # Every neighbouring pair is combined and one result is kept: cheaper than a gather.
        new_num, new_den = _combine(
            num[:, :-1], den[:, :-1], num[:, 1:], den[:, 1:], operators[None, :]
        )
        # The literals are not zero, so only a division by zero makes a denominator zero.
        is_defined &= jnp.where(at == first, (new_den != 0).any(axis=0), True).all()
        num = _replace_pair(num, new_num, first)
        den = _replace_pair(den, new_den, first)
        operators = jnp.where(at[:-1] < first, operators[:-1], operators[1:])
    difference = num - target % _PRIMES * den
    return is_defined & (difference % _PRIMES == 0).all()


def _combine(
    num: Int[Array, "I M"],
    den: Int[Array, "I M"],
    other_num: Int[Array, "I M"],
    other_den: Int[Array, "I M"],
    operator: Int[Array, "1 M"],
) -> tuple[Int[Array, "I M"], Int[Array, "I M"]]:
    """num/den ∘ other_num/other_den, modulo the primes."""
    is_product, is_inverse = operator & 2 > 0, operator & 1 > 0
    is_quotient = is_product & is_inverse
    factor = jnp.where(is_quotient, other_den, other_num)
    divisor = jnp.where(is_quotient, other_num, other_den)
    sign = jnp.where(is_inverse & ~is_product, -1, 1)
    total = num * divisor + sign * factor * den
    return jnp.where(is_product, num * factor, total) % _PRIMES, den * divisor % _PRIMES


def _replace_pair(
    old: Int[Array, "I M"], new: Int[Array, "I M-1"], first: Int[Array, ""]
) -> Int[Array, "I M-1"]:
    """One shorter: the pair at `first` becomes its combination, the rest stays in order."""
    at = jnp.arange(new.shape[1])[None, :]
    return jnp.where(at < first, old[:, :-1], jnp.where(at == first, new, old[:, 1:]))


def _latest(claim: Bool[Array, "N"], is_event: Bool[Array, "N"]) -> Bool[Array, "N"]:
    """The claim as it was at the last event before each place; False before the first."""
    event = jnp.where(is_event, 2 * jnp.arange(claim.size) + claim, 0)
    return _shift(jax.lax.cummax(event), 1) % 2 == 1


def _starts(text: UInt8[Array, "N"], word: bytes) -> Bool[Array, "N"]:
    """Where the word begins."""
    matches = [_shift(text, -i) == byte for i, byte in enumerate(word)]
    return jnp.stack(matches).all(axis=0)


def _shift(values: Array, steps: int) -> Array:
    """Moved to the right (to the left if negative), zeros moving in."""
    if steps < 0:
        return jnp.pad(values, (0, -steps))[-steps:]
    return jnp.pad(values, (steps, 0))[: values.size]
