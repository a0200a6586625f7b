"""Countdown problems as data: read from files or the hub, generated, split by key.

A problem's key is (target, sorted numbers). The public data set, Jiayi-Pan/Countdown-Tasks-3to4,
repeats a twelfth of its keys: a split by rows would leak.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.envs import host
from jaxrl_llm.types import ConfigError

MAX_NUMBER, MAX_TARGET = 999, 10**6
_MAX_PRODUCT = 1.147e18  # see `expression.grade`
_SUFFIXES = (".parquet", ".jsonl")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CHUNK = {3: 8192, 4: 2048, 5: 64, 6: 64}  # problems searched at once


@dataclass(frozen=True)
class Problems:
    """N problems of up to K numbers.

    Args:
        numbers: 1 to 6 in each row, 1 to 999 each, zeros after them.
        targets: 1 to one million.

    Raises:
        ConfigError: other shapes, a number or target out of range, or numbers so large that
            `expression.grade` would not be exact. Rows are counted from 1.
    """

    numbers: Int[np.ndarray, "N K"]
    targets: Int[np.ndarray, "N"]

    def __post_init__(self):
        n, k = self.numbers.shape
        if self.targets.shape != (n,) or not n or not 1 <= k <= host.MAX_NUMBERS:
            raise ConfigError(
                f"numbers {self.numbers.shape} and targets {self.targets.shape}: expected at least "
                f"one problem, and (N, K) and (N,) with K from 1 to {host.MAX_NUMBERS}"
            )
        is_known = (self.numbers >= 0) & (self.numbers <= MAX_NUMBER)
        is_padding = np.arange(k)[None, :] >= self.n_numbers[:, None]
        is_fine = (is_known & ((self.numbers == 0) == is_padding)).all(1) & (self.n_numbers > 0)
        is_fine &= (self.targets >= 1) & (self.targets <= MAX_TARGET)
        is_fine &= self.targets * (self.numbers + 1.0).prod(1) < _MAX_PRODUCT
        if not is_fine.all():
            row = int(is_fine.argmin())
            raise ConfigError(
                f"row {row + 1}: target {self.targets[row]}, numbers {self.numbers[row].tolist()}; "
                f"expected a target of 1 to {MAX_TARGET}, numbers of 1 to {MAX_NUMBER}, and "
                "target · Π(number + 1) below 10¹⁸"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __add__(self, other: "Problems") -> "Problems":
        k = max(self.numbers.shape[1], other.numbers.shape[1])
        padded = [np.pad(p.numbers, ((0, 0), (0, k - p.numbers.shape[1]))) for p in (self, other)]
        return Problems(np.concatenate(padded), np.concatenate([self.targets, other.targets]))

    @property
    def n_numbers(self) -> Int[np.ndarray, "N"]:
        """How many numbers each problem has."""
        return (self.numbers != 0).sum(1)

    def take(self, rows: Int[np.ndarray, "R"] | Bool[np.ndarray, "N"]) -> "Problems":
        """Some of them: row numbers from 0, or a mask."""
        return Problems(self.numbers[rows], self.targets[rows])


def read_problems(source: str | Path) -> Problems:
    """The problems of a file, of a folder, or of a data set on the Hugging Face hub.

    Files are parquet or JSONL with columns `target` (an integer) and `nums` (a list of 1 to 6);
    others are ignored. Rows stay in order, repeated and unsolvable ones (`is_solvable`) included.

    Args:
        source: a file, a folder of such files, or a name such as
            "Jiayi-Pan/Countdown-Tasks-3to4", of which the parquet files are downloaded once.

    Raises:
        ConfigError: nothing of the kind is there, the hub is out of reach, pyarrow is missing, or
            a file is damaged, is empty, lacks a column or has a row that is no problem (named by
            its number, counted from 1).
    """
    path = Path(source)
    if not path.exists():
        path = _download(str(source))
    files = [path] if path.is_file() else sorted(f for s in _SUFFIXES for f in path.rglob(f"*{s}"))
    if not files:
        raise ConfigError(f"{source}: expected files that end with .parquet or .jsonl in it")
    first, *others = map(_read_file, files)
    return sum(others, first)


def split(problems: Problems, held_out: int, seed: int) -> tuple[Problems, Problems]:
    """Training problems, and `held_out` others that share no key with them.

    Which keys are held out depends on the set of keys and the seed, not on the order of the rows.
    Of a held-out key one row is kept; of the others all are.

    Raises:
        ConfigError: there are no more than `held_out` keys.
    """
    keys = np.column_stack([problems.targets, np.sort(problems.numbers, axis=1)])
    _, first, key_of_row = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    if not 1 <= held_out < len(first):
        raise ConfigError(
            f"held_out={held_out}: expected 1 to {len(first) - 1}, as there are {len(first)} "
            "problems with different (target, sorted numbers)"
        )
    chosen = np.random.default_rng(seed).choice(len(first), held_out, replace=False)
    is_held_out = np.isin(key_of_row.reshape(-1), chosen)
    return problems.take(~is_held_out), problems.take(first[chosen])


def generate(n: int, seed: int, preset: str = "3to4", **overrides: int | float) -> Problems:
    """N solvable problems, drawn as `envs.countdown.Countdown` draws them; some may be alike.

    Args:
        n: how many.
        seed: the same seed draws the same ones.
        preset: of `countdown_params`.
        overrides: fields of `countdown.EnvParams`, such as max_target=50.

    Raises:
        ConfigError: unknown or impossible parameters, or `n` below 1.
    """
    # Here, since the environments start JAX's devices.
    from jaxrl_llm.envs import countdown
    from jaxrl_llm.tokenizers import arithmetic_tokenizer

    if n < 1:
        raise ConfigError(f"n={n}: expected at least 1 problem")
    params = countdown.countdown_params(preset, **({"split": countdown.BOTH} | overrides))
    env = countdown.Countdown(arithmetic_tokenizer(), max_numbers=int(params.max_numbers))
    countdown.check_params(params, env)
    drawn = countdown._draw_many(env, params, seed=seed, n=n)
    return Problems(np.asarray(drawn.numbers), np.asarray(drawn.target))


def is_solvable(problems: Problems) -> Bool[np.ndarray, "N"]:
    """Whether each problem has a solution over the rationals, exactly.

    Solutions in integer steps are looked for on the device; what has none goes to `host.solve`,
    which takes milliseconds for up to 5 numbers and may take a second for 6.
    """
    found = np.zeros(len(problems), bool)
    for count in (3, 4, 5, 6):
        rows = np.flatnonzero(problems.n_numbers == count)
        size = _CHUNK[count]
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            padded = np.resize(chunk, size)  # repeated: one shape, one compilation
            numbers, targets = problems.numbers[padded, :count], problems.targets[padded]
            found[chunk] = _search(count)(numbers, targets)[: len(chunk)]
    for row in np.flatnonzero(~found):
        numbers = problems.numbers[row]
        found[row] = (
            host.solve(numbers[numbers > 0].tolist(), int(problems.targets[row])) is not None
        )
    return found


@cache
def _search(count: int):
    """`countdown.is_reachable` for many problems of so many numbers."""
    import jax

    from jaxrl_llm.envs import countdown

    def one(numbers, target):
        return countdown.is_reachable(numbers[:, None], target, jax.numpy.int32(count))[0]

    return jax.jit(jax.vmap(one))


def _download(name: str) -> Path:
    if name.endswith(_SUFFIXES) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name}: no such file or folder; expected one, or the name of a data set on the hub "
            "such as Jiayi-Pan/Countdown-Tasks-3to4"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns="*.parquet"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{name}: neither a file here nor a data set that could be downloaded from the hub "
            f"({type(error).__name__}: {reason}); expected a network, or a parquet or JSONL file"
        ) from error


def _read_file(path: Path) -> Problems:
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: expected a file that ends with .parquet or .jsonl")
    rows = []
    for number, (target, nums) in enumerate(readers[path.suffix](path), 1):
        _check_types(target, nums, f"{path}, row {number}")
        rows.append((target, nums))
    if not rows:
        raise ConfigError(f"{path} has no rows: expected at least one problem")
    k = max(len(nums) for _, nums in rows)
    numbers = np.array([nums + [0] * (k - len(nums)) for _, nums in rows], np.int32)
    try:
        return Problems(numbers, np.array([target for target, _ in rows], np.int32))
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error


def _check_types(target: Any, nums: Any, where: str) -> None:
    def is_integer(x: Any) -> bool:
        return type(x) is int and abs(x) < 2**31  # True is none

    is_list = isinstance(nums, list) and 1 <= len(nums) <= host.MAX_NUMBERS
    if not is_list or not all(map(is_integer, [target, *nums])) or 0 in nums:
        raise ConfigError(
            f"{where}: target={target!r}, nums={nums!r}; expected an integer and a list of 1 to "
            f"{host.MAX_NUMBERS} positive integers"
        )


def _parquet_rows(path: Path) -> Iterable[tuple[Any, Any]]:
    try:
        import pyarrow  # type: ignore
        import pyarrow.parquet  # type: ignore
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow; type pip install 'jaxrl_llm[hf]'"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_columns(file.schema_arrow.names, str(path))
        table = file.read(columns=["target", "nums"])
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file that can be read ({error})") from error
    return zip(table["target"].to_pylist(), table["nums"].to_pylist(), strict=True)


def _jsonl_rows(path: Path) -> Iterable[tuple[Any, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, row {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, row {number}: expected an object, got {line[:80]!r}")
            _check_columns(list(row), f"{path}, row {number}")
            yield row["target"], row["nums"]


def _check_columns(names: list[str], where: str) -> None:
    missing = [name for name in ("target", "nums") if name not in names]
    if missing:
        raise ConfigError(
            f"{where}: no column {' and no column '.join(missing)} among {names}; expected target "
            "and nums"
        )
