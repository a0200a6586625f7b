"""Folders of safetensors: one file, or shards with an index."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.weights import Slot, Tensor
from jaxrl_llm.types import ConfigError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_headers(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model's folder, by name."""
    return read_tensors(_weight_files(folder))


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of some files, by name; rotary frequencies, which old files keep, left out."""
    safe_open = _safetensors().safe_open
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}
                shapes = {name: tuple(s.get_shape()) for name, s in slices.items()}
                types = {name: s.get_dtype() for name, s in slices.items()}
        except Exception as error:  # safetensors' own class, or an OSError
            raise ConfigError(
                f"{file} is damaged or no safetensors file: {first_line(error)}; fetch it again"
            ) from None
        for name, shape in shapes.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name in tensors:
                raise ConfigError(f"{file}: tensor {name} is in {tensors[name].file} too")
            if types[name] not in _FLOATS:
                raise ConfigError(
                    f"{file}: tensor {name} is {types[name]}; expected one of {', '.join(_FLOATS)}"
                )
            tensors[name] = Tensor(str(file), shape, _Read(file, name))
    return tensors


class _Read:
    """Reads one tensor, without mapping the file: its pages would count as the process's own."""

    def __init__(self, file: Path, name: str):
        self.file, self.name = file, name

    def __call__(self) -> np.ndarray:
        try:
            with _safetensors().safe_open(self.file, framework="np", backend="pread") as opened:
                return opened.get_tensor(self.name)
        except Exception as error:  # safetensors' own class, or an OSError
            raise ConfigError(
                f"{self.file}: cannot read {self.name}: {first_line(error)}"
            ) from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise ConfigError(_no_weights(folder))
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {index}: {first_line(error)}") from None
    for shard in shards:
        if not (folder / shard).is_file():
            raise ConfigError(f"{index} names {shard}, which is not there: fetch it again")
    return [folder / shard for shard in shards]


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return (
            f"{folder} holds only .bin files, which run code when they are read: convert them "
            "with transformers' save_pretrained, which writes safetensors"
        )
    return f"no {_SINGLE} and no {_INDEX} in {folder}: expected one of them"


def write_weights(
    folder: Path, wanted: Mapping[str, Slot], flat: Mapping[Any, jax.Array], max_bytes: int
) -> None:
    """Write the leaves as the tensors that files name, in place of those that are there."""
    for old in [_SINGLE, _INDEX, *(path.name for path in folder.glob("model-*-of-*.safetensors"))]:
        (folder / old).unlink(missing_ok=True)
    shards = _shards({name: _n_bytes(slot, flat) for name, slot in wanted.items()}, max_bytes)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = [_SINGLE] if len(files) == 1 else files
    for file, names in zip(files, shards, strict=True):
        write_tensors(folder / file, {name: wanted[name] for name in names}, flat)
    if len(files) > 1:
        total = sum(_n_bytes(slot, flat) for slot in wanted.values())
        of = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": of})


def write_tensors(file: Path, wanted: Mapping[str, Slot], flat: Mapping[Any, jax.Array]) -> None:
    """Write one file."""
    arrays = {name: _on_host(slot, flat) for name, slot in wanted.items()}
    _safetensors().numpy.save_file(arrays, file, metadata={"format": "pt"})


def _shards(n_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The names in their order, cut wherever the next would make a shard too large."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, n in n_bytes.items():
        if shards[-1] and size + n > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n
    return shards


def _n_bytes(slot: Slot, flat: Mapping[Any, jax.Array]) -> int:
    return int(np.prod(slot.shape)) * flat[slot.path].dtype.itemsize


def _on_host(slot: Slot, flat: Mapping[Any, jax.Array]) -> np.ndarray:
    """A tensor as files have it. safetensors writes memory as it lies, so it must lie straight."""
    leaf = flat[slot.path]
    array = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
    return np.ascontiguousarray(array.T if slot.transposed else array)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write it as people like to read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ConfigError(
            "reading and writing weights needs the package safetensors: pip install 'jaxrl_llm[hf]'"
        ) from None
    return safetensors


def first_line(error: Exception) -> str:
    """The first line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
