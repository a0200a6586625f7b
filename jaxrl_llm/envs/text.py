"""Text inside a compiled program: bytes that a model wrote, tokens that it is to read."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8, UInt32

from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import Prompts

SPACE, MINUS, ZERO = 32, 45, 48
MAX_DIGITS = 6  # of a number that is read or written


class Text(NamedTuple):
    """Bytes from the left, zeros after them."""

    bytes: UInt8[Array, "N"]
    length: Int[Array, ""]


def find(text: Text, word: bytes, start: int | Int[Array, ""] = 0) -> Int[Array, ""]:
    """Where the word first begins at or after `start`; N when it does not."""
    n = text.bytes.size
    padded = jnp.pad(text.bytes, (0, len(word)))
    is_here = jnp.stack([padded[i : i + n] == byte for i, byte in enumerate(word)]).all(0)
    at = jnp.arange(n)
    is_here &= (at >= start) & (at + len(word) <= text.length)
    return jnp.where(is_here.any(), is_here.argmax(), n)


def cut(text: Text, start: int | Int[Array, ""], stop: Int[Array, ""], size: int) -> Text:
    """The bytes from `start` to before `stop`, without spaces around them, at most `size`.

    A longer piece is cut; its length still says how long it was.
    """
    at = jnp.arange(text.bytes.size)
    is_ink = (at >= start) & (at < stop) & (text.bytes != SPACE)
    first = jnp.where(is_ink.any(), is_ink.argmax(), stop)
    after = jnp.where(is_ink.any(), text.bytes.size - is_ink[::-1].argmax(), first)
    piece = jax.lax.dynamic_slice(jnp.pad(text.bytes, (0, size)), (first,), (size,))
    length = jnp.maximum(after - first, 0)
    return Text(jnp.where(jnp.arange(size) < length, piece, 0), length)


def fingerprint(text: Text) -> UInt32[Array, ""]:
    """FNV-1a of the bytes: equal texts have equal ones, different texts almost never."""

    def step(hash, byte):
        return jnp.where(byte > 0, (hash ^ byte) * jnp.uint32(16777619), hash), None

    start = jnp.uint32(2166136261)
    return jax.lax.scan(step, start, text.bytes.astype(jnp.uint32), unroll=8)[0]


def read_integer(text: Text) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The number that the text is, and whether it is one: an optional −, then 1 to 6 digits."""
    is_negative = text.bytes[0] == MINUS
    at = jnp.arange(text.bytes.size)
    within = (at >= is_negative) & (at < text.length)
    digits = text.bytes.astype(jnp.int32) - ZERO
    is_digit = (digits >= 0) & (digits <= 9)
    n_digits = text.length - is_negative
    power = jnp.clip(text.length - 1 - at, 0, MAX_DIGITS)
    value = jnp.where(within, digits * jnp.asarray(10 ** np.arange(MAX_DIGITS + 1))[power], 0).sum()
    is_number = (is_digit | ~within).all() & (n_digits >= 1) & (n_digits <= MAX_DIGITS)
    return jnp.where(is_negative, -value, value), is_number


class Lexicon:
    """A list of words that can be recognised in a text: entry i is `words[i]`."""

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        encoded = [word.encode() for word in self.words]
        self.width = max(map(len, encoded))
        self._bytes = np.stack(
            [np.frombuffer(word.ljust(self.width, b"\0"), np.uint8) for word in encoded]
        )

    def read(self, text: Text) -> Int[Array, ""]:
        """Which word the whole text is; −1 for none."""
        size = max(self.width, text.bytes.size)
        padded = jnp.pad(text.bytes, (0, size - text.bytes.size))
        table = np.pad(self._bytes, ((0, 0), (0, size - self.width)))
        is_word = (padded[None, :] == table).all(-1) & (text.length <= size)
        return jnp.where(is_word.any(), is_word.argmax(), -1)


def split(text: Text, n: int, size: int) -> list[Text]:
    """The first n words of a text; empty ones where it has fewer. The last takes all the rest."""
    words, start = [], jnp.int32(0)
    for i in range(n):
        stop = text.length if i == n - 1 else jnp.minimum(find(text, b" ", start), text.length)
        words.append(cut(text, start, stop, size))
        start = stop + 1
    return words


class Tokens(NamedTuple):
    """A piece of what an environment writes: the selected tokens, in order."""

    ids: Int[Array, "*N S"]
    mask: Bool[Array, "*N S"]


class Writer:
    """Turns integers and entries of lists into tokens; all encoding is done beforehand."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._digits = self.table([str(digit) for digit in range(10)])
        self._minus = self.literal("-")

    def table(self, texts: Sequence[str]) -> Tokens:
        """One row for each text: `Writer.choose` takes one."""
        encoded = [self.tokenizer.encode(text) for text in texts]
        mask = (
            np.arange(max(map(len, encoded)))[None, :] < np.array(list(map(len, encoded)))[:, None]
        )
        ids = np.zeros(mask.shape, np.int32)
        ids[mask] = np.concatenate(encoded).astype(np.int32)
        return Tokens(jnp.asarray(ids), jnp.asarray(mask))

    def literal(self, text: str) -> Tokens:
        ids = jnp.asarray(self.tokenizer.encode(text), jnp.int32)
        return Tokens(ids, jnp.ones(ids.shape, bool))

    def integer(self, value: Int[Array, ""]) -> Tokens:
        """A number of at most six digits, digit by digit."""
        powers = jnp.asarray(10 ** np.arange(MAX_DIGITS)[::-1])
        digits = jnp.abs(value) // powers % 10
        is_shown = (jnp.abs(value) >= powers) | (powers == 1)
        number = jax.tree.map(lambda x: x[digits], self._digits)
        number = Tokens(number.ids.reshape(-1), (number.mask & is_shown[:, None]).reshape(-1))
        return join(self._minus._replace(mask=self._minus.mask & (value < 0)), number)


def choose(table: Tokens, index: Int[Array, ""]) -> Tokens:
    """Row `index` of a table; nothing for a negative index."""
    row = jax.tree.map(lambda x: x[jnp.maximum(index, 0)], table)
    return Tokens(row.ids, row.mask & (index >= 0))


def join(*pieces: Tokens) -> Tokens:
    """One after the other."""
    return Tokens(*(jnp.concatenate(parts) for parts in zip(*pieces, strict=True)))


def when(condition: Bool[Array, ""], piece: Tokens) -> Tokens:
    """The piece, or nothing."""
    return piece._replace(mask=piece.mask & condition)


def left_padded(piece: Tokens, length: int, pad_id: int) -> Prompts:
    """The selected tokens at the right end of `length` places; what does not fit is cut off."""
    n = piece.mask.sum()
    order = jnp.cumsum(piece.mask) - 1
    place = jnp.where(
        piece.mask & (order < length), length - jnp.minimum(n, length) + order, length
    )
    return Prompts(
        jnp.full(length, pad_id, jnp.int32).at[place].set(piece.ids, mode="drop"),
        jnp.zeros(length, bool).at[place].set(True, mode="drop"),
    )
