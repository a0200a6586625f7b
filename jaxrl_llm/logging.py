"""What a run writes while it trains: its folder, its metrics, its provenance.

`metrics.jsonl` holds what is computed from the seed and nothing else, so that a run that was killed
and resumed leaves the same bytes as one that was not; whatever the clock decides (seconds, tokens
per second) goes to `timing.jsonl`. TensorBoard shows both.
"""

import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

from jaxrl_llm.distributed import agree, any_process, is_first
from jaxrl_llm.types import ConfigError

_LOCK, _TEMPORARY = ".lock", ".config.json.tmp"
_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint", "numpy")
_VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


class RunFolder:
    """The folder of one run, locked against a second live process. Make it with `open`.

    Of several processes that train together the first one holds the lock and writes.

    Attributes:
        path: the folder.
        is_resumed: whether it held this run before.
    """

    def __init__(self, path: Path, lock: int, *, is_resumed: bool):
        self.path, self._lock, self.is_resumed = path, lock, is_resumed

    @classmethod
    def open(
        cls, path: str | Path, config: Mapping[str, Any], *, free: frozenset[str] = frozenset()
    ) -> Self:
        """Make the folder of a run, or take up the run that it holds.

        Args:
            path: root/experiment/name.
            config: everything that decides the metrics; nested mappings, written by `json`.
            free: dotted paths of fields that may differ from the run's earlier ones (a path covers
                what is below it). `config.json` then holds the new config, `config.1.json`,
                `config.2.json`, ... the earlier ones.

        Raises:
            ConfigError: the folder holds a run of another config, or no run; another process
                writes it; it cannot be made or written. Nothing in it has changed then.
                Or not all processes of the run see it.
        """
        path, lock = Path(path), -1
        config = _json_safe(json.loads(json.dumps(config, default=str)))

        def claim() -> bool:
            nonlocal lock
            lock, is_resumed = _claim(path, config, free)
            return is_resumed

        is_resumed = agree(claim)
        if any_process(not (path / "config.json").exists()):
            raise ConfigError(
                f"not all processes see {path.absolute()}, which the first one has made; expected "
                "a folder that all hosts share: choose another with --run.root"
            )
        return cls(path, lock, is_resumed=is_resumed)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def forget(self) -> None:
        """Take back a config of which nothing has been computed: its correction is another one."""
        if is_first() and not self.is_resumed:
            (self.path / "config.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the folder. The death of this one, however caused, does too."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _claim(path: Path, config: Any, free: frozenset[str]) -> tuple[int, bool]:
    """Lock the folder and settle its config: (the lock, whether it held this run before)."""
    try:
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _lock_or_refuse(lock, path)
            return lock, _settle_config(path, config, free)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write a run to {path} ({error.strerror}); expected a folder that can be "
            "made and written: choose another with --run.name"
        ) from error


def _refuse_foreign(path: Path) -> None:
    if not path.is_dir() or (path / "config.json").exists():
        return
    if {entry.name for entry in path.iterdir()} - {_LOCK, _TEMPORARY}:
        raise ConfigError(
            f"{path} has files but no config.json, so it is not a run's folder; "
            "expected a new or empty folder: choose another with --run.name"
        )


def _lock_or_refuse(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is writing {path}; wait for it, stop it, or choose another "
            "folder with --run.name"
        ) from error


def _settle_config(path: Path, config: Any, free: frozenset[str]) -> bool:
    """Compare with the folder's config and write ours; True when there was one."""
    file = path / "config.json"
    if not file.exists():
        write_json(file, config)
        return False
    try:
        earlier = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{file} is not JSON ({error}); repair it or choose another folder with --run.name"
        ) from error
    changes = config_diff(earlier, config)
    refused = {name: pair for name, pair in changes.items() if not _is_covered(name, free)}
    if refused:
        told = ", ".join(f"{name} was {old}, now {new}" for name, (old, new) in refused.items())
        raise ConfigError(
            f"{path} holds a run of another config: {told}; "
            "type the earlier values to resume it, or --run.name with a new name to start another"
        )
    if changes:
        kept = (path / f"config.{i}.json" for i in itertools.count(1))
        _write_atomic(next(f for f in kept if not f.exists()), file.read_text())
        write_json(file, config)
    return True


