"""The Gymnasium view against Gymnasium's checker, a player, and the environments themselves."""

import functools
import re
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import Countdown
from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.envs.gymnasium_view import TextEnv
from jaxrl_llm.tokenizers import TokenBytes, arithmetic_tokenizer
from jaxrl_llm.types import ConfigError

T, A = 24, 32  # tokens of an answer to Countdown, and of a turn


class Utf8Tokenizer:
    """A token for each byte; none is a character beyond ASCII."""

    pad_id, eos_ids, vocab_size = 256, (257,), 258
    token_bytes = TokenBytes(
        np.append(np.arange(256), [0, 0]).astype(np.uint8)[:, None], np.arange(258) < 256
    )

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@functools.cache
def inner(name):
    if name == "dialogue":
        return DialogueEnv("tool_efficiency", max_turn_tokens=A)
    return Countdown(arithmetic_tokenizer(), max_completion=T)


@pytest.fixture(params=["countdown", "dialogue"])
def env(request):
    return inner(request.param)


class Solver:
    """Answers Countdown, from the text of the problem alone."""

    def __call__(self, written):
        numbers, target = written.strip().split("=")
        return str(host.solve([int(number) for number in numbers.split(",")], int(target)))


class Talker:
    """Answers the questions of dialogues by the tools, from what is written alone."""

    opposites = dict(
        big="small", hot="cold", day="night", old="new", up="down", wet="dry", fast="slow",
        left="right",
    )  # fmt: skip

    def __init__(self):
        self.asked, self.item = [], ""

    def __call__(self, written):
        read = re.fullmatch(r"<(user|result)>(.*?)\??</\1>", written)
        assert read, written
        tag, text = read.groups()
        if tag == "user":
            self.asked, text = text.split(), None
        call, answer = self.next_step(text)
        return f"<call>{call}</call>" if answer is None else f"<answer>{answer}</answer>"

    def next_step(self, found):
        """A call, and the answer if it is known."""
        match self.asked:
            case ["what", "is", expression]:
                return None, eval(expression)
            case ["opposite", "of", word]:
                return None, self.opposites[word]
            case ["who" | "where" as which, *_, thing]:
                made = found and re.search("made by (?P<who>.*) in (?P<where>.*)", found)
                return f"search {thing}", made and made[which]
            case [_, "on", "shelf", shelf] if found is None:
                return f"lookup {shelf} item", None
            case [field, "on", "shelf", _]:
                self.asked, found, self.item = ["and", "its", field], None, found
            case [field, "of", item]:
                self.item = item
        return f"lookup {self.item} {self.asked[0 if 'of' in self.asked else -1]}", found


PLAYERS = {"Countdown": Solver, "Dialogue": Talker}


def played(view, **seed):
    """What was read, what was said, and what each turn returned."""
    written, info = view.reset(**seed)
    assert info == {}
    player, is_over = PLAYERS[view._env.name](), False
    read, said, returned = [written], [], []
    while not is_over:
        said.append(player(read[-1]))
        written, reward, is_terminated, is_truncated, info = view.step(said[-1])
        is_over = is_terminated or is_truncated
        read.append(written)
        returned.append((reward, is_terminated, is_truncated, info))
    return read, said, returned


# Gymnasium's rules


def test_gymnasiums_checker_has_no_objection(env):
    check_env(TextEnv(env))


def test_gymnasium_makes_more_of_them_with_the_same_episodes(env):
    view: Any = TextEnv(env)
    vector: Any = gymnasium.make_vec(view.spec, 2)
    written, _ = vector.reset(seed=[5, 6])
    assert list(written) == [view.reset(seed=seed)[0] for seed in (5, 6)]
    _, rewards, *_ = vector.step(["1+1", "2"])
    assert rewards.shape == (2,)
    vector.close()


@pytest.mark.parametrize("form", ["argument", "reset"])
def test_the_same_seed_gives_the_same_episodes_and_another_gives_others(env, form):
    def first(seed):
        view = TextEnv(env, seed=seed if form == "argument" else None)
        given = {} if form == "argument" else {"seed": seed}
        return [played(view, **given), *(played(view) for _ in range(2))]

    assert first(3) == first(3)
    prompts = {episode[0][0] for seed in range(3, 8) for episode in first(seed)}
    assert len(prompts) > 10  # of 15


def test_without_a_seed_episodes_differ_each_time(env):
    prompts = {TextEnv(env).reset()[0] for _ in range(10)}
    assert len(prompts) > 3


# Episodes


def test_a_player_gets_what_correct_answers_are_worth(env):
    view = TextEnv(env)
    n_calls = []
    for seed in range(30):
        _, said, returned = played(view, seed=seed)
        rewards, is_terminated, is_truncated, infos = zip(*returned, strict=True)
        n_calls.append(sum(turn.startswith("<call>") for turn in said))
        # A sum may be worked out without the calculator.
        assert sum(rewards) == pytest.approx(1.0 - 0.02 * n_calls[-1])
        assert infos[-1]["is_correct"] == 1.0 and not any(is_truncated)
        assert is_terminated == (False,) * (len(said) - 1) + (True,)
        assert all(type(x) is float for info in infos for x in info.values())
    assert env.name == "Countdown" or len(set(n_calls)) > 2


