"""The search against BM25 from its formula; the sandbox against programs that try to get out."""

import ctypes
import math
import os
import platform
import random
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from jaxrl_llm.envs import host_tools
from jaxrl_llm.envs.host_tools import (
    PythonLimits,
    document_search,
    register_document_search,
    register_python,
    run_python,
)
from jaxrl_llm.envs.tools import ToolError, ToolManager
from jaxrl_llm.types import ConfigError


def test_importing_the_tools_starts_nothing():
    program = """
import threading
import jaxrl_llm.envs.host_tools
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "1"]
    assert ToolManager().names == ()


# Document search


def write(folder, **files):
    """`a_md="text"` writes a.md."""
    for name, text in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def bm25(query, passage, passages, k1=1.2, b=0.75):
    """Robertson's formula; words in more than half of the passages count next to nothing."""
    mean = sum(map(len, passages)) / len(passages)
    score = 0.0
    for word in query:
        n = sum(word in each for each in passages)
        idf = max(math.log((len(passages) - n + 0.5) / (n + 0.5)), 1e-6)
        f = passage.count(word)
        score += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(passage) / mean))
    return score


def test_passages_come_in_the_order_of_bm25(tmp_path):
    rng = random.Random(0)
    words = [a + b for a in "bdkmz" for b in "aeiou"]  # too short to have a stem
    passages = [rng.choices(words, k=rng.randint(3, 30)) for _ in range(40)]
    for i, passage in enumerate(passages):
        write(tmp_path, **{f"{i:02}_txt": " ".join(passage)})
    search = document_search(tmp_path, top_k=5, max_chars=1000)
    for _ in range(200):
        query = rng.sample(words, k=rng.randint(1, 4))
        scores = [bm25(query, passage, passages) for passage in passages]
        found = [int(line[:2]) for line in search(" ".join(query).upper()).splitlines()]
        best = sorted((score for score in scores if score > 0), reverse=True)[:5]
        assert [scores[i] for i in found] == pytest.approx(best)


def test_the_best_passage_is_returned_after_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path, seas_txt="The Baltic is shallow.\n\nThe Pacific is the\ndeepest ocean.")
    write(tmp_path / "deep", lakes_md="Lake Baikal is the deepest lake.")
    write(tmp_path, code_py="deepest ocean")
    manager = ToolManager()
    register_document_search(manager, tmp_path)
    assert manager.call("search", "deepest ocean").text == (
        "seas.txt: The Pacific is the deepest ocean."
    )
    assert manager.call("search", '{"query": "lakes"}').text == (
        "deep/lakes.md: Lake Baikal is the deepest lake."
    )


def test_a_heading_belongs_to_the_paragraph_below_it(tmp_path):
    write(tmp_path, a_md="# Volcanoes\n\nThey erupt.\n\n## Glaciers\n\nThey melt.\n\nSlowly.")
    search = document_search(tmp_path)
    assert search("volcano") == "a.md: # Volcanoes They erupt."
    assert search("glacier") == "a.md: ## Glaciers They melt."


def test_long_paragraphs_are_divided(tmp_path):
    words = [f"w{i}" for i in range(2000)]
    write(tmp_path, a_txt=" ".join(words), b_txt="x" * 5000)
    search = document_search(tmp_path, max_chars=80)
    for word in ("w0", "w777", "w1900"):
        passage = search(word).removeprefix("a.txt: ")
        assert word in passage.split() and 60 < len(passage) <= 80
    assert search("w1999").endswith("w1999")
    assert search("x" * 80) == "b.txt: " + "x" * 80


def test_files_that_are_not_utf8_are_named_once_and_left_out(tmp_path):
    write(tmp_path, a_txt="good cats", b_txt=b"caf\xe9 cats", c_md=b"\xff\xfecats", d_txt="dogs")
    with pytest.warns(UserWarning) as caught:
        search = document_search(tmp_path, top_k=9)
    assert [str(w.message) for w in caught] == ["documents that are not UTF-8 text: b.txt, c.md"]
    assert search("cats") == "a.txt: good cats"


def test_nothing_found_is_said(tmp_path):
    assert document_search(tmp_path)("cats") == "nothing found"
    write(tmp_path, a_txt="dogs", empty_txt="", blank_md="\n \n\n")
    assert document_search(tmp_path)("cats") == "nothing found"
    with pytest.raises(ToolError, match="no words"):
        document_search(tmp_path)("?! ...")


@pytest.mark.parametrize(
    "query",
    [
        'dogs"',
        '"dogs',
        "dogs AND",
        "NEAR(dogs",
        "text: dogs",
        "-dogs*",
        "dogs OR NOT (",
        "dogs\0",
        "dogs\ud800",
        "dogs'; DROP TABLE passages; --",
        "_ dogs ́",
    ],
)
def test_queries_are_words_and_never_syntax(tmp_path, query):
    assert document_search(write(tmp_path, a_txt="dogs"))(query) == "a.txt: dogs"


