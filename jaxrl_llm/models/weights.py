"""From the tensors of a file to the parameters of a `LanguageModel`, one tensor at a time.

Files name one tensor per layer and keep linear weights as [out, in]; parameters are stacked over
layers and kept as [in, out]. What goes where is decided, and checked, before anything is read.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.types import ConfigError

Path = tuple[str, ...]  # of a leaf of the parameters, such as ("blocks", "query", "kernel")
Place = Callable[[Path, np.ndarray], jax.Array]
WeightType = Literal["float32", "bfloat16"]


class Tensor(NamedTuple):
    """A tensor of a file, not read yet."""

    file: str
    shape: tuple[int, ...]  # as NumPy gives it: [out, in]
    read: Callable[[], np.ndarray]


class Slot(NamedTuple):
    """A tensor's place in the parameters."""

    path: Path
    layer: int | None  # None: not of a layer
    shape: tuple[int, ...]  # that the file should have
    transposed: bool  # [out, in] there, [in, out] here


def check_size(value: Any, name: str) -> None:
    """Refuse what is not a positive integer.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; expected a positive integer")


def slots(model: LanguageModel, names: Mapping[str, str]) -> dict[str, Slot]:
    """The place of each tensor that a file should have, by its name there.

    Args:
        model: whose parameters are wanted.
        names: from the module's name ("query", "embedding", ...) to the file's, without the
            ending; {} stands for the layer.
    """
    found = {}
    leaves: dict[Any, Any] = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)))
    for path, leaf in leaves.items():
        module, ending = path[-1], "weight"
        if module in ("kernel", "scale", "bias"):
            module, ending = path[-2], "bias" if module == "bias" else "weight"
        in_layer = path[0] == "blocks"
        transposed = path[-1] in ("kernel", "head")
        shape = leaf.shape[in_layer:]
        for layer in range(leaf.shape[0]) if in_layer else [None]:
            name = f"{names[module].format(layer)}.{ending}"
            found[name] = Slot(path, layer, shape[::-1] if transposed else shape, transposed)
    return found


def check(wanted: Mapping[str, Slot], tensors: Mapping[str, Tensor], where: object) -> None:
    """Refuse tensors that do not fit.

    Raises:
        ConfigError: a tensor is missing, has no place, or has another shape.
    """
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ConfigError(f"{where}: no tensor {_some(missing)}; expected one for each weight")
    for name in tensors:
        if name not in wanted:
            rest = [name for name in tensors if name not in wanted]
            raise ConfigError(
                f"{tensors[name].file}: tensor {_some(rest)} has no place in this model"
            )
    for name, slot in wanted.items():
        tensor = tensors[name]
        if tensor.shape != slot.shape:
            raise ConfigError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}; expected "
                f"{list(slot.shape)} from the configuration"
            )


def fill(
    wanted: Mapping[str, Slot], tensors: Mapping[str, Tensor], dtype: WeightType, place: Place
) -> Params:
    """Read every tensor to its place, the largest first.

    The host holds one tensor at a time. Layers are written into their stack, which is donated, so
    the device holds what is loaded and one layer.
    """
    params: dict[Path, jax.Array] = {}
    layers = 1 + max(slot.layer for slot in wanted.values() if slot.layer is not None)
    for name in sorted(wanted, key=lambda name: -np.prod(wanted[name].shape)):
        slot = wanted[name]
        placed = place(slot.path, _read(tensors[name], slot.transposed, dtype))
        if slot.layer is None:
            params[slot.path] = placed
            continue
        if slot.path not in params:
            params[slot.path] = _empty_stack(placed, layers)
        stack = _write(params[slot.path], placed, slot.layer)
        params[slot.path] = jax.block_until_ready(stack)  # or reading runs ahead of writing
    return unflatten_dict(params)


def _read(tensor: Tensor, transposed: bool, dtype: WeightType) -> np.ndarray:
    array = tensor.read()
    return np.ascontiguousarray(array.T if transposed else array, jnp.dtype(dtype))


def _empty_stack(layer: jax.Array, layers: int) -> jax.Array:
    """Zeros for so many layers, sharded like the one."""
    sharding = layer.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jnp.zeros((layers, *layer.shape), layer.dtype, device=sharding)


@partial(jax.jit, donate_argnums=0)
def _write(stack: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def _some(names: Iterable[str]) -> str:
    """The first of the names, and how many more there are."""
    first, *rest = names
    return f"{first} (and {len(rest)} more)" if rest else first
