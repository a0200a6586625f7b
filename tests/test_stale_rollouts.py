import jax
import numpy as np
import pytest

from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.training import score


def fixed_rollout(bandit):
    """A rollout that depends on the parameters alone, and reports a checksum of its tokens."""
    rollout = bandit()

    def of(params, key):
        rolled = rollout(params, jax.random.key(7))
        weights = jax.random.normal(jax.random.key(8), rolled.completions.tokens.shape)
        checksum = (weights * rolled.completions.tokens).sum(-1)
        return rolled._replace(info={"checksum": checksum})

    return of


@pytest.fixture(scope="module")
def stale(begin, bandit):
    """Four iterations with a lag of one: the policy before each, and the metrics of each."""
    config = DAPOConfig(dynamic_sampling=False, importance_cap=1.1)
    rollout = fixed_rollout(bandit)
    state, step = begin(config, rollout, 4, rollout_lag=1, learning_rate=5e-2)
    call, policies, metrics = jax.jit(step), [], []
    for _ in range(4):
        policies.append(state.params)
        state, measured = call(state)
        metrics.append(measured)
    return jax.jit(rollout), policies, metrics


def test_a_lagging_iteration_samples_with_the_policy_before_the_last_updates(stale):
    rollout, policies, metrics = stale
    sums = [rollout(p, jax.random.key(0)).info["checksum"].mean() for p in policies]
    assert len({float(x) for x in sums}) == 4
    found = [m["rollout/checksum"] for m in metrics]
    np.testing.assert_allclose(found, [sums[0], sums[0], sums[1], sums[2]], rtol=1e-5)


def test_stale_tokens_get_truncated_weights_and_the_ratio_starts_at_one(toy, stale):
    rollout, policies, metrics = stale
    for new, old, measured in zip(policies[1:], policies, metrics[1:], strict=False):
        rolled = rollout(old, jax.random.key(0))
        logp_t = score(new, toy, rolled.prompts, rolled.completions).logp_t
        mask = np.asarray(rolled.completions.loss_mask)
        moved = np.asarray(logp_t - rolled.completions.logprobs, np.float64)[mask]
        weights = np.minimum(np.exp(moved), 1.1)
        assert (weights == 1.1).any()
        assert (weights < 0.9).any()
        np.testing.assert_allclose(measured["policy/importance_weight"], weights.mean(), rtol=1e-4)
        np.testing.assert_allclose(measured["policy/logprob_gap"], np.abs(moved).max(), rtol=1e-4)
    for measured in metrics:
        assert measured["policy/ratio_max"] == measured["policy/ratio_min"] == 1


def test_fresh_tokens_have_weight_one(run, bandit):
    _, metrics = run(DAPOConfig(dynamic_sampling=False, importance_cap=2.0), bandit(), 4)
    np.testing.assert_allclose(metrics["policy/importance_weight"], 1.0, atol=1e-5)
