import itertools

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import EvalConfig, mean_over_problems, pass_at_k, proportion
from jaxrl_llm.types import ConfigError


def test_a_proportion_has_wilsons_interval():
    # Wilson's centre and half-width for 8 of 10, written out.
    z, n, p = stats.norm.ppf(0.975), 10, 0.8
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    estimate = proportion(8, 10)
    np.testing.assert_allclose(estimate[:3], (0.8, center - half, center + half), rtol=1e-12)


def test_the_interval_is_not_empty_when_all_or_nothing_succeeds():
    assert proportion(0, 50).high > 0.05
    assert proportion(50, 50).low < 0.95
    assert mean_over_problems(np.zeros(50)).high > 0.05


def test_with_one_completion_per_problem_both_intervals_agree():
    values = np.repeat([1.0, 0.0], [30, 70])
    np.testing.assert_allclose(mean_over_problems(values)[:3], proportion(30, 100)[:3], rtol=1e-9)


def test_completions_of_one_problem_do_not_count_as_independent():
    clustered = np.repeat([1.0, 0.0], 50)  # all samples of a problem agree
    spread = np.full(100, 0.5) + np.tile([0.1, -0.1], 50)
    wide, narrow = mean_over_problems(clustered), mean_over_problems(spread)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    truths = random.beta(0.5, 1.5, (2000, 200))
    samples = random.binomial(4, truths) / 4
    covered = [(e := mean_over_problems(row)).low <= 0.25 <= e.high for row in samples]
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    is_correct = np.array([[True, False, False, True], [False] * 4, [True] * 4])
    expected = [
        np.mean([any(row[list(subset)]) for subset in itertools.combinations(range(4), k)])
        for row in is_correct
    ]
    np.testing.assert_allclose(pass_at_k(is_correct, k), expected)


@pytest.mark.parametrize("name", ["problems", "samples", "every"])
def test_a_measurement_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0: expected at least 1"):
        EvalConfig(**{name: 0})
