"""Rewards computed on the device, through the table of bytes, and on the host, from the text."""

import ast
import random
from fractions import Fraction
from functools import cache
from operator import add, mul, sub, truediv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs import host
from jaxrl_llm.envs.expression import grade
from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.tokenizers import tokens_to_bytes

pytest.importorskip("jinja2")

END = "<|endoftext|>"
ROOM, N_TOKENS, ROWS = 128, 24, 2000
FUNCTIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def is_right(text: str, numbers: list[int], target: int) -> bool:
    """By Python's parser, on exact rationals."""
    used = []

    def evaluate(node) -> Fraction:
        match node:
            case ast.Constant(value=int(value)):
                used.append(value)
                return Fraction(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in FUNCTIONS:
                return FUNCTIONS[type(op)](evaluate(left), evaluate(right))
        raise SyntaxError

    if set(text) - set("0123456789+-*/() "):
        return False
    try:
        value = evaluate(ast.parse(text.strip(" "), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


@cache
def problems() -> list[tuple[list[int], int, str]]:
    rng, found = random.Random(1), []
    while len(found) < 200:
        numbers, target = [rng.randint(1, 20) for _ in range(3)], rng.randint(1, 60)
        solution = host.solve(numbers, target)
        found += [(numbers, target, solution)] if solution else []
    return found


def completion(rng: random.Random, tokenizer: HFTokenizer, solution: str) -> list[int]:
    """A solution, spaced, damaged, ended or not; or any ids."""
    if rng.random() < 0.2:
        return rng.choices(range(tokenizer.vocab_size), k=N_TOKENS)
    text = "".join(letter + " " * (rng.random() < 0.1) for letter in solution)
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice("0123456789+-*/()=é日😀<\n") + text[at + rng.randint(0, 1) :]
    ids = tokenizer.encode(text)
    if rng.random() < 0.2:
        ids.insert(rng.randrange(len(ids) + 1), rng.choice(range(tokenizer.vocab_size)))
    if rng.random() < 0.8:
        ids = [*ids, rng.choice(tokenizer.eos_ids)]
    return (ids + rng.choices(range(tokenizer.vocab_size), k=N_TOKENS))[:N_TOKENS]


def test_the_device_rewards_ten_thousand_completions_as_the_host_does(any_kind, wrapped):
    tokenizer, rng = wrapped(any_kind, eos_token=END), random.Random(2)
    posed = [rng.choice(problems()) for _ in range(10_000)]
    ids = np.array([completion(rng, tokenizer, solution) for _, _, solution in posed])
    ends = jnp.array(tokenizer.eos_ids)

    @jax.jit
    @jax.vmap
    def reward(tokens, numbers, target):
        is_said = jnp.cumsum(jnp.isin(tokens, ends)) == 0
        text, length = tokens_to_bytes(tokens, is_said, tokenizer.token_bytes, ROOM)
        return grade(text, length, numbers, target).is_correct

    numbers = np.array([numbers for numbers, _, _ in posed])
    targets = np.array([target for _, target, _ in posed])
    parts = [slice(i, i + ROWS) for i in range(0, len(ids), ROWS)]
    found = np.concatenate([reward(ids[p], numbers[p], targets[p]) for p in parts])
    expected = []
    for row, (given, target, _) in zip(ids.tolist(), posed, strict=True):
        stops = [t for t, i in enumerate(row) if i in tokenizer.eos_ids]
        text = tokenizer.decode(row[: stops[0]] if stops else row)
        expected.append(is_right(text, given, target))
    assert found.tolist() == expected
    assert 2500 < sum(expected) < 7500
