"""Answers graded in processes of their own, where one that hangs costs one answer."""

import importlib.util
import json
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from jaxrl_llm import graders
from jaxrl_llm.types import ConfigError

_START_SECONDS = 120.0  # for the imports of a grader
_KEPT = ("LD_LIBRARY_PATH", "LANG")  # of the environment; keys and the like stay away from graders
# Sets are in the same order every time, so that generators which iterate over them repeat.
_SETTINGS = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1"}


class Grade(NamedTuple):
    """What became of one answer."""

    value: Any  # what the grader returned; 0.0 where it did not return
    status: Literal["ok", "timed_out", "failed"] = "ok"
    problem: str = ""  # why there is no value


class GradingPool:
    """Calls a grader in a few processes, each call for no longer than a bound.

    A process that takes longer, or that ends, is replaced, and its answer is worth 0.0. The
    processes start with the first call. They are started from scratch rather than forked, so that
    this works beside a running JAX and within its callbacks, and, on Linux, they cannot write
    files, start processes or open sockets: some graders evaluate what a model wrote. This stops
    accidents (see `envs.host_tools.run_python`), it is no security boundary.

    Args:
        make: a function of an importable module, or a `functools.partial` of one, that returns the
            grader; called once in each process. `graders` has some.
        seconds: the bound, wall-clock time of one call.
        workers: processes.

    Raises:
        ConfigError: a function that other processes cannot import, or a number that is too small.
    """

    def __init__(self, make: Callable[[], graders.Grader], *, seconds: float = 5.0, workers=1):
        function = make.func if isinstance(make, partial) else make
        if function.__module__ == "__main__":
            raise ConfigError(
                f"{function.__qualname__} is defined in the program itself: expected a function of "
                "a module, which other processes can import; move it into a file"
            )
        try:
            self._made_by = pickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"no function that other processes can import ({error}): expected one at the top "
                "of a module"
            ) from None
        if not seconds > 0 or workers < 1:
            raise ConfigError(f"seconds={seconds}, workers={workers}: expected > 0 and at least 1")
        self._seconds, self._n_workers = seconds, workers
        self._idle: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._idle)

    def grade(self, calls: Iterable[tuple]) -> list[Grade]:
        """A grade for each tuple of the grader's arguments, in their order.

        Raises:
            ConfigError: the grader cannot be made.
        """
        with ThreadPoolExecutor(self._n_workers) as threads:
            return list(threads.map(self._grade_one, calls))

    def _take(self) -> "_Worker":
        """A process that waits, or else a new one; those that have ended are cleared away."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return _Worker(self._made_by, self._seconds)
            if worker.is_running():
                return worker
            worker.end()

    def _grade_one(self, arguments: tuple) -> Grade:
        worker = self._take()
        grade = worker.call(arguments, self._seconds)
        if worker.is_lost:
            worker.end()
        else:
            self._idle.append(worker)
        return grade

    def close(self) -> None:
        """End the processes; a further call starts new ones."""
        _end(self._idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A process that runs `graders.main`."""

    def __init__(self, made_by: bytes, seconds: float):
        self.is_lost = False
        self._folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm_", ignore_cleanup_errors=True)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._process = subprocess.Popen(
            # -P: the names of modules beside it are those of the standard library.
            [sys.executable, "-P", graders.__file__],
            cwd=self._folder.name,
            env=kept | _SETTINGS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        path = [os.path.abspath(folder) for folder in sys.path]
        started = self.call((path, made_by, seconds), _START_SECONDS)
        if started.status != "ok":
            self.end()
            raise ConfigError(f"the grader cannot be made: {started.problem}")

    def call(self, request: tuple, seconds: float) -> Grade:
        """Send a request and wait for its answer; no answer leaves the process lost."""
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline, line = time.monotonic() + seconds, b""
        try:
            self._process.stdin.write(pickle.dumps(request))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # and nothing is to be read
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.is_lost = True
                    return Grade(0.0, "timed_out", f"no grade after {seconds:g} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    self.is_lost = True
                    return Grade(0.0, "failed", "the process of the grader ended")
                line += chunk
        answer = json.loads(line)
        if "problem" in answer:
            return Grade(0.0, "failed", answer["problem"])
        return Grade(answer["value"])

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # what it did not read is flushed
            pass
        self._process.wait()
        self._folder.cleanup()


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def math_pool(*, seconds: float = 5.0, workers: int = 1) -> GradingPool:
    """Graders of mathematical expressions, called with (answer, reference); see `graders.math`.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            'answers like \\frac{1}{2} need math-verify: pip install "math-verify[antlr4_13_2]"; '
            "to compare texts instead would call 1/2 and 0.5 different"
        )
    return GradingPool(graders.math, seconds=seconds, workers=workers)
