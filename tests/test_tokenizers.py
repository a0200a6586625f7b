"""Text to tokens, and tokens to bytes inside a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.tokenizers import CharTokenizer, TokenBytes, arithmetic_tokenizer, tokens_to_bytes
from jaxrl_llm.types import ConfigError

# Ids 0 to 4 stand for nothing, "a", "bcd", "é" (two bytes) and a NUL.
WORDS = [b"", b"a", b"bcd", "é".encode(), b"\0"]
TABLE = TokenBytes(
    np.frombuffer(b"".join(word.ljust(3, b"\0") for word in WORDS), np.uint8).reshape(-1, 3),
    np.array([len(word) for word in WORDS], np.int32),
)


def read(tokens, mask=None, max_bytes=12, token_bytes=TABLE) -> tuple[bytes, int]:
    mask = [True] * len(tokens) if mask is None else mask
    text, length = jax.jit(tokens_to_bytes, static_argnums=3)(
        jnp.array(tokens), jnp.array(mask), token_bytes, max_bytes
    )
    assert text.shape == (max_bytes,) and text.dtype == jnp.uint8
    return bytes(np.asarray(text)), int(length)


def test_tokens_of_no_one_and_many_bytes_are_joined_in_order():
    assert read([2, 0, 1, 3, 2]) == ("bcdaébcd".encode().ljust(12, b"\0"), 9)


def test_a_token_that_stands_for_a_nul_byte_takes_a_place():
    assert read([1, 4, 1], max_bytes=4) == (b"a\0a\0", 3)


def test_masked_tokens_leave_no_gap():
    tokens, mask = [2, 1, 2, 1, 3], [False, True, False, True, False]
    assert read(tokens, mask, max_bytes=4) == (b"aa\0\0", 2)
    assert read(tokens, [False] * 5, max_bytes=4) == (b"\0" * 4, 0)


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(7, b"abcdbcd"), (6, b"abcdbc"), (2, b"ab"), (8, b"abcdbcd\0")]
)
def test_a_text_that_does_not_fit_is_cut_and_counted_in_full(max_bytes, expected):
    assert read([1, 2, 2], max_bytes=max_bytes) == (expected, 7)


def test_rows_of_a_batch_are_read_alone():
    tokens = jnp.array([[1, 2], [2, 1], [3, 3]])
    text, length = jax.vmap(lambda row: tokens_to_bytes(row, row != 1, TABLE, 4))(tokens)
    np.testing.assert_array_equal(length, [3, 3, 4])
    expected = [b"bcd\0", b"bcd\0", "éé".encode()]
    assert [bytes(row) for row in np.asarray(text)] == expected


def test_decoding_undoes_encoding():
    tokenizer = arithmetic_tokenizer()
    text = tokenizer.alphabet + "(1+2)*3, 4=5,100"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert min(ids) == 3 and max(ids) == tokenizer.vocab_size - 1


def test_special_tokens_stand_for_nothing():
    tokenizer = CharTokenizer("xy")
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("yx") == [4, 3]
    ids = [tokenizer.bos_id, 4, tokenizer.pad_id, 3, *tokenizer.eos_ids]
    assert tokenizer.decode(ids) == "yx"
    assert read(ids, token_bytes=tokenizer.token_bytes) == (b"yx".ljust(12, b"\0"), 2)


def test_compiled_reading_agrees_with_decoding():
    tokenizer = arithmetic_tokenizer()
    ids = np.random.default_rng(0).integers(tokenizer.vocab_size, size=50)
    text = tokenizer.decode(ids.tolist()).encode()
    expected = (text.ljust(120, b"\0"), len(text))
    assert read(ids, max_bytes=120, token_bytes=tokenizer.token_bytes) == expected


@pytest.mark.parametrize("alphabet", ["aba", "é", "12٣"])
def test_an_alphabet_that_repeats_or_leaves_ascii_is_refused(alphabet):
    with pytest.raises(ConfigError, match="distinct ASCII"):
        CharTokenizer(alphabet)


def test_a_character_outside_the_alphabet_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"cannot encode \['a', 'z'\].*'xy'"):
        CharTokenizer("xy").encode("xazya")


def test_words_are_taken_before_characters_and_read_back_alike():
    tokenizer = CharTokenizer("0123456789+", ["12", "100"])
    ids = tokenizer.encode("12+1003+21")
    assert [tokenizer.decode([i]) for i in ids] == ["12", "+", "100", "3", "+", "2", "1"]
    text, length = tokens_to_bytes(
        jnp.array(ids), jnp.ones(len(ids), bool), tokenizer.token_bytes, 16
    )
    assert bytes(np.asarray(text[:length])) == b"12+1003+21"


@pytest.mark.parametrize("words", [["12", "12"], ["1"], ["1x"]])
def test_words_that_repeat_or_leave_the_alphabet_are_refused(words):
    with pytest.raises(ConfigError, match="words"):
        CharTokenizer("0123456789", words)
