"""Two tools that run on the host: a search in text files, and Python in a confined subprocess.

Neither is there until it is registered.
"""

import functools
import json
import os
import re
import selectors
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxrl_llm.envs import sandbox_launcher
from jaxrl_llm.envs.tools import ToolError, ToolManager
from jaxrl_llm.types import ConfigError

_SUFFIXES = (".md", ".txt")
_MAX_TERMS = 64  # of a query


def register_document_search(
    manager: ToolManager,
    folder: str | Path,
    *,
    name: str = "search",
    top_k: int = 1,
    max_chars: int = 300,
) -> None:
    """Let a model search the text files below a folder. The index is built here, once.

    Args:
        manager: where the tool is registered.
        folder: as in `document_search`.
        name: of the tool; its one argument is `query`.
        top_k: as in `document_search`.
        max_chars: as in `document_search`.
    """
    manager.register(
        name,
        "Searches the documents and returns the passage that fits the query best, after the name "
        "of its file.",
        _one_string("query", "words to look for"),
        document_search(folder, top_k=top_k, max_chars=max_chars),
        max_output=4 * top_k * (max_chars + 100),
    )


def document_search(
    folder: str | Path, *, top_k: int = 1, max_chars: int = 300
) -> Callable[[str], str]:
    """A function from a query to the passages that fit it best.

    Passages are the paragraphs of all .txt and .md files below the folder, headings joined with
    what follows them, and long ones divided. They are ranked by BM25 (SQLite's FTS5, with Porter
    stemming) and returned as lines `FILE: PASSAGE`, the best first. Files that are not UTF-8 are
    left out, and named in one warning.

    Args:
        folder: holds the files.
        top_k: passages to return at most.
        max_chars: longest passage, characters.

    Raises:
        ConfigError: there is no such folder, or a number is too small.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected one that holds .txt or .md files")
    if top_k < 1 or max_chars < 20:
        raise ConfigError(
            f"top_k={top_k}, max_chars={max_chars}: expected at least 1 passage of 20 characters"
        )
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE passages USING fts5(file UNINDEXED, text, tokenize=porter)")
    index.executemany("INSERT INTO passages VALUES (?, ?)", _passages(folder, max_chars))

    def search(query: str) -> str:
        terms = list(dict.fromkeys(re.findall(r"\w+", query)))[:_MAX_TERMS]
        if not terms:
            raise ToolError("the query has no words")
        found = index.execute(
            "SELECT file, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{term}"' for term in terms), top_k),
        )
        return "\n".join(f"{file}: {text}" for file, text in found) or "nothing found"

    weakref.finalize(search, index.close)
    return search


def _passages(folder: Path, max_chars: int) -> list[tuple[str, str]]:
    """(file, passage) of all files, in the order of their names."""
    found, skipped = [], []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES):
        file = path.relative_to(folder).as_posix()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError):
            skipped.append(file)
            continue
        text = re.sub(r"(?m)^(#+ .*)\n\s*\n", r"\1\n", text)
        for paragraph in re.split(r"\n\s*\n", text):
            found += [(file, passage) for passage in textwrap.wrap(paragraph, max_chars)]
    if skipped:
        warnings.warn(f"documents that are not UTF-8 text: {', '.join(skipped)}", stacklevel=4)
    return found


@dataclass(frozen=True, kw_only=True)
class PythonLimits:
    """What a program may use. It may start no process and no thread, whatever these are.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: processor time.
        memory: address space, bytes; the interpreter itself takes about 30 MB of it.
        file_size: of each file that it writes, bytes. Their number is not limited.
        open_files: at a time.
        output: what it may print, bytes; more of it ends the program.
    """

    seconds: float = 10.0
    cpu_seconds: int = 2
    memory: int = 1 << 29
    file_size: int = 1 << 20
    open_files: int = 32
    output: int = 10_000

    def __post_init__(self):
        least = dict(
            seconds=0.1, cpu_seconds=1, memory=1 << 26, file_size=0, open_files=8, output=1
        )
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least {value}")

    def as_rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": int(self.cpu_seconds),
            "RLIMIT_AS": int(self.memory),
            "RLIMIT_FSIZE": int(self.file_size),
            "RLIMIT_NOFILE": int(self.open_files),
            "RLIMIT_NPROC": 0,
            "RLIMIT_CORE": 0,
        }


def register_python(
    manager: ToolManager,
    *,
    name: str = "python",
    limits: PythonLimits = PythonLimits(),
    max_output: int = 1000,
) -> None:
    """Let a model run Python programs, by `run_python`.

    Warns where the system cannot keep programs from the network, from other files or from
    starting processes: use a disposable container there.

    Args:
        manager: where the tool is registered.
        name: of the tool; its one argument is `code`.
        limits: of each program.
        max_output: longest answer, bytes.
    """
    tests = {
        "using the network": network_is_blocked,
        "changing files": files_are_protected,
        "starting processes": processes_are_blocked,
    }
    allowed = [what for what, is_refused in tests.items() if not is_refused()]
    if allowed:
        warnings.warn(
            f"this system cannot keep the programs of the tool {name} from {', '.join(allowed)}",
            stacklevel=2,
        )

    def python(code: str) -> str:
        status, text = run_python(code, limits)
        if status == "failed":
            raise ToolError(text)
        return text

    manager.register(
        name,
        "Runs a Python program, which has the standard library but no network, and returns what "
        "it prints.",
        _one_string("code", "the program"),
        python,
        timeout=limits.seconds + 10.0,  # the program's own limit comes first
        max_output=max_output,
    )


def run_python(
    code: str, limits: PythonLimits = PythonLimits()
) -> tuple[Literal["ok", "failed"], str]:
    """Run a program in a subprocess that is confined as far as Linux lets an ordinary user do it.

    - An empty environment (but for a fixed hash seed, so that sets print alike every time), no
      standard input, the standard library alone, a fresh folder that is deleted afterwards.
    - Limits that it cannot lift, low priority, no capabilities. At the end, however it comes, its
      process group is killed.
    - Where the kernel has seccomp: no processes or threads, no sockets, no signals to others.
      Where it has Landlock: no file written, made or removed outside of its folder. Whether this
      system has them: `network_is_blocked`, `processes_are_blocked`, `files_are_protected`.

    This stops accidents and the tricks that a model comes upon. It is not a security boundary
    against a determined attacker: the program shares the kernel, can read every file that this
    process can read, and can fill the disk with many small files. Run what you distrust in a
    virtual machine.

    Args:
        code: the program.
        limits: what it may use.

    Returns:
        "ok" and what it printed, or "failed" and the reason in the first line (an exception's last
        line, a limit), then what it printed. Bytes that are not UTF-8 are replaced by U+FFFD.

    Raises:
        ConfigError: this is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(f"run_python needs Linux, this is {sys.platform}: do not register it")
    launcher = [*sandbox_launcher.PYTHON_FLAGS, sandbox_launcher.__file__]
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm_", ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                [sys.executable, *launcher, json.dumps(limits.as_rlimits()), code],
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # too long, or characters that no program has
            return "failed", f"not a program: {getattr(error, 'strerror', None) or error}"
        with process:
            try:
                output, problem = _watch(process, limits)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return _summary(output.decode(errors="replace").strip(), problem)


