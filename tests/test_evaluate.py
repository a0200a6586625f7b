"""The command that evaluates policies: what it writes, finds again and compares."""

import json
import os

import pytest

pytest.importorskip("lm_eval")

import datasets
from lm_eval.tasks import TaskManager
from test_harness_tasks import (
    ASKED,
    LENIENT,
    QUESTIONS,
    SAID,
    STRICT,
    TASKS,
    Scripted,
    asked_last,
    rows,
    write_jsonl,
)

from experiments import evaluate
from jaxrl_llm import harness_tasks
from jaxrl_llm.suites import SuiteResult, load_result
from jaxrl_llm.types import ConfigError


@pytest.fixture(autouse=True)
def no_other_tasks(tmp_path, monkeypatch):
    """lm-eval's whole list takes seconds to read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        harness_tasks,
        "TaskManager",
        lambda: TaskManager(include_defaults=False, include_path=str(TASKS / "gsm8k")),
    )


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Models `weak`, which is right by chance only, and `strong`; questions in `data`."""
    answers = {"weak": lambda _: "#### 2", "strong": lambda prompt: SAID[asked_last(prompt)]}
    for name in answers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(
        evaluate.Candidate,
        "lm",
        property(lambda self: Scripted(answers[os.path.basename(self.name)])),
    )
    write_jsonl(tmp_path / "data" / "gsm8k.jsonl", rows(QUESTIONS))

    def run(**settings):
        config = evaluate.Config(
            **{"model": str(tmp_path / "strong"), "tasks": "gsm8k", "num_fewshot": 1}
            | {"data": tmp_path / "data", "root": tmp_path / "runs"}
            | settings
        )
        evaluate.main(config)
        return config.folder

    return run


def forbid(monkeypatch):
    def measure(*_, **__):
        raise RuntimeError("measured again")

    monkeypatch.setattr(harness_tasks, "evaluate_task", measure)


def test_the_scores_of_every_question_are_kept_with_where_they_came_from(scripted):
    folder = scripted()
    held = json.loads((folder / "results.json").read_text())
    ((result,),) = held["stages"].values()
    assert result["scores"] == dict(zip(ASKED, (STRICT, LENIENT), strict=True))
    assert len(result["questions"]) == 5 and "commit" in held["provenance"]
    (path,) = (folder / "results").glob("gsm8k-strong-????????????.json")
    assert load_result(path).scores == result["scores"]
    settings = json.loads(path.read_text())["provenance"]["settings"]
    assert settings["num_fewshot"] == 1 and settings["task"] == "gsm8k" and settings["lm_eval"]
    answers = json.loads(path.with_suffix(".answers.json").read_text())
    assert answers[1]["responses"] == [[SAID["What is 2 + 2?"]]]
    assert not list(folder.glob("results/*.db"))


def test_what_is_measured_is_found_again_and_what_changed_is_not(scripted, tmp_path, monkeypatch):
    first = (scripted() / "results.json").read_text()
    with monkeypatch.context() as patch:
        forbid(patch)
        again = (scripted() / "results.json").read_text()
        assert json.loads(again)["stages"] == json.loads(first)["stages"]
        for changed in ({"limit": 3}, {"num_fewshot": 0}, {"max_gen_toks": 9}, {"chat": True}):
            with pytest.raises(RuntimeError, match="measured again"):
                scripted(**changed)
        os.utime(tmp_path / "strong" / "config.json", (1, 1))  # other weights
        with pytest.raises(RuntimeError, match="measured again"):
            scripted()
    scripted()
    write_jsonl(tmp_path / "data" / "gsm8k.jsonl", rows(QUESTIONS[:3]))
    held = json.loads((scripted() / "results.json").read_text())
    ((result,),) = held["stages"].values()
    assert len(result["questions"]) == 3