@pytest.mark.parametrize("n_before, found", [(63, "a.txt: dogs"), (64, "nothing found")])
def test_of_a_query_however_long_the_first_64_words_count(tmp_path, n_before, found):
    search = document_search(write(tmp_path, a_txt="dogs"))
    before, after = [*map(str, range(n_before))], map(str, range(200_000))
    assert search(" ".join([*before, *before, "dogs", *after])) == found


def test_many_threads_may_search_at_once(tmp_path):
    for i in range(50):
        write(tmp_path, **{f"{i}_txt": f"word{i} common"})
    manager = ToolManager()
    register_document_search(manager, tmp_path, name="find", top_k=2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: manager.call("find", f"word{i % 50}").text, range(500)))
    assert answers == [f"{i % 50}.txt: word{i % 50} common" for i in range(500)]


def test_searches_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="missing is not a folder; expected one that holds"):
        document_search(tmp_path / "missing")
    for settings in ({"top_k": 0}, {"max_chars": 19}):
        with pytest.raises(ConfigError, match="expected at least 1 passage of 20 characters"):
            document_search(tmp_path, **settings)


# Python

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


def kernel_has_seccomp():
    known = platform.machine() in ("x86_64", "aarch64")
    return known and Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def kernel_has_landlock():
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


seccomp = pytest.mark.skipif(not kernel_has_seccomp(), reason="the kernel has no seccomp")
landlock = pytest.mark.skipif(not kernel_has_landlock(), reason="the kernel has no Landlock")


def patient(*, seconds=60.0, **limits):
    """Limits under which a busy machine does not end a program that is not about time."""
    return PythonLimits(seconds=seconds, **limits)


def reason(code, **limits):
    """The first line of a failure."""
    status, text = run_python(code, patient(**limits))
    assert status == "failed", text
    return text.splitlines()[0]


def printed(code, **limits):
    status, text = run_python(code, patient(**limits))
    assert status == "ok", text
    return text


@linux
def test_a_program_has_the_standard_library_and_nothing_else():
    code = (
        "import fractions, itertools, json, math, random, re, statistics; print(math.gcd(12, 18))"
    )
    assert printed(code) == "6"
    assert printed("for word in ['é', '漢']:\n    print(word)") == "é\n漢"
    assert printed("pass") == ""
    for module in ("numpy", "jaxrl_llm"):
        assert reason(f"import {module}").startswith("ModuleNotFoundError")


@linux
def test_a_failure_begins_with_its_reason():
    status, text = run_python("print(1)\n1 / 0", patient())
    assert status == "failed"
    assert text.splitlines()[:4] == [
        "ZeroDivisionError: division by zero",
        "1",
        "Traceback (most recent call last):",
        '  File "<string>", line 2, in <module>',
    ]
    assert reason("1 +").startswith("SyntaxError")
    assert run_python("print(1); raise SystemExit(3)", patient()) == ("failed", "exit status 3\n1")
    assert reason("raise SystemExit('too cold')") == "too cold"
    assert reason("import ctypes; ctypes.string_at(0)") == "ended by a signal: Segmentation fault"


@linux
def test_the_same_program_prints_the_same():
    code = "print({'a', 'b', 'c', 'd', 'e', 'f', 'g'}, hash('x'))"
    assert len({printed(code) for _ in range(4)}) == 1


@linux
@pytest.mark.parametrize("code", ["print('\0')", "print('\ud800')", "#" * 1_000_000])
def test_what_cannot_be_passed_to_python_is_no_program(code):
    assert reason(code).startswith("not a program: ")


@linux
def test_a_busy_program_is_ended_by_its_processor_time():
    assert reason("while True: pass", cpu_seconds=1) == "more than 1 s of processor time"


@linux
@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(1000)",
        "import os, time; os.close(1); os.close(2); time.sleep(1000)",
        "import signal, time\n"
        "for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(1000)",
        "while True: pass",
    ],
)
def test_no_program_runs_past_its_time(code):
    start = time.monotonic()
    assert reason(code, seconds=0.5, cpu_seconds=60) == "not finished after 0.5 s"
    assert time.monotonic() - start < 10


@linux
def test_what_was_printed_before_the_end_of_time_is_kept():
    code = "import time; print('begun'); time.sleep(1000)"
    assert run_python(code, PythonLimits(seconds=3.0)) == (
        "failed",
        "not finished after 3 s\nbegun",
    )


