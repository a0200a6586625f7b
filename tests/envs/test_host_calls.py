"""Tools of the host, called from compiled steps and rollouts of dialogues."""

import functools
import re
import threading
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs import device_tools
from jaxrl_llm.envs.dialogue import DialogueEnv, dialogue_tokenizer
from jaxrl_llm.envs.host_calls import HostCaller, encode_known
from jaxrl_llm.envs.text import Text
from jaxrl_llm.envs.tools import ToolManager
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import make_dialogue_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.tokenizers import CharTokenizer

A, P = 32, 24  # tokens of a turn, and of what is written, of which the two tags are 2
N_AT_ONCE = 12
USUAL = dialogue_tokenizer()


def schema(**types):
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


def raising(error):
    def function():
        raise error

    return function


# What the tool `fetch` does, by its argument, and what is written then; None is a failure.
FETCHED = {
    "nothing": (lambda: "", ""),
    "long": (lambda: "ab" * 5_000_000, "ab" * ((P - 2) // 2)),
    "foreign": (lambda: "café zürich 漢🙂\n;", "caf? z?rich ????"),
    "none": (lambda: None, None),
    "number": (lambda: 12, None),
    "bytes": (lambda: b"caf\xe9", None),
    "surrogate": (lambda: "caf\udce9", None),
    "error": (raising(OSError("down")), None),
    "exit": (raising(SystemExit(0)), None),
    "interrupt": (raising(KeyboardInterrupt()), None),
    "unknown": (lambda: {}["unknown"], None),
}


class Tools:
    """A manager with tools of both kinds, which remembers the calls of the host's."""

    def __init__(self):
        self.manager, self.calls = ToolManager(), Counter[str]()
        self.release = threading.Event()
        self.together = threading.Barrier(N_AT_ONCE)
        register = self.manager.register
        word = schema(word="string")
        register("say", "", word, self.say)
        register("fetch", "", word, lambda word: FETCHED[word][0](), max_output=20_000_000)
        register("half", "", schema(n="integer"), lambda n: str(n // 2))
        register("hang", "", schema(), self.hang, timeout=0.2)
        register("meet", "", schema(), self.meet, timeout=60.0)
        device_tools.registered(self.manager)

    def say(self, word):
        self.calls[word] += 1
        return word

    def hang(self):
        self.release.wait(60)
        return "too late"

    def meet(self):
        self.together.wait(60)
        return "met"


@pytest.fixture(scope="module")
def tools():
    made = Tools()
    yield made
    made.release.set()


class Step:
    """`step(texts)` is one compiled step of as many rows: what is written, and the statistics."""

    def __init__(self, tools, size=64):
        self.tools, self.size = tools, size
        self.env = DialogueEnv(tools=tools.manager, max_turn_tokens=A, max_written=P)
        self.one_step = jax.vmap(self.env.step_env, (None, None, 0, None))
        self.compiled = jax.jit(self.one_step)
        params = self.env.default_params
        self.state = jax.jit(self.env.reset_env)(jax.random.key(0), params)[1]

    def __call__(self, texts):
        actions = np.full((self.size, A), USUAL.pad_id, np.int32)  # rows that say nothing
        for row, text in zip(actions, texts, strict=False):
            ids = [*USUAL.encode(text), USUAL.end_id]
            row[: len(ids)] = ids
        self.tools.calls.clear()
        self.tools.manager.statistics.reset()
        written, state, _, _, info = jax.device_get(
            self.compiled(jax.random.key(0), self.state, actions, self.env.default_params)
        )
        rows = zip(written.tokens[: len(texts)], written.mask, strict=False)
        return [USUAL.decode(ids[mask].tolist()) for ids, mask in rows], state.statistics, info


@pytest.fixture(scope="module")
def step(tools):
    return Step(tools)


def call(content):
    return f"<call>{content}</call>"


def result(text):
    return f"<result>{'error: failed' if text is None else text}</result>"


# One step


@pytest.mark.parametrize("what", FETCHED)
def test_whatever_a_tool_returns_is_written_as_far_as_it_can_be_or_is_a_failure(step, what):
    expected = FETCHED[what][1]
    [written], statistics, _ = step([call(f"fetch {what}")])
    assert written == result(expected)
    is_ok = expected is not None
    assert (statistics.succeeded[0], statistics.failed[0]) == (is_ok, not is_ok)
    total = step.tools.manager.statistics.total
    assert (total.calls, total.succeeded, total.failed) == (1, is_ok, not is_ok)


def test_a_tool_that_hangs_fails_and_the_other_rows_have_their_results(step):
    written, statistics, _ = step([call("say a"), call("hang"), call("say b"), call("hang")])
    assert written == [result(text) for text in ("a", None, "b", None)]
    assert statistics.failed[:4].tolist() == [0, 1, 0, 1]
    assert step.tools.manager.statistics.tools["hang"].failed == 2


def test_the_calls_of_a_step_run_at_once(step):
    # Each waits for all the others.
    written, *_ = step([call("meet")] * N_AT_ONCE)
    assert written == [result("met")] * N_AT_ONCE


TURNS = {
    call("say one"): "one",
    call("calc 37*48"): "1776",
    call("half 37"): "18",
    call("search big"): "small is the opposite of big",
    call("fetch error"): None,
    call("calc 1/0"): None,
    call("half many"): None,
    call("say"): None,
    call("fetch foreign"): "caf? z?rich ????",
    call("say two words"): "two words",
    call("  say   three  "): "three",
}


def test_every_row_has_the_result_of_its_own_call_on_the_device_and_on_the_host(step):
    written, statistics, info = step(TURNS)
    assert written == [result(text) for text in TURNS.values()]
    is_ok = [text is not None for text in TURNS.values()]
    n = len(TURNS)
    assert statistics.succeeded[:n].tolist() == is_ok
    assert statistics.failed[:n].tolist() == [not ok for ok in is_ok]
    assert statistics.calls.tolist() == [1] * n + [0] * (step.size - n)
    assert statistics.malformed.tolist() == [0] * n + [1] * (step.size - n)
    called = [text.removeprefix("<call>").split()[0].removesuffix("</call>") for text in TURNS]
    for name in step.env.tool_names:
        assert info[f"calls/{name}"][:n].tolist() == [each == name for each in called]


def test_the_managers_running_statistics_count_the_hosts_calls_of_all_rows(step):
    step(TURNS)
    counts = step.tools.manager.statistics
    # The calculator and the search are the device's.
    names = ("calls", "succeeded", "failed", "malformed")
    by_tool = {name: [getattr(each, k) for k in names] for name, each in counts.tools.items()}
    assert by_tool == {"say": [4, 3, 0, 1], "half": [2, 1, 0, 1], "fetch": [2, 1, 1, 0]}
    assert [getattr(counts.total, k) for k in names] == [8, 5, 1, 2]
    assert counts.total.unknown == counts.total.redundant == 0


def test_more_rows_than_run_at_a_time_have_their_own_results(step):
    words = [f"word {i}" for i in range(step.size)]
    written, *_ = step([call(f"say {word}") for word in words])
    assert written == [result(word) for word in words]
    assert step.tools.calls == Counter(words)


def test_turns_that_are_no_calls_call_nothing(step):
    turns = [
        "<answer>say a</answer>",
        "say a",
        "<call>say a",
        "say a</call>",
        "<call>say a</call>.",
    ]
    turns += ["<result>say a</result>", call("say a") * 2, call("sayer a"), call("calc 1+1"), ""]
    step(turns)
    assert not step.tools.calls and step.tools.manager.statistics.total.calls == 0


def test_one_callback_serves_all_rows_and_without_host_tools_there_is_none(step):
    alone = DialogueEnv(max_turn_tokens=A, max_written=P)
    for env, n_callbacks in ((step.env, 1), (alone, 0)):
        params = env.default_params
        state = jax.eval_shape(env.reset_env, jax.random.key(0), params)[1]
        rows: Any = jax.vmap(jax.vmap(env.step_env, (None, None, 0, None)), (None, None, 0, None))
        actions = jax.ShapeDtypeStruct((2, 3, A), jnp.int32)
        program = str(jax.make_jaxpr(rows)(jax.random.key(0), state, actions, params))
        assert len(re.findall(r"\w*callback\w*\[", program)) == n_callbacks


# Rollouts

SAID = ["alpha", "b", "three words long", "0"]
SPOKEN = [*map("<call>say {}</call>".format, SAID), call("calc 37*48"), call("fetch error")]
SPEAKER = CharTokenizer(USUAL.alphabet, [*USUAL.words, *SPOKEN, "<answer>12</answer>"])


@functools.cache
def speaker():
    """A model that mostly says one of the speaker's last tokens, then the end of its turn.

    The first two of an embedding say whether it is such a token; the head looks at nothing else.
    """
    config = ModelConfig(width=32, layers=1, heads=2, tie_embeddings=False)
    model = LanguageModel(config, SPEAKER.vocab_size)
    params = model.init(jax.random.key(0))
    is_turn = jnp.arange(SPEAKER.vocab_size) >= SPEAKER.vocab_size - len(SPOKEN) - 1
    embedding = params["embedding"].at[:, :2].set(6.0 * jnp.stack([~is_turn, is_turn], axis=1))
    head = jnp.zeros_like(params["head"]).at[0].set(is_turn).at[1, SPEAKER.end_id].set(1.5)
    return model, params | {"embedding": embedding, "head": head}


class Overheard(DialogueEnv):
    """Remembers the turns that it is given, but for those of padding alone."""

    heard: Counter[str]

    def step_env(self, key, state, action, params):
        jax.debug.callback(self.hear, action)
        return super().step_env(key, state, action, params)

    def hear(self, action):
        if (action != SPEAKER.pad_id).any():
            self.heard[SPEAKER.decode(action.tolist())] += 1


@pytest.fixture(scope="module")
def rolled(tools):
    """A rollout of 4 × 6 dialogues, the calls on the host, their statistics, the turns heard."""
    env = Overheard(
        "tool_efficiency", tools=tools.manager, tokenizer=SPEAKER, max_turn_tokens=4, max_written=P
    )
    model, params = speaker()
    sampling = SamplingConfig(max_tokens=40, block=64)
    rollout = make_dialogue_rollout(
        env, env.default_params, model, SPEAKER, sampling, prompts=4, group_size=6
    )
    env.heard = Counter[str]()
    tools.calls.clear()
    tools.manager.statistics.reset()
    made = jax.device_get(jax.jit(rollout)(params, jax.random.key(1)))
    jax.effects_barrier()
    return made, Counter(tools.calls), tools.manager.statistics.as_dict(), env.heard


def turns_of(completions):
    """Each turn that was answered, and what was written after it; None where that was cut off."""
    shape = (-1, completions.tokens.shape[-1])
    for ids, is_said, is_real in zip(*(x.reshape(shape) for x in completions[:3]), strict=True):
        edges = np.flatnonzero(np.diff(is_said, prepend=False, append=False))
        begins, stops = edges[::2], edges[1::2]
        for begin, stop, after in zip(begins, stops, [*begins[1:], is_real.sum()], strict=True):
            said, written = ids[begin:stop].tolist(), ids[stop:after].tolist()
            if said[-1] == SPEAKER.end_id or len(said) == 4:
                is_whole = after < ids.size
                yield SPEAKER.decode(said), SPEAKER.decode(written) if is_whole else None


def test_in_a_rollout_the_host_is_called_once_for_each_call_and_for_nothing_else(rolled):
    made, calls, *_ = rolled
    said = Counter(text for text, _ in turns_of(made.completions))
    expected = {word: said[call(f"say {word}")] for word in SAID}
    assert calls == expected and min(calls.values()) > 5
    # Turns end at different places of the transcripts, and some dialogues early.
    lengths = made.completions.attention_mask.sum(-1)
    assert np.unique(lengths).size > 4 and 0 < made.info["is_truncated"].mean() < 1


def test_in_a_rollout_a_dialogue_says_nothing_to_the_environment_before_the_end_of_its_turn(rolled):
    made, _, _, heard = rolled
    assert heard == Counter(text for text, _ in turns_of(made.completions))


def test_in_a_rollout_every_dialogue_reads_the_results_of_its_own_calls(rolled):
    results = {call(f"say {word}"): result(word) for word in SAID}
    results |= {call("calc 37*48"): result("1776"), call("fetch error"): result(None)}
    read = [pair for pair in turns_of(rolled[0].completions) if pair[0] in results and pair[1]]
    assert {said for said, _ in read} == set(results) and len(read) > 40
    assert all(written == results[said] for said, written in read)


def test_in_a_rollout_the_episodes_and_the_managers_statistics_count_alike(rolled):
    made, _, counts, _ = rolled
    info = {name: x.sum() for name, x in made.info.items()}
    said = Counter(text for text, _ in turns_of(made.completions))
    assert counts["calls/say"] == info["calls/say"] == sum(said[call(f"say {w}")] for w in SAID)
    assert counts["calls/fetch"] == info["calls/fetch"] == said[call("fetch error")] > 0
    assert info["calls/calc"] == said[call("calc 37*48")] > 0
    assert counts["calls"] == info["calls"] - info["calls/calc"]
    assert counts["calls_failed"] == info["calls_failed"] == counts["calls/fetch"]
    assert counts["calls_succeeded"] == info["calls_succeeded"] - info["calls/calc"]


# The caller by itself


def test_arguments_that_are_not_utf8_reach_the_tool_with_substitutes(tools):
    caller = HostCaller(tools.manager, USUAL, P)
    raw = [b"caf\xe9", "漢".encode(), b"a\0b", "漢".encode()[:2]]
    table = np.stack([np.frombuffer(text.ljust(8, b"x"), np.uint8) for text in raw])
    arguments = Text(jnp.asarray(table), jnp.array([*map(len, raw)]))
    tools.calls.clear()
    say = jnp.full(len(raw), caller.names.index("say"))
    answers = jax.jit(jax.vmap(caller))(say, arguments)
    assert tools.calls == Counter(["caf\ufffd", "漢", "a\0b", "\ufffd"])
    assert answers.is_ok.all()
    read = [USUAL.decode(ids[mask].tolist()) for ids, mask in zip(*answers.tokens, strict=True)]
    assert read == ["caf?", "?", "a?b", "?"]


def test_a_negative_number_calls_no_tool_and_answers_nothing(tools):
    caller = HostCaller(tools.manager, USUAL, P)
    tools.calls.clear()
    answer = jax.jit(caller)(jnp.int32(-1), Text(jnp.zeros(8, jnp.uint8), jnp.int32(0)))
    assert not answer.tokens.mask.any() and not answer.is_ok and not tools.calls


class WithSpecials(CharTokenizer):
    """Reads $ as the end token, as large tokenizers do with their <eos>."""

    def encode(self, text):
        parts = [super(WithSpecials, self).encode(part) for part in text.split("$")]
        return [token for part in parts for token in [self.end_id, *part]][1:]


@pytest.mark.parametrize(
    "alphabet, text, expected",
    [
        ("abc?", "abc", "abc"),
        ("abc?", "a\nbé漢c", "a?b??c"),
        ("abc", "a\nbé漢c", "abc"),  # no ? either
        ("abc", "é", ""),
        ("abc", "", ""),
        ("abc?", "a$b$$c$", "abc"),
    ],
)
def test_results_are_encoded_without_unknown_characters_and_special_tokens(
    alphabet, text, expected
):
    tokenizer = WithSpecials(alphabet)
    ids = encode_known(tokenizer, text)
    assert ids == [3 + alphabet.index(letter) for letter in expected]
