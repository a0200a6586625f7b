import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import environment

from jaxrl_llm.envs.dialogue import DialogueEnv, dialogue_tokenizer
from jaxrl_llm.envs.tools import ToolManager
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.types import ConfigError, Prompts

A, TURNS, N = 32, 8, 500  # tokens of a turn, turns of an episode, episodes played at once
USUAL = dialogue_tokenizer()
TOKENIZER = CharTokenizer(USUAL.alphabet, [*USUAL.words, " " * 16])
ENV = DialogueEnv(
    {"tool_efficiency": 1.0, "dialogue_quality": 0.5},
    tokenizer=TOKENIZER,
    max_turn_tokens=A,
    max_written=24,
)
END = TOKENIZER.eos_ids[0]
FAMILIES = ("arithmetic", "lookup", "two_hop", "search", "plain")
ITEMS = "apple book chair drum fork glove kite mirror".split()
THINGS = "bridge clock flute lamp quilt statue vase wheel".split()
MAKERS = "ada bela carl dora emil fritz gina hugo".split()
TOWNS = "bern cork delft graz lyon nice oslo pisa".split()
OPPOSITES = {
    "big": "small", "hot": "cold", "day": "night", "old": "new", "up": "down", "wet": "dry",
    "fast": "slow", "left": "right",
}  # fmt: skip


# What the docstrings promise, once more, in plain Python.


class World:
    """The inventory and the documents of one episode."""

    def __init__(self, world):
        self.items = [ITEMS[i] for i in world.items]
        self.figures = {
            "price": dict(zip(self.items, world.prices.tolist(), strict=True)),
            "stock": dict(zip(self.items, world.stocks.tolist(), strict=True)),
        }
        columns = (world.things, world.makers, world.towns)
        made = [
            (THINGS[thing], MAKERS[maker], TOWNS[town])
            for thing, maker, town in zip(*columns, strict=True)
        ]
        self.documents = [(words, "{}: made by {} in {}".format(*words)) for words in made]
        self.documents += [
            ((given, opposite), f"{opposite} is the opposite of {given}")
            for given, opposite in OPPOSITES.items()
        ]


class Asked:
    """A question as text, its answer as text, and the calls that it needs."""

    def __init__(self, question, world):
        first, second = int(question.first), int(question.second)
        family = FAMILIES[question.family]
        field = ("price", "stock")[second % 2]
        if family == "arithmetic":
            sign = "+-*"[question.operator]
            body, answer = f"what is {first}{sign}{second}", eval(f"{first}{sign}{second}")
            needed = 1 if max(first, second) > 10 else 0
        elif family == "lookup":
            item = world.items[first]
            body = f"and its {field}" if question.is_follow_up else f"{field} of {item}"
            answer, needed = world.figures[field][item], 1
        elif family == "two_hop":
            body, needed = f"{field} on shelf {'ABCDEF'[first]}", 2
            answer = world.figures[field][world.items[first]]
        elif family == "search":
            thing, *made = world.documents[first][0]
            body = f"{('who made the', 'where was made the')[second]} {thing}"
            answer, needed = made[second], 1
        else:
            given = list(OPPOSITES)[first]
            body, answer, needed = f"opposite of {given}", OPPOSITES[given], 0
        self.text, self.answer, self.needed = f"<user>{body}?</user>", str(answer), needed


def integer(text):
    return int(text) if re.fullmatch("-?[0-9]{1,6}", text) else None


def calc(world, text):
    parts = re.fullmatch(r"(.[^-+*/]*)([-+*/])(.*)", text)
    if not parts:
        return None
    left, right = integer(parts[1].strip(" ")), integer(parts[3].strip(" "))
    if left is None or right is None or (parts[2] == "/" and (right == 0 or left % right)):
        return None
    value = {"+": left + right, "-": left - right, "*": left * right}.get(parts[2])
    value = left // right if value is None else value
    return str(value) if abs(value) <= 999_999 else None


def lookup(world, text):
    subject, _, field = text.partition(" ")
    field = field.strip(" ")
    if field in world.figures and subject in world.items:
        return str(world.figures[field][subject])
    shelf = "ABCDEF".find(subject) if len(subject) == 1 else -1
    return world.items[shelf] if field == "item" and shelf >= 0 else None


