"""What several seeds say together: means with bootstrap intervals, differences, verdicts."""

from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxrl_llm.evaluation import Estimate
from jaxrl_llm.types import ConfigError

Verdict = Literal["supported", "not resolved", "contradicted"]

RESAMPLES = 20_000


def mean_over_seeds(values: Float[np.ndarray, "n"], confidence: float = 0.95) -> Estimate:
    """The mean of one figure per seed, with a bootstrap interval that is wide enough for few.

    Percentiles of resampled means cover too little when n is small: they lack the factor
    √(n/(n−1)) of the standard deviation, and Student's t. So the percentiles are taken further out:

      α'/2 = Φ(−√(n/(n−1)) · t_{1−α/2, n−1})

    The resampling has a fixed seed: equal values give an equal interval.

    Args:
        values: one figure per seed.
        confidence: 1 − α.

    Raises:
        ConfigError: fewer than two values, which have no interval.

    References:
        Hesterberg 2015, §4.3 (expanded percentile interval), https://arxiv.org/abs/1411.5279
    """
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        raise ConfigError(f"{n} seeds have no interval: expected at least 2, better 5")
    mean = float(values.mean())
    if np.ptp(values) == 0.0:
        return Estimate(mean, mean, mean, n)
    t = stats.t.ppf(0.5 + confidence / 2, n - 1)
    tail = float(stats.norm.cdf(-np.sqrt(n / (n - 1)) * t))
    resampled = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=1.0 - 2.0 * tail,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(mean, float(resampled.low), float(resampled.high), n)


def paired_difference(
    treated: Float[np.ndarray, "n"], control: Float[np.ndarray, "n"], confidence: float = 0.95
) -> Estimate:
    """Mean of treated − control over seeds that both have, in the same order.

    Raises:
        ConfigError: they have not the same number of seeds.
    """
    treated, control = np.asarray(treated, float), np.asarray(control, float)
    if treated.shape != control.shape:
        raise ConfigError(
            f"{len(treated)} seeds against {len(control)}: expected the same seeds on both sides"
        )
    return mean_over_seeds(treated - control, confidence)


def verdict(effect: Estimate, claimed: Literal[">", "<"], bound: float = 0.0) -> Verdict:
    """Whether an interval supports the claim that the effect is above, or below, a bound.

    Supported when all of the interval is on the claimed side of the bound, contradicted when none
    of it is, and not resolved when the bound lies within.

    >>> verdict(Estimate(0.02, 0.01, 0.03, 5), ">")
    'supported'
    """
    if effect.low <= bound <= effect.high:
        return "not resolved"
    return "supported" if (effect.low > bound) == (claimed == ">") else "contradicted"


def verdict_of_all(verdicts: list[Verdict]) -> Verdict:
    """Of a claim that needs all its parts: contradicted by one, supported by all."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if set(verdicts) == {"supported"} else "not resolved"
