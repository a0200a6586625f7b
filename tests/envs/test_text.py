"""Every function on random strings, against its twin in Python's own words."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs.text import (
    Lexicon,
    Text,
    Tokens,
    Writer,
    choose,
    cut,
    find,
    fingerprint,
    join,
    left_padded,
    read_integer,
    split,
    when,
)
from jaxrl_llm.tokenizers import CharTokenizer

N, SIZE = 2000, 16  # strings, and the room of each
TOKENIZER = CharTokenizer("0123456789-ab <>", ["12", "aba"])


def random_strings(alphabet, n=N, size=SIZE, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(alphabet), rng.integers(0, size + 1))) for _ in range(n)]


def texts(strings, size=SIZE):
    padded = [string.encode().ljust(size, b"\0") for string in strings]
    table = np.frombuffer(b"".join(padded), np.uint8).reshape(-1, size)
    return Text(jnp.asarray(table), jnp.array([len(string) for string in strings]))


def as_strings(text):
    """What the bytes say, and how long the text claims to be."""
    rows = np.asarray(text.bytes)
    return [row.tobytes().rstrip(b"\0").decode() for row in rows], np.asarray(text.length).tolist()


@pytest.mark.parametrize("word", ["a", "ab", "aab", "<a>"])
def test_find_is_strings_find(word):
    strings = random_strings("ab<>")
    starts = np.random.default_rng(1).integers(0, SIZE + 1, N)
    at = jax.jit(jax.vmap(lambda text, start: find(text, word.encode(), start)))(
        texts(strings), jnp.asarray(starts)
    )
    pairs = zip(strings, starts.tolist(), strict=True)
    found = [string.find(word, start) for string, start in pairs]
    assert at.tolist() == [SIZE if place < 0 else place for place in found]


def test_a_word_that_only_the_padding_would_complete_is_not_found():
    text = Text(jnp.frombuffer(b"xxa>garb", jnp.uint8), jnp.int32(3))
    assert find(text, b"a>") == 8 and find(text, b"a") == 2


@pytest.mark.parametrize("size", [3, SIZE, 40])
def test_cut_is_a_slice_without_the_spaces_around_it(size):
    strings = random_strings("a b")
    rng = np.random.default_rng(2)
    lengths = np.array([len(string) for string in strings])
    starts, stops = rng.integers(0, lengths + 1, (2, N))  # in either order
    pieces = jax.jit(jax.vmap(lambda text, a, b: cut(text, a, b, size)))(
        texts(strings), jnp.asarray(starts), jnp.asarray(stops)
    )
    rows = zip(strings, starts, stops, strict=True)
    expected = [string[a:b].strip(" ") for string, a, b in rows]
    assert as_strings(pieces) == ([piece[:size] for piece in expected], [*map(len, expected)])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_split_is_strings_split_with_the_rest_in_the_last_word(n):
    strings = [string.strip(" ") for string in random_strings("ab  ")]
    words = jax.jit(jax.vmap(lambda text: split(text, n, SIZE)))(texts(strings))
    expected = [string.split(" ", n - 1) + [""] * n for string in strings]
    for i, word in enumerate(words):
        assert as_strings(word)[0] == [row[i].strip(" ") for row in expected]


def test_integers_are_a_minus_and_one_to_six_digits_and_nothing_else():
    strings = random_strings("0123456789", size=8) + random_strings("-01 9", size=8, seed=1)
    strings += ["-" + string for string in strings[: N // 2]]
    strings += [
        "",
        "-",
        "--1",
        "1-",
        " 1",
        "1 ",
        "+1",
        "1.0",
        "0x1",
        "999999",
        "-999999",
        "1000000",
    ]
    strings += ["000001", "0000001", "-000001", "-0000001", "/", ":", "1:", "-0", "a", "1e3"]
    numbers, is_number = jax.jit(jax.vmap(read_integer))(texts(strings))
    is_expected = [bool(re.fullmatch("-?[0-9]{1,6}", string)) for string in strings]
    assert is_number.tolist() == is_expected
    for i in np.flatnonzero(is_expected):
        assert numbers[i] == int(strings[i])


def test_a_number_that_was_cut_is_none():
    whole = texts(["123456789"])
    piece = jax.vmap(lambda text: cut(text, 0, text.length, 4))(whole)
    assert as_strings(piece) == (["1234"], [9])
    assert not jax.vmap(read_integer)(piece)[1][0]


def test_fingerprints_of_almost_a_hundred_thousand_strings_differ():
    strings = random_strings("abcdefgh 0123456789*", n=120_000, seed=3)
    strings = list(dict.fromkeys(strings))
    hashes = np.asarray(jax.jit(jax.vmap(fingerprint))(texts(strings)))
    # By chance alone n²/2³³ ≈ 1 pair would agree.
    assert len(strings) > 90_000 and len(np.unique(hashes)) >= len(strings) - 5


def test_the_fingerprint_is_fnv_1a_whatever_the_room():
    known = {"": 0x811C9DC5, "a": 0xE40C292C, "foobar": 0xBF9CF968}  # of its authors' test suite
    for size in (6, 40):
        hashes = jax.jit(jax.vmap(fingerprint))(texts(known, size))
        assert hashes.tolist() == list(known.values())


@pytest.mark.parametrize("size", [2, 3, SIZE])
def test_a_lexicon_reads_whole_words_only(size):
    lexicon = Lexicon(["a", "ab", "abb", "b"])
    strings = random_strings("ab ", size=size) + ["", "a", "ab"]
    strings += ["abb"] * (size >= 3)
    read = jax.jit(jax.vmap(lexicon.read))(texts(strings, size)).tolist()
    words = lexicon.words
    assert read == [words.index(s) if s in words else -1 for s in strings]
    assert set(read) >= {-1, 0, 1, 3}


def test_a_lexicon_knows_no_word_that_was_cut():
    cut_text = Text(jnp.frombuffer(b"ab", jnp.uint8)[None], jnp.array([5]))
    assert jax.vmap(Lexicon(["ab"]).read)(cut_text).tolist() == [-1]


@functools.cache
def writer():
    return Writer(TOKENIZER)


def ids_of(piece):
    """The selected ids of each row."""
    rows = zip(np.asarray(piece.ids), np.asarray(piece.mask), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def test_integers_are_written_digit_by_digit():
    rng = np.random.default_rng(4)
    edges = [0, *(sign * 10**k + d for k in range(6) for sign in (1, -1) for d in (-1, 0, 1))]
    values = np.concatenate([edges, rng.integers(-999_999, 10**6, N), [999_999, -999_999]])
    written = ids_of(jax.jit(jax.vmap(writer().integer))(jnp.asarray(values)))
    one_by_one = [[i for c in str(value) for i in TOKENIZER.encode(c)] for value in values]
    assert written == one_by_one


def test_literals_and_tables_are_encoded_by_the_tokenizer():
    strings = ["aba", "12 7", "a", "<>", "", "ab12"]
    table = writer().table(strings)
    rows = jax.vmap(lambda i: choose(table, i))(jnp.arange(-1, len(strings)))
    assert ids_of(rows) == [[], *map(TOKENIZER.encode, strings)]
    for string in strings:
        piece = writer().literal(string)
        assert piece.mask.all() and piece.ids.tolist() == TOKENIZER.encode(string)


def test_pieces_are_joined_in_order_and_left_out_when_so_asked():
    first, second = writer().literal("ab"), writer().literal("12")
    for is_shown in (True, False):
        whole = join(first, when(jnp.array(is_shown), second), first)
        ids = whole.ids[whole.mask].tolist()
        assert TOKENIZER.decode(ids) == ("ab12ab" if is_shown else "abab")


@pytest.mark.parametrize("length", [1, 5, 12])
def test_left_padding_keeps_the_order_and_cuts_the_end_off(length):
    rng = np.random.default_rng(5)
    ids = rng.integers(1, 9, (N, 9)).astype(np.int32)
    mask = rng.random((N, 9)) < rng.random((N, 1))
    mask[:2] = [[True] * 9, [False] * 9]
    padded = jax.jit(jax.vmap(lambda ids, mask: left_padded(Tokens(ids, mask), length, 99)))(
        jnp.asarray(ids), jnp.asarray(mask)
    )
    for i in range(N):
        kept = ids[i][mask[i]].tolist()[:length]
        assert padded.tokens[i].tolist() == [99] * (length - len(kept)) + kept
        assert padded.mask[i].tolist() == [False] * (length - len(kept)) + [True] * len(kept)
