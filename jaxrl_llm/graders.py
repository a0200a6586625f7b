"""Graders of answers, and the program of the process in which `grading.GradingPool` runs them.

A grader is made once in each process, by a function such as `reasoning` or `math` that imports what
it needs, and then called with one answer at a time. Nothing here imports JAX.
"""

import base64
import hashlib
import json
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

Grader = Callable[..., Any]  # returns what JSON can hold

# Of a process; an answer may make a computer algebra system compute 9**9**9.
_LIMITS = {"RLIMIT_AS": 4 << 30, "RLIMIT_FSIZE": 1 << 20, "RLIMIT_CORE": 0}


def main() -> None:
    """Make the grader, then answer pickled requests, each with a line of JSON, while some come."""
    # What graders print is no reply, and exit() closes its standard input.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 0)
    os.dup2(2, 1)

    def reply(call: Callable[[], Any]) -> bool:
        """Whether the call returned."""
        try:
            answer = {"value": call()}
        except BaseException as error:  # an answer that is evaluated may even exit
            answer = {"problem": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(answer).encode() + b"\n")
        return "value" in answer

    path, made_by, seconds = pickle.load(requests)
    sys.path[:] = path
    made = []
    if not reply(lambda: made.append(pickle.loads(made_by)())):
        return
    if sys.platform == "linux":
        from jaxrl_llm.envs.sandbox_launcher import give_up

        give_up(_LIMITS)
    while True:
        try:
            arguments = pickle.load(requests)
        except EOFError:
            return
        # The pool kills what hangs; should it be gone itself, this ends the process.
        signal.setitimer(signal.ITIMER_REAL, seconds + 10.0)
        reply(lambda: made[0](*arguments))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def math() -> Grader:
    """Whether a mathematical expression equals the reference, by math-verify.

    Both are read as LaTeX, as if within a box.
    """
    from math_verify import parse, verify

    def grade(answer: str | None, reference: str) -> float:
        if answer is None:
            return 0.0
        # No timeouts of its own: they are signals, and the pool has the bound.
        expected, given = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # type: ignore
            for text in (reference, answer)
        )
        if not expected:
            raise ValueError(f"the reference {reference!r} cannot be read")
        return float(verify(expected, given, timeout_seconds=None))

    return grade


def reasoning(task: str, options: dict[str, Any]) -> Grader:
    """The scores that a task of reasoning-gym gives itself, for entries of `questions`."""
    from reasoning_gym import create_dataset

    dataset = create_dataset(task, seed=0, size=1, **options)

    def grade(answer: str | None, entry: str) -> float:
        return float(dataset.score_answer(answer, pickle.loads(base64.b64decode(entry))))

    return grade


def questions(task: str, options: dict[str, Any]) -> Grader:
    """The distinct questions of one split of a task of reasoning-gym, as dicts.

    `question` and `answer` are texts, `fields` is what else is known, as texts, and `entry` is what
    `reasoning` takes.
    """
    from reasoning_gym import create_dataset

    def draw(n: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
        random.seed(seed)  # some tasks draw from the global generator too
        found: dict[str, dict[str, Any]] = {}
        for entry in create_dataset(task, seed=seed, size=4 * n + 16, **options):
            text = entry["question"].strip()
            if len(found) == n:
                break
            if text not in found and is_held_out(text) == held_out:
                found[text] = {
                    "question": text,
                    "answer": str(entry["answer"]),
                    "fields": {name: str(value) for name, value in entry["metadata"].items()},
                    "entry": base64.b64encode(pickle.dumps(entry)).decode(),
                }
        return list(found.values())

    return draw


def is_held_out(question: str) -> bool:
    """Half of all questions are for training and half for evaluation, whatever drew them."""
    return bool(hashlib.sha256(question.encode()).digest()[-1] & 1)


if __name__ == "__main__":
    main()
