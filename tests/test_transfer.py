import dataclasses
import json

import jax
import pytest

from experiments import transfer_countdown
from experiments.transfer_countdown import DISTRIBUTIONS, Config, countdown_suite, scores, suites
from jaxrl_llm.envs import host
from jaxrl_llm.policy import Policy
from jaxrl_llm.suites import SuiteResult
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.types import ConfigError


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_suites_of_countdown_have_solvable_held_out_problems_and_grade_them(name):
    suite = countdown_suite(name, 12, DISTRIBUTIONS[name])
    answers, targets = [], []
    for question in suite.questions:
        numbers, target = question.strip().split("=")
        numbers = [int(number) for number in numbers.split(",")]
        assert host.split_of(numbers, int(target), 8) == 1
        answers.append(host.solve(numbers, int(target)))
        targets.append(int(target))
    assert len(set(suite.questions)) == 12
    if "targets" in name:
        assert min(targets) > 100
    right = suite.grade((answer, i) for i, answer in enumerate(answers))
    assert [grade.value for grade in right] == [1.0] * 12
    shifted = suite.grade((answers[i - 1], i) for i in range(12))
    nothing = suite.grade([(None, 0), ("1+", 1)])
    assert sum(grade.value for grade in [*shifted, *nothing]) == 0.0


def test_the_tiny_policy_can_be_asked_them():
    prompts = countdown_suite("countdown", 4, {"max_target": 200}).prompts(arithmetic_tokenizer())
    assert len(prompts) == 4 and all(prompts)


def test_arms_differ_in_what_their_names_say():
    config = Config(run=RunConfig(seed=3), iterations=7)
    arms = {name: config.arm(name) for name in config.arms}
    with_it, without = arms["DAPO"], arms["DAPO without dynamic sampling"]
    assert with_it.algorithm.dynamic_sampling and not without.algorithm.dynamic_sampling
    assert dataclasses.replace(without.algorithm, dynamic_sampling=True) == with_it.algorithm
    assert {(arm.train.iterations, arm.run.seed) for arm in arms.values()} == {(7, 3)}
    assert len({json.dumps(arm.warm_start, default=str) for arm in arms.values()}) == 1


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ConfigError, match="no APO; expected some of PPO, GRPO"):
        Config(arms=("APO",))
    with pytest.raises(ConfigError, match="add --model"):
        Config(suites=("chain_sum",))
    with pytest.raises(ConfigError, match="questions=0"):
        Config(questions=0)
    assert list(suites(Config(model="smollm2-135m", suites=("syllogism",)))) == ["syllogism"]


def test_the_table_leaves_out_what_is_no_score():
    result = SuiteResult("s", {"greedy/strict": [1.0], "greedy/truncated": [0.0]}, ["a"], 1.0)
    assert list(scores(result).scores) == ["greedy/strict"]


@pytest.mark.slow
def test_the_pipeline_goes_from_a_fresh_policy_to_a_table_and_is_found_again(
    tmp_path, capsys, monkeypatch
):
    config = Config(arms=("GRPO",), run=RunConfig(root=tmp_path, quiet=True), smoke=True)
    assert transfer_countdown.main(config)
    folder = tmp_path / "transfer_countdown" / "smoke"
    record = json.loads((folder / "results.json").read_text())
    assert list(record["stages"]) == ["base", "SFT", "GRPO"]
    for results in record["stages"].values():
        assert [result["suite"] for result in results] == list(DISTRIBUTIONS)
        assert all(len(result["scores"]["greedy/strict"]) == 8 for result in results)
    assert len(list(folder.glob("results/*.answers.json"))) == 3 * len(DISTRIBUTIONS)
    table = (folder / "table.md").read_text()
    assert table.splitlines()[0].endswith("| base | SFT | GRPO |")
    trained = Policy.from_pretrained(folder / "grpo" / "run" / "policy")
    base = Policy.from_pretrained(folder / "base")
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), trained.params, base.params)
    assert any(jax.tree.leaves(changed))

    def unexpected(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(transfer_countdown, "evaluate_suite", unexpected)
    assert transfer_countdown.main(config)
    assert (folder / "table.md").read_text() == table
