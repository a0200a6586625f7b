"""Weights of Llama, Qwen2 and Qwen3 models in a GGUF file, quantised or not."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models import weights
from jaxrl_llm.models.transformer import (
    LanguageModel,
    ModelConfig,
    Params,
    RopeScaling,
    rotary_frequencies,
)
from jaxrl_llm.models.weights import Place, Tensor, WeightType
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.types import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

NAMES = {
    "embedding": "token_embd",
    "head": "output",
    "final_norm": "output_norm",
    "attention_norm": "blk.{}.attn_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "query": "blk.{}.attn_q",
    "key": "blk.{}.attn_k",
    "value": "blk.{}.attn_v",
    "out": "blk.{}.attn_output",
    "query_norm": "blk.{}.attn_q_norm",
    "key_norm": "blk.{}.attn_k_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}

# Metadata, after the architecture's name, that change the arithmetic, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
}

_SIZES = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")


def load_gguf(
    path: str | Path,
    *,
    dtype: WeightType = "float32",
    compute_dtype: WeightType | None = None,
    place: Place = SINGLE.place,
    **overrides: Any,
) -> tuple[LanguageModel, Params]:
    """A model and its parameters, from one GGUF file.

    Tensors are dequantised one by one, the largest first. The file is mapped, not read: a system
    that is short of memory drops its pages.

    Args:
        path: of the file.
        dtype: of the weights.
        compute_dtype: of the computation, by default `dtype` too.
        place: as in `hf.load_pretrained`.
        overrides: further fields of `ModelConfig`, such as remat and scan_unroll.

    Raises:
        ConfigError: no such file, a damaged one, a model that is not supported, tensors that do not
            fit it.
    """
    model, architecture, tensors = _described(path, dtype=compute_dtype or dtype, **overrides)
    wanted = weights.slots(model, NAMES)
    weights.check(wanted, tensors, path)
    if architecture == "llama":
        heads = {"attn_q": model.config.heads, "attn_k": model.config.n_kv_heads}
        for name, tensor in tensors.items():
            count = heads.get(name.split(".")[-2])
            if count is not None:
                tensors[name] = tensor._replace(read=_Unpermuted(tensor.read, count))
    return model, weights.fill(wanted, tensors, dtype, place)


def describe(path: str | Path, **overrides: Any) -> LanguageModel:
    """The model of a file, by its metadata alone.

    Args:
        path: of the file.
        overrides: fields of `ModelConfig`, such as dtype, that of the computation.

    Raises:
        ConfigError: no such file, a damaged one, or a model that is not supported.
    """
    return _described(path, **overrides)[0]


def _described(path: str | Path, **overrides: Any) -> tuple[LanguageModel, str, dict[str, Tensor]]:
    """The model, its architecture, and its tensors, not read yet."""
    reader = _open(path)
    fields = _Fields(path, reader.fields)
    tensors = {
        tensor.name: Tensor(str(path), tuple(int(n) for n in tensor.shape[::-1]), _Read(tensor))
        for tensor in reader.tensors
    }
    config = model_config(fields, tied="output.weight" not in tensors, **overrides)
    if "rope_freqs.weight" in tensors:
        scaling = _rope_scaling(config, tensors.pop("rope_freqs.weight"))
        config = dataclasses.replace(config, rope_scaling=scaling)
    return LanguageModel(config, _vocab_size(fields, tensors)), fields.architecture, tensors


def model_config(fields: "_Fields", *, tied: bool, **overrides: Any) -> ModelConfig:
    """The model that a file's metadata describe.

    Raises:
        ConfigError: it computes something that `Transformer` does not, or a value is missing.
    """
    fields.refuse_others()
    for key in _SIZES:
        weights.check_size(fields[key], f"{fields.path}: {fields.architecture}.{key}")
    heads = fields["attention.head_count"]
    head_width = fields.get("attention.key_length", fields["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.refuse_unless(key, head_width)
    return ModelConfig(
        **dict(
            width=fields["embedding_length"],
            layers=fields["block_count"],
            heads=heads,
            kv_heads=fields.get("attention.head_count_kv", heads),
            head_width=head_width,
            mlp_width=fields["feed_forward_length"],
            rope_theta=float(fields.get("rope.freq_base", 10_000.0)),
            norm_eps=float(fields["attention.layer_norm_rms_epsilon"]),
            tie_embeddings=tied,
            qkv_bias=fields.architecture == "qwen2",
            qk_norm=fields.architecture == "qwen3",
        )
        | overrides
    )


def _rope_scaling(config: ModelConfig, divisors: Tensor) -> RopeScaling:
    """The scaling whose divisors of the rotary frequencies a file holds, one for each pair.

    The file does not say what they were computed from; in llama.cpp's files of Llama 3.1 and 3.2
    that differs in its factor only.
    """
    found = divisors.read()
    scaling = RopeScaling(factor=float(found.max()))
    frequencies = rotary_frequencies(dataclasses.replace(config, rope_scaling=None))
    expected = frequencies / scaling.scaled(frequencies)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise ConfigError(
            f"{divisors.file}: tensor rope_freqs.weight is not supported; expected the divisors of "
            f"{expected.size} frequencies that Llama 3.1 has"
        )
    return scaling


class _Fields:
    """Metadata by their keys, the architecture's name left out."""

    def __init__(self, path: str | Path, fields: Mapping[str, Any]):
        self.path, self._fields = path, fields
        self.architecture = ""
        architecture = self._value("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{path}: general.architecture={architecture!r}; expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.architecture = architecture

    def __getitem__(self, key: str) -> Any:
        return self._value(f"{self.architecture}.{key}")

    def get(self, key: str, default: Any) -> Any:
        return self[key] if f"{self.architecture}.{key}" in self._fields else default

    def refuse_others(self) -> None:
        for key, (neutral, *_) in _NEUTRAL.items():
            self.refuse_unless(key, neutral)
        if "split.count" in self._fields and self._value("split.count") > 1:
            raise ConfigError(
                f"{self.path} is one of {self._value('split.count')} parts: merge them with "
                "llama-gguf-split --merge"
            )

    def refuse_unless(self, key: str, expected: Any) -> None:
        value = self.get(key, expected)
        if value != expected:
            raise ConfigError(
                f"{self.path}: {self.architecture}.{key}={value!r} is not supported; expected "
                f"{expected!r}"
            )

    def n_tokens(self) -> int:
        field = self._fields.get("tokenizer.ggml.tokens")
        return 0 if field is None else len(field.data)

    def _value(self, key: str) -> Any:
        if key not in self._fields:
            raise ConfigError(f"{self.path}: no metadata {key}; expected it in a model's file")
        return self._fields[key].contents()


class _Read:
    """Dequantises one tensor."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def __call__(self) -> np.ndarray:
        from gguf.quants import dequantize

        try:
            return dequantize(self.tensor.data, self.tensor.tensor_type)
        except NotImplementedError:
            raise ConfigError(
                f"tensor {self.tensor.name} is {self.tensor.tensor_type.name}, which the package "
                "gguf cannot dequantise; expected another quantisation of the model"
            ) from None


class _Unpermuted:
    """A query or key weight with the rotary pairs of a head at i and i + E/2.

    llama.cpp has them side by side, at 2i and 2i + 1.
    """

    def __init__(self, read: Callable[[], np.ndarray], heads: int):
        self.read, self.heads = read, heads

    def __call__(self) -> np.ndarray:
        array = self.read()
        pairs = array.reshape(self.heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


def _open(path: str | Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            "reading a GGUF file needs the package gguf: pip install 'jaxrl_llm[hf]'"
        ) from None
    if not Path(path).is_file():
        raise ConfigError(f"no GGUF file {path}: expected the path of a file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError(f"{path} is no GGUF file, or a damaged one: {error}") from None


def _vocab_size(fields: _Fields, tensors: Mapping[str, Tensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{fields.path}: no tensor token_embd.weight; expected the embedding")
    rows = tensors["token_embd.weight"].shape[0]
    if fields.n_tokens() > rows:
        raise ConfigError(
            f"{fields.path}: {fields.n_tokens()} tokens, and token_embd.weight has {rows} rows; "
            "expected one for each token"
        )
    return rows