def search(world, text):
    n = len(world.documents)
    scores = [0.0] * n
    for word in text.split(" ", 3):
        has = [word.strip(" ") in words for words, _ in world.documents]
        idf = math.log(1 + (n - sum(has) + 0.5) / (sum(has) + 0.5))
        scores = [score + idf * is_in for score, is_in in zip(scores, has, strict=True)]
    best = max(range(n), key=lambda i: round(scores[i], 4))
    return world.documents[best][1] if scores[best] > 0 else None


TOOLS = {"calc": calc, "lookup": lookup, "search": search}


class Simulator:
    """One episode."""

    def __init__(self, state):
        self.world = World(state.world)
        n_questions = int(state.n_questions)
        self.asked = [Asked(q, self.world) for q in (state.question, state.follow_up)]
        self.count = Counter(questions=n_questions)
        self.calls, self.calls_here = [], 0

    @property
    def question(self):
        return self.asked[min(self.count["answered"], 1)]

    @property
    def is_over(self):
        return self.count["answered"] == self.count["questions"] or self.count["turns"] == TURNS

    def step(self, ids):
        """What is written in answer to a turn."""
        is_ended = END in ids
        said = ids[: ids.index(END)] if is_ended else ids
        self.count.update(turns=1, tokens=len(said) + is_ended)
        text = TOKENIZER.decode(said)
        parts = re.fullmatch(r"<(call|answer)>([^<]*)</\1>", text.strip(" "))
        content = parts[2].strip(" ") if parts else ""
        if not is_ended or len(text) > 96 or not 1 <= len(content) <= 40:
            self.count["malformed"] += 1
            reply = "<result>error: malformed</result>"
        elif parts[1] == "call":
            reply = f"<result>{self.call(content)}</result>"
        else:
            self.answer(content)
            reply = self.question.text
        return "" if self.is_over else reply

    def call(self, content):
        name, _, arguments = content.partition(" ")
        self.count["calls"] += 1
        self.count["redundant"] += content in self.calls
        self.count["unnecessary"] += self.calls_here >= self.question.needed
        self.calls.append(content)
        self.calls_here += 1
        if name not in TOOLS:
            self.count["unknown"] += 1
            return "error: unknown tool"
        self.count[f"by {name}"] += 1
        result = TOOLS[name](self.world, arguments.strip(" "))
        self.count["failed" if result is None else "succeeded"] += 1
        return "error: failed" if result is None else result

    def answer(self, content):
        expected = self.question.answer
        number = integer(content)
        is_right = content == expected if integer(expected) is None else number == int(expected)
        self.count.update(answered=1, correct=is_right)
        self.calls_here = 0

    @property
    def value(self):
        """1 × tool_efficiency + ½ × dialogue_quality."""
        c = self.count
        wasted = sum(c[k] for k in ("redundant", "malformed", "failed", "unknown", "unnecessary"))
        efficiency = c["correct"] / c["questions"] - 0.02 * c["calls"] - 0.1 * wasted
        rambling = max(c["tokens"] / (16 * c["questions"]) - 1, 0)
        protocol = 1 - c["malformed"] / max(c["turns"], 1)
        quality = 0.5 * c["answered"] / c["questions"] + 0.5 * protocol - 0.1 * rambling
        return efficiency + 0.5 * quality

    @property
    def info(self):
        c = self.count
        n = c["questions"]
        names = "succeeded failed unknown redundant unnecessary malformed".split()
        return (
            {
                "success": c["correct"] / n,
                "is_correct": float(c["correct"] == n),
                "answered": c["answered"] / n,
                "turns": c["turns"],
                "calls": c["calls"],
            }
            | {f"calls_{k}": c[k] for k in names}
            | {f"calls/{k}": c[f"by {k}"] for k in TOOLS}
        )


# The environment, compiled once.

RESET = jax.jit(jax.vmap(ENV.reset_env, (0, None)))


def drawn(seed=0, **params):
    """N episodes on the host: what they observe, and their states."""
    keys = jax.random.split(jax.random.key(seed), N)
    params = ENV.default_params.replace(**params)
    return jax.device_get(RESET(keys, jax.tree.map(jnp.asarray, params)))


