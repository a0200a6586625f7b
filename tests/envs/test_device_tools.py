import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs import device_tools
from jaxrl_llm.envs.device_tools import World, bm25
from jaxrl_llm.envs.dialogue import dialogue_tokenizer
from jaxrl_llm.envs.text import Text, Writer
from jaxrl_llm.envs.tools import ToolManager

TOKENIZER = dialogue_tokenizer()
THINGS, MAKERS, TOWNS = (
    lexicon.words for lexicon in (device_tools.THINGS, device_tools.MAKERS, device_tools.TOWNS)
)
WORLD = World(
    items=jnp.array([7, 0, 3, 2, 5, 4]),
    prices=jnp.array([1, 99, 50, 8, 8, 31]),
    stocks=jnp.array([10, 2, 3, 4, 5, 6]),
    things=jnp.array([4, 0, 7, 1, 2, 3]),
    makers=jnp.array([0, 0, 1, 2, 2, 2]),
    towns=jnp.array([0, 1, 1, 3, 4, 5]),
)


@functools.cache
def compiled(tool):
    handle = tool(Writer(TOKENIZER))
    return jax.jit(jax.vmap(handle, (0, None)))


def results(tool, arguments):
    """What the tool says to each of the arguments; None where it fails."""
    raw = [text.encode().ljust(40, b"\0") for text in arguments]
    table = np.frombuffer(b"".join(raw), np.uint8).reshape(-1, 40)
    answer = compiled(tool)(Text(jnp.asarray(table), jnp.array([*map(len, arguments)])), WORLD)
    ids, mask, is_ok = (np.asarray(x) for x in (*answer.tokens, answer.is_ok))
    return [
        TOKENIZER.decode(row[shown].tolist()) if ok else None
        for row, shown, ok in zip(ids, mask, is_ok, strict=True)
    ]


def test_the_calculator_computes_what_python_computes():
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.integers(0, 7, (2, 4000))
    left, right = rng.integers(-sizes + 1, sizes)
    signs = rng.choice(list("+-*/"), 4000)
    left[::4] = left[::4] // 1000 * right[::4]  # some whole quotients
    expected = []
    for a, sign, b in zip(left.tolist(), signs, right.tolist(), strict=True):
        is_exact = sign != "/" or (b != 0 and a % b == 0)
        value = eval(f"{a}{sign.replace('/', '//')}({b})") if is_exact else 10**9
        is_read = max(abs(a), abs(b)) <= 999_999
        expected.append(str(value) if is_read and abs(value) <= 999_999 else None)
    sums = [f"{a}{sign}{b}" for a, sign, b in zip(left, signs, right, strict=True)]
    assert results(device_tools.calculator, sums) == expected
    assert 500 < expected.count(None) < 3000


def test_every_entry_of_the_inventory_is_found_and_no_other():
    items, prices, stocks = (np.asarray(x).tolist() for x in WORLD[:3])
    words = [*device_tools.ITEMS.words, *"ABCDEFG", "a", "", "price"]
    fields = ["price", "stock", "item", "", "maker"]
    expected = []
    for word in words:
        known = device_tools.ITEMS.words.index(word) if word in device_tools.ITEMS.words else -1
        for field in fields:
            entry = None
            if known in items and field in ("price", "stock"):
                entry = str((prices if field == "price" else stocks)[items.index(known)])
            if field == "item" and word in list("ABCDEF"):
                entry = device_tools.ITEMS.words[items["ABCDEF".index(word)]]
            expected.append(entry)
    asked = [f"{word} {field}".strip() for word in words for field in fields]
    assert results(device_tools.lookup, asked) == expected
    assert sum(entry is not None for entry in expected) == 6 * 2 + 6


def test_search_returns_the_document_that_contains_the_words():
    documents = [
        (THINGS[a], MAKERS[b], TOWNS[c])
        for a, b, c in zip(*(np.asarray(x).tolist() for x in WORLD[3:]), strict=True)
    ]
    for subset in ([0], [1, 2], [2, 1], [0, 2], [0, 1, 2]):
        queries = [" ".join(document[i] for i in subset) for document in documents]
        for document, found in zip(documents, results(device_tools.search, queries), strict=True):
            assert found == "{}: made by {} in {}".format(*document)


@pytest.mark.parametrize("query", ["", "lantern", "made by", "gina", "wheelvase", "Vase", "apple"])
def test_search_fails_without_a_match(query):
    assert results(device_tools.search, [query]) == [None]


def test_a_rare_word_outweighs_a_common_one():
    # dora made nothing, carl three things, bela one: the one of bela comes first.
    (found,) = results(device_tools.search, ["carl bela dora"])
    assert found == "wheel: made by bela in cork"


def test_bm25_is_its_formula():
    rng = np.random.default_rng(0)
    k1, b = 1.2, 0.75
    for n_terms, n_docs in ((1, 1), (3, 6), (12, 6), (5, 40)):
        is_in = rng.random((n_terms, n_docs)) < 0.4
        expected = np.zeros(n_docs)
        for d in range(n_docs):
            for w in range(n_terms):
                n_with, tf, length_ratio = is_in[w].sum(), float(is_in[w, d]), 1.0
                idf = math.log(1 + (n_docs - n_with + 0.5) / (n_with + 0.5))
                norm = k1 * (1 - b + b * length_ratio)
                expected[d] += idf * tf * (k1 + 1) / (tf + norm)
        np.testing.assert_allclose(bm25(jnp.asarray(is_in)), expected, rtol=1e-5)


def test_the_built_in_tools_describe_themselves():
    manager = device_tools.registered(ToolManager())
    assert manager.names == ("calc", "lookup", "search")
    assert manager.device_tools() and not manager.host_tools()
    required = [s["function"]["parameters"]["required"] for s in manager.schemas()]
    assert required == [["expression"], ["subject", "field"], ["query"]]