def test_a_policy_is_compared_with_its_base_question_by_question(scripted, tmp_path):
    folder = scripted(base=str(tmp_path / "weak"))
    table = (folder / "table.md").read_text().splitlines()
    strict = next(line for line in table if "strict-match" in line)
    lenient = next(line for line in table if "flexible-extract" in line)
    assert "| 5 | 0.200 [" in strict and "; +0.200 [" in strict
    # Right 1 of 5 before and 4 of 5 after, none lost: McNemar's p is 2 · ½³.
    assert "0.200 [" in lenient and "; +0.600 [" in lenient and "p = 0.25" in lenient
    assert "p = 1 " in strict  # one question gained
    held = json.loads((folder / "results.json").read_text())["stages"]
    assert [os.path.basename(name) for name in held] == ["weak", "strong"]
    (before,), (after,) = held.values()
    assert before["questions"] == after["questions"]


@pytest.mark.slow
def test_suites_are_drawn_offline_asked_once_and_found_again(scripted, monkeypatch, capsys):
    calls = []

    def answered(policy, suite, **settings):
        answers = settings.pop("answers")
        assert answers.match(f"evaluate/default/results/{suite.name}-*.answers.json")
        calls.append((suite.name, settings))
        n = len(suite.questions)
        return SuiteResult(suite.name, {"greedy/strict": [1.0] * n}, suite.questions, 2.0)

    monkeypatch.setattr(evaluate.Candidate, "policy", None)
    monkeypatch.setattr(evaluate, "evaluate_suite", answered)
    asked = {"tasks": None, "suites": ("chain_sum", "countdown"), "limit": 3, "max_gen_toks": 9}
    folder = scripted(**asked)
    expected = {"max_tokens": 9, "batch": 8}
    assert calls == [("chain_sum", expected), ("countdown", expected)]
    table = (folder / "table.md").read_text()
    assert "| chain_sum | greedy/strict | 3 | 1.000" in table and "gsm8k" not in table
    scripted(**asked)
    assert len(calls) == 2
    scripted(**asked | {"limit": None})
    assert len(calls) == 4
    assert "| countdown | greedy/strict | 200 |" in (folder / "table.md").read_text()
    assert "chain_sum" in evaluate.Config(suites=("offline",)).suite_names


def test_an_interrupted_task_goes_on_where_it_was(scripted, tmp_path, monkeypatch):
    """What lm-eval's cache has is not asked again."""
    asked = []

    class Fragile(Scripted):
        def generate_until(self, requests, disable_tqdm=False):
            for request in requests:
                asked.append(asked_last(request.args[0]))
                if len(asked) == 3:
                    raise KeyboardInterrupt
                self.cache_hook.add_partial("generate_until", request.args, "#### 2")
            return ["#### 2"] * len(requests)

    monkeypatch.setattr(evaluate.Candidate, "lm", property(lambda _: Fragile(None)))
    with pytest.raises(KeyboardInterrupt):
        scripted()
    scripted()
    assert len(asked) == 6 and set(asked) == {question for question, _ in QUESTIONS}


def test_the_smoke_run_measures_a_fresh_model(tmp_path):
    evaluate.main(evaluate.Config(smoke=True, root=tmp_path))
    held = json.loads((tmp_path / "evaluate" / "smoke" / "results.json").read_text())
    ((result,),) = held["stages"].values()
    assert {len(values) for values in result["scores"].values()} == {2}


def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path):
    for settings, message in (
        ({"tasks": " , "}, "expected distinct names"),
        ({"tasks": "gsm8k,gsm8k"}, "expected distinct names"),
        ({"tasks": "", "suites": ()}, "expected distinct names"),
        ({"base": "smollm2-135m"}, "that is the model"),
        ({"limit": 0}, "limit=0: expected at least 1"),
        ({"num_fewshot": -1}, "num_fewshot=-1"),
        ({"data": tmp_path / "none"}, "is no folder"),
        ({"name": "a/b"}, "plain folder name"),
    ):
        with pytest.raises(ConfigError, match=message) as told:
            evaluate.Config(**settings)
        assert "\n" not in str(told.value)