def _is_covered(name: str, free: frozenset[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in free)


def config_hash(config: Any) -> str:
    """12 hexadecimal digits that stand for settings, whatever the order of their fields."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_diff(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Dotted path → (old, new) of every field that differs, as JSON text or "absent".

    >>> config_diff({"a": 1, "model": {"width": 64}}, {"a": 1, "model": {"width": 96}})
    {'model.width': ('64', '96')}
    """
    if isinstance(old, dict) and isinstance(new, dict):
        absent = object()
        diff = {}
        for key in old | new:
            pair = old.get(key, absent), new.get(key, absent)
            told = ["absent" if value is absent else json.dumps(value) for value in pair]
            if absent in pair:
                diff[f"{prefix}{key}"] = tuple(told)
            else:
                diff |= config_diff(*pair, f"{prefix}{key}.")
        return diff
    return {} if old == new else {prefix.rstrip("."): (json.dumps(old), json.dumps(new))}


class MetricsLog:
    """The growing files of a run: metrics, timing and samples as JSON lines, and TensorBoard.

    A row is `{"step": …, tag: number, …}`, tags sorted. Floats are written with all digits that
    float64 needs, so float32 values come back exactly; NaN and ±∞ are the strings "NaN",
    "Infinity" and "-Infinity" (JSON has no numbers for them; `float` reads them).

    Every row is handed to the operating system before `write` returns: a killed process loses
    none. Write the rows of a step, call `sync`, then save the checkpoint of that step: what a
    resumed run finds in the files is then never behind its checkpoint.

    Args:
        folder: the run's folder.
        step: the step resumed from. Later rows are removed, in the files and on TensorBoard, and
            half-written lines with them: the resumed run writes them again. −1 for a run that
            starts from the beginning.

    Of several processes only the first one writes.
    """

    def __init__(self, folder: RunFolder, step: int):
        self._is_writing = is_first()
        if not self._is_writing:
            return
        paths = (folder.metrics, folder.timing, folder.samples)
        for path in paths:
            _truncate(path, step)
        self._metrics, self._timing, self._samples = [path.open("ab") for path in paths]
        # Events are written here and now: SummaryWriter's background queue would lose on
        # kill -9 the last points before the checkpoint, and nobody writes those again.
        earlier = len(list(folder.path.glob("events.out.tfevents.*")))
        self._events = EventsWriter(str(folder.path / "events"), f".{earlier:04d}")
        start = SessionLog(status=SessionLog.START)
        self._write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(
        self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any] | None = None
    ) -> None:
        """Log scalars of one step; array scalars are fine.

        Args:
            step: the step they belong to.
            metrics: tag → value, decided by config and seed alone.
            timing: tag → value, decided by the clock.
        """
        if not self._is_writing:
            return
        metrics, timing = _plain(metrics), _plain(timing or {})
        _append(self._metrics, [{"step": step} | metrics])
        if timing:
            _append(self._timing, [{"step": step} | timing])
        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in (metrics | timing).items()
        ]
        self._write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log transcripts: each row is a JSON-able mapping, kept in its own order of keys."""
        if self._is_writing:
            _append(self._samples, [{"step": step} | _json_safe(row) for row in rows])

    def _write_event(self, event: Event) -> None:
        self._events.write_event(event)
        self._events.flush()

    def sync(self) -> None:
        """Return when all rows are on the disk. Call it before saving a checkpoint."""
        if self._is_writing:
            for file in (self._metrics, self._timing, self._samples):
                os.fsync(file.fileno())

    def close(self) -> None:
        if self._is_writing:
            for file in (self._metrics, self._timing, self._samples, self._events):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, in order; lines that are not whole are left out."""
    path = Path(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for row in map(_parse, lines) if row is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [(line, _parse(line)) for line in lines if line.endswith(b"\n")]
    kept = b"".join(line for line, row in rows if row is not None and row["step"] <= step)
    if kept != b"".join(lines):
        _write_atomic(path, kept.decode())


def _append(file: BinaryIO, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    file.write(text.encode())
    file.flush()


def _plain(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {tag: _json_safe(np.asarray(scalars[tag]).item()) for tag in sorted(scalars)}


def _json_safe(value: Any) -> Any:
    """`value` with non-finite floats as strings and array scalars as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _json_safe(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is the old one or the new one at every moment.

    Of several processes only the first one writes.
    """
    if is_first():
        _write_atomic(path, json.dumps(_json_safe(value), indent=2, allow_nan=False) + "\n")


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write a run's `summary.json`; non-finite numbers as in `MetricsLog`."""
    write_json(folder.summary, summary)


def _write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def provenance() -> dict[str, Any]:
    """Where a figure came from: commit, versions, machine, command line, time of the call (UTC).

    `commit` is None and `is_dirty` is None when the package does not lie in a git checkout.
    """
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    devices = jax.devices()
    return {
        "commit": commit,
        "is_dirty": None if changes is None else bool(changes),
        "versions": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "command": list(sys.orig_argv),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name and its vector instructions, since XLA compiles for these, and rounds accordingly.

    Virtual machines say the same name on processors that differ.
    """
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    fields = dict(re.findall(r"^([^\t:]+)\t*: (.+)$", text, re.MULTILINE))
    name = fields.get("model name", platform.processor() or platform.machine())
    known = fields.get("flags", fields.get("Features", "")).split()
    return ", ".join([name, *(flag for flag in _VECTORS if flag in known)])


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Interrupt:
    """While it is entered, SIGINT and SIGTERM ask instead of killing: `requested` turns True.

    A second SIGINT raises KeyboardInterrupt, for who cannot wait. Only the main thread may enter
    (Python's rule for signal handlers: ValueError elsewhere).
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._earlier: dict[int, Callable[..., Any] | int] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            # None is a handler that was not set from Python: it can only be replaced.
            earlier = signal.signal(number, self._handle)
            self._earlier[number] = signal.SIG_DFL if earlier is None else earlier
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
