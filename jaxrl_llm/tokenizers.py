"""Tokenizers, and the table that lets a compiled reward read what a model wrote."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

from jaxrl_llm.types import ConfigError


class TokenBytes(NamedTuple):
    """The bytes that each token id stands for, padded with zeros to M, the longest.

    Special tokens (padding, end) stand for no bytes: length 0.
    """

    table: UInt8[Array | np.ndarray, "V M"]
    length: Int[Array | np.ndarray, "V"]


class Tokenizer(Protocol):
    """What the library asks of a tokenizer."""

    pad_id: int
    eos_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def token_bytes(self) -> TokenBytes: ...


class CharTokenizer:
    """One token per character of a fixed ASCII alphabet, and per word of a list.

    Ids 0, 1 and 2 are padding, begin and end; characters follow in the order of `alphabet`, then
    words. Encoding takes the longest word or character that fits, from the left.

    >>> tokenizer = CharTokenizer("0123456789+-*/()", words=["12"])
    >>> len(tokenizer.encode("(12+2)*3"))
    7
    >>> tokenizer.decode(tokenizer.encode("(12+2)*3"))
    '(12+2)*3'

    Raises:
        ConfigError: the alphabet repeats a character or leaves ASCII, or a word repeats or cannot
            be written with the alphabet.
    """

    pad_id, bos_id, end_id = 0, 1, 2
    eos_ids: tuple[int, ...] = (2,)
    _n_special = 3

    def __init__(self, alphabet: str, words: Sequence[str] = ()):
        if len(set(alphabet)) != len(alphabet) or not alphabet.isascii():
            raise ConfigError(f"alphabet must be distinct ASCII characters, got {alphabet!r}")
        self.alphabet, self.words = alphabet, list(words)
        self.symbols = [*alphabet, *words]
        if len(set(self.symbols)) != len(self.symbols) or set("".join(words)) - set(alphabet):
            raise ConfigError(f"words must be distinct and in {alphabet!r}, got {list(words)}")
        self._ids = {symbol: i + self._n_special for i, symbol in enumerate(self.symbols)}
        longest_first = sorted(self.symbols, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.token_bytes = self._make_token_bytes()

    @property
    def vocab_size(self) -> int:
        return self._n_special + len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without begin or end.

        Raises:
            ConfigError: a character is not in the alphabet.
        """
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise ConfigError(f"cannot encode {unknown}: the alphabet is {self.alphabet!r}")
        return [self._ids[symbol] for symbol in self._pattern.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens stand for nothing."""
        return "".join(self.symbols[i - self._n_special] for i in ids if i >= self._n_special)

    def _make_token_bytes(self) -> TokenBytes:
        symbols = [b""] * self._n_special + [symbol.encode() for symbol in self.symbols]
        length = np.array([len(symbol) for symbol in symbols], np.int32)
        padded = [symbol.ljust(length.max(), b"\0") for symbol in symbols]
        table = np.frombuffer(b"".join(padded), np.uint8).reshape(len(symbols), -1)
        return TokenBytes(table.copy(), length)


def arithmetic_tokenizer() -> CharTokenizer:
    """The tokenizer of the built-in small models.

    Digits, operators, a few separators, and one token for each number of two digits and for 100:
    a model with a few hundred thousand weights then sees numbers instead of spelling them.
    """
    return CharTokenizer("0123456789+-*/()=, ", [str(n) for n in range(10, 101)])


def tokens_to_bytes(
    tokens: Int[Array, "T"], mask: Bool[Array, "T"], token_bytes: TokenBytes, max_bytes: int
) -> tuple[UInt8[Array, "N"], Int[Array, ""]]:
    """The bytes of one completion, inside a compiled program.

    Args:
        tokens: token ids.
        mask: the tokens to read; the others are skipped.
        token_bytes: the tokenizer's table.
        max_bytes: N, the room for the result.

    Returns:
        The bytes, zero-padded to N, and how many there are. The count may exceed N: the text was
        then cut, and a grader must not trust it.
    """
    lengths = jnp.where(mask, jnp.asarray(token_bytes.length)[tokens], 0)
    starts = jnp.cumsum(lengths) - lengths
    within = jnp.arange(token_bytes.table.shape[1])
    is_real = within[None, :] < lengths[:, None]
    places = jnp.where(is_real, starts[:, None] + within[None, :], max_bytes)
    text = jnp.zeros(max_bytes, jnp.uint8)
    text = text.at[places].set(jnp.asarray(token_bytes.table)[tokens], mode="drop")
    return text, lengths.sum()
