"""Tools that run on the device, within the sampling loop: a calculator, a lookup and a search.

An on-device tool is a function that is given a `Writer` once and returns a handler

    handler(arguments: Text, world: World) -> Answer

that JAX traces; it is mapped over all rows. `registered(manager)` adds the three built-in ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.envs.text import (
    Lexicon,
    Text,
    Tokens,
    Writer,
    choose,
    cut,
    join,
    read_integer,
    split,
    when,
)
from jaxrl_llm.envs.tools import ToolManager

ITEMS = Lexicon(["apple", "book", "chair", "drum", "fork", "glove", "kite", "mirror"])
SHELVES = Lexicon(list("ABCDEF"))
FIELDS = Lexicon(["price", "stock", "item"])
THINGS = Lexicon(["bridge", "clock", "flute", "lamp", "quilt", "statue", "vase", "wheel"])
MAKERS = Lexicon(["ada", "bela", "carl", "dora", "emil", "fritz", "gina", "hugo"])
TOWNS = Lexicon(["bern", "cork", "delft", "graz", "lyon", "nice", "oslo", "pisa"])
GIVEN = Lexicon(["big", "hot", "day", "old", "up", "wet", "fast", "left"])
OPPOSITES = Lexicon(["small", "cold", "night", "new", "down", "dry", "slow", "right"])
PRICE, STOCK, ITEM = range(3)

WORD_BYTES = 12  # longer words are in no lexicon
LARGEST_RESULT = 999_999


class World(NamedTuple):
    """What tools can find out in one episode."""

    items: Int[Array, "K"]  # the item on each shelf, all different
    prices: Int[Array, "K"]
    stocks: Int[Array, "K"]
    things: Int[Array, "N"]  # what each document is about, all different
    makers: Int[Array, "N"]
    towns: Int[Array, "N"]


class Answer(NamedTuple):
    """What a tool returns: text as tokens, or a failure."""

    tokens: Tokens
    is_ok: Bool[Array, ""]


Handler = Callable[[Text, World], Answer]


def calculator(writer: Writer) -> Handler:
    """Computes "37*48": two integers, one of + − * /; a quotient must be whole."""

    def handle(arguments: Text, world: World) -> Answer:
        n = arguments.bytes.size
        at = jnp.arange(n)
        symbols = jnp.asarray(np.frombuffer(b"+-*/", np.uint8))
        is_symbol = (arguments.bytes[:, None] == symbols[None, :]).any(-1) & (at > 0)
        middle = jnp.where(is_symbol.any(), is_symbol.argmax(), n - 1)
        symbol = arguments.bytes[middle]
        left, left_is_number = read_integer(cut(arguments, jnp.int32(0), middle, WORD_BYTES))
        right, right_is_number = read_integer(
            cut(arguments, middle + 1, arguments.length, WORD_BYTES)
        )
        divisor = jnp.where(right == 0, 1, right)
        results = jnp.stack([left + right, left - right, left * right, left // divisor])
        which = (symbol == symbols).argmax()
        # In float32 too, where a product of six digits each does not overflow.
        is_small = jnp.abs(left.astype(jnp.float32) * right) <= LARGEST_RESULT
        is_exact = jnp.where(which == 3, (right != 0) & (left % divisor == 0), True)
        is_ok = (
            left_is_number
            & right_is_number
            & is_symbol.any()
            & is_exact
            & (is_small | (which != 2))
            & (jnp.abs(results[which]) <= LARGEST_RESULT)
        )
        return Answer(writer.integer(jnp.where(is_ok, results[which], 0)), is_ok)

    return handle


def lookup(writer: Writer) -> Handler:
    """Finds "apple price", "apple stock" or "C item": one entry of the episode's inventory."""
    names = writer.table(ITEMS.words)

    def handle(arguments: Text, world: World) -> Answer:
        subject, field = split(arguments, 2, WORD_BYTES)
        item, shelf, wanted = ITEMS.read(subject), SHELVES.read(subject), FIELDS.read(field)
        holds = world.items == item
        is_known = (item >= 0) & holds.any()
        place = holds.argmax()
        is_number = is_known & ((wanted == PRICE) | (wanted == STOCK))
        is_name = (shelf >= 0) & (wanted == ITEM)
        number = jnp.where(wanted == PRICE, world.prices[place], world.stocks[place])
        name = choose(names, jnp.where(is_name, world.items[jnp.maximum(shelf, 0)], -1))
        written = writer.integer(number)
        written = written._replace(mask=written.mask & is_number)
        return Answer(join(written, name), is_number | is_name)

    return handle


