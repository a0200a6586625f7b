"""Results of suites: files, paired differences, the table."""

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import mean_over_problems, proportion
from jaxrl_llm.suites import (
    SuiteResult,
    comparison_table,
    load_result,
    paired,
    question_digest,
    save_result,
)
from jaxrl_llm.types import ConfigError


def result(scores, suite="sums", prefix="q"):
    scores = scores if isinstance(scores, dict) else {"greedy": scores}
    n = len(next(iter(scores.values())))
    scores = {name: list(map(float, values)) for name, values in scores.items()}
    return SuiteResult(suite, scores, [question_digest(f"{prefix}{i}") for i in range(n)], 1.5)


def test_a_result_is_read_as_it_was_written(tmp_path):
    held = result({"greedy": [0, 1, 0.3], "pass@4": [1, 1, 0]})
    save_result(tmp_path / "deep" / "sums.json", held, {"commit": "abc"})
    assert load_result(tmp_path / "deep" / "sums.json") == held
    written = json.loads((tmp_path / "deep" / "sums.json").read_text())
    assert written["provenance"] == {"commit": "abc"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sums.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"suite": "sums"}', None])
def test_a_file_that_holds_no_result_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"x.json holds no result .*save_result wrote"):
        load_result(path)


def test_scores_that_do_not_fit_the_questions_are_refused():
    with pytest.raises(ConfigError, match="2 scores of greedy for 1 questions"):
        SuiteResult("sums", {"greedy": [0.0, 1.0]}, ["a"], 0.0)
    for value in (1.5, -0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"greedy is not within \[0, 1\]"):
            SuiteResult("sums", {"greedy": [value]}, ["a"], 0.0)
    with pytest.raises(ConfigError, match="no questions"):
        SuiteResult("sums", {}, [], 0.0)


def test_mcnemars_p_value_counts_discordant_pairs_alone():
    # 5 questions won, 1 lost, 6 that agree: P(at least 5 of 6 heads), twice: 2 · (6 + 1) / 2⁶.
    base, trained = [0] * 5 + [1] + [1, 0] * 3, [1] * 5 + [0] + [1, 0] * 3
    difference = paired(result(base), result(trained), "greedy")
    assert difference.p_value == pytest.approx(14 / 64)
    assert difference.value == pytest.approx(4 / 12)
    assert paired(result(trained), result(base), "greedy").value == pytest.approx(-4 / 12)
    assert str(difference).startswith("+0.333 [")


def test_the_permutation_test_of_graded_scores_is_that_over_all_signs():
    base, trained = [0.5, 0.2, 0.0, 0.7, 0.1], [0.9, 0.1, 0.3, 1.0, 0.3]
    d = np.subtract(trained, base)
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=5)]
    expected = np.mean([s >= abs(d.sum()) - 1e-9 for s in sums])
    assert paired(result(base), result(trained), "greedy").p_value == pytest.approx(expected)


def test_the_interval_of_the_difference_is_that_of_pairs():
    random = np.random.default_rng(0)
    base = random.integers(0, 2, 400)
    trained = np.where(random.random(400) < 0.1, 1, base)
    found = paired(result(base), result(trained), "greedy")
    # The normal interval of the mean of the differences, which large samples agree with.
    d = trained - base
    half = 1.96 * d.std() / 20
    assert found.low == pytest.approx(d.mean() - half, abs=0.005)
    assert found.high == pytest.approx(d.mean() + half, abs=0.005)
    assert found == paired(result(base), result(trained), "greedy")  # a fixed seed


def test_differences_that_are_all_equal_have_an_interval_too():
    # No difference in 50 questions: with 7.1 % of differing ones that has 0.929⁵⁰ = 2.5 %.
    same = paired(result([1, 0] * 25), result([1, 0] * 25), "greedy")
    np.testing.assert_allclose(same[:4], (0.0, -0.0711, 0.0711, 1.0), atol=1e-4)
    better = paired(result([0] * 50), result([1] * 50), "greedy")
    np.testing.assert_allclose(better[:3], (1.0, 1 - 2 * 0.0711, 1.0), atol=1e-4)
    assert better.p_value == pytest.approx(2 * 0.5**50)


def test_one_question_decides_nothing():
    assert paired(result([0.2]), result([0.9]), "greedy").p_value == 1.0
    one = paired(result([0]), result([1]), "greedy")
    assert one.p_value == 1.0 and one.low == pytest.approx(1 - 2 * 0.975)


def test_one_discordant_pair_has_a_finite_interval():
    found = paired(result([0] * 50), result([1] + [0] * 49), "greedy")
    assert np.isfinite(found[:4]).all() and found.low <= found.value < found.high


def test_results_of_other_questions_are_no_pairs():
    with pytest.raises(ConfigError, match="are no pairs: expected the same questions"):
        paired(result([0, 1]), result([0, 1], prefix="other"), "greedy")
    with pytest.raises(ConfigError, match="are no pairs"):
        paired(result([0, 1]), result([0, 1], suite="products"), "greedy")
    with pytest.raises(ConfigError, match="no metric 'maj@4': expected one of greedy"):
        paired(result([0, 1]), result([0, 1]), "maj@4")


def test_the_table_has_a_line_for_each_suite_and_metric():
    base = [result({"greedy": [0] * 8 + [1] * 2, "sampled": [0.25] * 10}), result([1] * 4, "logic")]
    trained = [result({"greedy": [0] * 2 + [1] * 8, "sampled": [0.5] * 10})]
    lines = comparison_table([("base", base), ("trained", trained)]).splitlines()
    assert lines[0] == "| suite | metric | n | base | trained |"
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| sums", "greedy", "10"],
        ["| sums", "sampled", "10"],
        ["| logic", "greedy", "4"],
    ]
    cells = lines[2].strip("| ").split(" | ")
    # Wilson's for 2 and 8 of 10; all six discordant pairs are won: p = 2 / 2⁶.
    assert cells[3] == str(proportion(2, 10)) == "0.200 [0.057, 0.510]"
    assert cells[4].startswith(f"{proportion(8, 10)}; +0.600 [") and cells[4].endswith("p = 0.031")
    assert str(mean_over_problems(np.full(10, 0.25))) in lines[3]
    assert lines[4].endswith("| – |")


def test_a_table_without_columns_or_with_one_suite_twice_is_refused():
    with pytest.raises(ConfigError, match="no columns"):
        comparison_table([])
    with pytest.raises(ConfigError, match="column base: two results of one suite"):
        comparison_table([("base", [result([1]), result([0])])])


def test_mcnemar_agrees_with_the_binomial_tail():
    base, trained = [0] * 9 + [1] * 2, [1] * 9 + [0] * 2
    expected = 2 * stats.binom.sf(8, 11, 0.5)
    assert paired(result(base), result(trained), "greedy").p_value == pytest.approx(expected)
