"""Suites asked of a policy: buckets, answers, pass@k and majority votes by hand."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm.answers import EXPRESSION, AskConfig
from jaxrl_llm.grading import Grade
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.suite_eval import (
    Completion,
    Suite,
    evaluate_suite,
    generate,
    reasoning_suite,
    score_completions,
)
from jaxrl_llm.suites import paired, question_digest
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.types import ConfigError

SUMS = ["1+1", "2+5", "10+20", "3*4-5+6-7"]


def grade(calls):
    """1 for the sum, half for another number; one answer cannot be graded."""
    right = ["2", "7", "30", "6"]
    return [
        Grade(0.0, "timed_out")
        if answer == "99"
        else Grade(float(answer == right[i]) or 0.5 * (answer or "x").isdigit())
        for answer, i in calls
    ]


SUITE = Suite(
    name="sums",
    questions=SUMS,
    fields=[{"expression": question} for question in SUMS],
    references=["2", "7", "30", "6"],
    grade=grade,
    ask=EXPRESSION,
)


@pytest.fixture(scope="module")
def policy():
    """Its distributions are not flat."""
    policy = Policy.from_scratch(
        ModelConfig(width=16, layers=1, heads=2), tokenizer=arithmetic_tokenizer()
    )
    return replace(policy, params=jax.tree.map(lambda x: 3.0 * x, policy.params))


def said(*texts):
    return [Completion(text, 1, False) for text in texts]


def test_scores_by_hand():
    tagged = replace(SUITE, ask=AskConfig())
    greedy = said("<answer>2</answer>", "It is 7", "30 <answer>31</answer>", "")
    sampled = [
        ["<answer>3</answer>", "<answer>2</answer>", "<answer>2</answer>", "5"],
        ["<answer>7</answer>", "<answer>8</answer>", "7", "8"],
        ["1", "2", "30", "30"],
        ["<answer>99</answer>", "", "", ""],
    ]
    greedy[3] = Completion("", 4, True)
    scores = score_completions(tagged, greedy, sampled)
    assert scores == {
        "greedy/strict": [1.0, 0.0, 0.5, 0.0],
        "greedy/lenient": [1.0, 1.0, 0.5, 0.0],
        # ½ 1 1 none · 1 ½ none none · none · not graded, none none none
        "sampled/strict": [2.5 / 4, 1.5 / 4, 0.0, 0.0],
        # ½ 1 1 ½ · 1 ½ 1 ½ · ½ ½ 1 1
        "sampled/lenient": [0.75, 0.75, 0.75, 0.0],
        "pass@4/strict": [1.0, 1.0, 0.0, 0.0],
        "pass@4/lenient": [1.0, 1.0, 1.0, 0.0],
        # 2 · a tie, which 7 leads · none · 99
        "maj@4/strict": [1.0, 1.0, 0.0, 0.0],
        "maj@4/lenient": [1.0, 1.0, 1.0, 0.0],
        "greedy/answered": [1.0, 0.0, 1.0, 0.0],
        "greedy/truncated": [0.0, 0.0, 0.0, 1.0],
        "ungraded": [0.0, 0.0, 0.0, 1.0],
    }


def test_without_samples_there_is_no_vote():
    scores = score_completions(SUITE, said("2", "7", "5", "x"), [[]] * 4)
    assert set(scores) == {
        "greedy/strict", "greedy/lenient", "greedy/answered", "greedy/truncated", "ungraded"
    }  # fmt: skip
    assert scores["greedy/strict"] == [1.0, 1.0, 0.5, 0.0]


def test_equal_answers_are_graded_once():
    asked = []
    suite = replace(SUITE, grade=lambda calls: grade(asked.extend(calls) or asked))
    score_completions(suite, said(*"2222"), [["2"] * 8] * 4)
    assert sorted(asked) == [("2", i) for i in range(4)]


def test_completions_depend_neither_on_the_batch_nor_on_padding(policy):
    prompts = [policy.tokenizer.encode(text) for text in [*SUMS, "(" * 20 + "1"]]
    config = SamplingConfig(max_tokens=6)
    whole = generate(policy, prompts, config, samples=3, batch=8, seed=1)
    single = generate(policy, prompts, config, samples=3, batch=1, seed=1)
    assert whole == single
    assert len(whole) == 5 and {len(row) for row in whole} == {3}
    assert len({completion.text for row in whole for completion in row}) > 5
    assert whole != generate(policy, prompts, config, samples=3, batch=8, seed=2)


def test_the_end_token_ends_a_completion_and_is_no_text(policy):
    config = SamplingConfig(max_tokens=40)
    rows = generate(policy, [policy.tokenizer.encode("1+1=")] * 4, config, samples=8)
    ended = [c for row in rows for c in row if not c.is_truncated]
    assert ended and all(c.n_tokens <= 40 for c in ended)
    for completion in ended:  # other special tokens stand for nothing, so ≤
        assert len(policy.tokenizer.encode(completion.text)) <= completion.n_tokens - 1


def test_a_suite_is_measured(policy, tmp_path):
    answers = tmp_path / "sums.answers.json"
    result = evaluate_suite(policy, SUITE, 4, max_tokens=4, batch=2, answers=answers)
    assert result.suite == "sums" and result.seconds > 0
    assert result.questions == [question_digest(question) for question in SUMS]
    assert {"greedy/strict", "sampled/strict", "pass@4/strict", "maj@4/lenient"} < set(
        result.scores
    )
    again = evaluate_suite(policy, SUITE, 4, max_tokens=4, batch=4)
    assert again.scores == result.scores
    assert paired(result, again, "sampled/strict").value == 0.0
    greedy = generate(
        policy, SUITE.prompts(policy.tokenizer), SamplingConfig(max_tokens=4, greedy=True)
    )
    expected = grade([(row[0].text.strip() or None, i) for i, row in enumerate(greedy)])
    assert result.scores["greedy/strict"] == [each.value for each in expected]
    rows = json.loads(answers.read_text())
    assert [(row["question"], row["reference"]) for row in rows] == list(
        zip(SUMS, SUITE.references, strict=True)
    )
    assert [row["greedy"] for row in rows] == [row[0].text for row in greedy]
    # What was kept has the scores that were told.
    kept = score_completions(
        SUITE, said(*[row["greedy"] for row in rows]), [row["sampled"] for row in rows]
    )
    assert kept["sampled/strict"] == result.scores["sampled/strict"]
    assert kept["greedy/strict"] == result.scores["greedy/strict"]


def test_what_the_tokenizer_cannot_write_is_refused(policy):
    worded = replace(SUITE, ask=AskConfig(question="What is {expression}?", chat=False))
    with pytest.raises(ConfigError, match=r"suite sums cannot be asked .* cannot encode \['\?'"):
        evaluate_suite(policy, worded)
    with pytest.raises(ConfigError, match="CharTokenizer has no method `chat`"):
        evaluate_suite(policy, replace(SUITE, ask=AskConfig()))


def test_measurements_of_nothing_are_refused(policy):
    with pytest.raises(ConfigError, match="samples=0: expected at least 1"):
        evaluate_suite(policy, SUITE, 0)
    with pytest.raises(ConfigError, match="shortest prompt 0"):
        generate(policy, [[], [3]], SamplingConfig())


def test_a_task_of_reasoning_gym_is_asked_of_the_tiny_policy(policy):
    pytest.importorskip("reasoning_gym")
    suite = reasoning_suite("chain_sum", 6, ask=EXPRESSION)
    # A policy that knows the answers.
    texts = said(*suite.references)
    scores = score_completions(suite, texts, [[text] * 2 for text in suite.references])
    assert scores["greedy/strict"] == scores["maj@2/strict"] == [1.0] * 6
    result = evaluate_suite(policy, suite, max_tokens=4)
    assert len(result.questions) == 6 and np.mean(result.scores["greedy/strict"]) < 1.0
    with pytest.raises(ConfigError, match=r"suite chain_sum cannot be asked of this policy"):
        evaluate_suite(policy, replace(suite, ask=AskConfig(question="{question}", chat=False)))
