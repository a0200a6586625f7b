"""A language model with its tokenizer and parameters: what is trained, saved and loaded."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.models import lora
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params
from jaxrl_llm.tokenizers import CharTokenizer, Tokenizer
from jaxrl_llm.types import ConfigError

SIZES = {
    "tiny": ModelConfig(width=96, layers=3, heads=4),
    "small": ModelConfig(width=256, layers=6, heads=8),
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy; frozen, so training returns another one."""

    model: LanguageModel
    tokenizer: Tokenizer
    params: Params

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
        return dataclasses.replace(self, params=lora.merge(self.params))

    @classmethod
    def from_pretrained(cls, name_or_folder: str | Path) -> "Policy":
        """A policy that `save` wrote.

        Raises:
            ConfigError: the folder is not there, or holds something else.
        """
        folder = Path(name_or_folder).absolute()
        described = folder / "policy.json"
        if not described.is_file():
            raise ConfigError(
                f"{name_or_folder}: no policy.json there; expected a folder that Policy.save "
                "wrote, such as RUN/policy"
            )
        settings = json.loads(described.read_text())
        tokenizer = CharTokenizer(settings["alphabet"], settings["words"])
        model = LanguageModel(ModelConfig(**settings["model"]), tokenizer.vocab_size)
        adapters = settings.get("lora")

        def fresh(key):
            params = model.init(key)
            if adapters is None:
                return params
            config = LoRAConfig(**adapters | {"targets": tuple(adapters["targets"])})
            return lora.add_adapters(params, config, key)

        target = jax.eval_shape(fresh, jax.random.key(0))
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(folder / "params", target)
        return cls(model, tokenizer, params)

    def save(self, folder: str | Path) -> None:
        """Write `policy.json` and the parameters; what was there before is replaced.

        Raises:
            ConfigError: the tokenizer is not one of the built-in ones.
        """
        if not isinstance(self.tokenizer, CharTokenizer):
            raise ConfigError(f"cannot save a policy with a {type(self.tokenizer).__name__}")
        folder = Path(folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "params", self.params, force=True)
        settings: dict[str, Any] = {
            "model": dataclasses.asdict(self.model.config),
            "alphabet": self.tokenizer.alphabet,
            "words": self.tokenizer.words,
        }
        adapters = lora.config_of(self.params)
        settings["lora"] = None if adapters is None else dataclasses.asdict(adapters)
        (folder / "policy.json").write_text(json.dumps(settings, indent=2) + "\n")
