"""Weights of Llama, Qwen2 and Qwen3 models in Hugging Face's format: safetensors, without torch."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl_llm.models import lora, weights
from jaxrl_llm.models.presets import PRESETS, packaged_gguf
from jaxrl_llm.models.safetensors_files import (
    first_line,
    read_headers,
    write_json,
    write_weights,
)
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params, RopeScaling
from jaxrl_llm.models.weights import Place, Tensor, WeightType
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

NAMES = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "final_norm": "model.norm",
    "attention_norm": "model.layers.{}.input_layernorm",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "query": "model.layers.{}.self_attn.q_proj",
    "key": "model.layers.{}.self_attn.k_proj",
    "value": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj",
    "query_norm": "model.layers.{}.self_attn.q_norm",
    "key_norm": "model.layers.{}.self_attn.k_norm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}

# Fields of a configuration that change the arithmetic, and the values that leave it as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]


def model_config(hf_config: Any, **overrides: Any) -> ModelConfig:
    """The model that a `transformers` configuration describes.

    Args:
        hf_config: of a Llama (2, 3, SmolLM2), Qwen2 (2, 2.5) or dense Qwen3.
        overrides: fields of `ModelConfig` that the configuration does not say: dtype, remat, ...

    Raises:
        ConfigError: it computes something that `Transformer` does not.
    """
    kind = hf_config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model_type={kind!r}: expected one of {', '.join(ARCHITECTURES)}")
    for field, neutral in _NEUTRAL.items():
        _refuse_unless(getattr(hf_config, field, neutral[0]) in neutral, hf_config, field, neutral)
    sliding = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention"}
    _refuse_unless(not sliding, hf_config, "layer_types", ["full_attention"])
    for field in _SIZES:
        weights.check_size(getattr(hf_config, field), f"{kind}: {field}")
    return ModelConfig(
        **dict(
            width=hf_config.hidden_size,
            layers=hf_config.num_hidden_layers,
            heads=hf_config.num_attention_heads,
            kv_heads=hf_config.num_key_value_heads,
            head_width=getattr(hf_config, "head_dim", None)
            or hf_config.hidden_size // hf_config.num_attention_heads,
            mlp_width=hf_config.intermediate_size,
            rope_theta=float(hf_config.rope_parameters["rope_theta"]),
            rope_scaling=_rope_scaling(hf_config),
            norm_eps=hf_config.rms_norm_eps,
            tie_embeddings=hf_config.tie_word_embeddings,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )
        | overrides
    )


def describe(folder: str | Path, **overrides: Any) -> LanguageModel:
    """The model of a folder, by its config.json alone.

    Args:
        folder: see `resolve` for names.
        overrides: fields of `ModelConfig`, such as dtype, that of the computation.

    Raises:
        ConfigError: no config.json, a damaged one, or a model that is not supported.
    """
    hf_config = _read_config(Path(folder))
    return LanguageModel(model_config(hf_config, **overrides), hf_config.vocab_size)


def load_pretrained(
    folder: str | Path,
    *,
    dtype: WeightType = "float32",
    compute_dtype: WeightType | None = None,
    place: Place = SINGLE.place,
    **overrides: Any,
) -> tuple[LanguageModel, Params]:
    """A model and its parameters, from config.json and safetensors, one file or shards.

    All names and shapes are checked before anything is read; tensors are then read one by one, the
    largest first, so that the host never holds more than one beside what is loaded.

    Args:
        folder: see `resolve` for names.
        dtype: of the weights.
        compute_dtype: of the computation, by default `dtype` too.
        place: (path, array) -> array on the device: where to put a leaf of the parameters, or one
            layer of it. The stack over layers is sharded likewise, with its first axis whole.
        overrides: further fields of `ModelConfig`, such as remat and scan_unroll.

    Raises:
        ConfigError: no weights, a damaged file, a model that is not supported, tensors that do not
            fit it.
    """
    folder = Path(folder)
    model = describe(folder, dtype=compute_dtype or dtype, **overrides)
    tensors = read_headers(folder)
    if model.config.tie_embeddings:
        _drop_tied_head(tensors)
    wanted = weights.slots(model, NAMES)
    weights.check(wanted, tensors, folder)
    return model, weights.fill(wanted, tensors, dtype, place)


def save_pretrained(
    folder: str | Path,
    model: LanguageModel,
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
    max_position_embeddings: int = 32768,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write what `transformers.AutoModelForCausalLM` loads, as Llama, Qwen2 or Qwen3.

    Weights keep their type; adapters are merged. Weights that an earlier call left in the folder
    are replaced.

    Args:
        folder: is made where it is missing.
        model: decides the architecture.
        params: of the model.
        tokenizer: an `HFTokenizer`, saved too.
        max_position_embeddings: the longest text that the model was made for, which is only noted.
        max_shard_bytes: weights that are larger in all are split over files of this size.

    Raises:
        ConfigError: no architecture has the model's options, or the parameters are not its own.
    """
    kind = _architecture(model.config)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"transformers has no {type(tokenizer).__name__}: leave the tokenizer out, or give an "
            "HFTokenizer"
        )
    flat: dict[Any, Any] = flatten_dict(lora.merge(params))
    wanted = weights.slots(model, NAMES)
    _check_params(model, flat)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    types = {str(leaf.dtype) for leaf in flat.values()}
    ends = _end_ids(tokenizer)
    described = _describe(kind, model, max_position_embeddings)
    described |= {"dtype": types.pop() if len(types) == 1 else "float32"} | ends
    write_json(folder / "config.json", described)
    write_json(folder / "generation_config.json", ends)
    write_weights(folder, wanted, flat, max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]