@linux
def test_memory_is_limited():
    assert reason("bytearray(10 * 2**30)") == "MemoryError"
    assert reason("x = []\nwhile True: x.append(bytearray(2**20))", memory=2**27) == "MemoryError"
    code = "import mmap; mmap.mmap(-1, 10 * 2**30)"
    assert reason(code) == "OSError: [Errno 12] Cannot allocate memory"
    assert printed("print(len(bytearray(100 * 2**20)))") == str(100 * 2**20)
    assert reason("bytearray(100 * 2**20)", memory=2**26) == "MemoryError"


@linux
def test_files_are_limited():
    code = "file = open('big', 'wb')\nfor _ in range(1000): file.write(bytes(2**20)); file.flush()"
    assert reason(code) == "OSError: [Errno 27] File too large"
    assert printed("open('a', 'w').write('x' * 100); print(open('a').read(3))") == "xxx"
    code = "files = [open(str(i), 'w') for i in range(100)]"
    assert reason(code).startswith("OSError: [Errno 24] Too many open files")


@linux
@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 10_000_000)",
        "while True: print('x' * 99)",
        "import os\nos.write(2, b'y' * 101)",
    ],
)
def test_output_is_read_no_further_than_its_limit(code):
    start = time.monotonic()
    status, text = run_python(code, patient(output=100, cpu_seconds=60))
    assert status == "failed" and text.startswith("more than 100 bytes of output\n")
    assert len(text) <= len("more than 100 bytes of output\n") + 100
    assert time.monotonic() - start < 30


@linux
def test_output_within_its_limit_is_kept():
    assert printed("print('x' * 99)", output=100) == "x" * 99


@linux
def test_output_that_is_not_utf8_is_replaced():
    code = r"import sys; sys.stdout.buffer.write(b'caf\xe9 \xff')"
    assert printed(code) == "caf� �"


@linux
def test_the_environment_and_the_input_are_empty(monkeypatch):
    monkeypatch.setenv("JAXRL_LLM_SECRET", "sesame")
    text = printed("import os; print(sorted(os.environ))")
    assert set(eval(text)) <= {"LC_CTYPE", "PYTHONHASHSEED"}
    assert reason("input()") == "EOFError: EOF when reading a line"


@linux
def test_no_file_of_the_parent_is_inherited(tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = (
            "import os; print(*(fd for fd in range(100) if os.path.exists(f'/proc/self/fd/{fd}')))"
        )
        assert printed(code) == "0 1 2"


@linux
def test_each_program_has_a_fresh_folder_that_is_deleted():
    code = "import os; print(os.listdir()); open('left', 'w').close(); print(os.getcwd())"
    folders = set()
    for _ in range(2):
        listed, folder = printed(code).splitlines()
        assert listed == "[]" and not Path(folder).exists()
        folders.add(folder)
    assert len(folders) == 2


@linux
def test_limits_are_as_asked_and_cannot_be_lifted():
    names = ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE")
    code = f"import resource as r\nfor n in {names}: print(*r.getrlimit(getattr(r, 'RLIMIT_' + n)))"
    limits = dict(cpu_seconds=3, memory=2**28, file_size=1000, open_files=20)
    expected = (3, 2**28, 1000, 20, 0, 0)
    assert printed(code, **limits) == "\n".join(f"{n} {n}" for n in expected)
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))"
    assert reason(code) == "ValueError: not allowed to raise maximum limit"


@linux
def test_programs_have_low_priority_and_no_capabilities():
    assert int(printed("import os; print(os.nice(0))")) >= min(os.nice(0) + 10, 19)
    status = printed("print(open('/proc/self/status').read())")
    held = [line.split()[1] for line in status.splitlines() if line[:6] in ("CapEff", "CapPrm")]
    may_read_everything = 1 << 2
    assert [int(mask, 16) & ~may_read_everything for mask in held] == [0, 0]
    assert "NoNewPrivs:\t1" in status


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_gives_no_file_away():
    assert reason("open('a', 'w'); import os; os.chown('a', 1, 1)").startswith("PermissionError")


NOT_PERMITTED = "PermissionError: [Errno 1] Operation not permitted"


@seccomp
def test_no_socket_is_opened():
    assert host_tools.network_is_blocked()
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert reason(f"import socket; socket.socket(socket.{family})") == NOT_PERMITTED


@seccomp
def test_no_process_or_thread_is_started():
    assert host_tools.processes_are_blocked()
    # Only the first process forks, so that the worst is 20 processes.
    bomb = "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(5); os._exit(0)"
    assert reason(bomb) == NOT_PERMITTED
    assert reason("import subprocess; subprocess.run(['true'])") == NOT_PERMITTED
    code = "import os; os.posix_spawn('/bin/true', ['true'], {})"
    assert reason(code).startswith(NOT_PERMITTED)
    code = "import threading; threading.Thread(target=print).start()"
    assert reason(code) == "RuntimeError: can't start new thread"