def search(writer: Writer) -> Handler:
    """Answers with the best document: "lamp: made by ada in oslo", "small is the opposite of big".

    The N documents on things change with the episode, those on opposites never.
    """
    lexicons = (THINGS, MAKERS, TOWNS, OPPOSITES, GIVEN)
    tables = [writer.table(lexicon.words) for lexicon in lexicons]
    literals = [writer.literal(text) for text in (": made by ", " in ", " is the opposite of ")]
    n_opposites = len(GIVEN.words)

    def handle(arguments: Text, world: World) -> Answer:
        n_things = world.things.size
        on_things = [jnp.pad(x, (0, n_opposites), constant_values=-2) for x in world[3:]]
        on_opposites = jnp.arange(-n_things, n_opposites)
        on_opposites = jnp.where(on_opposites < 0, -2, on_opposites)
        columns = (*on_things, on_opposites, on_opposites)  # words of all documents, −2 for none
        words = split(arguments, 4, WORD_BYTES)
        matches = jnp.stack(
            [
                lexicon.read(word) == column
                for word in words
                for lexicon, column in zip(lexicons, columns, strict=True)
            ]
        )
        scores = bm25(matches)
        best = scores.argmax()
        thing, maker, town, opposite, given = (
            choose(table, column[best]) for table, column in zip(tables, columns, strict=True)
        )
        made_by, in_, is_opposite = literals
        text = join(
            when(best < n_things, join(thing, made_by, maker, in_, town)),
            when(best >= n_things, join(opposite, is_opposite, given)),
        )
        return Answer(text, scores[best] > 0)

    return handle


def bm25(is_in: Bool[Array, "W N"]) -> Float[Array, "N"]:
    """Scores of N documents of equal length for W query terms, each at most once in a document.

      Σ_w idf(w) · tf (k₁+1) / (tf + k₁),   idf = log(1 + (N − n_w + ½)/(n_w + ½))

    References:
        Robertson and Zaragoza 2009, section 3, https://doi.org/10.1561/1500000019
    """
    n_docs = is_in.shape[1]
    n_with = is_in.sum(1, keepdims=True)
    idf = jnp.log1p((n_docs - n_with + 0.5) / (n_with + 0.5))
    return jnp.where(is_in, idf, 0.0).sum(0)  # tf = 1: (k₁+1)/(1+k₁) = 1


def registered(manager: ToolManager) -> ToolManager:
    """The manager, with the three built-in tools registered."""

    def parameters(**properties: str) -> dict:
        described = {k: {"type": "string", "description": v} for k, v in properties.items()}
        return {"type": "object", "properties": described, "required": list(properties)}

    manager.register(
        "calc",
        "Computes an integer sum, difference, product or whole quotient.",
        parameters(expression="two integers around one of + - * /, as 37*48"),
        calculator,
        on_device=True,
    )
    manager.register(
        "lookup",
        "Looks up the inventory.",
        parameters(
            subject="an item, or the letter of a shelf",
            field="price or stock of the item; item for what is on the shelf",
        ),
        lookup,
        on_device=True,
    )
    manager.register(
        "search",
        "Finds the document that best matches some words.",
        parameters(query="one to four words"),
        search,
        on_device=True,
    )
    return manager
