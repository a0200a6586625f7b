"""What an iteration has to compute and to read, and how fast a machine can: floors for timings.

A floor is the time that the matmuls alone would take at the rate that one large matmul reaches on
the same machine, or that the bytes which have to be read would take at the bandwidth of a large
copy. Nothing runs faster, and the ratio to it says how far from it a program is.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.trainer import peak_memory

_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    """Of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]


def live_heap() -> int | None:
    """Bytes that this process has allocated and not freed; None without glibc 2.33 or newer.

    Of the resident memory the rest is what malloc keeps for later.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo2
    told = mallinfo()
    return told.uordblks + told.hblkhd  # on heaps, and mapped one by one


class Peak(NamedTuple):
    """What a device's maker promises."""

    flops: float  # FLOP/s of dense bfloat16 (float16 where there is none) matmuls
    bandwidth: float  # bytes/s of its memory


# By the first words of `device_kind`, as many as fit; of one JAX device, which is one core of a
# TPU v2 or v3 and one chip of the later ones.
PEAKS = {
    "NVIDIA A100": Peak(312e12, 1.555e12),
    "NVIDIA A100 SXM4 80GB": Peak(312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 1.935e12),
    "NVIDIA B200": Peak(2250e12, 8.0e12),
    "NVIDIA H100": Peak(989e12, 3.35e12),
    "NVIDIA H100 PCIe": Peak(756e12, 2.0e12),
    "NVIDIA H200": Peak(989e12, 4.8e12),
    "NVIDIA L4": Peak(121e12, 0.3e12),
    "NVIDIA L40S": Peak(362e12, 0.864e12),
    "Tesla T4": Peak(65e12, 0.32e12),
    "Tesla V100": Peak(125e12, 0.9e12),
    "TPU v2": Peak(22.5e12, 0.35e12),
    "TPU v3": Peak(61.5e12, 0.45e12),
    "TPU v4": Peak(275e12, 1.228e12),
    "TPU v5 lite": Peak(197e12, 0.819e12),
    "TPU v5": Peak(459e12, 2.765e12),
    "TPU v5p": Peak(459e12, 2.765e12),
    "TPU v6 lite": Peak(918e12, 1.64e12),
}


def peak_of(device_kind: str) -> Peak | None:
    """The promise for a device; None where there is none, as for CPUs.

    >>> peak_of("TPU v5 lite").flops / 1e12
    197.0
    """
    words = device_kind.replace("-", " ") + " "
    fitting = [name for name in PEAKS if words.startswith(name + " ")]
    return PEAKS[max(fitting, key=len)] if fitting else None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one iteration in which every completion is of full length."""

    model: ModelConfig
    """Shape of the policy."""
    vocab: int
    """Vocabulary V."""
    prompts: int
    """Prompts B."""
    group_size: int
    """Completions per prompt G."""
    prompt_tokens: int
    """Prompt length P, without padding."""
    completion_tokens: int
    """Completion length T."""

    @property
    def completion_rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens by which each phase's speed is told: the prompts' in prefill, else B·G·T."""
        sampled = self.completion_rows * self.completion_tokens
        phases = ("decode", "score", "update", "iteration")
        return {"prefill": self.prompts * self.prompt_tokens} | dict.fromkeys(phases, sampled)

    def flops(self) -> dict[str, float]:
        """Matmul FLOP of each phase: two for each weight that a token meets, and attention's.

        Each prompt is computed once for its G completions, and a query meets only the positions
        that it may see: 4·H·E for each of these and each layer. A completion's last token is fed to
        no layer. The backward pass is twice the forward pass; recomputation does not count.
        """
        b, p, t = self.prompts, self.prompt_tokens, self.completion_tokens
        per_token = 2.0 * self.layer_weights() * self.model.layers
        per_pair = 4.0 * self.model.heads * self.model.head_size * self.model.layers
        logits = 2.0 * self.model.width * self.vocab * self.completion_rows * t
        prefill = b * (p * per_token + per_pair * p * (p + 1) / 2)
        fed = t - 1
        seen = fed * p + fed * (fed + 1) / 2
        decode = self.completion_rows * (fed * per_token + per_pair * seen) + logits
        score = prefill + decode
        update = 3.0 * score
        return {
            "prefill": prefill,
            "decode": decode,
            "score": score,
            "update": update,
            "iteration": score + update,
        }

    def layer_weights(self) -> int:
        """Weights of one layer's projections, which every token is multiplied with."""
        config = self.model
        attention = 2 * (config.heads + config.n_kv_heads) * config.head_size
        return config.width * (attention + 3 * config.mlp_size)

    def decode_bytes(self) -> float:
        """What sampling has to read: at each step all weights, prompts' and own keys and values."""
        config = self.model
        fed = self.completion_tokens - 1
        number = jnp.dtype(config.dtype).itemsize
        head = config.width * self.vocab
        weights = config.layers * self.layer_weights() + head
        per_position = 2 * config.layers * config.n_kv_heads * config.head_size
        prefixes = fed * self.prompts * self.prompt_tokens
        own = self.completion_rows * fed * (fed + 1) / 2
        return number * (fed * weights + head + per_position * (prefixes + own))


class Program:
    """A compiled function and its arguments, to be run many times.

    Args:
        name: what traces call it.
        function: of arrays; with `carries`, its first result takes the place of its first
            argument, which is donated.
        args: its arguments.
        carries: as above.

    Attributes:
        compile_seconds: what tracing and compiling took.
        peak_bytes: arguments, results and temporaries, by XLA's analysis.
        seconds: of each run so far.
    """

    def __init__(self, name: str, function: Callable[..., Any], *args: Any, carries: bool = False):
        self.name, self._args, self._carries = name, args, carries
        start = time.perf_counter()
        jitted = jax.jit(function, donate_argnums=(0,) if carries else ())
        self._compiled = jitted.lower(*args).compile()
        self.compile_seconds = time.perf_counter() - start
        self.peak_bytes = peak_memory(self._compiled)
        self.seconds: list[float] = []

    def run(self) -> Any:
        """Run once to the end, and note the time."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(self.name):
            results = jax.block_until_ready(self._compiled(*self._args))
        self.seconds.append(time.perf_counter() - start)
        if self._carries:
            self._args = (results[0], *self._args[1:])
        return results


class Machine:
    """The rates of the device at hand, measured: run it between what it is compared with.

    Args:
        dtype: of the matmul.
        side: of its square matrices.
        mebibytes: size of the array that is copied.
    """

    def __init__(self, dtype: str, *, side: int, mebibytes: int):
        self._flop, self._bytes = 2.0 * side**3, 2.0 * mebibytes * 2**20  # read and written
        square = jnp.ones((side, side), dtype)
        self._matmul = Program("matmul", jnp.matmul, square, square)
        array = jnp.ones((mebibytes * 2**18,), jnp.float32)
        # In place: fresh memory would have to be mapped first.
        self._copy = Program("copy", lambda x: (x + 1.0, ()), array, carries=True)

    def run(self) -> None:
        """One large matmul, one large copy."""
        self._matmul.run()
        self._copy.run()

    @property
    def flops(self) -> float:
        """FLOP/s of the fastest matmul so far."""
        return self._flop / min(self._matmul.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes/s, read and written, of the fastest copy so far."""
        return self._bytes / min(self._copy.seconds)


@contextlib.contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """Write a `jax.profiler` trace of what runs inside, for TensorBoard or Perfetto; None: none."""
    if folder is None:
        yield
    else:
        with jax.profiler.trace(str(folder)):
            yield
