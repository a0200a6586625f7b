import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import Estimate
from jaxrl_llm.statistics import (
    mean_over_seeds,
    paired_difference,
    verdict,
    verdict_of_all,
)
from jaxrl_llm.types import ConfigError


def test_the_interval_of_many_seeds_is_the_bootstrap_of_scipy():
    """The correction for few seeds vanishes."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    theirs = stats.bootstrap((values,), np.mean, rng=np.random.default_rng(2)).confidence_interval
    ours = mean_over_seeds(values)
    assert ours.value == values.mean() and ours.n == 400
    np.testing.assert_allclose(ours[1:3], theirs, atol=0.015)


def test_the_interval_of_five_seeds_is_about_students():
    values = np.array([0.41, 0.44, 0.40, 0.43, 0.42])
    half = stats.t.ppf(0.975, 4) * values.std(ddof=1) / np.sqrt(5)
    low, high = mean_over_seeds(values)[1:3]
    assert low < values.mean() - 0.7 * half and high > values.mean() + 0.7 * half
    assert values.min() <= low and high <= values.max()  # no resampled mean is outside


def test_coverage_with_five_seeds():
    """Of true means within the interval: plain percentiles reach 0.83 or so."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(300, 5))

    def share(interval):
        return np.mean([low <= 0.0 <= high for low, high in map(interval, draws)])

    def percentiles(x):
        options = {"method": "percentile", "n_resamples": 999, "rng": np.random.default_rng(0)}
        return stats.bootstrap((x,), np.mean, **options).confidence_interval

    assert share(lambda x: mean_over_seeds(x)[1:3]) > share(percentiles) + 0.05
    assert share(lambda x: mean_over_seeds(x)[1:3]) > 0.9


def test_equal_values_give_equal_intervals_and_no_spread_gives_none():
    values = np.array([0.1, 0.4, 0.2])
    assert mean_over_seeds(values) == mean_over_seeds(values)
    assert mean_over_seeds(np.full(5, 0.25)) == Estimate(0.25, 0.25, 0.25, 5)


def test_pairs_remove_what_their_seeds_share():
    control = np.array([0.10, 0.30, 0.50, 0.70, 0.90])
    effect = paired_difference(control + np.array([0.02, 0.03, 0.02, 0.03, 0.02]), control)
    assert effect.value == pytest.approx(0.024)
    assert effect.low > 0.0199 and effect.high < 0.0301


@pytest.mark.parametrize(
    ("effect", "claimed", "bound", "expected"),
    [
        ((0.02, 0.01, 0.03), ">", 0.0, "supported"),
        ((0.02, 0.01, 0.03), "<", 0.0, "contradicted"),
        ((-0.02, -0.03, -0.01), "<", 0.0, "supported"),
        ((-0.02, -0.03, -0.01), ">", 0.0, "contradicted"),
        ((0.00, -0.01, 0.01), ">", 0.0, "not resolved"),
        ((0.00, -0.01, 0.01), "<", 0.0, "not resolved"),
        ((0.00, -0.004, 0.004), "<", 0.01, "supported"),  # no gain of a point
        ((0.00, 0.0, 0.0), ">", 0.0, "not resolved"),
    ],
)
def test_the_verdict_says_on_which_side_the_interval_lies(effect, claimed, bound, expected):
    assert verdict(Estimate(*effect, 5), claimed, bound) == expected


def test_a_claim_with_parts_needs_all_of_them():
    assert verdict_of_all(["supported", "supported"]) == "supported"
    assert verdict_of_all(["supported", "not resolved"]) == "not resolved"
    assert verdict_of_all(["supported", "not resolved", "contradicted"]) == "contradicted"


def test_what_has_no_interval_is_refused():
    with pytest.raises(ConfigError, match="1 seeds have no interval: expected at least 2"):
        mean_over_seeds(np.array([0.3]))
    with pytest.raises(ConfigError, match="5 seeds against 4: expected the same seeds"):
        paired_difference(np.zeros(5), np.zeros(4))
