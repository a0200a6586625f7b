"""A language model with its tokenizer and parameters: what is trained, saved and loaded."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.distributed import agree, fetch
from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.models import hf, lora, peft
from jaxrl_llm.models.gguf import load_gguf
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params, RopeScaling
from jaxrl_llm.models.weights import WeightType
from jaxrl_llm.parallel import SINGLE, Layout
from jaxrl_llm.tokenizers import CharTokenizer, Tokenizer
from jaxrl_llm.types import ConfigError

SIZES = {
    "tiny": ModelConfig(width=96, layers=3, heads=4),
    "small": ModelConfig(width=256, layers=6, heads=8),
}

_SETTINGS = "policy.json"
_BASE = "base"
_TELLING = (_SETTINGS, peft.CONFIG, "config.json")  # files that tell what a folder holds
_WRITTEN = ("params", _BASE, "model*.safetensors*", "adapter_model.*", "generation_config.json")
_WRITTEN += ("tokenizer*.json", "chat_template.jinja", "*_tokens*.json")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy; frozen, so training returns another one."""

    model: LanguageModel
    tokenizer: Tokenizer
    params: Params
    source: str | None = None
    """Where its weights, without adapters, were loaded from: a hub name or an absolute path."""

    @classmethod
    def from_scratch(
        cls, size: str | ModelConfig, *, tokenizer: Tokenizer | None = None, seed: int = 0
    ) -> "Policy":
        """Fresh weights.

        Args:
            size: "tiny" (0.37 million weights), "small" (5 million), or any `ModelConfig`.
            tokenizer: by default that of the dialogue environment.
            seed: of the weights.

        Raises:
            ConfigError: no such size.
        """
        if isinstance(size, str):
            if size not in SIZES:
                raise ConfigError(
                    f"no model size {size!r}: expected one of {', '.join(SIZES)}, or a ModelConfig"
                )
            size = SIZES[size]
        if tokenizer is None:
            # Here, since the environments are above this module.
            from jaxrl_llm.envs.dialogue import dialogue_tokenizer

            tokenizer = dialogue_tokenizer()
        model = LanguageModel(size, tokenizer.vocab_size)
        return cls(model, tokenizer, model.init(jax.random.key(seed)))

    def with_lora(self, config: LoRAConfig = LoRAConfig(), *, seed: int = 0) -> "Policy":
        """This policy with fresh adapters, which are then all that training changes.

        Raises:
            ConfigError: it has adapters already.
        """
        params = lora.add_adapters(self.params, config, jax.random.key(seed))
        return dataclasses.replace(self, params=params)

    def merged(self) -> "Policy":
        """This policy with its adapters, if any, added to the weights they adapt."""
        return self.with_params(lora.merge(self.params)) if lora.has_adapters(self.params) else self

    def with_params(self, params: Params) -> "Policy":
        """This policy with trained parameters; with adapters, the weights they adapt are the same.

        Without adapters all weights were trained, so it is its source no longer.
        """
        source = self.source if lora.has_adapters(params) else None
        return dataclasses.replace(self, params=params, source=source)

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        dtype: WeightType = "float32",
        compute_dtype: WeightType | None = None,
        layout: Layout = SINGLE,
        **overrides: Any,
    ) -> "Policy":
        """A policy that `save` wrote, or a model that others trained, with its tokenizer.

        Adapters are float32, whatever the weights are: `from_pretrained(name, dtype="bfloat16")
        .with_lora()` trains them on frozen weights of half the size, and `compute_dtype="bfloat16"`
        alone computes fast with float32 weights.

        Args:
            name_or_folder: a folder that `save` wrote; a folder of transformers or PEFT; a GGUF
                file; a name of `models.presets.PRESETS` or of the Hugging Face hub.
            dtype: of the weights.
            compute_dtype: of the computation; by default what policy.json says, or else `dtype`.
            layout: of the devices; over a mesh (`parallel.make_layout`) each gets its part of every
                weight as it is read, and none, and no host, all of them.
            overrides: further fields of `ModelConfig`, such as remat and scan_unroll.

        Raises:
            ConfigError: it is none of these, cannot be fetched, is damaged, or not supported.
        """
        name = str(name_or_folder)
        if name in SIZES and not Path(name).is_dir():
            raise ConfigError(
                f"{name} has no pretrained weights: Policy.from_scratch({name!r}) makes fresh ones"
            )
        folder = hf.resolve(name_or_folder)
        if (folder / _SETTINGS).is_file():
            return _read_checkpoint(folder, dtype, compute_dtype, layout, overrides)
        is_adapter = (folder / peft.CONFIG).is_file()
        if not (is_adapter or folder.suffix == ".gguf" or (folder / "config.json").is_file()):
            raise ConfigError(
                f"{folder}: no {_SETTINGS}, config.json or {peft.CONFIG} there; expected a folder "
                "that Policy.save wrote, such as RUN/policy, or one of transformers or PEFT"
            )
        base = _base_of(folder) if is_adapter else name_or_folder
        path = hf.resolve(base)
        load = load_gguf if path.suffix == ".gguf" else hf.load_pretrained
        model, params = load(
            path, dtype=dtype, compute_dtype=compute_dtype, place=layout.place, **overrides
        )
        if is_adapter:
            params = peft.load_adapters(folder, params, place=layout.place)
        has_tokenizer = (folder / "tokenizer.json").is_file()
        tokenizer = _read_tokenizer(folder if has_tokenizer else path, model.vocab_size)
        return cls(model, tokenizer, params, hf.origin(base))

    def save(self, folder: str | Path) -> None:
        """Write what `from_pretrained` reads, with equal parameters, given the same dtype.

        With a tokenizer of transformers that is a folder of transformers (`models.hf`), or, with
        adapters, one of PEFT (`models.peft`), which names the `source`; without one it holds the
        weights that are adapted too, in `base`. With a built-in tokenizer it is `policy.json` and
        the parameters. What an earlier call wrote there is replaced once all is written; until it
        is replaced entirely, the folder loads as nothing. Other files are left alone. Of several
        processes the first one writes, and all have to call this: weights that lie on the devices
        of several are gathered.

        Raises:
            ConfigError: the tokenizer or the model is none that can be saved.
        """
        whole = dataclasses.replace(self, params=fetch(self.params))
        agree(lambda: whole._write(Path(folder).resolve()))

    def _write(self, folder: Path) -> None:
        if isinstance(self.tokenizer, HFTokenizer):
            write = self._write_adapters if lora.has_adapters(self.params) else self._write_model
        elif isinstance(self.tokenizer, CharTokenizer):
            write = self._write_checkpoint
        else:
            raise ConfigError(f"cannot save a policy with a {type(self.tokenizer).__name__}")
        with _replacing(folder) as staging:
            write(staging, folder)

    def _write_model(self, staging: Path, folder: Path) -> None:
        del folder
        hf.save_pretrained(staging, self.model, self.params, tokenizer=self.tokenizer)

    def _write_adapters(self, staging: Path, folder: Path) -> None:
        source = self.source
        if source is None or Path(source).is_relative_to(folder):  # which is being replaced
            source = str(folder / _BASE)
            base = dataclasses.replace(self, params=lora.without_adapters(self.params))
            base._write_model(staging / _BASE, folder)
        peft.save_adapters(staging, self.params, base=source)
        assert isinstance(self.tokenizer, HFTokenizer)
        self.tokenizer.save_pretrained(staging)

    def _write_checkpoint(self, staging: Path, folder: Path) -> None:
        del folder
        assert isinstance(self.tokenizer, CharTokenizer)
        alone = ocp.options.MultiprocessingOptions(
            active_processes={0}, barrier_sync_key_prefix="policy"
        )
        with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
            checkpointer.save(staging / "params", jax.tree.map(np.asarray, self.params))
        settings: dict[str, Any] = {
            "model": dataclasses.asdict(self.model.config),
            "alphabet": self.tokenizer.alphabet,
            "words": self.tokenizer.words,
        }
        adapters = lora.config_of(self.params)
        settings["lora"] = None if adapters is None else dataclasses.asdict(adapters)
        (staging / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _read_checkpoint(
    folder: Path,
    dtype: WeightType,
    compute_dtype: WeightType | None,
    layout: Layout,
    overrides: dict[str, Any],
) -> Policy:
    settings = json.loads((folder / _SETTINGS).read_text())
    tokenizer = CharTokenizer(settings["alphabet"], settings["words"])
    described = settings["model"]
    if described.get("rope_scaling"):
        described["rope_scaling"] = RopeScaling(**described["rope_scaling"])
    if compute_dtype:
        described["dtype"] = compute_dtype
    model = LanguageModel(ModelConfig(**described | overrides), tokenizer.vocab_size)
    adapters = settings.get("lora")

    def fresh(key):
        params = jax.tree.map(lambda x: x.astype(dtype), model.init(key))
        if adapters is None:
            return params
        config = LoRAConfig(**adapters | {"targets": tuple(adapters["targets"])})
        return lora.add_adapters(params, config, key)

    target = layout.outline(jax.eval_shape(fresh, jax.random.key(0)))
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(folder.absolute() / "params", target)
    return Policy(model, tokenizer, params)


def _base_of(folder: Path) -> str | Path:
    """Of a folder of adapters: what they adapt, which lies in it or is named."""
    within = folder / _BASE
    return within if within.is_dir() else peft.base_of(folder)


def _read_tokenizer(path: Path, vocab_size: int) -> HFTokenizer:
    if path.suffix == ".gguf":
        return HFTokenizer.from_gguf(path, vocab_size=vocab_size)
    return HFTokenizer.from_pretrained(path, vocab_size=vocab_size)


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder within a folder, whose content then replaces what an earlier save left there.

    What tells a folder's kind is the first to go and the last to come.
    """
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)  # left by a save that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        for pattern in (*_TELLING, *_WRITTEN):
            for old in folder.glob(pattern):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for new in sorted(staging.iterdir(), key=lambda path: path.name in _TELLING):
            new.rename(folder / new.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
