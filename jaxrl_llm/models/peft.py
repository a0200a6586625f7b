"""Adapters in the format of the package PEFT, without it: adapter_config.json and safetensors."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxrl_llm.models import lora, weights
from jaxrl_llm.models.hf import NAMES
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.safetensors_files import first_line, read_tensors, write_json, write_tensors
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.models.weights import Place, Slot
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.types import ConfigError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# Each file's name of a projection, such as q_proj, and ours.
_TARGETS = {NAMES[ours].rpartition(".")[2]: ours for ours in lora.PROJECTIONS}
_MATRICES = {"a": "lora_A", "b": "lora_B"}

# What a configuration must say; and what it may say besides, since it changes no output.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base too
    "revision": (None, "main"),
}
_HARMLESS = {"r", "lora_alpha", "target_modules", "base_model_name_or_path", "lora_dropout"}
_HARMLESS |= {"inference_mode", "peft_version", "auto_mapping", "exclude_modules"}
_HARMLESS |= {"megatron_core", "qalora_group_size"}  # defaults of what is itself refused


def base_of(folder: Path) -> str:
    """The name or the folder of the model that a folder's adapters are for.

    Raises:
        ConfigError: the folder's configuration is damaged or names none.
    """
    name = _read_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r}; expected the name or the folder "
            "of the model that was adapted"
        )
    return name


def load_adapters(folder: Path, params: Params, *, place: Place = SINGLE.place) -> Params:
    """The parameters with a folder's adapters, which are float32 whatever the weights are.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        params: of the model that was adapted, without adapters.
        place: as in `hf.load_pretrained`.

    Raises:
        ConfigError: a damaged file, adapters of another kind than `lora.py`'s, tensors that do not
            fit the model.
    """
    file = folder / TENSORS
    if not file.is_file():
        raise ConfigError(f"no {TENSORS} in {folder}: expected it beside {CONFIG}")
    tensors = read_tensors([file])
    adapted = lora.add_adapters(params, _lora_config(folder, tensors), jax.random.key(0))
    wanted = _slots(adapted)
    weights.check(wanted, tensors, file)
    trained = weights.fill(wanted, tensors, "float32", place)
    return lora.combine(trained, lora.partition(adapted)[1])


def save_adapters(folder: Path, params: Params, *, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which `peft.PeftModel` loads.

    Args:
        folder: is made where it is missing.
        params: with adapters; only these are written.
        base: the name or the folder of the model that they adapt.
    """
    config = lora.config_of(params)
    assert config is not None
    folder.mkdir(parents=True, exist_ok=True)
    leaves: dict[Any, Any] = flatten_dict(params)
    write_tensors(folder / TENSORS, _slots(params), leaves)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": [theirs for theirs, ours in _TARGETS.items() if ours in config.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, described)


def _slots(params: Params) -> dict[str, Slot]:
    """The place of each tensor, by its name; PEFT keeps A as [r, in] and B as [out, r]."""
    found = {}
    leaves: dict[Any, Any] = flatten_dict(params)
    for path, leaf in leaves.items():
        if path[-2:] not in lora.TRAINED:
            continue
        for layer in range(leaf.shape[0]):
            module = f"base_model.model.{NAMES[path[-3]].format(layer)}"
            name = f"{module}.{_MATRICES[path[-1]]}.weight"
            found[name] = Slot(path, layer, leaf.shape[:0:-1], transposed=True)
    return found


def _lora_config(folder: Path, tensors: Iterable[str]) -> LoRAConfig:
    """What our adapters would be made from; the tensors' names say where they are."""
    config, where = _read_config(folder), folder / CONFIG
    for field, value in ({"peft_type": None} | config).items():
        expected = _EXPECTED.get(field)
        if value not in expected if expected else value and field not in _HARMLESS:
            raise ConfigError(
                f"{where}: {field}={value!r} is not supported; expected "
                f"{repr(expected[0]) if expected else 'none'}"
            )
    rank: Any = config.get("r")
    alpha = config.get("lora_alpha")
    weights.check_size(rank, f"{where}: r")
    if not isinstance(alpha, int | float):
        raise ConfigError(f"{where}: lora_alpha={alpha!r}; expected a number")
    found = {_TARGETS.get(module) for name in tensors for module in name.split(".")}
    targets = tuple(target for target in lora.PROJECTIONS if target in found)
    return LoRAConfig(rank=rank, alpha=alpha, targets=targets)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / CONFIG}: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"cannot read {folder / CONFIG}: expected the fields of a LoraConfig")
    return config