def test_the_environment_itself_says_and_rewards_the_same(env):
    view, tokenizer, step = TextEnv(env), env.tokenizer, jax.jit(env.step_env)
    size = env.action_space(env.default_params).shape[0]
    for seed in range(5):
        read, said, returned = played(view, seed=seed)
        view.reset(seed=seed)
        state = view._state
        for turn, written, expected in zip(said, read[1:], returned, strict=True):
            ids = [*tokenizer.encode(turn), tokenizer.eos_ids[0]]
            action = jnp.array(ids + [tokenizer.pad_id] * (size - len(ids)))
            observed, state, reward, is_over, info = jax.device_get(
                step(jax.random.key(0), state, action, env.default_params)
            )
            assert tokenizer.decode(observed.tokens[observed.mask].tolist()) == written
            assert (float(reward), bool(is_over), False) == expected[:3]
            assert {name: float(x) for name, x in info.items()} == expected[3]


def test_parameters_say_which_episodes_are_drawn():
    env: Any = inner("dialogue")
    weights = np.array([0, 0, 0, 0, 1], np.float32)
    view = TextEnv(env, env.default_params.replace(weights=weights, follow_up=0.0))
    for seed in range(5):
        read, said, _ = played(view, seed=seed)
        assert read[0].startswith("<user>opposite of ") and len(said) == 1


def test_the_transcript_is_rendered_without_what_nobody_reads(env):
    view = TextEnv(env)
    read, said, _ = played(view, seed=1)
    lines = [line for pair in zip(read, said, strict=False) for line in pair]
    assert view.render() == "\n".join(lines)
    silent = TextEnv(env, render_mode=None)
    silent.reset()
    assert silent.render() is None


# Whatever is said


WRONG = ["", " ", "<call>", "</answer><call>", "<result>1</result>", "12", ")(", "1/0", "9" * 5000]


def test_any_text_of_known_characters_is_answered_within_bounds(env):
    view: Any = TextEnv(env)
    known = view.action_space.character_set
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(sorted(known), rng.integers(0, 60))) for _ in range(40)]
    for text in [*(text for text in WRONG if set(text) <= known), *texts]:
        view.reset(seed=0)
        written, reward, is_terminated, _, info = view.step(text)
        assert written in view.observation_space
        assert info["is_correct"] == 0.0 and np.isfinite(reward)
        if not is_terminated:
            assert re.fullmatch("<(user|result)>.*</(user|result)>", written)


def test_a_turn_that_is_too_long_has_no_end():
    env: Any = inner("dialogue")
    view = TextEnv(env)
    call = "<call>calc 1+1</call>"
    n_tokens = len(env.tokenizer.encode(call))
    for n_spaces, result in ((A - 1 - n_tokens, "2"), (A - n_tokens, "error: malformed")):
        view.reset(seed=0)
        assert view.step(call + n_spaces * " ")[0] == f"<result>{result}</result>"
    view = TextEnv(inner("countdown"))
    for n_spaces, is_truncated in ((T - 2, 0.0), (T - 1, 1.0)):
        view.reset(seed=0)
        _, reward, is_over, _, info = view.step("1" + n_spaces * " ")
        assert is_over and info["is_truncated"] == is_truncated
        assert reward == pytest.approx(0.0 if is_truncated else 0.1)


@pytest.mark.parametrize("action", ["é", "12é", "漢字", "1\n", "\ud800", "\0", b"12", 12, None])
def test_what_the_tokenizer_cannot_encode_is_refused_and_the_episode_goes_on(env, action):
    view = TextEnv(env)
    prompt, _ = view.reset(seed=2)
    with pytest.raises(ValueError, match="action .*: (cannot encode|expected text)") as caught:
        view.step(action)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    turn = PLAYERS[env.name]()(prompt)
    alone = TextEnv(env)
    alone.reset(seed=2)
    assert view.step(turn) == alone.step(turn)
    assert view.render() == alone.render()


def test_text_beyond_ascii_is_wrong_where_the_tokenizer_can_encode_it():
    view = TextEnv(Countdown(Utf8Tokenizer(), max_completion=T))
    for text in ("é", "漢字" * 3, "1+\N{FULLWIDTH DIGIT TWO}"):
        view.reset(seed=0)
        assert view.step(text)[1] == pytest.approx(0.1)


# What cannot work


def test_a_step_without_an_episode_is_one_clear_error(env):
    view = TextEnv(env)
    message = r"^no episode is running; call reset\(\) first$"
    with pytest.raises(gymnasium.error.ResetNeeded, match=message):
        view.step("12")
    played(view)
    for _ in range(2):
        with pytest.raises(gymnasium.error.ResetNeeded, match=message):
            view.step("12")
    assert played(view, seed=0) == played(TextEnv(env), seed=0)


def test_what_is_no_environment_of_text_is_refused_in_one_line():
    nothing: Any = object()
    with pytest.raises(ConfigError, match="^object has no tokenizer; expected an environment of"):
        TextEnv(nothing)
    with pytest.raises(ConfigError, match="^render_mode='human': expected 'ansi' or None$"):
        TextEnv(inner("dialogue"), render_mode="human")
