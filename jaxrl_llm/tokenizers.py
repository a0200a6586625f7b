"""Tokenizers, and the table that lets a compiled reward read what a model wrote."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

from jaxrl_llm.types import ConfigError


class TokenBytes(NamedTuple):
    """The bytes that each token id stands for, padded with zeros to M, the longest.

    Special tokens (padding, end) stand for no bytes: length 0.
    """

    table: UInt8[Array, "V M"]
    length: Int[Array, "V"]


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
    """One token per character of a fixed ASCII alphabet.

    Ids 0, 1 and 2 are padding, begin and end; characters follow in the order of `alphabet`.

    >>> tokenizer = CharTokenizer("0123456789+-*/()")
    >>> tokenizer.decode(tokenizer.encode("(1+2)*3"))
    '(1+2)*3'

    Raises:
        ConfigError: the alphabet repeats a character or leaves ASCII.
    """

    pad_id, bos_id, end_id = 0, 1, 2
    eos_ids: tuple[int, ...] = (2,)
    _n_special = 3

    def __init__(self, alphabet: str):
        if len(set(alphabet)) != len(alphabet) or not alphabet.isascii():
            raise ConfigError(f"alphabet must be distinct ASCII characters, got {alphabet!r}")
        self.alphabet = alphabet
        self._ids = {char: i + self._n_special for i, char in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return self._n_special + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without begin or end.

        Raises:
            ConfigError: a character is not in the alphabet.
        """
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ConfigError(f"cannot encode {unknown}: the alphabet is {self.alphabet!r}")
        return [self._ids[char] for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens stand for nothing."""
        return "".join(self.alphabet[i - self._n_special] for i in ids if i >= self._n_special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        table = np.frombuffer(b"\0" * self._n_special + self.alphabet.encode(), np.uint8)
        return TokenBytes(table[:, None].copy(), (table > 0).astype(np.int32))


def arithmetic_tokenizer() -> CharTokenizer:
    """The tokenizer of the built-in small models: digits, operators and a few separators."""
    return CharTokenizer("0123456789+-*/()=, ")


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
