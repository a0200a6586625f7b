"""Transcripts of a demonstrator for the warm start: it knows all answers, and calls tools badly.

It calls where no call is needed, calls twice, and says what only a call can tell without one, so
that who imitates it has to guess there.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.envs.device_tools import GIVEN, ITEMS, PRICE, SHELVES, THINGS
from jaxrl_llm.envs.dialogue import DialogueEnv, EnvParams
from jaxrl_llm.envs.questions import (
    ANSWERS,
    ARITHMETIC,
    LOOKUP,
    SEARCH,
    TWO_HOP,
)
from jaxrl_llm.types import ConfigError, Prompts


class Demonstrations(NamedTuple):
    """N dialogues to learn from."""

    prompts: Prompts  # [N, P]
    tokens: Int[np.ndarray, "N T"]
    loss_mask: Bool[np.ndarray, "N T"]  # the agent's turns
    attention_mask: Bool[np.ndarray, "N T"]  # those, and what the environment wrote


def demonstrations(
    env: DialogueEnv,
    params: EnvParams,
    n: int,
    *,
    max_tokens: int,
    seed: int,
    guess: float = 0.25,
    waste: float = 0.5,
    repeat: float = 0.1,
) -> Demonstrations:
    """Play n episodes by script; every answer is right.

    Args:
        env: the environment.
        params: which episodes it draws.
        n: how many.
        max_tokens: T, room for a dialogue after its first question.
        seed: of episodes and script.
        guess: chance of no call for a question that needs some.
        waste: chance of a call for a question that needs none.
        repeat: chance that one of an episode's calls is made twice.

    Raises:
        ConfigError: a turn or a dialogue does not fit, or an answer turned out wrong.
    """
    rng = np.random.default_rng(seed)
    reset = jax.jit(jax.vmap(env.reset_env, in_axes=(0, None)))
    step = jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, 0, None)))
    keys = jax.random.split(jax.random.key(seed), n)
    prompts, states = reset(keys, params)
    scripts = write_scripts(jax.device_get(states), rng, guess, waste, repeat)
    longest = max(scripts, key=len)
    if len(longest) > params.max_turns:
        raise ConfigError(
            f"the demonstrator failed: {longest} are more turns than max_turns={params.max_turns}"
        )
    transcripts: list[list[tuple[int, bool]]] = [[] for _ in range(n)]
    for turn in range(max(map(len, scripts))):
        actions = np.full((n, env.max_turn_tokens), env.tokenizer.pad_id, np.int32)
        for i, script in enumerate(scripts):
            if turn < len(script):
                ids = encode_turn(env, script[turn])
                actions[i, : len(ids)] = ids
                transcripts[i] += [(token, True) for token in ids]
        written, states, _, _, info = step(keys, states, actions, params)
        written, n_correct = jax.device_get((written, info["is_correct"]))
        for i, script in enumerate(scripts):
            if turn < len(script) - 1:
                transcripts[i] += [(token, False) for token in written.tokens[i][written.mask[i]]]
            elif turn == len(script) - 1 and not n_correct[i]:
                raise ConfigError(
                    f"the demonstrator failed: {script} in max_turns={params.max_turns}; expected "
                    "enough turns, and an environment that takes right answers"
                )
    return pack(jax.device_get(prompts), transcripts, max_tokens, env.tokenizer.pad_id)


def encode_turn(env: DialogueEnv, text: str) -> list[int]:
    """The tokens of a turn, with the end token."""
    ids = [*env.tokenizer.encode(text), env.tokenizer.eos_ids[0]]
    if len(ids) > env.max_turn_tokens:
        raise ConfigError(
            f"max_turn_tokens={env.max_turn_tokens}: the turn {text} takes {len(ids)} tokens; set "
            "max_turn_tokens to at least that"
        )
    return ids


def pack(
    prompts: Prompts, transcripts: list[list[tuple[int, bool]]], max_tokens: int, pad_id: int
) -> Demonstrations:
    """Right-pad the transcripts."""
    longest = max(map(len, transcripts))
    if longest > max_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens}: a demonstrated dialogue takes {longest} tokens; set "
            f"max_tokens to at least that"
        )
    tokens = np.full((len(transcripts), max_tokens), pad_id, np.int32)
    masks = np.zeros((2, *tokens.shape), bool)
    for i, transcript in enumerate(transcripts):
        ids, is_said = zip(*transcript, strict=True)
        tokens[i, : len(ids)] = ids
        masks[0, i, : len(ids)] = is_said
        masks[1, i, : len(ids)] = True
    return Demonstrations(prompts, tokens, *masks)


def write_scripts(
    states: Any, rng: np.random.Generator, guess: float, waste: float, repeat: float
) -> list[list[str]]:
    """The turns of each episode."""
    n = len(states.n_questions)
    rows = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(n))
    scripts = []
    for row in rows:
        asked = [row.question, row.follow_up][: int(row.n_questions)]
        script = []
        for question in asked:
            needed = needed_calls(question, row.world)
            if needed:
                calls = [] if rng.random() < guess else needed
            else:
                calls = [wasted_call(question)] if rng.random() < waste else []
            script += [f"<call>{call}</call>" for call in calls]
            script.append(f"<answer>{answer(question)}</answer>")
        calls_at = [i for i, turn in enumerate(script) if turn.startswith("<call>")]
        if calls_at and rng.random() < repeat:
            repeated = rng.choice(calls_at)
            script.insert(repeated, script[repeated])
        scripts.append(script)
    return scripts


def expression(question: Any) -> str:
    """The sum that is asked for."""
    return f"{question.first}{'+-*'[question.operator]}{question.second}"


def needed_calls(question: Any, world: Any) -> list[str]:
    """The calls without which the question cannot be answered."""
    if question.n_needed == 0:
        return []
    place = int(question.first)
    field = "price" if question.second == PRICE else "stock"
    if question.family == ARITHMETIC:
        return [f"calc {expression(question)}"]
    if question.family == SEARCH:
        return [f"search {THINGS.words[world.things[place]]}"]
    of_item = f"lookup {ITEMS.words[world.items[place]]} {field}"
    return {LOOKUP: [of_item], TWO_HOP: [f"lookup {SHELVES.words[place]} item", of_item]}[
        int(question.family)
    ]


def wasted_call(question: Any) -> str:
    """A call that the question does not need, and which answers it."""
    if question.family == ARITHMETIC:
        return f"calc {expression(question)}"
    return f"search {GIVEN.words[question.first]}"


def answer(question: Any) -> str:
    """The right answer."""
    return ANSWERS.words[question.word] if question.word >= 0 else str(question.number)
