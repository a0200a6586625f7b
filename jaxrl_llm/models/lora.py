"""Low-rank adapters: a few trained weights beside the frozen ones of each chosen projection.

  y = x·W + (α/r)·(x·A)·B,   A: [in, r], B: [r, out], B = 0 at first

Adapters are leaves of the policy's own parameters: a projection `{"kernel": W}` becomes
`{"kernel": W, "lora": {"a": A, "b": B, "scale": α/r}}`. Where there are some, training changes them
and nothing else, and the reference policy is the same weights without them: no second copy.

References:
    Hu et al. 2021, eq. 3, https://arxiv.org/abs/2106.09685
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key

from jaxrl_llm.types import ConfigError

_Leaves = dict[tuple[str, ...], Any]  # by path; flatten_dict is not typed that closely

PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")
TRAINED = (("lora", "a"), ("lora", "b"))  # the last two names of a trained leaf's path


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Which projections get an adapter, and how large it is."""

    rank: int = 8
    """Rank r."""
    alpha: float = 16.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """Names of projections: query, key, value, out, gate, up, down."""

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ConfigError(
                f"lora: rank={self.rank}, alpha={self.alpha}; expected at least 1, and above 0"
            )
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ConfigError(
                f"lora: targets {', '.join(unknown) or '(none)'} match no projection; expected "
                f"some of {', '.join(PROJECTIONS)}"
            )


def add_adapters(params: Any, config: LoRAConfig, key: Key[Array, ""]) -> Any:
    """The same policy with fresh adapters, which change nothing yet.

    Args:
        params: of a `LanguageModel`, blocks stacked over L layers; without adapters.
        config: where, and how large.
        key: A is uniform in ±1/√in, as in PEFT.

    Raises:
        ConfigError: there are adapters already.
    """
    if has_adapters(params):
        raise ConfigError("the policy has adapters already: merge them first")
    flat: _Leaves = flatten_dict(params)
    kernels = {path: x for path, x in flat.items() if path[-1] == "kernel"}
    chosen = sorted(path for path in kernels if path[-2] in config.targets)
    for path, a_key in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        n_layers, n_in, n_out = kernels[path].shape
        bound = n_in**-0.5
        leaves = {
            "a": jax.random.uniform(
                a_key, (n_layers, n_in, config.rank), minval=-bound, maxval=bound
            ),
            "b": jnp.zeros((n_layers, config.rank, n_out)),
            "scale": jnp.full(n_layers, config.alpha / config.rank),
        }
        flat |= {(*path[:-1], "lora", name): x for name, x in leaves.items()}
    return unflatten_dict(flat)


def has_adapters(params: Any) -> bool:
    """Whether any projection has one."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return any(jax.tree_util.DictKey("lora") in path for path, _ in paths)


def config_of(params: Any) -> LoRAConfig | None:
    """What `add_adapters` was told; None without adapters."""
    if not has_adapters(params):
        return None
    flat: _Leaves = flatten_dict(params)
    adapted = [path[:-2] for path in flat if path[-2:] == ("lora", "a")]
    some = adapted[0]
    rank = flat[(*some, "lora", "a")].shape[-1]
    targets = {path[-1] for path in adapted}
    return LoRAConfig(
        rank=rank,
        alpha=_alpha(np.asarray(flat[(*some, "lora", "scale")][0]), rank),
        targets=tuple(name for name in PROJECTIONS if name in targets),
    )


def _alpha(scale: np.ndarray, rank: int) -> float:
    """Whose quotient by the rank is this float32 number; of several, one with few digits."""
    alpha = float(scale) * rank
    short = round(alpha, 4)
    return short if np.float32(short / rank) == scale else alpha


def partition(params: Any) -> tuple[Any, Any]:
    """(what is trained, what is frozen): the adapters and the rest, or everything and None."""
    if not has_adapters(params):
        return params, None
    flat: _Leaves = flatten_dict(params)
    trained = {path: x for path, x in flat.items() if path[-2:] in TRAINED}
    frozen = {path: x for path, x in flat.items() if path not in trained}
    return unflatten_dict(trained), unflatten_dict(frozen)


def combine(trained: Any, frozen: Any) -> Any:
    """Undo `partition`."""
    if frozen is None:
        return trained
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def without_adapters(params: Any) -> Any:
    """The frozen policy."""
    flat: _Leaves = flatten_dict(params)
    return unflatten_dict({path: x for path, x in flat.items() if "lora" not in path})


def merge(params: Any) -> Any:
    """The adapted policy as one without adapters: W + (α/r)·A·B."""
    if not has_adapters(params):
        return params
    flat: _Leaves = flatten_dict(params)
    merged: _Leaves = flatten_dict(without_adapters(params))
    for path in [path[:-2] for path in flat if path[-2:] == ("lora", "a")]:
        a, b, scale = (flat[(*path, "lora", name)] for name in ("a", "b", "scale"))
        kernel = merged[(*path, "kernel")]
        product = jnp.einsum("l,lir,lro->lio", scale, a, b)
        merged[(*path, "kernel")] = (kernel + product).astype(kernel.dtype)
    return unflatten_dict(merged)
