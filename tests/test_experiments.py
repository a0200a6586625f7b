import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import cli, grpo_countdown
from jaxrl_llm.logging import read_rows

ROOT = Path(__file__).parents[1]


def command(*arguments):
    return [sys.executable, "-m", "experiments.grpo_countdown", *arguments]


def invoke(monkeypatch, *arguments):
    """Run the command line in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["grpo_countdown", *arguments])
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        cli.run(grpo_countdown.Config, grpo_countdown.main, grpo_countdown.__doc__)
    return stopped.value.code


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--train.group-size", "1"], "group_size=1"),
        (["--train.prompts", "30", "--train.minibatches", "4"], "multiple of 16"),
        (["--sampling.top-k", "5"], "leave top_k to evaluation"),
        (["--sampling.max-tokens", "0"], "max_tokens=0"),
        (["--model.heads", "5"], "not a multiple of heads=5"),
        (["--run.name", "a/b"], "plain folder name"),
    ],
)
def test_bad_settings_are_one_line_and_exit_status_2(
    monkeypatch, capsys, tmp_path, arguments, told
):
    status = invoke(monkeypatch, "--smoke", "--run.root", str(tmp_path / "runs"), *arguments)
    error = capsys.readouterr().err
    assert status == 2
    assert told in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_foreign_folder_is_refused_and_left_as_it_was(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "grpo_countdown" / "smoke"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("three years of work")
    assert invoke(monkeypatch, "--smoke", "--run.root", str(tmp_path)) == 2
    assert "not a run's folder" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_the_smoke_run_leaves_everything_it_promises_and_survives_kill_9(tmp_path):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}

    def start(root):
        arguments = ["--smoke", "--run.root", str(root), "--run.quiet"]
        return subprocess.Popen(
            command(*arguments), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )

    whole = start(tmp_path / "whole")
    printed, _ = whole.communicate()
    assert whole.returncode == 0
    assert "held-out accuracy" in printed
    folder = tmp_path / "whole" / "grpo_countdown" / "smoke"
    assert {p.name for p in folder.iterdir()} >= {
        "config.json", "metrics.jsonl", "timing.jsonl", "samples.jsonl", "checkpoints", "plots",
        "summary.json",
    }  # fmt: skip
    assert (folder / "plots" / "learning.png").stat().st_size > 10_000
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"] == {k: v for k, v in summary["final"].items() if "eval/" in k}
    assert max(row["policy/logprob_gap"] for row in read_rows(folder / "metrics.jsonl")[1:]) < 1e-5

    killed = start(tmp_path / "killed")
    metrics = tmp_path / "killed" / "grpo_countdown" / "smoke" / "metrics.jsonl"
    while not (metrics.exists() and len(read_rows(metrics)) > 1) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = start(tmp_path / "killed")
    again.communicate()
    assert again.returncode == 0
    assert metrics.read_bytes() == (folder / "metrics.jsonl").read_bytes()