@jax.jit
def compiled_play(states, actions):
    def turn(states, actions):
        step = jax.vmap(ENV.step_env, (None, 0, 0, None))
        written, states, rewards, is_over, info = step(
            jax.random.key(0), states, actions, ENV.default_params
        )
        return states, (written, rewards, is_over, info, states.statistics)

    return jax.lax.scan(turn, states, actions)[1]


def play(states, turns):
    """Everything that the environment returns, [TURNS, N, …], for up to N × TURNS turns of ids."""
    actions = np.full((TURNS, N, A), TOKENIZER.pad_id, np.int32)
    actions[:] = END
    for i, row in enumerate(turns):
        for t, ids in enumerate(row):
            actions[t, i, : len(ids)] = ids
            actions[t, i, len(ids) :] = TOKENIZER.pad_id
    return jax.device_get(compiled_play(states, actions))


def said(text, *, ended=True, then=""):
    return TOKENIZER.encode(text) + [END] * ended + TOKENIZER.encode(then)


def read(tokens, mask):
    return TOKENIZER.decode(tokens[mask].tolist())


def only(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@functools.cache
def fixed_states():
    """N times the same episode: a follow-up comes after "price of chair?"."""
    _, states = drawn()
    world = states.world._replace(
        items=np.tile([2, 0, 1, 3, 4, 5], (N, 1)),
        prices=np.tile([37, 5, 6, 7, 8, 9], (N, 1)),
        stocks=np.tile([12, 15, 16, 17, 18, 19], (N, 1)),
        things=np.tile([3, 1, 2, 0, 4, 5], (N, 1)),
        makers=np.tile([0, 0, 2, 3, 4, 5], (N, 1)),
        towns=np.tile([6, 1, 1, 3, 4, 5], (N, 1)),
    )
    asked = dict(family=1, first=0, operator=0, word=-1, n_needed=1)
    every = {name: np.full(N, value, np.int32) for name, value in asked.items()}
    question = states.question._replace(
        **every, second=np.zeros(N, np.int32), number=np.full(N, 37), is_follow_up=np.zeros(N, bool)
    )
    follow_up = question._replace(
        second=np.ones(N, np.int32), number=np.full(N, 12), is_follow_up=np.ones(N, bool)
    )
    changed = dict(world=world, question=question, follow_up=follow_up)
    statistics = states.statistics.replace(questions=np.full(N, 2, np.float32))
    return states.replace(n_questions=np.full(N, 2, np.int32), statistics=statistics, **changed)


# Random transcripts.

WORDS = [*ITEMS[:3], *THINGS[:3], *MAKERS, *TOWNS, "price", "stock", "item", "A", "F", "x", "big"]
LETTERS = list(TOKENIZER.alphabet)


def random_content(rng, simulator):
    number = [str(rng.integers(-5, 20)), str(rng.integers(-(10**6), 10**6)), "007", "0"]
    world = simulator.world
    kinds = [
        f"calc {rng.choice(number)}{rng.choice(list('+-*/'))}{rng.choice(number)}",
        f"calc 84{rng.choice(list('+-*/'))}{rng.choice([1, 2, 7, 12, 84, 5])}",
        f"lookup {rng.choice(world.items)} {rng.choice(['price', 'stock', 'item'])}",
        f"lookup {rng.choice(list('ABCDEF'))} item",
        f"search {rng.choice(world.documents[rng.integers(14)][0])} {rng.choice(WORDS)}",
        f"{rng.choice([*TOOLS, 'shout'])} {' '.join(rng.choice(WORDS, rng.integers(0, 6)))}",
    ]
    return kinds[rng.integers(len(kinds))]


def random_text(rng, simulator, before):
    kind = rng.random()
    if kind < 0.15 and before:
        return before[-1]
    if kind < 0.35:
        asked = simulator.asked[rng.integers(2)].answer
        return f"<answer>{rng.choice([asked, asked, '12', 'oslo'])}</answer>"
    text = f"<call>{random_content(rng, simulator)}</call>"
    if kind > 0.65:
        text = mutated(rng, text)
    return text if kind < 0.9 else "".join(rng.choice(LETTERS, rng.integers(0, 30)))


def mutated(rng, text):
    """With a piece dropped, doubled, replaced by other characters, or put elsewhere."""
    start, stop = sorted(rng.integers(0, len(text) + 1, 2))
    stop = min(stop, start + rng.integers(1, 12))
    piece = text[start:stop]
    other = "".join(rng.choice(LETTERS + list("  <>/-"), rng.integers(0, 4)))
    rest = text[:start] + text[stop:]
    at = rng.integers(0, len(rest) + 1)
    moved = rest[:at] + piece + rest[at:]
    return [rest, text[:stop] + piece + text[stop:], text[:start] + other + text[stop:], moved][
        rng.integers(4)
    ]


def random_turn(rng, text):
    """Its tokens: words or characters, mostly with an end, sometimes with more after it."""
    if rng.random() < 0.07:
        return rng.integers(0, TOKENIZER.vocab_size, rng.integers(1, A + 1)).tolist()
    ids = TOKENIZER.encode(text)
    if rng.random() < 0.3 and len(text) < A:
        ids = [token for letter in text for token in TOKENIZER.encode(letter)]
    if rng.random() < 0.1:
        ids.insert(rng.integers(0, len(ids) + 1), TOKENIZER.pad_id)
    ids += [END] * (rng.random() < 0.95)
    if rng.random() < 0.2:
        ids += rng.integers(0, TOKENIZER.vocab_size, 3).tolist()
    return ids[:A]


def check_random_transcripts(seed):
    """Play N of them on both sides; returns how often what happened."""
    rng = np.random.default_rng(seed)
    observed, states = drawn(seed)
    simulators = [Simulator(only(states, i)) for i in range(N)]
    transcripts = []
    for simulator in simulators:
        texts = []
        for _ in range(TURNS):
            texts.append(random_text(rng, simulator, texts))
        transcripts.append([random_turn(rng, text) for text in texts])
    written, rewards, is_over, info, statistics = play(states, transcripts)
    for i, simulator in enumerate(simulators):
        assert read(observed.tokens[i], observed.mask[i]) == simulator.question.text
        for t, ids in enumerate(transcripts[i]):
            before = simulator.value
            padded = ids + [TOKENIZER.pad_id] * (A - len(ids))
            reply = simulator.step(padded)
            where = f"seed {seed}, row {i}, turn {t}: {TOKENIZER.decode(ids)!r}"
            assert read(written.tokens[t, i], written.mask[t, i]) == reply, where
            assert is_over[t, i] == simulator.is_over, where
            got = {name: float(x[t, i]) for name, x in info.items()}
            assert got == pytest.approx(simulator.info), where
            assert statistics.tokens[t, i] == simulator.count["tokens"], where
            assert rewards[t, i] == pytest.approx(simulator.value - before, abs=2e-6), where
            if simulator.is_over:
                break
    return sum((simulator.count for simulator in simulators), Counter())


def test_random_transcripts_are_answered_counted_and_rewarded_as_by_plain_python():
    total = check_random_transcripts(0) + check_random_transcripts(1)
    assert min(total.values()) > 50, total  # everything happened, often
    assert len(total) == 15


@pytest.mark.slow
def test_ten_thousand_random_transcripts_are_answered_as_by_plain_python():
    for seed in range(2, 2 + 10_000 // N):
        check_random_transcripts(seed)


# Turns by hand, in the episode of `fixed_states`.

RESULTS = {
    # well formed
    "<call>calc 37*48</call>": "1776",
    " <call> calc  37 * 48 </call> ": "1776",
    "<call>lookup chair price</call>": "37",
    "<call>lookup chair  stock</call>": "12",
    "<call>lookup A item</call>": "chair",
    "<call>lookup F item</call>": "glove",
    "<call>search lamp</call>": "lamp: made by ada in oslo",
    "<call>search in the town of oslo</call>": None,  # the fourth word is "of oslo"
    "<call>search town of oslo</call>": "lamp: made by ada in oslo",
    "<call>search ada cork</call>": "clock: made by ada in cork",
    "<call>search big</call>": "small is the opposite of big",
    "<call>search right lamp</call>": "lamp: made by ada in oslo",  # the first of equals
    "<call>search slow fast lamp</call>": "slow is the opposite of fast",
    # malformed
    "": "malformed",
    "   ": "malformed",
    "chair": "malformed",
    "<call>": "malformed",
    "</call>": "malformed",
    "<call></call>": "malformed",
    "<call>  </call>": "malformed",
    "<answer></answer>": "malformed",
    "<call>calc 1+1": "malformed",
    "calc 1+1</call>": "malformed",
    "<call>calc 1+1</answer>": "malformed",
    "<answer>37</call>": "malformed",
    "</call>calc 1+1<call>": "malformed",
    "<call>calc 1+1</call>.": "malformed",
    "so <call>calc 1+1</call>": "malformed",
    "<call>calc 1+1</call><call>calc 1+1</call>": "malformed",
    "<call>calc 1+1</call><answer>37</answer>": "malformed",
    "<answer>37</answer><call>calc 1+1</call>": "malformed",
    "<call><call>calc 1+1</call></call>": "malformed",
    "<call><answer>37</answer></call>": "malformed",
    "<call>calc 1<2</call>": "malformed",
    "<result>37</result>": "malformed",
    "<user>what is 1+1?</user>": "malformed",
    # unknown
    "<call>calc1+1</call>": "unknown tool",
    "<call>clac 1+1</call>": "unknown tool",
    "<call>cal</call>": "unknown tool",
    "<call>calc> 1</call>": "unknown tool",
    "<call>37</call>": "unknown tool",
    "<call>CAB 1</call>": "unknown tool",
    # the calculator
    "<call>calc</call>": None,
    "<call>calc 1</call>": None,
    "<call>calc +</call>": None,
    "<call>calc 1+</call>": None,
    "<call>calc +1</call>": None,
    "<call>calc 1+1+1</call>": None,
    "<call>calc 1 1+1</call>": None,
    "<call>calc 1.5+1</call>": None,
    "<call>calc a+b</call>": None,
    "<call>calc 84/7</call>": "12",
    "<call>calc 84/5</call>": None,
    "<call>calc 84/0</call>": None,
    "<call>calc 0/0</call>": None,
    "<call>calc 0/84</call>": "0",
    "<call>calc -84/7</call>": "-12",
    "<call>calc -84/-7</call>": "12",
    "<call>calc -84/5</call>": None,
    "<call>calc -5+3</call>": "-2",
    "<call>calc 3-5</call>": "-2",
    "<call>calc 3--5</call>": "8",
    "<call>calc --5</call>": None,
    "<call>calc --5+1</call>": None,
    "<call>calc 3---5</call>": None,
    "<call>calc -</call>": None,
    "<call>calc 007*010</call>": "70",
    "<call>calc -0+0</call>": "0",
    "<call>calc 999999+0</call>": "999999",
    "<call>calc 999999+1</call>": None,
    "<call>calc -999999-1</call>": None,
    "<call>calc -999999+0</call>": "-999999",
    "<call>calc 999999*999999</call>": None,
    "<call>calc 65536*65536</call>": None,  # 0 modulo 2³²
    "<call>calc 65537*65536</call>": None,  # 65536 modulo 2³²
    "<call>calc 1000*1000</call>": None,
    "<call>calc 999*1001</call>": "999999",
    "<call>calc 1000000-1</call>": None,
    "<call>calc 0000001+1</call>": None,  # seven digits
    "<call>calc 99999999999+1</call>": None,
    # the other tools
    "<call>lookup</call>": None,
    "<call>lookup chair</call>": None,
    "<call>lookup price</call>": None,
    "<call>lookup chair item</call>": None,
    "<call>lookup A price</call>": None,
    "<call>lookup AB item</call>": None,
    "<call>lookup chair price price</call>": None,
    "<call>lookup mirror price</call>": None,  # on no shelf
    "<call>lookup chairs price</call>": None,
    "<call>search</call>": None,
    "<call>search vase lamps nobody</call>": None,
    "<call>search price</call>": None,
}


def test_turns_made_by_hand_are_answered_as_documented():
    rows = [[said(text)] for text in RESULTS]
    written, rewards, is_over, _, statistics = play(fixed_states(), rows)
    for i, (text, expected) in enumerate(RESULTS.items()):
        status = {"malformed": "malformed", "unknown tool": "unknown", None: "failed"}.get(
            expected, "succeeded"
        )
        if status != "succeeded":
            expected = f"error: {expected or 'failed'}"
        got = read(written.tokens[0, i], written.mask[0, i])
        assert got == f"<result>{expected}</result>", text
        counts = {k: float(getattr(statistics, k)[0, i]) for k in (
            "turns", "calls", "succeeded", "failed", "unknown", "malformed", "unnecessary"
        )}  # fmt: skip
        is_call = status != "malformed"
        right = dict.fromkeys(counts, 0.0) | {"turns": 1, "calls": is_call, status: 1}
        assert counts == right, text
        assert not is_over[0, i] and np.isfinite(rewards[0, i])


def test_an_answer_is_right_only_if_it_is_the_whole_answer():
    answers = {
        "37": 1, " 37 ": 1, "037": 1, "-37": 0, "3 7": 0, "37.": 0, "12": 0, "chair": 0,
        "0000037": 0, "37+0": 0, "--37": 0, "3": 0, "370": 0,
    }  # fmt: skip
    rows = [[said(f"<answer>{text}</answer>")] for text in answers]
    written, _, _, _, statistics = play(fixed_states(), rows)
    n = len(answers)
    assert statistics.correct[0, :n].tolist() == list(answers.values())
    assert (statistics.answered[0, :n] == 1).all()
    for i in range(n):  # right or wrong, the next question is asked
        assert read(written.tokens[0, i], written.mask[0, i]) == "<user>and its stock?</user>"


def test_only_what_precedes_the_first_end_token_is_said():
    call = "<call>calc 1+1</call>"
    rows = [
        said(call, then="junk</call>"),
        [*said(call), END, END],
        said("", then=call),
        said(call, ended=False),  # never ended
        [*said(call, ended=False), *(A - len(said(call))) * said(" ", ended=False), END],
        [TOKENIZER.pad_id, *said(call)],  # special tokens stand for no text
        [*said("<call>", ended=False), TOKENIZER.bos_id, *said("calc 1+1</call>")],
    ]
    written, *_, statistics = play(fixed_states(), [[ids] for ids in rows])
    results = [read(written.tokens[0, i], written.mask[0, i])[8:-9] for i in range(len(rows))]
    bad = "error: malformed"
    assert results == ["2", "2", bad, bad, "2", "2", "2"]
    n = len(said(call))
    assert statistics.tokens[0, : len(rows)].tolist() == [n, n, 1, A, A, n + 1, n + 1]


def test_contents_and_turns_are_bounded_in_bytes():
    call = "<call>calc 1+1</call>"
    results = {f"<call>{'price' * 8}</call>": "error: unknown tool"}  # 40 bytes
    results[f"<call>{'price' * 8}x</call>"] = "error: malformed"
    results[call + " " * (96 - len(call))] = "2"
    results[call + " " * (97 - len(call))] = "error: malformed"
    results["where was made the " * 20 + call] = "error: malformed"
    written, *_ = play(fixed_states(), [[said(text)] for text in results])
    got = [read(written.tokens[0, i], written.mask[0, i])[8:-9] for i in range(len(results))]
    assert got == list(results.values())


def test_an_episode_by_hand_is_counted_and_rewarded_by_hand():
    row = [
        "<call>lookup chair stock</call>",  # not what was asked, but the first call
        "<call>lookup chair price</call>",  # a second call
        "<call>lookup chair price</call>",  # redundant
        "37",
        "<answer>37</answer>",
        "<call>lookup chair stock</call>",  # redundant: the episode remembers
        "<call>find chair</call>",
        "<answer>13</answer>",
    ]
    _, rewards, is_over, info, statistics = play(fixed_states(), [[said(text) for text in row]])
    # −0.02 a call and −0.1 a waste; ½ · ½ for each answer; and what the protocol's share changes.
    tokens = np.cumsum([len(said(text)) for text in row])
    malformed = np.array([0, 0, 0, 1, 1, 1, 1, 1]) / np.arange(1, 9)
    efficiency = np.cumsum([-0.02, -0.12, -0.22, -0.1, 0.5, -0.12, -0.22, 0.0])
    quality = 0.25 * np.array([0, 0, 0, 0, 1, 1, 1, 2]) + 0.5 * (1 - malformed)
    worth = efficiency + 0.5 * (quality - 0.1 * np.maximum(tokens / 32 - 1, 0))
    np.testing.assert_allclose(rewards[:, 0], np.diff(worth, prepend=0.25), atol=1e-6)
    assert is_over[:, 0].tolist() == [False] * 7 + [True]
    expected = dict(
        questions=2, answered=2, correct=1, turns=8, tokens=tokens[-1], calls=5, succeeded=4,
        failed=0, unknown=1, redundant=2, unnecessary=3, malformed=1,
    )  # fmt: skip
    got = {name: float(getattr(statistics, name)[-1, 0]) for name in expected}
    assert got == expected
    assert statistics.by_tool[-1, 0].tolist() == [0, 4, 0]
    assert info["success"][-1, 0] == 0.5 and info["is_correct"][-1, 0] == 0


def test_the_rewards_of_an_episode_add_up_to_the_reward_of_its_end():
    _, states = drawn(5)
    rng = np.random.default_rng(5)
    texts = [
        ["<answer>12</answer>", "junk", "<call>calc 1+1</call>"][i] for i in rng.integers(0, 3, N)
    ]
    _, rewards, is_over, _, statistics = play(states, [[said(text)] * TURNS for text in texts])
    ends = is_over.argmax(0)
    last = jax.tree.map(lambda x: jnp.asarray(x[ends, np.arange(N)]), statistics)
    first = states.statistics
    change = jax.vmap(ENV.reward_fn)(last) - jax.vmap(ENV.reward_fn)(first)
    total = np.where(np.arange(TURNS)[:, None] <= ends[None, :], rewards, 0).sum(0)
    np.testing.assert_allclose(total, change, atol=1e-5)
    assert is_over[-1].all() and np.unique(ends).size > 2


def test_an_episode_ends_with_its_answers_or_its_turns_and_then_nothing_is_written():
    rows = [["<answer>1</answer>"] * 2, ["junk"] * 8, ["<answer>1</answer>", *["junk"] * 7]]
    written, _, is_over, _, _ = play(fixed_states(), [[said(t) for t in row] for row in rows])
    for i, end in enumerate([1, 7, 7]):
        assert is_over[: end + 1, i].tolist() == [False] * end + [True]
        assert written.mask[: end + 1, i].any(-1).tolist() == [True] * end + [False]
    assert (written.tokens[1, 0] == TOKENIZER.pad_id).all()


# What is drawn.


def test_questions_are_written_with_the_tokenizers_ids_and_their_answers_are_the_worlds():
    observed, states = drawn(11)
    seen = Counter()
    for i in range(N):
        simulator = Simulator(only(states, i))
        ids = TOKENIZER.encode(simulator.question.text)
        n_padding = ENV.prompt_length - len(ids)
        assert observed.tokens[i].tolist() == [TOKENIZER.pad_id] * n_padding + ids
        assert observed.mask[i].tolist() == [False] * n_padding + [True] * len(ids)
        for question, asked in zip(
            (states.question, states.follow_up), simulator.asked, strict=True
        ):
            row = only(question, i)
            answers = [*OPPOSITES.values(), *MAKERS, *TOWNS]
            answer = answers[row.word] if row.word >= 0 else str(row.number)
            assert (answer, row.n_needed) == (asked.answer, asked.needed)
            seen[FAMILIES[row.family], bool(row.is_follow_up)] += 1
    assert {family for family, _ in seen} == set(FAMILIES)
    assert ("lookup", True) in seen and seen["two_hop", True] == 0


def test_after_a_lookup_the_other_figure_of_the_same_item_is_asked_for():
    _, states = drawn(12)
    first, second = states.question, states.follow_up
    is_lookup = np.isin(first.family, [FAMILIES.index("lookup"), FAMILIES.index("two_hop")])
    np.testing.assert_array_equal(second.is_follow_up, is_lookup)
    assert (second.family[is_lookup] == FAMILIES.index("lookup")).all()
    assert (second.first == first.first)[is_lookup].all()
    assert (second.second + first.second == 1)[is_lookup].all()
    assert (first.second[is_lookup] == 0).any() and (first.second[is_lookup] == 1).any()


def test_families_large_sums_and_second_questions_are_as_frequent_as_asked():
    weights = np.array([0.5, 0.0, 0.25, 0.0, 0.25], np.float32)
    _, states = drawn(13, weights=weights, large=0.25, follow_up=0.8)
    counts = np.bincount(states.question.family, minlength=5)
    assert (counts[[1, 3]] == 0).all()
    assert (np.abs(counts - N * weights) <= 4 * np.sqrt(N * weights * (1 - weights))).all()
    sums = states.question.family == 0
    numbers = np.stack([states.question.first, states.question.second])[:, sums]
    is_large = (numbers > 10).all(0)
    assert (is_large | (numbers <= 10).all(0)).all()
    assert abs(is_large.mean() - 0.25) < 4 * (0.25 * 0.75 / sums.sum()) ** 0.5
    assert abs((states.n_questions - 1).mean() - 0.8) < 4 * (0.8 * 0.2 / N) ** 0.5
    _, states = drawn(13, large=1.0, follow_up=0.0)
    assert (states.n_questions == 1).all()
    sums = states.question.family == 0
    assert (states.question.first[sums] > 10).all() and (states.question.n_needed[sums] == 1).all()


def test_worlds_are_distinct_things_on_shelves_with_figures_from_1_to_99():
    world = drawn()[1].world
    for column in (world.items, world.things):
        ordered = np.sort(column, axis=1)
        assert column.shape == (N, 6) and (np.diff(ordered, axis=1) > 0).all()
        assert set(np.unique(column)) == set(range(8))
    for column in (world.prices, world.stocks):
        assert column.min() == 1 and column.max() == 99
    assert (world.prices != world.stocks).any()
    assert (world.makers != world.towns).any()


def test_the_same_key_draws_the_same_episode_and_others_draw_others():
    first, again, other = (drawn(seed)[1].world.prices for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).mean() > 0.9


# The interface.


def test_the_public_interface_is_that_of_gymnax():
    params = ENV.default_params
    assert isinstance(ENV, environment.Environment) and ENV.name == "Dialogue"
    observed = Prompts(*(jnp.asarray(x[0]) for x in drawn()[0]))
    assert ENV.observation_space(params).contains(observed)
    assert ENV.action_space(params).contains(jnp.full(A, END))
    assert ENV.action_space(params).shape == (A,)
    state = only(drawn()[1], 0)
    action = jax.ShapeDtypeStruct((A,), jnp.int32)
    key = jax.random.key(0)
    step = jax.eval_shape(ENV.step, key, state, action, params)
    next_observed, next_state, reward, terminated, truncated, info = step
    for got, first in ((next_observed, observed), (next_state, state)):
        same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, got, first)
        assert jax.tree.all(same)
    assert (reward.shape, reward.dtype) == ((), jnp.float32)
    assert terminated.dtype == truncated.dtype == bool
    reported = jax.eval_shape(ENV.step_env, key, state, action, params)[-1]
    scalars = [info[name] for name in reported]
    assert {(x.shape, x.dtype) for x in scalars} == {((), jnp.dtype("float32"))}


def test_is_terminated_says_what_step_says():
    _, states = drawn()
    assert not ENV.is_terminated(only(states, 0), ENV.default_params)
    last_turn = only(states, 0).replace(time=jnp.int32(TURNS))
    assert ENV.is_terminated(last_turn, ENV.default_params)
    fixed = only(fixed_states(), 0)
    for answered in (1, 2):
        statistics = fixed.statistics.replace(answered=jnp.float32(answered))
        state = fixed.replace(statistics=statistics)
        assert ENV.is_terminated(state, ENV.default_params) == (answered == 2)
    assert not ENV.is_truncated(last_turn, ENV.default_params)


def test_what_cannot_work_is_refused_in_one_line():
    for arguments, message in (
        (dict(reward_fn="success"), "no reward called success; expected task_success"),
        (dict(reward_fn={}), "no reward called nothing"),
        (dict(tools=ToolManager()), "has no tool"),
        (dict(tokenizer=CharTokenizer("0123456789")), "cannot encode"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            DialogueEnv(**arguments)
        assert "\n" not in str(caught.value)
