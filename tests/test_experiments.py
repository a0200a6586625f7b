import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments import cli, compare_algorithms
from jaxrl_llm.logging import RunFolder, read_rows
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.types import ConfigError

ROOT = Path(__file__).parents[1]
ARMS = ("ppo", "grpo", "dapo", "drgrpo", "gspo", "cispo", "rloo")


def experiment(arm):
    return importlib.import_module(f"experiments.{arm}_countdown")


def invoke(monkeypatch, arm, *arguments):
    """Run the command line in this process; returns its exit status."""
    module = experiment(arm)
    monkeypatch.setattr(sys, "argv", [f"{arm}_countdown", *arguments])
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        cli.run(module.Config, module.main, module.__doc__)
    return stopped.value.code


def test_matmul_precision_is_that_of_every_matmul_of_a_run(monkeypatch):
    found = {}

    def main(config):
        x = jnp.ones((3, 3))
        program = jax.jit(lambda x: x @ x).lower(x).as_text()
        found[config.matmul_precision] = "HIGHEST" in program

    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    for arguments in ([], ["--matmul-precision", "highest"]):
        monkeypatch.setattr(sys, "argv", ["grpo_countdown", *arguments])
        with pytest.raises(SystemExit):
            cli.run(experiment("grpo").Config, main, "")
    assert found == {None: False, "highest": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--train.prompts", "30", "--train.minibatches", "4"], "multiple of 16"),
        (["--sampling.top-k", "5"], "leave top_k to evaluation"),
        (["--sampling.max-tokens", "0"], "max_tokens=0"),
        (["--network.heads", "5"], "not a multiple of heads=5"),
        (["--run.name", "a/b"], "plain folder name"),
        (["--optimizer.learning-rate", "-1e-3"], "learning_rate=-0.001"),
        (["--eval.samples", "0"], "samples=0"),
        (["--network.layers", "0"], "layers=0"),
        (["--algorithm.kl-coef", "nan"], "kl_coef=nan"),
        (["--sampling.temperature", "nan"], "temperature=nan"),
        (["--task.reward-wrong", "nan"], "reward_wrong=nan"),
        (["--task.reward-wrong", "1"], "a correct answer's is the largest"),
        (["--smoke", "--train.group-size", "1"], "set group_size=8"),
        (["--smoke", "--network.attention", "cudnn"], "attention=cudnn cannot be"),
    ],
)
def test_bad_settings_are_one_line_and_exit_status_2(
    monkeypatch, capsys, tmp_path, arguments, told
):
    refuse("grpo", arguments, told, monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize(
    ("arm", "arguments", "told"),
    [
        ("grpo", ["--train.group-size", "1"], "set group_size=8"),
        ("grpo", ["--algorithm.kl-target", "0.01"], "kl_schedule=adaptive or linear"),
        ("dapo", ["--algorithm.kl-schedule", "linear"], "there is no KL to steer"),
        ("dapo", ["--algorithm.kl-coef", "0.1"], "kl_in=loss"),
        ("dapo", ["--algorithm.max-sampling-rounds", "1"], "nothing would be sampled again"),
        ("dapo", ["--algorithm.overlong-cache", "10"], "every completion would be penalised"),
        ("ppo", ["--algorithm.grad-reg-coeff", "0.05", "--train.minibatches", "1"], "epochs=2"),
        ("cispo", ["--algorithm.dual-clip", "3"], "surrogate=clipped"),
        ("grpo", ["--paper", "--algorithm.clip-high", "0.3"], "leave it out"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_way_out(
    monkeypatch, capsys, tmp_path, arm, arguments, told
):
    refuse(arm, arguments, told, monkeypatch, capsys, tmp_path)


def refuse(arm, arguments, told, monkeypatch, capsys, tmp_path):
    # Without --smoke, unless asked for: it has sizes of its own.
    status = invoke(monkeypatch, arm, "--run.root", str(tmp_path / "runs"), *arguments)
    error = capsys.readouterr().err
    assert status == 2
    assert told in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_what_the_warm_start_refuses_can_be_corrected_in_the_same_folder(
    monkeypatch, capsys, tmp_path
):
    arguments = ["--smoke", "--run.root", str(tmp_path), "--sampling.max-tokens", "4"]
    assert invoke(monkeypatch, "grpo", *arguments) == 2
    assert "cannot hold the solution" in capsys.readouterr().err
    with RunFolder.open(tmp_path / "grpo_countdown" / "smoke", {"max_tokens": 8}) as folder:
        assert not folder.is_resumed


def test_a_foreign_folder_is_refused_and_left_as_it_was(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "grpo_countdown" / "smoke"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("three years of work")
    assert invoke(monkeypatch, "grpo", "--smoke", "--run.root", str(tmp_path)) == 2
    assert "not a run's folder" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("arm", ARMS)
def test_every_axis_is_on_every_command_line(monkeypatch, capsys, arm):
    monkeypatch.setenv("COLUMNS", "90")  # wider ones put sections side by side
    assert invoke(monkeypatch, arm, "--help") == 0
    axes = capsys.readouterr().out.split("algorithm options")[1].split("eval options")[0]
    fields = dataclasses.fields(AlgorithmConfig)
    for field in fields:
        assert f"--algorithm.{field.name.replace('_', '-')}" in axes
    assert axes.count("(default:") == len(fields)


@pytest.mark.parametrize("arm", ARMS)
def test_the_paper_flag_gives_the_published_settings(arm):
    config = experiment(arm).Config(paper=True).resolved()
    published = PRESETS[arm]()
    if arm == "dapo":
        assert config.algorithm.overlong_cache == config.sampling.max_tokens // 5
        published = dataclasses.replace(published, overlong_cache=2)
    assert config.algorithm == published


def test_all_experiments_share_the_warm_start():
    warm_starts = [experiment(arm).Config().warm_start for arm in ARMS]
    assert all(warm_start == warm_starts[0] for warm_start in warm_starts)


def test_a_comparison_of_unknown_arms_names_the_known_ones():
    with pytest.raises(ConfigError, match="no experiment for a2c; expected some of ppo, grpo"):
        compare_algorithms.Config(arms=("ppo", "a2c"))
    with pytest.raises(ConfigError, match="seeds=0: expected at least 1"):
        compare_algorithms.Config(seeds=0)


def test_gains_over_seeds_are_paired_with_the_first_algorithms():
    def row(name, seed, after):
        figures = [{"eval/sampled": x} for x in (0.2, after)]
        return {"algorithm": name, "seed": seed, "before": figures[0], "after": figures[1]}

    rows = [row("ppo", seed, 0.3 + 0.01 * seed) for seed in range(3)]
    rows += [row("grpo", seed, 0.35 + 0.01 * seed) for seed in range(3)]
    ppo, grpo = compare_algorithms.over_seeds(rows).splitlines()[2:]
    assert ppo.startswith("| ppo | 3 | +11.0 [+") and ppo.endswith("] | – |")
    assert grpo.startswith("| grpo | 3 | +16.0 [+") and grpo.endswith("| +5.0 [+5.0, +5.0] |")


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["grpo", "dapo"])
def test_the_smoke_run_leaves_everything_it_promises_and_survives_kill_9(tmp_path, arm):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}

    def start(root):
        arguments = ["--smoke", "--run.root", str(root), "--run.quiet"]
        command = [sys.executable, "-m", f"experiments.{arm}_countdown", *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )

    whole = start(tmp_path / "whole")
    printed, _ = whole.communicate()
    assert whole.returncode == 0
    assert "held out" in printed
    folder = tmp_path / "whole" / f"{arm}_countdown" / "smoke"
    assert {p.name for p in folder.iterdir()} >= {
        "config.json", "metrics.jsonl", "timing.jsonl", "samples.jsonl", "checkpoints", "plots",
        "summary.json",
    }  # fmt: skip
    assert (folder / "plots" / "learning.png").stat().st_size > 10_000
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"] == {k: v for k, v in summary["final"].items() if "eval/" in k}
    assert max(row["policy/logprob_gap"] for row in read_rows(folder / "metrics.jsonl")[1:]) < 1e-5

    killed = start(tmp_path / "killed")
    metrics = tmp_path / "killed" / f"{arm}_countdown" / "smoke" / "metrics.jsonl"
    while not (metrics.exists() and len(read_rows(metrics)) > 1) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = start(tmp_path / "killed")
    again.communicate()
    assert again.returncode == 0
    assert metrics.read_bytes() == (folder / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_comparison_runs_its_arms_and_finds_them_again(tmp_path, capsys):
    run = RunConfig(root=tmp_path, quiet=True)
    config = compare_algorithms.Config(arms=("rloo", "dapo"), run=run, smoke=True)
    assert compare_algorithms.main(config)
    folder = tmp_path / "compare_algorithms" / "smoke"
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["rloo", "dapo"]
    rows = json.loads((folder / "table.json").read_text())
    assert rows[1]["sampling"]["extra_completions"] > 0
    assert rows[1]["sampling"]["extra_seconds"] > 0
    assert rows[0]["sampling"]["extra_completions"] == 0
    assert compare_algorithms.main(config)
    assert (folder / "table.md").read_text() == table