def _watch(process: subprocess.Popen, limits: PythonLimits) -> tuple[bytes, str | int]:
    """What a process prints until it ends or goes too far, and its exit status or the reason."""
    assert process.stdout is not None
    deadline, output = time.monotonic() + limits.seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            output += chunk
            if len(output) > limits.output:
                return output[: limits.output], f"more than {limits.output} bytes of output"
            if not chunk:
                break
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return output, f"not finished after {limits.seconds:g} s"
    if status == -signal.SIGKILL:
        return output, f"more than {limits.cpu_seconds} s of processor time"
    return output, f"ended by a signal: {signal.strsignal(-status)}" if status < 0 else status


def _summary(printed: str, problem: str | int) -> tuple[Literal["ok", "failed"], str]:
    if problem == 0:
        return "ok", printed
    lines = printed.splitlines()
    if problem == 1 and lines:  # an exception: its last line says what it was
        return "failed", "\n".join([lines[-1], *lines[:-1]])
    reason = f"exit status {problem}" if isinstance(problem, int) else problem
    return "failed", "\n".join([reason, *lines])


@functools.cache
def network_is_blocked() -> bool:
    """Whether programs of `run_python` cannot open a socket. Tried once."""
    return _is_refused("import socket; socket.socket()")


@functools.cache
def processes_are_blocked() -> bool:
    """Whether programs of `run_python` cannot start a process. Tried once."""
    return _is_refused("import os; os.fork() or os._exit(0)")


@functools.cache
def files_are_protected() -> bool:
    """Whether programs of `run_python` cannot write to files of this user. Tried once."""
    with tempfile.NamedTemporaryFile() as file:
        return _is_refused(f"open({file.name!r}, 'a')")


def _is_refused(action: str) -> bool:
    code = f"try: {action}\nexcept OSError: print('refused')"
    return run_python(code, PythonLimits(seconds=60.0)) == ("ok", "refused")


def _one_string(name: str, description: str) -> dict:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
    }
