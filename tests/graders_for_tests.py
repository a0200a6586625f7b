"""Graders that misbehave. Other processes import this file."""

import os
import time


def made():
    return lambda answer: {
        "hang": lambda: time.sleep(3600),
        "die": lambda: os._exit(3),
        "raise": lambda: 1 / 0,
        "exit": lambda: exit(),
        "compute": lambda: len(str(9**9**8)),
        "write": lambda: open("/tmp/jaxrl_llm_is_not_written", "w"),
        "print": lambda: print("x" * 10**6) or 0.25,
        "pid": os.getpid,
        "hash": lambda: hash("text"),
        "secret": lambda: os.environ.get("SECRET_KEY"),
    }.get(answer, lambda: float(answer))()


def unmakeable():
    raise ImportError("no module named tricks")
