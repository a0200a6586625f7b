"""One pure step on one device or on many: `jit`, `pmap`, or `jit` over a data × fsdp × tensor mesh.

Steps say where rows of the batch are made (`shard_rows`), and sum over `axis_name` where they are
mapped; where a weight lies follows from its name (`SPECS`). Both do nothing on one device. A
`Layout` compiles steps, and puts states and parameters where these expect them.
"""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from jaxrl_llm.distributed import put
from jaxrl_llm.types import ConfigError

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the axes over which the batch is spread
DEVICES = "devices"  # the axis of pmap

# By the end of a leaf's path: the mesh axes of its last dimensions, [in, out] of a kernel. All else
# is replicated. An optimizer's moments have the path of their parameter, and so its rule.
SPECS = (
    (r"(query|key|value|gate|up)/kernel", ("fsdp", "tensor")),
    (r"(out|down)/kernel", ("tensor", "fsdp")),
    (r"(query|key|value)/bias", ("tensor",)),
    (r"(query|key|value|gate|up)/lora/a", ("fsdp", None)),
    (r"(query|key|value|gate|up)/lora/b", (None, "tensor")),
    (r"(out|down)/lora/a", ("tensor", None)),
    (r"(out|down)/lora/b", (None, "fsdp")),
    (r"embedding", ("tensor", "fsdp")),  # [V, D]
    (r"head", ("fsdp", "tensor")),  # [D, V]
)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over which devices work and arrays are spread."""

    backend: Literal["auto", "jit", "pmap", "mesh"] = "auto"
    """jit: one device. pmap: a copy of the state on each, and a part of the batch. mesh: a part of
    the state too. auto: jit on one device, mesh on several."""
    data: int = -1
    """Copies of the weights, each with a part of the batch; −1: the rest of the devices."""
    fsdp: int = 1
    """Parts of the weights and of the optimizer's state, and of the batch too (mesh)."""
    tensor: int = 1
    """Parts of the heads, of the MLP and of the vocabulary, and so of the weights (mesh)."""

    def __post_init__(self):
        sizes = self.data, self.fsdp, self.tensor
        if any(size < 1 and size != -1 for size in sizes):
            raise ConfigError(f"{self}: expected at least 1 device along every axis, or −1")
        if sizes.count(-1) > 1:
            raise ConfigError(f"{self}: only one size can be −1, the rest of the devices")
        if self.backend == "pmap" and (self.fsdp, self.tensor) != (1, 1):
            raise ConfigError(
                f"{self}: pmap copies the weights; set backend=mesh, or leave fsdp and tensor at 1"
            )

    def __str__(self) -> str:
        return f"{self.backend}: data={self.data} × fsdp={self.fsdp} × tensor={self.tensor}"

    def resolved(self, n_devices: int) -> "ParallelConfig":
        """The same with a definite backend and sizes, for so many devices.

        Raises:
            ConfigError: the sizes do not multiply to the number of devices.
        """
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        if self.backend == "jit":
            if max(sizes.values()) > 1:
                raise ConfigError(f"{self}: jit runs on one device; set backend=mesh")
            return ParallelConfig(backend="jit", data=1)
        given = math.prod(size for size in sizes.values() if size != -1)
        rest = n_devices // given
        sizes = {name: rest if size == -1 else size for name, size in sizes.items()}
        if math.prod(sizes.values()) != n_devices:
            raise ConfigError(
                f"{self}: the sizes do not multiply to the {n_devices} devices; leave one at −1, "
                "the rest of the devices, or set backend=jit for one"
            )
        one = "jit" if n_devices == 1 else "mesh"
        return ParallelConfig(backend=one if self.backend == "auto" else self.backend, **sizes)

    def planned(self) -> "ParallelConfig":
        """The same with definite sizes, for devices that need not be here: at least as many."""
        given = math.prod(size for size in (self.data, self.fsdp, self.tensor) if size != -1)
        is_open = -1 in (self.data, self.fsdp, self.tensor)
        return self.resolved(max(given, jax.device_count()) if is_open else given)

    @property
    def batch_parts(self) -> int:
        return self.data * self.fsdp

    @property
    def weight_parts(self) -> int:
        return self.fsdp * self.tensor

    def check_rows(self, rows: int, what: str) -> None:
        """Raises ConfigError unless every device gets equally many whole groups."""
        if rows % self.batch_parts:
            raise ConfigError(
                f"data={self.data} × fsdp={self.fsdp} devices share the {rows} {what}, and groups "
                f"stay whole: make them a multiple of {self.batch_parts}"
            )

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Raises ConfigError unless every device gets equally many heads."""
        for count, name in (heads, "query"), (kv_heads, "key/value"):
            if count % self.tensor:
                raise ConfigError(
                    f"tensor={self.tensor} does not divide the {count} {name} heads: set it to a "
                    f"divisor of {math.gcd(heads, kv_heads)}"
                )


def spec(path: str, shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """How the weight of this name is cut; axes that do not divide its dimension are left out.

    >>> mesh = jax.sharding.AbstractMesh((2, 2, 2), AXES)
    >>> spec("params/blocks/out/kernel", (3, 8, 7), mesh)
    PartitionSpec(None, 'tensor', None)
    """
    found = (axes for end, axes in SPECS if re.search(rf"(^|/){end}$", path))
    axes = next(found, ())[-len(shape) :] if shape else ()
    fitting = [
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape[len(shape) - len(axes) :], strict=True)
    ]
    return PartitionSpec(*(None,) * (len(shape) - len(axes)), *fitting)


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A `NamedSharding` for each array or shape in parameters or in a whole `TrainState`."""

    def one(path, leaf) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, tree)