def resolve(name_or_folder: str | Path) -> Path:
    """The folder of a model, or its GGUF file.

    Args:
        name_or_folder: a folder, a GGUF file, a name of `PRESETS`, or one of the Hugging Face hub,
            whose files are fetched, or found in its cache where there is no network.

    Raises:
        ConfigError: it is none of these, or cannot be fetched.
    """
    found = _locate(name_or_folder)
    return found if isinstance(found, Path) else _fetch(found)


def origin(name_or_folder: str | Path) -> str:
    """What `resolve` takes to find the same model from anywhere: an absolute path, or a hub name.

    Raises:
        ConfigError: it is neither.
    """
    found = _locate(name_or_folder)
    return str(found.absolute()) if isinstance(found, Path) else found


def _locate(name_or_folder: str | Path) -> Path | str:
    """The path, or the name on the hub."""
    path, name = Path(name_or_folder), str(name_or_folder)
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if name in PRESETS:
        preset = PRESETS[name]
        packaged = packaged_gguf(preset.package) if preset.package else None
        if not packaged and preset.hub is None:
            raise ConfigError(f"{name} has no pretrained weights: Policy.from_scratch makes fresh")
        return packaged or str(preset.hub)
    if name.count("/") != 1 or path.is_absolute():
        raise ConfigError(
            f"{name}: no such folder; expected one, a hub name such as Qwen/Qwen2.5-0.5B, or one "
            f"of {', '.join(PRESETS)}"
        )
    return name


def _rope_scaling(hf_config: Any) -> RopeScaling | None:
    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    fields = [field.name for field in dataclasses.fields(RopeScaling)]
    is_known = kind == "default" or kind == "llama3" and all(rope.get(name) for name in fields)
    if not is_known or rope.get("partial_rotary_factor", 1.0) != 1:
        raise ConfigError(
            f"{hf_config.model_type}: rope_parameters={rope} is not supported; expected rope_type "
            f"'default', or 'llama3' with {', '.join(fields)}"
        )
    return None if kind == "default" else RopeScaling(**{name: rope[name] for name in fields})


def _refuse_unless(is_neutral: bool, hf_config: Any, field: str, neutral: Any) -> None:
    if not is_neutral:
        raise ConfigError(
            f"{hf_config.model_type}: {field}={getattr(hf_config, field)!r} is not supported; "
            f"expected {neutral[0]!r}"
        )


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json in {folder}: expected the folder of a model")
    try:
        kind = json.loads(path.read_text("utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}") from None
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: model_type={kind!r}; expected one of {', '.join(ARCHITECTURES)}"
        )
    with _without_torch_notice():
        from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validation raises classes of its own
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def _without_torch_notice():
    """Without the line that transformers logs at its import, that torch is missing."""

    def is_other(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _drop_tied_head(tensors: dict[str, Tensor]) -> None:
    """Tied models may have the head written out; it must then be the embedding."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ConfigError(
            f"{head.file}: lm_head.weight is not the embedding, and config.json says that they "
            "are tied; set tie_word_embeddings to false there"
        )


def _architecture(config: ModelConfig) -> str:
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "qkv_bias and qk_norm: no architecture of transformers has both; expected one at most"
        )
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if kind == "llama" and config.width % config.heads:
        raise ConfigError(
            f"width={config.width} is not a multiple of heads={config.heads}, as transformers' "
            "Llama has to be"
        )
    return kind


def _check_params(model: LanguageModel, flat: Mapping[tuple[str, ...], jax.Array]) -> None:
    wanted: dict[Any, Any] = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)))
    for path in sorted(wanted.keys() | flat.keys()):
        shapes = [list(x[path].shape) if path in x else "nothing" for x in (flat, wanted)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"params at {'/'.join(path)}: {shapes[0]}; expected {shapes[1]}: these are not "
                "this model's"
            )


def _describe(kind: str, model: LanguageModel, max_position_embeddings: int) -> dict[str, Any]:
    """config.json, with what is rotary where versions 4 and 5 of transformers look for it."""
    config = model.config
    rope = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3"} | dataclasses.asdict(config.rope_scaling)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
    } | ({"use_sliding_window": False} if kind != "llama" else {"mlp_bias": False})


def _end_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {
        "bos_token_id": None,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"cannot fetch {name} from the Hugging Face hub, and its cache has none: "
            f"{first_line(error)}; without a network, give a folder"
        ) from None
