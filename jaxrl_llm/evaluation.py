"""Accuracy on held-out problems, with the interval that says how much it means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float
from scipy import special, stats

from jaxrl_llm.rollout import Rollout, RolloutFn
from jaxrl_llm.types import ConfigError


class Estimate(NamedTuple):
    """A measured value, its confidence interval, and the number of independent units behind it."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def proportion(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """A proportion with Wilson's score interval, which is right at 0 and 1 too."""
    interval = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def mean_over_problems(values: Float[np.ndarray, "N"], confidence: float = 0.95) -> Estimate:
    """A mean of per-problem values in [0, 1] with Wilson's interval at the effective sample size.

      n_eff = p (1 − p) / s²,   p the mean, s its standard error over problems

    Several completions of one problem are not independent, so the unit is the problem: pass the
    average of each. With one completion per problem this is `proportion`.
    """
    n, mean = len(values), float(np.mean(values))
    variance = float(np.var(values)) / n
    n_eff = mean * (1.0 - mean) / variance if variance > 0 else float(n)
    z2 = stats.norm.ppf(0.5 + confidence / 2) ** 2 / n_eff
    center = (mean + z2 / 2) / (1 + z2)
    half = np.sqrt(z2 * (mean * (1 - mean) + z2 / 4)) / (1 + z2)
    return Estimate(mean, float(center - half), float(center + half), n)


def mean_count(values: Float[np.ndarray, "N"], confidence: float = 0.95) -> Estimate:
    """A mean of per-problem values of any size, with the normal interval of its standard error."""
    n, mean = len(values), float(np.mean(values))
    half = float(stats.norm.ppf(0.5 + confidence / 2) * np.std(values) / np.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def pass_at_k(is_correct: Bool[np.ndarray, "N S"], k: int) -> Float[np.ndarray, "N"]:
    """Unbiased estimate, per problem, of the chance that one of k samples is right.

      pass@k = 1 − C(S−c, k) / C(S, k)    for c correct of S samples

    References:
        Chen et al. 2021, eq. 1, https://arxiv.org/abs/2107.03374
    """
    n_samples = is_correct.shape[1]
    wrong = n_samples - is_correct.sum(1)
    return 1.0 - np.asarray(special.comb(wrong, k)) / special.comb(n_samples, k)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measurement on problems that share no key with training."""

    problems: int = 1024
    """Held-out problems, the same at every evaluation."""
    samples: int = 8
    """Completions per problem at temperature 1, for sampled accuracy and pass@k."""
    every: int = 100
    """Iterations between evaluations; the first and the last are always done."""
    seed: int = 1_000_003
    """Draws the held-out problems and the evaluation's samples."""

    def __post_init__(self):
        for name in ("problems", "samples", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"eval: {name}={getattr(self, name)}: expected at least 1")


class Evaluation(NamedTuple):
    """One measurement of a policy."""

    greedy: Estimate
    sampled: Estimate
    pass_at: Estimate
    k: int
    counts: dict[str, Estimate]  # whatever else the environment reports of the samples

    def metrics(self) -> dict[str, float]:
        """Flat figures for the log."""
        named = {"greedy": self.greedy, "sampled": self.sampled, f"pass@{self.k}": self.pass_at}
        named |= self.counts
        return {
            f"eval/{name}{suffix}": value
            for name, estimate in named.items()
            for suffix, value in zip(("", "_low", "_high"), estimate[:3], strict=True)
        }


def make_evaluate(
    greedy: RolloutFn, sampled: RolloutFn, config: EvalConfig, *, compile: Callable = jax.jit
) -> Callable[[object], tuple[Evaluation, Rollout]]:
    """Compile once, measure often: `params -> (Evaluation, the sampled rollout)`.

    Both rollouts draw the same problems: they get the same key. `compile` is `Layout.evaluate`
    where they are made for several devices.
    """
    key = jax.random.key(config.seed)
    greedy, sampled = compile(greedy), compile(sampled)

    def evaluate(params) -> tuple[Evaluation, Rollout]:
        best = jax.device_get(greedy(params, key).info["is_correct"])
        rolled = sampled(params, key)
        info = jax.device_get(rolled.info)
        is_correct = np.asarray(info["is_correct"], bool)
        k = is_correct.shape[1]
        result = Evaluation(
            greedy=proportion(int(best.sum()), best.shape[0]),
            sampled=mean_over_problems(is_correct.mean(1)),
            pass_at=mean_over_problems(pass_at_k(is_correct, k)),
            k=k,
            counts={k: mean_count(x.mean(1)) for k, x in info.items() if not k.startswith("is_")},
        )
        return result, rolled

    return evaluate