# Within a step.


def row_axes() -> dict[str, int]:
    """Axes and sizes of the surrounding mesh over which XLA may spread the batch."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {axis: mesh.shape[axis] for axis in ROWS if types.get(axis) == AxisType.Auto}


def row_shards(rows: int) -> int:
    """In how many parts `shard_rows` cuts so many rows: 1 without a mesh, or where it cannot."""
    n = math.prod(row_axes().values())
    return 1 if rows % n else n


def shard_rows(tree: PyTree) -> PyTree:
    """Spread the leading axis over the mesh's `ROWS`; as it is where there is no mesh."""
    axes = tuple(row_axes())

    def one(x):
        if not axes or row_shards(x.shape[0]) == 1:
            return x
        free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *free))

    return jax.tree.map(one, tree)


def prompt_keys(key: Key[Array, ""], n: int, axis_name: Any = None) -> Key[Array, "n"]:
    """fold_in(key, b) for the n prompts of this device, with b counted over all devices."""
    first = 0 if axis_name is None else n * jax.lax.axis_index(axis_name)
    rows = shard_rows(first + jnp.arange(n))
    return jax.vmap(lambda b: jax.random.fold_in(key, b))(rows)


def gather_weight(path: str, x: Array) -> Array:
    """A weight to compute with: whole over fsdp, where it is kept in parts; tensor's parts stay.

    Without this XLA may rather leave it in parts, and exchange activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if "fsdp" not in row_axes():
        return x
    kept = (None if axis == "fsdp" else axis for axis in spec(path, x.shape, mesh))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))


def gather_params(params: PyTree, dtype: Any) -> PyTree:
    """All weights to sample with, at once, matrices in the compute type.

    Adapters are merged later, into weights as they are.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    is_adapted = any("lora" in name for name in names)

    def one(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_matrix = re.search(r"(kernel|embedding|head)$", name)
        return gather_weight(name, x.astype(dtype) if is_matrix and not is_adapted else x)

    return jax.tree_util.tree_map_with_path(one, params)


# Around a step.


@dataclass(frozen=True)
class Layout:
    """Compiles steps for a backend, and puts arrays where they are expected. See `make_layout`."""

    config: ParallelConfig  # resolved
    devices: tuple[Any, ...]  # of JAX

    @property
    def axis_name(self) -> str | None:
        """The device axis that steps sum over: pmap's. XLA itself sums over a mesh."""
        return DEVICES if self.config.backend == "pmap" else None

    @property
    def parts(self) -> int:
        """Of the batch of a mapped step, which sees one of them."""
        return len(self.devices) if self.axis_name else 1

    @cached_property
    def mesh(self) -> Mesh | None:
        if self.config.backend != "mesh":
            return None
        shape = self.config.data, self.config.fsdp, self.config.tensor
        types = (AxisType.Auto,) * len(AXES)  # Linen's modules know no explicit ones
        return jax.make_mesh(shape, AXES, axis_types=types, devices=self.devices)

    @property
    def _everywhere(self) -> NamedSharding | None:
        """Of results that every device of the mesh is to have whole."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def _ambient(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def shard(self, tree: PyTree) -> PyTree:
        """Parameters or a state on their devices of the mesh; as they are without one."""
        if self.mesh is None:
            return tree
        return put(tree, shardings(tree, self.mesh))

    def outline(self, shapes: PyTree) -> PyTree:
        """Shapes of parameters or of a state, with where each is to lie."""
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: single, shapes)
        if self.mesh is not None:
            places = shardings(shapes, self.mesh)

        def one(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(one, shapes, places)

    def place(self, path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        """For `Policy.from_pretrained`: each tensor goes to its devices as it is read."""
        if self.mesh is None:
            return jnp.array(array)  # a copy, which XLA may then overwrite
        return put(array, NamedSharding(self.mesh, spec("/".join(path), array.shape, self.mesh)))

    def init(self, function: Callable[..., PyTree], *args: Any) -> PyTree:
        """function(*args), whose arrays are born on their devices of the mesh."""
        if self.mesh is None:
            return function(*args)
        out = shardings(jax.eval_shape(function, *args), self.mesh)
        with self._ambient():
            return jax.jit(function, out_shardings=out)(*args)

    def replicate(self, tree: PyTree) -> PyTree:
        """For pmap: one copy per device, as a leading axis; as it is otherwise."""
        if not self.axis_name:
            return tree
        n = len(self.devices)
        sharding = NamedSharding(Mesh(np.array(self.devices), DEVICES), PartitionSpec(DEVICES))

        def one(x):
            copies = [jax.device_put(x[None], device) for device in self.devices]
            return jax.make_array_from_single_device_arrays((n, *x.shape), sharding, copies)

        return jax.tree.map(one, tree)

    def first(self, tree: PyTree) -> PyTree:
        """Undo `replicate`."""
        if not self.axis_name:
            return tree
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], tree)

    def compile(self, function: Callable[..., Any], state: PyTree, *args: Any) -> Any:
        """A pure function of a state, and of more, compiled for these arguments."""
        if self.axis_name:
            return jax.pmap(function, DEVICES, devices=self.devices).lower(state, *args).compile()
        with self._ambient():
            return jax.jit(function).lower(state, *args).compile()

    def compile_step(self, step: Callable[..., Any], state: PyTree, *args: Any) -> Any:
        """`compile` of (state, …) -> (state, metrics); the state is donated and stays in place."""
        if self.axis_name:
            mapped = jax.pmap(step, DEVICES, devices=self.devices, donate_argnums=0)
            return mapped.lower(state, *args).compile()
        places = None
        if self.mesh is not None:
            places = jax.tree.map(lambda x: x.sharding, state), self._everywhere
        with self._ambient():
            jitted = jax.jit(step, donate_argnums=0, out_shardings=places)
            return jitted.lower(state, *args).compile()

    def rollout(self, make: Callable[[int, Any], Any], prompts: int, dtype: Any) -> Any:
        """A rollout of so many prompts, to be part of a step or evaluated by `evaluate`.

        Over a mesh the weights are gathered once for all steps of the sampling loop, in the type
        that it computes with; the tensor axis stays. Without that axis every device leaves the
        loop when its own rows have ended. With it they leave together: XLA's collective permutes
        wait for all devices, those that have left included.

        Args:
            make: (prompts of one device, device axis) -> rollout.
            prompts: on all devices together.
            dtype: the compute type.
        """
        if self.axis_name:
            return make(prompts // self.parts, DEVICES)
        mesh = self.mesh
        if mesh is None:
            return make(prompts, None)
        sample = make(prompts, None)
        if self.config.tensor == 1:
            sample = jax.shard_map(
                make(prompts // self.config.batch_parts, ROWS),
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec()),
                out_specs=PartitionSpec(ROWS),
                check_vma=False,  # zeros in carries of loops, of environments too
            )
        return lambda params, key: sample(gather_params(params, dtype), key)

    def evaluate(self, rollout: Callable[..., Any]) -> Callable[..., Any]:
        """A rollout compiled apart: (parameters of one device or of the mesh, key) -> all of it.

        Every device, and so every process, gets all of it.
        """
        if self.axis_name:

            def joined(params, key):
                return jax.lax.all_gather(rollout(params, key), DEVICES, tiled=True)

            mapped = jax.pmap(joined, DEVICES, devices=self.devices, in_axes=(None, 0))
            return lambda params, key: self.first(mapped(params, self.replicate(key)))
        jitted = jax.jit(rollout, out_shardings=self._everywhere)

        def call(params, key):
            with self._ambient():
                return jitted(self.shard(params), key)

        return call

    def describe(self, state: PyTree) -> str:
        """Axes, devices, and bytes of the state on each, in one line."""
        config, count = self.config, len(self.devices)
        axes = " × ".join(f"{axis} {getattr(config, axis)}" for axis in AXES)
        axes = f"{DEVICES} {count}" if self.axis_name else axes
        kind = f"{count} {self.devices[0].device_kind} devices"
        if jax.process_count() > 1:
            kind += f" of {jax.process_count()} processes"
        size = sum(_bytes_per_device(x) for x in jax.tree.leaves(state))
        return f"{config.backend}: {axes} ({kind}); {size / 2**20:.1f} MiB of state on each"


SINGLE = Layout(ParallelConfig(backend="jit", data=1), ())


def make_layout(
    config: ParallelConfig = ParallelConfig(), devices: Sequence[Any] | None = None
) -> Layout:
    """The layout that a config describes, by default on all devices.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    resolved = config.resolved(len(devices))
    if resolved.backend != "mesh" and jax.process_count() > 1:
        raise ConfigError(
            f"{config}: {resolved.backend} is for one process, and there are "
            f"{jax.process_count()}; set backend=mesh"
        )
    return SINGLE if resolved.backend == "jit" else Layout(resolved, tuple(devices))


def _bytes_per_device(x: jax.Array) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
