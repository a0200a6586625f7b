import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.grpo import GRPOConfig, grpo_advantages, grpo_loss
from jaxrl_llm.types import Batch, ConfigError, Scores

CONFIG = GRPOConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.1, entropy_coef=0.01)


@pytest.fixture
def batch(prompts, completions):
    shape = completions.tokens.shape
    rewards = jax.random.uniform(jax.random.key(5), shape[:2])
    return Batch(
        prompts,
        completions,
        grpo_advantages(rewards, completions, CONFIG),
        completions.logprobs + 0.3 * jax.random.normal(jax.random.key(6), shape),
    )


@pytest.fixture
def scores(batch):
    shape = batch.completions.tokens.shape
    logp_t = batch.completions.logprobs + 0.5 * jax.random.normal(jax.random.key(7), shape)
    return Scores(logp_t, jax.random.uniform(jax.random.key(8), shape))


def test_the_objective_equals_a_float64_loop_written_from_the_paper(scores, batch):
    logp, entropy = (np.asarray(x, np.float64) for x in scores)
    old, ref, adv = (
        np.asarray(x, np.float64)
        for x in (batch.completions.logprobs, batch.ref_logp_t, batch.adv_t)
    )
    mask = np.asarray(batch.completions.loss_mask)
    per_completion = []
    for b, g in np.ndindex(mask.shape[:2]):
        terms = []
        for t in np.flatnonzero(mask[b, g]):
            ratio = np.exp(logp[b, g, t] - old[b, g, t])
            clipped = min(max(ratio, 0.8), 1.3)
            gain = min(ratio * adv[b, g, t], clipped * adv[b, g, t])
            rho = np.exp(ref[b, g, t] - logp[b, g, t])
            kl = rho - 1 - np.log(rho)
            terms.append(-gain + 0.1 * kl - 0.01 * entropy[b, g, t])
        if terms:
            per_completion.append(np.mean(terms))
    np.testing.assert_allclose(
        grpo_loss(scores, batch, CONFIG).loss.mean(), np.mean(per_completion), rtol=1e-5
    )


def test_masked_tokens_do_not_change_the_gradient(scores, batch):
    mask = batch.completions.loss_mask

    def gradient(scores):
        def loss(logp_t):
            return grpo_loss(scores._replace(logp_t=logp_t), batch, CONFIG).loss.mean()

        return jax.grad(loss)(scores.logp_t)

    garbage = jax.tree.map(lambda x: jnp.where(mask, x, 1e9), scores)
    np.testing.assert_array_equal(gradient(scores), gradient(garbage))
    assert jnp.all(jnp.where(mask, 0.0, gradient(scores)) == 0)


def test_the_gradient_agrees_with_finite_differences(scores, batch):
    def loss(logp_t):
        return grpo_loss(scores._replace(logp_t=logp_t), batch, CONFIG).loss.mean()

    direction = jax.random.normal(jax.random.key(9), scores.logp_t.shape)
    step = 1e-3
    slope = (loss(scores.logp_t + step * direction) - loss(scores.logp_t - step * direction)) / (
        2 * step
    )
    along = (jax.grad(loss)(scores.logp_t) * direction).sum()
    np.testing.assert_allclose(along, slope, rtol=2e-2)


@pytest.mark.parametrize("reward", [0.05, 0.1, 0.35, 0.95])
def test_equal_rewards_give_exactly_zero_advantage(reward, completions):
    rewards = jnp.full(completions.tokens.shape[:2], reward)
    assert jnp.all(grpo_advantages(rewards, completions, CONFIG) == 0)


def test_dead_groups_leave_the_loss_when_asked_to(batch, scores):
    dead = batch._replace(adv_t=batch.adv_t.at[0].set(0.0))
    without = jax.tree.map(lambda x: x[1:], (scores, dead))
    config = GRPOConfig(kl_coef=0.1, mask_dead_groups=True)
    np.testing.assert_allclose(
        grpo_loss(scores, dead, config).loss.mean(),
        grpo_loss(*without, config).loss.mean(),
        rtol=1e-6,
    )

    def loss(logp_t):
        return grpo_loss(scores._replace(logp_t=logp_t), dead, config).loss.mean()

    assert jnp.all(jax.grad(loss)(scores.logp_t)[0] == 0)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="clip_low"):
        GRPOConfig(clip_low=1.5)
    with pytest.raises(ConfigError, match="away from the reference"):
        GRPOConfig(kl_coef=-0.1)


def test_diagnostics_count_what_the_surrogate_cuts(prompts, completions):
    ones = jnp.ones(completions.tokens.shape)
    batch = Batch(prompts, completions, ones, completions.logprobs)
    scores = Scores(completions.logprobs + 1.0, ones)  # r = e, above every bound
    out = grpo_loss(scores, batch, CONFIG)
    assert out.means["policy/clip_fraction_high"].mean() == 1
    assert out.means["policy/clip_fraction_low"].mean() == 0
    np.testing.assert_allclose(out.maxima["policy/ratio_max"], np.e, rtol=1e-5)
    np.testing.assert_allclose(out.maxima["policy/logprob_gap"], 1.0, rtol=1e-5)
