"""Gives up what a program must not have, then becomes Python running that program.

`host_tools.run_python` starts this file in the child process. What is given up here cannot be had
back: hard resource limits, Linux capabilities, a seccomp filter and a Landlock domain outlive
`exec`. It imports the standard library alone, and takes two arguments: limits as JSON, and code.

References:
    https://docs.kernel.org/userspace-api/seccomp_filter.html
    https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

# -P keeps the current folder, -S all site-packages off sys.path; -u loses no output to a kill.
PYTHON_FLAGS = ("-P", "-S", "-u")

# AUDIT_ARCH_* of linux/audit.h, and the numbers of the system calls that are refused.
_SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        (56, 57, 58, 435)  # clone, fork, vfork, clone3
        + (41, 425)  # socket, io_uring_setup
        + (62, 129, 200, 234, 297, 424)  # kill and its kin
        + (90, 91, 268, 452),  # chmod and its kin
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435) + (198, 425) + (129, 130, 131, 138, 240, 424) + (52, 53, 452),
    ),
}
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # 1 is EPERM
_X32_BIT = 0x40000000  # marks the calls of x86_64's second interface

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
_ALL_WRITES = 0x7FFF & ~0b1101  # all rights but to execute a file, to read one, to list a folder

_CAP_DAC_READ_SEARCH = 1 << 2  # root may need it to reach an interpreter of somebody else's
_CAP_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Give everything up and run the code."""
    limits, code = json.loads(sys.argv[1]), sys.argv[2]
    os.nice(10)
    give_up(limits)
    os.execv(sys.executable, [sys.executable, *PYTHON_FLAGS, "-c", code])


def give_up(limits: dict[str, int]) -> None:
    """Take limits of the module `resource` by name, and do without all that is refused below."""
    for name, value in limits.items():
        _limit(getattr(resource, name), value)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    confine_writes()
    refuse_system_calls()
    drop_capabilities()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def confine_writes() -> None:
    """Let files be written, made and removed in the current folder alone (and /dev/null written).

    Does nothing where the kernel has no Landlock.
    """
    version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    handled = _ALL_WRITES & ((1 << min(12 + version, 15)) - 1)
    rules = struct.pack("Q", handled)
    ruleset = _libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    in_folder = _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE
    for path, allowed in ((".", in_folder), (os.devnull, _WRITE_FILE)):
        place = os.open(path, os.O_PATH)
        _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed & handled, place), 0)
        os.close(place)
    _libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def refuse_system_calls() -> None:
    """Let no process or thread be started, socket opened, signal sent, file mode changed.

    Does nothing where the kernel has no seccomp, or on another processor.
    """
    if platform.machine() not in _SYSTEM_CALLS:
        return
    architecture, numbers = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # BPF: code, jumps if and if not, value
    to_refuse = range(len(numbers), -1, -1)  # instructions between each comparison and the last
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, _KILL),
        (load, 0, 0, 0),
        (at_least, to_refuse[0] + 1, 0, _X32_BIT),
        *((equal, n, 0, number) for n, number in zip(to_refuse, numbers, strict=False)),
        (answer, 0, 0, _ALLOW),
        (answer, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def drop_capabilities() -> None:
    """Leave root without its powers over other people's files, processes and limits."""
    header = struct.pack("Ii", _CAP_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, high words
    if _libc.capget(header, words) == 0:
        kept = [words[0] & _CAP_DAC_READ_SEARCH, words[1] & _CAP_DAC_READ_SEARCH, 0, 0, 0, 0]
        words[:] = kept
        _libc.capset(header, words)


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)][:4]
    _libc.prctl(option, *values)


if __name__ == "__main__":
    main()
