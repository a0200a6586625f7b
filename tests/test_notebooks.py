"""The notebooks: how they are kept, and that each of them runs from top to bottom."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient
from test_chat_countdown import tokenizer

from jaxrl_llm.logging import read_rows
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.policy import Policy

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
VERSION = re.search(r'version="(.*)"', (ROOT / "setup.py").read_text())[1]


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Where compiled programs are kept: notebooks share some."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def execute(compiled, tmp_path, monkeypatch):
    """`execute(name)` runs a notebook in an empty folder; returns its text and its figures."""

    def of(name, **settings):
        settings = {"JAXRL_LLM_SMALL": 1, "JAX_COMPILATION_CACHE_DIR": compiled} | settings
        for variable, value in settings.items():
            monkeypatch.setenv(variable, str(value))
        notebook = read(name)
        where = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        data = [output.get("data", {}) for output in outputs]
        text = [output.get("text", "") for output in outputs]
        text += [shown.get("text/plain", "") + shown.get("text/markdown", "") for shown in data]
        return "\n".join(text), sum("image/png" in shown for shown in data)

    return of


def test_there_are_the_four_notebooks():
    assert NAMES == [
        "ablation_report",
        "countdown_grpo",
        "finetune_qwen_tpu",
        "losses_from_the_papers",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_small_and_without_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 50_000
    assert all(not cell.outputs and cell.execution_count is None for cell in code(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_badge_opens_this_notebook_at_the_version_that_it_installs(name):
    repository = re.search(r'REPOSITORY = "https://github.com/(.*?)"', code(name)[0].source)[1]
    address = re.search(
        r"\)\]\((https://colab\.research\.google\.com/\S*)\)", read(name).cells[0].source
    )
    assert address[1] == (
        f"https://colab.research.google.com/github/{repository}/blob/v{VERSION}"
        f"/notebooks/{name}.ipynb"
    )
    assert f'VERSION = "v{VERSION}"' in code(name)[0].source


def test_all_begin_with_the_same_installation():
    assert len({code(name)[0].source for name in NAMES}) == 1


@pytest.mark.parametrize(
    "found, extra", [((), []), (("nvidia-smi",), ["jax[cuda12]"]), (("libtpu",), ["jax[tpu]"])]
)
def test_where_it_is_missing_the_package_is_installed_with_the_plug_in_of_the_machine(
    found, extra, monkeypatch
):
    commands = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    source = code(NAMES[0])[0].source
    with pytest.raises(ValueError, match="REPOSITORY"):
        exec(source, {})
    exec(source.replace("/OWNER/", "/someone/", 1), {})
    (command,) = commands
    address = f"git+https://github.com/someone/jaxrl_llm@v{VERSION}"
    assert command[1:] == ["-m", "pip", "install", "--quiet", f"jaxrl_llm @ {address}", *extra]


def test_where_it_can_be_imported_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("installs"))
    exec(code(NAMES[0])[0].source, {})


@pytest.fixture
def runs(tmp_path):
    """`runs(name, finals)`: folders of finished runs, whose seeds end at these accuracies."""

    def of(name, finals):
        for seed, final in enumerate(finals):
            folder = tmp_path / "made" / name / f"seed-{seed}"
            folder.mkdir(parents=True)
            config = {"algorithm": {"name": name}, "run": {"seed": seed}}
            (folder / "config.json").write_text(json.dumps(config))
            rows = []
            for step in (0, 10, 20):
                value = 0.2 + (final - 0.2) * step / 20
                measured = {"eval/sampled": value, "eval/sampled_low": value - 0.05}
                measured |= {"eval/sampled_high": value + 0.05, "reward/mean": value}
                measured |= {"rollout/length_mean": 8.0 + step, "policy/entropy": 1.0 - value}
                rows.append(json.dumps({"step": step} | measured))
            (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        return tmp_path / "made"

    return of


@pytest.mark.slow
def test_the_report_shows_means_over_seeds_and_judges_by_the_interval(runs, execute):
    shift, word = -0.1, "contradicted"
    runs("grpo_countdown", [0.30, 0.32, 0.34, 0.36, 0.38])
    # Differences by seed: the shift, and ±0.01 or ±0.02 around it.
    noise = [0.01, -0.02, 0.02, -0.01, 0.0]
    finals = [0.30 + 0.02 * seed + shift + noise[seed] for seed in range(5)]
    folder = runs("drgrpo_countdown", finals)
    (folder / "table.md").write_text("| arm |\n|---|\n| made up |\n")
    text, n_figures = execute("ablation_report", JAXRL_LLM_RUNS=folder)
    assert f"drgrpo_countdown beats grpo_countdown in eval/sampled: {word}" in text
    told = re.search(r"difference (\S+) \[(\S+), (\S+)\], n = 5 seeds", text)
    mean, low, high = map(float, told.groups())
    assert mean == pytest.approx(shift, abs=1e-3)
    assert shift - 0.02 <= low < mean < high <= shift + 0.02
    assert re.search(rf"drgrpo_countdown +{0.34 + shift:.2f}\d* ", text)
    assert "made up" in text and n_figures == 4


@pytest.mark.slow
def test_the_report_makes_runs_of_its_own_where_there_are_none(execute, tmp_path):
    text, n_figures = execute("ablation_report")
    assert "drgrpo_countdown beats grpo_countdown" in text and n_figures == 4
    assert len(list((tmp_path / "runs").glob("ablation/*grpo_countdown/seed-*/summary.json"))) == 4


@pytest.mark.slow
def test_the_losses_agree_with_numpy_and_are_drawn(execute):
    text, n_figures = execute("losses_from_the_papers")
    assert text.count("agrees with NumPy") == 25 and n_figures == 8


@pytest.mark.slow
def test_countdown_is_trained_and_the_same_problems_are_shown_before_and_after(execute, tmp_path):
    text, n_figures = execute("countdown_grpo")
    assert "after 0 updates" in text and "after 4 updates" in text and n_figures == 3
    folder = tmp_path / "runs" / "grpo_countdown" / "notebook-0"
    first = read_rows(folder / "samples.jsonl")[0]
    line = next(line for line in text.splitlines() if line.startswith(first["prompt"]))
    assert first["completion"] in line


@pytest.mark.slow
def test_a_pretrained_model_is_trained_once_exported_and_talked_to(execute, tmp_path):
    ours = tokenizer()
    model = LanguageModel(ModelConfig(width=32, layers=2, heads=2), ours.vocab_size)
    Policy(model, ours, model.init(jax.random.key(0))).save(tmp_path / "small")
    text, n_figures = execute("finetune_qwen_tpu", JAXRL_LLM_MODEL=tmp_path / "small")
    assert "complete" in text and "<- peak" in text and n_figures == 2
    folder = tmp_path / "runs" / "grpo_countdown" / "small-smoke"
    exported = Policy.from_pretrained(folder / "exported")
    trained = Policy.from_pretrained(folder / "policy").merged()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), exported.params, trained.params)
    assert all(jax.tree.leaves(same))
    finished = (folder / "metrics.jsonl").read_bytes(), (folder / "summary.json").read_bytes()
    execute("finetune_qwen_tpu")
    assert finished == (
        (folder / "metrics.jsonl").read_bytes(),
        (folder / "summary.json").read_bytes(),
    )
