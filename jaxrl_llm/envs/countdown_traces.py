"""Worked Countdown solutions in words, for the warm start of a language model.

A trace tries a few equations, says of each what it comes to, and answers with the one that works:

  <think>
  19+5=24, 24-3=21 no
  19-5=14, 14*3=42 yes
  </think>
  <answer>(19-5)*3</answer>
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.envs.countdown_chat import CountdownChat
from jaxrl_llm.types import ConfigError, Prompts

MAX_COUNT = 4  # numbers up to which all derivations are listed
_RANK = {"+": 0, "-": 0, "*": 1, "/": 1, "": 2}


class Term(NamedTuple):
    """A value and how it was come by."""

    value: int
    text: str
    operator: str = ""  # the outermost one; "" for a number
    steps: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def derivations(numbers: tuple[int, ...]) -> list[Term]:
    """All ways to combine the numbers two by two in whole, non-negative steps.

    Ways that differ by the order of independent steps or of commuting operands count once each.

    >>> [term.text for term in derivations((6, 3))]
    ['6+3', '6-3', '6*3', '6/3']

    Raises:
        ConfigError: not 1 to 4 numbers.
    """
    if not 1 <= len(numbers) <= MAX_COUNT:
        raise ConfigError(f"traces of {len(numbers)} numbers: expected 1 to {MAX_COUNT}")
    found = _combined(tuple(Term(n, str(n)) for n in numbers))
    return list({term.text: term for term in found}.values())


def trace(
    numbers: Sequence[int], target: int, max_failures: int, choice: np.random.Generator
) -> str | None:
    """A trace with up to `max_failures` equations that fail, or None without a solution.

    How many fail is uniform; which ones, the likelier the nearer they come to the target.

    Raises:
        ConfigError: not 1 to 4 numbers.
    """
    every = derivations(tuple(numbers))
    solved = [term for term in every if term.value == target]
    if not solved:
        return None
    others = sorted({term.value for term in every} - {target})
    nearness = np.array([1.0 / abs(value - target) for value in others])
    n = min(int(choice.integers(max_failures + 1)), len(others))
    tried = choice.choice(others, n, replace=False, p=nearness / nearness.sum()) if n else []
    wrong = [_one(choice, [term for term in every if term.value == value]) for value in tried]
    right = _one(choice, solved)
    lines = [", ".join(term.steps) + " no" for term in wrong]
    lines.append(", ".join(right.steps) + " yes")
    return "\n".join(["<think>", *lines, "</think>", f"<answer>{right.text}</answer>"])


def trace_examples(
    env: CountdownChat, n: int, *, per_problem: int, max_tokens: int, max_failures: int, seed: int
) -> tuple[Prompts, Int[np.ndarray, "N G T"], Bool[np.ndarray, "N G T"]]:
    """Prompts of training problems with G = `per_problem` traces each, end tokens included.

    Problems are taken in order, again from the first where there are fewer than `n`; those without
    a solution in whole steps, and those with a trace longer than `max_tokens`, are passed over.

    Args:
        env: its tokenizer, prompts and problems.
        n: how many prompts, N.
        per_problem: traces of each, which share its computation.
        max_tokens: T.
        max_failures: see `trace`.
        seed: of the traces.

    Raises:
        ConfigError: there is none in a round over all problems, or `env.prefill` is not how a trace
            begins.
    """
    if not "<think>\n".startswith(env.prefill):
        raise ConfigError(f"prefill={env.prefill!r}: expected '<think>\\n', as traces begin, or ''")
    choice = np.random.default_rng(seed)
    rows: list[int] = []
    written: list[list[int]] = []
    while len(rows) < n:
        before = len(rows)
        for row in range(env.n_train):
            traces = [_tokens(env, row, max_failures, choice) for _ in range(per_problem)]
            if len(rows) < n and all(0 < len(ids) <= max_tokens for ids in traces):
                rows.append(row)
                written += traces
        if len(rows) == before:
            raise ConfigError(
                f"max_tokens={max_tokens}: no problem has traces that are short enough; expected "
                "more tokens, or a smaller max_failures"
            )
    prompts = jax.device_get(jax.vmap(env.table.write)(np.array(rows)))
    lengths = np.array([len(ids) for ids in written])
    mask = np.arange(max_tokens)[None, :] < lengths[:, None]
    tokens = np.full(mask.shape, env.tokenizer.pad_id, np.int32)
    tokens[mask] = np.concatenate(written)
    shape = n, per_problem, max_tokens
    return prompts, tokens.reshape(shape), mask.reshape(shape)


def _tokens(
    env: CountdownChat, row: int, max_failures: int, choice: np.random.Generator
) -> list[int]:
    """A trace of one of the environment's problems; nothing where there is none."""
    numbers, target = env.problems.numbers[row], int(env.problems.targets[row])
    text = trace(numbers[numbers > 0].tolist(), target, max_failures, choice)
    if text is None:
        return []
    return [*env.tokenizer.encode(text.removeprefix(env.prefill)), env.tokenizer.eos_ids[0]]


def _one(choice: np.random.Generator, terms: list[Term]) -> Term:
    return terms[choice.integers(len(terms))]


def _combined(terms: tuple[Term, ...]) -> Iterator[Term]:
    if len(terms) == 1:
        yield terms[0]
        return
    for i, j in combinations(range(len(terms)), 2):
        rest = tuple(term for k, term in enumerate(terms) if k not in (i, j))
        for joined in _joined(terms[i], terms[j]):
            yield from _combined((joined, *rest))


def _joined(a: Term, b: Term) -> Iterator[Term]:
    large, small = (a, b) if a.value >= b.value else (b, a)
    yield _step(a, "+", b, a.value + b.value)
    yield _step(large, "-", small, large.value - small.value)
    yield _step(a, "*", b, a.value * b.value)
    if small.value > 0 and large.value % small.value == 0:
        yield _step(large, "/", small, large.value // small.value)


def _step(left: Term, operator: str, right: Term, value: int) -> Term:
    def written(term: Term, lowest: int) -> str:
        return f"({term.text})" if _RANK[term.operator] < lowest else term.text

    rank = _RANK[operator]
    # a−(b+c) and a/(b·c) need their parentheses, a+(b−c) and a·(b/c) do not.
    text = written(left, rank) + operator + written(right, rank + (operator in "-/"))
    step = f"{left.value}{operator}{right.value}={value}"
    return Term(value, text, operator, (*left.steps, *right.steps, step))
