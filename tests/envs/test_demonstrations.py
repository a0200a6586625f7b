import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.envs.demonstrations import demonstrations, pack, write_scripts
from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.types import ConfigError, Prompts

ENV = DialogueEnv()
TOKENIZER = ENV.tokenizer
END = TOKENIZER.eos_ids[0]
N, T = 400, 100
STEP = jax.jit(jax.vmap(ENV.step_env, (None, 0, 0, None)))


@functools.cache
def drawn():
    """The episodes that `demonstrations(seed=0)` shows."""
    keys = jax.random.split(jax.random.key(0), N)
    reset = jax.jit(jax.vmap(ENV.reset_env, (0, None)))
    return jax.device_get(reset(keys, ENV.default_params))


@functools.cache
def shown():
    return demonstrations(ENV, ENV.default_params, N, max_tokens=T, seed=0)


def scripts_of(guess=0.0, waste=0.0, repeat=0.0):
    return write_scripts(drawn()[1], np.random.default_rng(0), guess, waste, repeat)


def play(turns):
    """Transcripts of rows of turns (ids), and the counts of each episode at its end."""
    _, states = drawn()
    transcripts, ends = [[] for _ in range(N)], {}
    for t in range(max(map(len, turns))):
        actions = np.full((N, ENV.max_turn_tokens), TOKENIZER.pad_id, np.int32)
        for i, row in enumerate(turns):
            if t < len(row):
                actions[i, : len(row[t])] = row[t]
        written, states, _, is_over, info = jax.device_get(
            STEP(jax.random.key(0), states, actions, ENV.default_params)
        )
        for i, row in enumerate(turns):
            if t < len(row):
                transcripts[i] += [*row[t], *written.tokens[i][written.mask[i]].tolist()]
                assert is_over[i] == (t == len(row) - 1)
                ends[i] = {name: float(x[i]) for name, x in info.items()}
    return transcripts, [ends[i] for i in range(N)]


def test_masks_are_those_of_the_agents_turns_and_of_the_whole_transcript():
    _, tokens, loss_mask, attention_mask = shown()
    assert tokens.shape == loss_mask.shape == attention_mask.shape == (N, T)
    assert not (loss_mask & ~attention_mask).any()
    lengths = attention_mask.sum(1)
    np.testing.assert_array_equal(attention_mask, np.arange(T)[None] < lengths[:, None])
    assert (tokens[~attention_mask] == TOKENIZER.pad_id).all()
    # Every turn of the agent ends with the end token, which is learned; nobody else says it.
    is_end = (tokens == END) & attention_mask
    is_last = loss_mask & ~np.pad(loss_mask, ((0, 0), (0, 1)))[:, 1:]
    np.testing.assert_array_equal(is_end, is_last)
    assert loss_mask[:, 0].all() and (loss_mask != attention_mask).any()


def test_the_transcripts_are_the_environments_and_end_with_right_answers():
    """Feed the turns, cut out by the mask alone, to the environment once more."""
    prompts, tokens, loss_mask, attention_mask = shown()
    turns = []
    for ids, is_said in zip(tokens, loss_mask, strict=True):
        ends = np.flatnonzero((ids == END) & is_said)
        pieces = np.split(np.arange(T), ends + 1)[:-1]
        turns.append([ids[piece][is_said[piece]].tolist() for piece in pieces])
    transcripts, ends = play(turns)
    for i in range(N):
        assert transcripts[i] == tokens[i][attention_mask[i]].tolist()
        assert ends[i]["is_correct"] == 1 and ends[i]["calls_malformed"] == 0
    np.testing.assert_array_equal(prompts.tokens, drawn()[0].tokens)
    np.testing.assert_array_equal(prompts.mask, drawn()[0].mask)
    assert np.mean([end["calls_redundant"] for end in ends]) > 0.03
    assert np.mean([end["calls_unnecessary"] for end in ends]) > 0.1