@seccomp
def test_no_daemon_survives():
    code = """
import os, time  # survivor-of-test
for _ in range(2):
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
    except OSError:
        pass
time.sleep(3)
"""
    run_python(code, PythonLimits(seconds=0.5))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended just now
            assert b"survivor-of-test" not in path.read_bytes()


@seccomp
def test_no_signal_reaches_another_process():
    assert reason(f"import os; os.kill({os.getpid()}, 0)") == NOT_PERMITTED
    assert reason("import os; os.killpg(0, 9)") == NOT_PERMITTED


@seccomp
def test_a_program_that_becomes_another_stays_confined():
    code = "import os; os.execv('/bin/sh', ['sh', '-c', 'echo shell; /bin/true; echo end'])"
    status, text = run_python(code, patient())
    assert status == "failed" and "shell" in text and "end" not in text


@landlock
@pytest.mark.parametrize(
    "action",
    [
        "open({file!r}, 'a')",
        "open({file!r}, 'w')",
        "os.truncate({file!r}, 0)",
        "os.remove({file!r})",
        "os.rename({file!r}, 'mine')",
        "os.link({file!r}, 'mine'); open('mine', 'a')",
        "open({folder!r} + '/new', 'w')",
        "os.mkdir({folder!r} + '/new')",
        "os.symlink('/', {folder!r} + '/new')",
        "os.rmdir({folder!r} + '/empty')",
        "os.mkdir('inside')",
    ],
)
def test_nothing_is_written_made_or_removed_elsewhere(tmp_path, action):
    assert host_tools.files_are_protected()
    file = tmp_path / "file"
    file.write_text("untouched")
    (tmp_path / "empty").mkdir()
    text = reason("import os; " + action.format(file=str(file), folder=str(tmp_path)))
    assert text.startswith(("PermissionError", "OSError: [Errno 18]")), text
    assert file.read_text() == "untouched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@seccomp
def test_no_mode_is_changed(tmp_path):
    tmp_path.chmod(0o755)
    assert reason(f"import os; os.chmod({str(tmp_path)!r}, 0)").startswith("PermissionError")
    code = f"import os; os.fchmod(os.open({str(tmp_path)!r}, os.O_RDONLY), 0)"
    assert reason(code).startswith("PermissionError")
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@landlock
def test_files_within_the_folder_and_the_null_device_are_written():
    code = """
import os, tempfile
for text in ("first", "second"):
    with open("a", "w") as file:
        file.write(text)
with tempfile.NamedTemporaryFile("w") as file:
    file.write("x")
open(os.devnull, "w").write("x")
print(open("a").read())
os.remove("a")
print(os.listdir())
"""
    assert printed(code) == "second\n[]"


@linux
def test_programs_run_at_once():
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: printed(f"print({i} ** 2)"), range(12)))
    assert answers == [str(i**2) for i in range(12)]


@linux
def test_the_python_tool_answers_through_the_manager():
    manager = ToolManager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what this system cannot block is another test's
        register_python(manager, limits=patient(), max_output=60)
        register_python(manager, name="hasty", limits=PythonLimits(seconds=0.5))
    assert manager.names == ("python", "hasty")
    assert manager.call("python", "for i in range(2):\n    print(i)")[:2] == ("0\n1", "ok")
    result = manager.call("python", '{"code": "print(1 / 0)"}')
    assert result.status == "failed"
    assert result.text.startswith("error: ZeroDivisionError: division by zero\n")
    assert len(result.text.encode()) <= 60
    result = manager.call("hasty", "import time; time.sleep(1000)")
    assert result[:2] == ("error: not finished after 0.5 s", "failed")
    assert manager.call("python", "").status == "malformed"


@linux
def test_what_the_system_cannot_block_is_told_at_registration(monkeypatch):
    for name in ("network_is_blocked", "files_are_protected", "processes_are_blocked"):
        monkeypatch.setattr(host_tools, name, lambda: True)
    register_python(ToolManager())
    monkeypatch.setattr(host_tools, "network_is_blocked", lambda: False)
    monkeypatch.setattr(host_tools, "files_are_protected", lambda: False)
    with pytest.warns(UserWarning, match="cannot keep .* from using the network, changing files$"):
        register_python(ToolManager())


@pytest.mark.parametrize(
    "limits",
    [{"seconds": 0}, {"seconds": float("nan")}, {"cpu_seconds": 0}, {"memory": 512}]
    + [{"file_size": -1}, {"open_files": 2}, {"output": 0}],
)
def test_limits_under_which_nothing_could_run_are_refused(limits):
    with pytest.raises(ConfigError, match=f"{next(iter(limits))}=.* expected at least"):
        PythonLimits(**limits)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="run_python needs Linux, this is darwin"):
        run_python("print(1)")
