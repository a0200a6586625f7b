"""What the user of a dialogue asks: five families of questions, drawn and written on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl_llm.envs.device_tools import (
    GIVEN,
    ITEMS,
    MAKERS,
    OPPOSITES,
    PRICE,
    SHELVES,
    STOCK,
    THINGS,
    TOWNS,
    World,
)
from jaxrl_llm.envs.text import Lexicon, Text, Tokens, Writer, choose, join, read_integer, when

FAMILIES = ("arithmetic", "lookup", "two_hop", "search", "plain")
ARITHMETIC, LOOKUP, TWO_HOP, SEARCH, PLAIN = range(5)

ANSWERS = Lexicon([*OPPOSITES.words, *MAKERS.words, *TOWNS.words])
SMALL, LARGE = (1, 10), (11, 100)  # ranges of the numbers that need no calculator, and do


PHRASES = (
    "<user>", "?</user>", "what is ", " of ", " on shelf ", "and its ", "who made the ",
    "where was made the ", "opposite of ",
)  # fmt: skip


class Question(NamedTuple):
    """One question, its answer, and how many calls it takes."""

    family: Int[Array, ""]
    first: Int[Array, ""]  # a number; or the place of an item or document; or a word of GIVEN
    second: Int[Array, ""]  # a number; or PRICE or STOCK; or 0 for the maker and 1 for the town
    operator: Int[Array, ""]  # of + − *
    is_follow_up: Bool[Array, ""]  # "and its stock?": about the item of the question before
    number: Int[Array, ""]  # the answer, where it is a number
    word: Int[Array, ""]  # the answer in ANSWERS, or −1
    n_needed: Int[Array, ""]  # calls of tools without which it cannot be known


def draw_world(key: Key[Array, ""]) -> World:
    """An inventory and a few documents."""
    keys = jax.random.split(key, 6)
    n_shelves = len(SHELVES.words)

    def distinct(key, lexicon):
        return jax.random.permutation(key, len(lexicon.words))[:n_shelves]

    def number(key):
        return jax.random.randint(key, (n_shelves,), 1, 100)

    def any_of(key, lexicon):
        return jax.random.randint(key, (n_shelves,), 0, len(lexicon.words))

    return World(
        items=distinct(keys[0], ITEMS),
        prices=number(keys[1]),
        stocks=number(keys[2]),
        things=distinct(keys[3], THINGS),
        makers=any_of(keys[4], MAKERS),
        towns=any_of(keys[5], TOWNS),
    )


def draw_question(
    key: Key[Array, ""], world: World, weights: Float[Array, "5"], large: float | Float[Array, ""]
) -> Question:
    """A question of a family drawn with `weights`; `large` is the chance of large numbers."""
    keys = jax.random.split(key, 7)
    family = jax.random.categorical(keys[0], jnp.log(weights))
    is_large = jax.random.bernoulli(keys[1], large)
    low, high = (jnp.where(is_large, *bounds) for bounds in zip(LARGE, SMALL, strict=True))
    numbers = jax.random.randint(keys[2], (2,), low, high)
    operator = jax.random.randint(keys[3], (), 0, 3)
    place = jax.random.randint(keys[4], (), 0, world.items.size)
    given = jax.random.randint(keys[5], (), 0, len(GIVEN.words))
    which = jax.random.randint(keys[6], (), 0, 2)
    is_sum, is_plain = family == ARITHMETIC, family == PLAIN
    return with_answer(
        Question(
            family=family,
            first=jnp.where(is_sum, numbers[0], jnp.where(is_plain, given, place)),
            second=jnp.where(is_sum, numbers[1], which),
            operator=operator,
            is_follow_up=jnp.array(False),
            number=jnp.int32(0),
            word=jnp.int32(-1),
            n_needed=jnp.array([0, 1, 2, 1, 0])[family] + (is_sum & is_large),
        ),
        world,
    )


def draw_follow_up(before: Question, fresh: Question, world: World) -> Question:
    """After a lookup the other figure of the same item, else the fresh question."""
    is_lookup = (before.family == LOOKUP) | (before.family == TWO_HOP)
    other = before._replace(
        family=jnp.int32(LOOKUP),
        second=PRICE + STOCK - before.second,
        is_follow_up=jnp.array(True),
        n_needed=jnp.int32(1),
    )
    return jax.tree.map(lambda a, b: jnp.where(is_lookup, a, b), with_answer(other, world), fresh)


def with_answer(question: Question, world: World) -> Question:
    """The question with its answer."""
    a, b = question.first, question.second
    place = jnp.clip(a, 0, world.items.size - 1)
    result = jnp.stack([a + b, a - b, a * b])[question.operator]
    figure = jnp.where(b == PRICE, world.prices[place], world.stocks[place])
    n_plain = len(OPPOSITES.words)
    maker = n_plain + world.makers[place]
    town = n_plain + len(MAKERS.words) + world.towns[place]
    word = jnp.stack([-1, -1, -1, jnp.where(b == 0, maker, town), a])[question.family]
    number = jnp.where(question.family == ARITHMETIC, result, figure)
    return question._replace(number=number, word=word)


def is_right(answer: Text, question: Question) -> Bool[Array, ""]:
    """Whether the text is the answer, and nothing else."""
    number, is_number = read_integer(answer)
    is_right_number = is_number & (number == question.number)
    return jnp.where(question.word >= 0, ANSWERS.read(answer) == question.word, is_right_number)


class QuestionWriter:
    """Writes questions as a user does, between tags."""

    def __init__(self, writer: Writer):
        self._writer = writer
        self._fields = writer.table(["price", "stock"])
        self._signs = writer.table(["+", "-", "*"])
        self._items, self._shelves = writer.table(ITEMS.words), writer.table(SHELVES.words)
        self._things, self._given = writer.table(THINGS.words), writer.table(GIVEN.words)
        self._pieces = {text: writer.literal(text) for text in PHRASES}

    def write(self, question: Question, world: World) -> Tokens:
        """The tokens of the question, tags included."""
        piece, writer = self._pieces, self._writer
        place = jnp.clip(question.first, 0, world.items.size - 1)
        field = choose(self._fields, question.second)
        is_follow_up = question.is_follow_up
        bodies = [
            join(
                piece["what is "],
                writer.integer(question.first),
                choose(self._signs, question.operator),
                writer.integer(question.second),
            ),
            join(
                when(is_follow_up, piece["and its "]),
                field,
                when(~is_follow_up, join(piece[" of "], choose(self._items, world.items[place]))),
            ),
            join(field, piece[" on shelf "], choose(self._shelves, place)),
            join(
                when(question.second == 0, piece["who made the "]),
                when(question.second == 1, piece["where was made the "]),
                choose(self._things, world.things[place]),
            ),
            join(piece["opposite of "], choose(self._given, question.first)),
        ]
        shown = [when(question.family == i, body) for i, body in enumerate(bodies)]
        return join(piece["<user>"], *shown, piece["?</user>"])
