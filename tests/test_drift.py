"""The drift of the Jacobian: the estimator against the explicit Jacobians, and its penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.regularizers import jacobian_drift
from jaxrl_llm.masking import masked_sum
from jaxrl_llm.training import make_drift, score
from jaxrl_llm.types import Batch


@pytest.fixture(scope="module")
def few(prompts, completions):
    """Two prompts with two completions of up to four tokens each."""
    return (
        jax.tree.map(lambda x: x[:2, -4:], prompts),
        jax.tree.map(lambda x: x[:2, :2, :4], completions),
    )


@pytest.fixture(scope="module")
def moved(params):
    """The policy after a step of 10 %."""
    keys = iter(jax.random.split(jax.random.key(11), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x + 0.1 * x * jax.random.normal(next(keys), x.shape), params)


def test_the_estimate_agrees_with_the_explicit_jacobians(model, params, moved, few):
    prompts, completions = few
    embeddings = model.embed(params, completions.tokens)
    n = 2000

    @jax.jit
    @jax.vmap
    def estimates(key):
        drift = make_drift(params, model, prompts, completions, key)
        scores = score(moved, model, prompts, completions, drift=drift)
        return jacobian_drift(scores.tangent_t, drift.old_tangent_t)

    found = np.float64(estimates(jax.random.split(jax.random.key(0), n)))

    def jacobian(params):
        _, prefix = model.prefill(params, prompts)
        context = model.completion_context(prompts, completions)

        def hidden(x):
            out = model.module.apply({"params": params}, x, prefix, context, method="backbone")
            return out[0]

        return np.float64(jax.jit(jax.jacfwd(hidden))(embeddings[:, :, :-1]))

    old, new = jacobian(params), jacobian(moved)
    random = np.random.default_rng(0)
    expected = np.zeros((n, *completions.tokens.shape))
    real = np.asarray(completions.attention_mask)
    for b, g in np.ndindex(2, 2):
        u = random.normal(size=(n, 4, model.config.width)) * real[b, g][None, :, None]
        u /= np.sqrt((u**2).sum((1, 2), keepdims=True))
        for t in range(1, 4):
            change, was = (
                np.einsum("dTD,nTD->nd", J[b, g, t - 1, :, b, g], u[:, :3])
                for J in (new - old, old)
            )
            expected[:, b, g, t] = (change**2).sum(-1) / (was**2).sum(-1)
    mask = np.asarray(completions.loss_mask)
    error = np.sqrt(found.var(0) / n + expected.var(0) / n)
    difference = (found.mean(0) - expected.mean(0))[mask]
    assert expected.mean(0)[mask].max() > 0.01
    assert (np.abs(difference) <= 4 * error[mask] + 1e-9).all()


def test_directions_have_norm_one_and_leave_padding_alone(model, params, prompts, completions):
    drift = make_drift(params, model, prompts, completions, jax.random.key(0))
    direction = np.float64(drift.direction)
    is_real = np.asarray(completions.attention_mask)
    assert (direction[~is_real] == 0).all()
    norm = np.sqrt((direction**2).sum((-2, -1)))
    np.testing.assert_allclose(norm, is_real.any(-1), rtol=1e-5)  # one completion is empty
    np.testing.assert_array_equal(drift.embeddings, params["embedding"][completions.tokens])
    assert np.isfinite(drift.old_tangent_t).all()


@pytest.fixture(scope="module")
def penalty(model, params, few):
    """`(policy, old tangent)` to the penalty, the policy's own tangent and the gradient."""
    prompts, completions = few
    config = GRPOConfig(grad_reg_coeff=1.0, kl_coef=0.0)
    loss = make_algorithm(config, iterations=1).loss
    zero_t = jnp.zeros(completions.tokens.shape)
    drift = make_drift(params, model, prompts, completions, jax.random.key(0))

    def total(policy, old_tangent_t):
        scores = score(policy, model, prompts, completions, drift=drift)
        scores = scores._replace(logp_t=zero_t, entropy_t=zero_t)
        old = drift._replace(old_tangent_t=old_tangent_t)
        batch = Batch(prompts, completions, zero_t, drift=old, adv_t=zero_t)
        return loss(scores, batch, jnp.float32(0)).loss.mean(), scores.tangent_t

    return jax.jit(jax.value_and_grad(total, has_aux=True)), drift.old_tangent_t


def test_the_penalty_is_exactly_zero_with_zero_gradient_at_the_old_policy(penalty, params):
    loss, old_tangent_t = penalty
    (value, tangent_t), _ = loss(params, old_tangent_t)
    assert value < 1e-10  # another program may round otherwise
    (value, _), grads = loss(params, tangent_t)
    assert value == 0
    assert all(jnp.all(g == 0) for g in jax.tree.leaves(grads))


def test_the_penalty_is_positive_elsewhere_and_points_back(penalty, params, moved):
    loss, old_tangent_t = penalty
    (value, _), grads = loss(moved, old_tangent_t)
    assert value > 0.01
    back = jax.tree.map(lambda new, old, g: ((old - new) * g).sum(), moved, params, grads)
    assert sum(jax.tree.leaves(back)) < 0


@pytest.mark.slow
def test_of_a_stale_rollout_the_drift_is_from_the_policy_that_sampled(run, bandit):
    # One update an iteration: only where the sampler is the older one has anything moved before it.
    config = GRPOConfig(kl_coef=0.0, grad_reg_coeff=0.05)
    _, metrics = run(config, bandit(), 3, rollout_lag=1, learning_rate=2e-2)
    drift = metrics["policy/jacobian_drift"]
    assert drift[0] < 1e-10
    assert drift[1:].min() > 1e-4


@pytest.mark.slow
def test_a_large_penalty_holds_the_jacobian(begin, bandit, toy, toy_params):
    rollout = bandit()

    @jax.jit
    def drift_of(policy):
        prompts, completions, *_ = rollout(toy_params, jax.random.key(3))
        drift = make_drift(toy_params, toy, prompts, completions, jax.random.key(4))
        scores = score(policy, toy, prompts, completions, drift=drift)
        drift_t = jacobian_drift(scores.tangent_t, drift.old_tangent_t)
        return masked_sum(drift_t, completions.loss_mask).mean()

    def drift_after(coef):
        config = GRPOConfig(kl_coef=0.0, grad_reg_coeff=coef)
        state, step = begin(config, rollout, 1, epochs=4, learning_rate=2e-2)
        new, metrics = jax.jit(step)(state)
        assert ("policy/jacobian_drift" in metrics) == (coef > 0)
        return drift_of(new.params)

    free, held = drift_after(0.0), drift_after(100.0)
    assert 0 < held < 0.7 * free
