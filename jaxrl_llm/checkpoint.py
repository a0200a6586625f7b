"""Checkpoints: any pytree, saved in the background, that comes back bit for bit or not at all.

A checkpoint of step 12 is the folder `12/`: the arrays as Orbax writes them (`state/`), the
caller's `extra` and the type of every leaf (`about.json`), and a digest of every file
(`sha256.json`). The folder gets its name by one rename, when everything is in it: whenever the
process is killed, what bears a step's name is complete. The digests catch what happens later:
Orbax restores an array whose bytes were flipped on disk without a word.
"""

import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from jaxrl_llm.distributed import agree, is_first
from jaxrl_llm.types import ConfigError

_ABOUT, _DIGESTS = "about.json", "sha256.json"
_UNFINISHED = (".saving", ".deleting")


class Restored(NamedTuple):
    """What `Checkpoints.restore_latest` found."""

    step: int
    state: PyTree
    extra: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of a run, in one folder that all its processes see.

    Use it as a context manager: leaving it waits for the last save. Of several processes each
    writes, and reads, what its devices hold; all of them have to make the same calls.

    Args:
        folder: where they lie; made if it does not exist.
        keep: how many to keep; older ones are deleted after a newer one is complete.
        every: interval of `is_due`, in steps.
        say: called with one line when a damaged checkpoint is passed over.

    Raises:
        ConfigError: `keep` or `every` is below 1, or the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        every: int = 1,
        say: Callable[[str], None] = print,
    ):
        if keep < 1 or every < 1:
            raise ConfigError(f"keep and every must be at least 1, got {keep} and {every}")
        self.folder = Path(folder).resolve()
        self._keep, self._every, self._say = keep, every, say
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self._saved = set(agree(self._tidy))
        self._last = max(self._saved, default=0)
        self._orbax = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tidy(self) -> list[int]:
        """Make the folder, or clear it of what was not finished; the steps that are there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the checkpoint folder: {error}") from error
        for leftover in self.folder.iterdir():
            if leftover.suffix in _UNFINISHED:
                shutil.rmtree(leftover)
        return self.steps()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first, damaged ones included."""
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def is_due(self, step: int) -> bool:
        """Whether a multiple of `every` has been reached since the last save or restore."""
        return step // self._every > self._last // self._every

    def save(self, step: int, state: PyTree, *, extra: dict[str, Any] | None = None) -> None:
        """Save `state` as step `step`; returns once it is copied, and writes in the background.

        The state may be donated to the next computation right away. A step that has a checkpoint
        keeps the one it has.

        Args:
            step: at least 0.
            state: pytree of arrays, typed keys and scalars.
            extra: anything that `json` can write.

        Raises:
            OSError: this save could not start, or the one before it failed in the background.
        """
        self.wait()
        self._last = step
        if step in self._saved:
            return
        leaves = _named_leaves(state)
        about = json.dumps({"extra": extra or {}, "leaves": _types(leaves)}, indent=1)
        staging = self.folder / f"{step}.saving"
        if is_first():
            shutil.rmtree(staging, ignore_errors=True)  # left by a save that failed
        self._orbax.save(staging / "state", {k: _on_disk(x) for k, x in _not_empty(leaves).items()})
        self._saving = self._thread.submit(self._finish, step, staging, about)

    def _finish(self, step: int, staging: Path, about: str) -> None:
        self._orbax.wait_until_finished()  # for all processes
        if is_first():
            self._complete(step, staging, about)
        self._saved.add(step)

    def _complete(self, step: int, staging: Path, about: str) -> None:
        (staging / _ABOUT).write_text(about)
        (staging / _DIGESTS).write_text(json.dumps(_digests(staging), indent=1))
        staging.rename(self.folder / str(step))
        for old in self.steps()[: -self._keep]:
            doomed = (self.folder / str(old)).rename(self.folder / f"{old}.deleting")
            shutil.rmtree(doomed)

    def restore_latest(self, template: PyTree) -> Restored | None:
        """The newest checkpoint that is whole, or None when there is none at all.

        Damaged checkpoints that are newer are renamed to `STEP.damaged`, and `say` is told once.

        Args:
            template: a state, or its `jax.eval_shape`: structure, shapes, dtypes and shardings.

        Raises:
            ConfigError: every checkpoint is damaged, or the newest whole one holds another
                structure than `template`. Nothing has been renamed then.
        """
        self.wait()
        damaged: dict[int, str] = {}
        step = agree(lambda: self._newest_whole(damaged))
        if step is None:
            return None
        path = self.folder / str(step)
        about = json.loads((path / _ABOUT).read_text())
        state = self._restore(path, template, about["leaves"])
        self._move_aside(damaged, step)
        self._saved = {saved for saved in self._saved if saved <= step}
        self._last = step
        return Restored(step, state, about["extra"])

    def _newest_whole(self, damaged: dict[int, str]) -> int | None:
        """The newest step without damage; newer ones, and what is wrong, are added to `damaged`."""
        for step in reversed(self.steps()):
            damage = _damage(self.folder / str(step))
            if damage is None:
                return step
            damaged[step] = damage
        if damaged:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be read ({_list_damage(damaged)}); to start "
                f"from the beginning type: mv {self.folder} {self.folder}.damaged"
            )
        return None

    def _restore(self, path: Path, template: PyTree, saved: dict[str, str]) -> PyTree:
        leaves = _named_leaves(template)
        differences = _differences(saved, _types(leaves))
        if differences:
            raise ConfigError(
                f"checkpoint {path} holds another state: {differences}; use the config it was "
                "saved with, or start a new run under another name"
            )
        wanted = {name: _to_restore(leaf) for name, leaf in _not_empty(leaves).items()}
        found = self._orbax.restore(path / "state", wanted)
        restored = [_as_in(leaf, found.get(name)) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(template), restored)

    def _move_aside(self, damaged: dict[int, str], used: int) -> None:
        for step in damaged:
            path = self.folder / str(step)
            path.rename(_free_name(path.with_suffix(".damaged")))
        if damaged:
            self._say(
                f"checkpoint damaged: {_list_damage(damaged)}; moved aside to STEP.damaged in "
                f"{self.folder}, resuming from step {used}"
            )

    def wait(self) -> None:
        """Block until the last save is complete, and raise what it raised."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Wait for the last save and release the writer; may be called twice."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()
            logging.getLogger("absl").removeFilter(_without_orbax_chatter)


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, so that Orbax sees a flat dict whatever the containers are."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _not_empty(leaves: dict[str, Any]) -> dict[str, Any]:
    """Orbax refuses arrays of size 0; their type says all there is to know."""
    return {name: leaf for name, leaf in leaves.items() if np.prod(np.shape(leaf)) > 0}


def _is_device_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _types(leaves: dict[str, Any]) -> dict[str, str]:
    arrays = {name: x if _is_device_array(x) else np.asarray(x) for name, x in leaves.items()}
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


def _on_disk(leaf: Any) -> Any:
    return leaf if _is_device_array(leaf) else np.asarray(leaf)


def _sharding_of(leaf: Any) -> jax.sharding.Sharding:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _to_restore(leaf: Any) -> Any:
    if _is_device_array(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding_of(leaf))
    return np.asarray(leaf)


def _as_in(leaf: Any, found: Any) -> Any:
    """What was found on disk, as the kind of leaf that the template has there."""
    if _is_device_array(leaf):
        if found is None:
            return jnp.zeros(leaf.shape, leaf.dtype, device=_sharding_of(leaf))
        return found
    if found is None or isinstance(leaf, np.ndarray):
        return leaf if found is None else found
    return type(leaf)(found.item())


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None when all are as they were written."""
    try:
        expected = json.loads((folder / _DIGESTS).read_text())
        found = _digests(folder)
    except (OSError, ValueError):
        return f"{_DIGESTS} cannot be read"
    if not isinstance(expected, dict):
        return f"{_DIGESTS} is garbage"
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    return f"{wrong[0]} is {'changed' if wrong[0] in found else 'missing'}" if wrong else None


def _list_damage(damaged: dict[int, str]) -> str:
    return ", ".join(f"step {step} ({damage})" for step, damage in damaged.items())


def _differences(saved: dict[str, str], wanted: dict[str, str], limit: int = 5) -> str:
    names = [n for n in saved | wanted if saved.get(n) != wanted.get(n)]
    told = [
        f"{n} is {saved.get(n, 'absent')} there and {wanted.get(n, 'absent')} here"
        for n in names[:limit]
    ]
    return ", ".join(told + [f"and {len(names) - limit} more"] * (len(names) > limit))


def _free_name(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ...: the first that is not taken."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())