def test_without_waste_and_repetition_no_call_is_superfluous():
    scripts = scripts_of()
    turns = [[[*TOKENIZER.encode(text), END] for text in script] for script in scripts]
    _, ends = play(turns)
    for script, end, n_questions in zip(scripts, ends, drawn()[1].n_questions, strict=True):
        assert end["is_correct"] == 1
        assert end["calls_unnecessary"] == end["calls_failed"] == end["calls_malformed"] == 0
        calls = [text for text in script if text.startswith("<call>")]
        # Only a second question that needs the very call of the first repeats one.
        assert end["calls_redundant"] == len(calls) - len(set(calls))
        assert n_questions == 2 or len(calls) == len(set(calls))
    assert np.mean([end["calls_redundant"] for end in ends]) < 0.03


@pytest.mark.parametrize("waste", [0.0, 0.5, 1.0])
def test_questions_that_need_no_call_get_one_as_often_as_asked(waste):
    _, states = drawn()
    n_needed = np.where(states.n_questions == 2, states.follow_up.n_needed, 0)
    n_needed += states.question.n_needed
    n_free = int((states.question.n_needed == 0).sum())
    n_free += int(((states.n_questions == 2) & (states.follow_up.n_needed == 0)).sum())
    n_calls = [sum("<call>" in turn for turn in script) for script in scripts_of(waste=waste)]
    n_wasted = (np.array(n_calls) - n_needed).sum()
    assert n_free > 100
    assert abs(n_wasted - n_free * waste) <= 4 * (n_free * waste * (1 - waste)) ** 0.5


@pytest.mark.parametrize("guess", [0.0, 0.25, 1.0])
def test_questions_that_need_calls_are_answered_without_as_often_as_asked(guess):
    _, states = drawn()
    is_first = states.question.n_needed > 0
    is_second = (states.n_questions == 2) & (states.follow_up.n_needed > 0)
    n = int(is_first.sum() + is_second.sum())
    pieces = [" ".join(script).split("</answer>")[:-1] for script in scripts_of(guess=guess)]
    n_guessed = sum(
        "<call>" not in row[0] for row, needs in zip(pieces, is_first, strict=True) if needs
    )
    n_guessed += sum(
        "<call>" not in row[1] for row, needs in zip(pieces, is_second, strict=True) if needs
    )
    assert n > 300
    assert abs(n_guessed - n * guess) <= 4 * (n * guess * (1 - guess)) ** 0.5


@pytest.mark.parametrize("repeat", [0.0, 0.3, 1.0])
def test_one_call_of_an_episode_is_made_twice_as_often_as_asked(repeat):
    calling = [script for script in scripts_of(repeat=repeat) if any("<call>" in t for t in script)]
    n_twice = [sum(a == b for a, b in zip(x, x[1:], strict=False)) for x in calling]
    assert max(n_twice) <= 1
    n = len(calling)
    assert abs(sum(n_twice) - n * repeat) <= 4 * (n * repeat * (1 - repeat)) ** 0.5


def test_transcripts_are_padded_on_the_right_and_refused_if_they_do_not_fit():
    prompts = Prompts(np.zeros((2, 1), np.int32), np.ones((2, 1), bool))
    rows = [[(5, True), (6, False), (7, True)], [(8, True)]]
    packed = pack(prompts, rows, 4, 9)
    assert packed.tokens.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert packed.loss_mask.astype(int).tolist() == [[1, 0, 1, 0], [1, 0, 0, 0]]
    assert packed.attention_mask.astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    with pytest.raises(ConfigError, match="max_tokens=2: a demonstrated dialogue takes 3 tokens"):
        pack(prompts, rows, 2, 9)


def test_turns_that_do_not_fit_are_refused():
    env = DialogueEnv(max_turn_tokens=4)
    with pytest.raises(ConfigError, match="max_turn_tokens=4: the turn <.*> takes [0-9]+ tokens"):
        demonstrations(env, env.default_params, 4, max_tokens=T, seed=0)


def test_a_demonstrator_that_has_too_few_turns_says_so():
    params = ENV.default_params.replace(max_turns=1)
    with pytest.raises(ConfigError, match="the demonstrator failed"):
        demonstrations(ENV, params, 4, max_tokens=T, seed=0)
