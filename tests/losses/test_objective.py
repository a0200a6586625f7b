import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.dapo import DAPOConfig
from jaxrl_llm.losses.family import (
    PRESETS,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm, with_advantages
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.types import Batch, Completions, Scores

EVERY_TERM = dict(entropy_coef=0.1, grad_reg_coeff=0.1, importance_cap=1.2, overlong_cache=4)


def loss_and_gradient(objective, scores, config, *args):
    """Of `(scores, config, *args)`, with respect to the scores."""
    return jax.value_and_grad(lambda s: objective(s, config, *args).loss.mean())(scores)


# --- Masks.


@pytest.fixture
def spoiled(batch, scores):
    """`filler -> (scores, batch)` with the filler wherever a token was not sampled."""
    mask = batch.completions.loss_mask

    def fill(filler):
        def spoil(x):
            return jnp.where(mask if x.ndim == 3 else mask[..., None], x, filler)

        spoiled = {
            name: spoil(getattr(batch, name)) for name in ("old_logp_t", "ref_logp_t", "value_t")
        }
        completions = batch.completions._replace(logprobs=spoil(batch.completions.logprobs))
        drift = batch.drift._replace(old_tangent_t=spoil(batch.drift.old_tangent_t))
        return jax.tree.map(spoil, scores), batch._replace(
            completions=completions, drift=drift, **spoiled
        )

    return fill


@pytest.mark.parametrize("filler", [1e9, jnp.nan])
@pytest.mark.parametrize("name", PRESETS)
def test_masked_tokens_change_neither_loss_nor_gradient(
    name, filler, scores, batch, rewards, objective, spoiled
):
    config = PRESETS[name](**EVERY_TERM)
    clean = loss_and_gradient(objective, scores, config, batch, rewards)
    spoiled_scores, spoiled_batch = spoiled(filler)
    chex.assert_trees_all_equal(
        loss_and_gradient(objective, spoiled_scores, config, spoiled_batch, rewards), clean
    )
    mask = batch.completions.loss_mask
    assert jnp.all(jnp.where(mask, 0.0, clean[1].logp_t) == 0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_tokens_has_loss_zero_and_gradient_zero(
    name, scores, batch, rewards, objective
):
    nothing = jnp.zeros_like(batch.completions.loss_mask)
    empty = batch._replace(completions=batch.completions._replace(loss_mask=nothing))
    loss, gradient = loss_and_gradient(
        objective, scores, PRESETS[name](**EVERY_TERM), empty, rewards
    )
    assert loss == 0
    chex.assert_trees_all_equal(gradient, jax.tree.map(jnp.zeros_like, scores))


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("reward", [0.05, 0.1, 0.35, 0.95])
@pytest.mark.parametrize("advantage", ["group_normalized", "group_centered", "leave_one_out"])
def test_equal_rewards_give_every_token_exactly_no_advantage(advantage, reward, whiten, batch):
    config = AlgorithmConfig(advantage=advantage, whiten=whiten)
    rewards = jnp.full((5, 4), reward)
    assert jnp.all(with_advantages(batch, rewards, 0.0, None, config=config).adv_t == 0)


# --- The KL to the reference.


@pytest.fixture
def two_tokens():
    """Two completions of two tokens: k1 is 0.3 and −0.1 in the first, 0 in the second."""
    ref_logp_t = jnp.array([[[-1.0, -2.0], [-1.0, -2.0]]])
    mask = jnp.ones((1, 2, 2), bool)
    logp_t = ref_logp_t + jnp.array([[[0.3, -0.1], [0.0, 0.0]]])
    completions = Completions(jnp.zeros((1, 2, 2), int), mask, mask, logp_t)
    return Batch(None, completions, logp_t, ref_logp_t, value_t=jnp.zeros((1, 2, 2)))


# β = ½: the tokens of the first completion are charged 0.15 and −0.05, in sum 0.1; R = 1, 1.
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(advantage="reward_to_go"), [[0.9, 1.05], [1.0, 1.0]]),
        # discounted by ½: −0.15 + ½·1.05, and ½·1
        (dict(advantage="reward_to_go", gamma=0.5), [[0.375, 1.05], [0.5, 1.0]]),
        (dict(advantage="gae", gae_lambda=1.0), [[0.9, 1.05], [1.0, 1.0]]),
        (dict(advantage="gae", gae_lambda=0.5), [[-0.15 + 0.525, 1.05], [0.5, 1.0]]),
        (dict(advantage="leave_one_out"), [[-0.1, -0.1], [0.1, 0.1]]),
        (dict(advantage="group_centered"), [[-0.05, -0.05], [0.05, 0.05]]),
        (dict(advantage="group_normalized"), [[-(0.5**0.5)] * 2, [0.5**0.5] * 2]),
    ],
)
def test_a_kl_in_the_reward_is_charged_to_each_token_or_to_the_completion(
    settings, expected, two_tokens
):
    config = AlgorithmConfig(kl_in="reward", kl_estimator="k1", kl_coef=0.5, **settings)
    batch = with_advantages(two_tokens, jnp.ones((1, 2)), jnp.float32(0.5), None, config=config)
    np.testing.assert_allclose(batch.adv_t[0], expected, rtol=1e-4)


def test_a_kl_in_the_reward_is_weighed_by_the_controllers_coefficient(two_tokens):
    # Not by the config's, from which an adaptive or linear schedule has moved on: 0.3 and −0.1.
    config = AlgorithmConfig(
        advantage="reward_to_go", kl_in="reward", kl_estimator="k1", kl_coef=0.5
    )
    batch = with_advantages(two_tokens, jnp.ones((1, 2)), jnp.float32(1.0), None, config=config)
    np.testing.assert_allclose(batch.adv_t[0], [[0.8, 1.1], [1.0, 1.0]], rtol=1e-5)


# d k2/d log π = log π − log π_ref;  d k3/d log π = 1 − π_ref/π;  d k1/d log π = 1.
@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", [1, 1]), ("k2", [0.3, -0.1]), ("k3", [1 - 0.740818, -0.105171])]
)
def test_a_kl_in_the_loss_pulls_towards_the_reference(estimator, slope, two_tokens, objective):
    config = GRPOConfig(kl_coef=0.5, kl_estimator=estimator)
    scores = Scores(two_tokens.old_logp_t, jnp.zeros((1, 2, 2)))
    _, gradient = loss_and_gradient(objective, scores, config, two_tokens, jnp.ones((1, 2)))
    # β/(2 completions · 2 tokens); descent lowers what the reference finds less likely.
    np.testing.assert_allclose(gradient.logp_t[0, 0], 0.5 / 4 * np.array(slope), rtol=1e-4)


def test_a_monitored_kl_is_logged_but_not_trained(scores, batch, rewards, objective):
    unwatched = batch._replace(ref_logp_t=None)
    chex.assert_trees_all_equal(
        loss_and_gradient(objective, scores, GRPOConfig(kl_in="monitor", kl_coef=0.0)),
        loss_and_gradient(objective, scores, GRPOConfig(kl_coef=0.0), unwatched, rewards),
    )
    means = objective(scores, GRPOConfig(kl_in="monitor", kl_coef=0.0)).means
    mask = batch.completions.loss_mask
    k1 = np.asarray(scores.logp_t - batch.ref_logp_t, np.float64)[mask]
    np.testing.assert_allclose(means["policy/kl_k1"].mean(), k1.mean(), rtol=1e-4)
    k3 = np.exp(-k1) - 1 + k1
    np.testing.assert_allclose(means["policy/kl_k3"].mean(), k3.mean(), rtol=1e-4)


def test_without_a_reference_no_kl_is_logged(scores, batch, rewards, objective):
    means = objective(scores, DAPOConfig(), batch._replace(ref_logp_t=None), rewards).means
    assert not [name for name in means if "kl" in name]


@pytest.mark.parametrize(
    "config",
    [
        GRPOConfig(kl_coef=0.5),
        ReinforcePPBaselineConfig(kl_coef=0.5),
        RLOOConfig(kl_coef=0.5),
        ReinforcePPConfig(kl_coef=0.5),
        PPOConfig(kl_coef=0.5),
    ],
    ids=lambda config: type(config).__name__,
)
def test_fifty_updates_without_reward_bring_the_policy_back_to_its_reference(config):
    algorithm = make_algorithm(config, iterations=50)
    ref = jax.nn.log_softmax(jnp.zeros(5))
    start = jnp.array([1.5, -0.5, 0.5, -1.5, 0.0])
    kl_coef = jnp.float32(config.kl_coef)

    def kl(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - ref)).sum()

    def update(logits, key):
        tokens = jax.random.categorical(key, logits, shape=(8, 8, 3))
        mask = jnp.ones(tokens.shape, bool)
        logp_t = jax.nn.log_softmax(logits)[tokens]
        zero_t = jnp.zeros(tokens.shape)
        batch = Batch(None, Completions(tokens, mask, mask, logp_t), logp_t, ref[tokens], zero_t)
        batch = algorithm.advantages(batch, jnp.zeros((8, 8)), kl_coef, None)

        def loss(logits):
            value_t = None if algorithm.critic is None else zero_t
            scores = Scores(jax.nn.log_softmax(logits)[tokens], zero_t, value_t)
            return algorithm.loss(scores, batch, kl_coef).loss.mean()

        return logits - 0.3 * jax.grad(loss)(logits), None

    end, _ = jax.jit(lambda keys: jax.lax.scan(update, start, keys))(
        jax.random.split(jax.random.key(0), 50)
    )
    assert kl(end) < 0.5 * kl(start)


# --- Options that are off, or have nothing to correct, change nothing.


def test_an_unmoved_jacobian_changes_neither_loss_nor_gradient(scores, batch, objective):
    unmoved = scores._replace(tangent_t=batch.drift.old_tangent_t)
    chex.assert_trees_all_equal(
        loss_and_gradient(objective, unmoved, GRPOConfig(grad_reg_coeff=0.1)),
        loss_and_gradient(objective, unmoved, GRPOConfig()),
    )


def test_the_jacobian_drift_is_weighed_by_its_coefficient(scores, batch, objective):
    plain, penalised = (
        objective(scores, GRPOConfig(aggregation="token", grad_reg_coeff=coef))
        for coef in (0.0, 0.1)
    )
    assert "policy/jacobian_drift" not in plain.means
    new, old = np.asarray(scores.tangent_t), np.asarray(batch.drift.old_tangent_t)
    drift = ((new - old) ** 2).sum(-1) / (old**2).sum(-1)
    drift = drift[batch.completions.loss_mask].mean()
    np.testing.assert_allclose(penalised.means["policy/jacobian_drift"].mean(), drift, rtol=1e-4)
    np.testing.assert_allclose(penalised.loss.mean() - plain.loss.mean(), 0.1 * drift, rtol=1e-4)


def test_fresh_tokens_need_no_importance_correction(scores, batch, rewards, objective):
    fresh = batch._replace(old_logp_t=batch.completions.logprobs)
    results = [
        loss_and_gradient(objective, scores, GRPOConfig(importance_cap=cap), fresh, rewards)
        for cap in (None, 1.0)
    ]
    chex.assert_trees_all_equal(*results)


def test_a_stale_token_is_weighed_by_old_over_behaviour(scores, batch, rewards, objective):
    # The behaviour policy was twice, or a tenth, as sure as the old one: w = ½, or the cap 3.
    config = GRPOConfig(kl_coef=0.0)
    plain = loss_and_gradient(objective, scores, config)
    for factor, weight in ((2.0, 0.5), (0.1, 3.0)):
        stale = batch.completions._replace(logprobs=batch.old_logp_t + jnp.log(factor))
        loss, gradient = loss_and_gradient(
            objective,
            scores,
            GRPOConfig(kl_coef=0.0, importance_cap=3.0),
            batch._replace(completions=stale),
            rewards,
        )
        np.testing.assert_allclose(loss, weight * plain[0], rtol=1e-4)
        np.testing.assert_allclose(gradient.logp_t, weight * plain[1].logp_t, rtol=1e-4, atol=1e-7)


def test_the_overlong_penalty_is_taken_off_the_reward(batch, rewards):
    config = AlgorithmConfig(advantage="reward_to_go", overlong_cache=4, overlong_penalty=0.5)
    adv_t = with_advantages(batch, rewards, jnp.float32(0.0), None, config=config).adv_t
    mask = np.asarray(batch.completions.loss_mask)
    lengths = mask.sum(-1)
    # Of at most 7 tokens the last 4 cost: an eighth each.
    expected = (rewards - np.maximum(lengths - 3, 0) / 8)[..., None] * mask
    np.testing.assert_allclose(adv_t, expected, rtol=1e-5, atol=1e-7)


def test_no_gradient_reaches_what_was_fixed_before_the_updates(scores, batch, rewards, objective):
    def loss(old_tangent_t, behavior_logp_t):
        stale = batch.completions._replace(logprobs=behavior_logp_t)
        drift = batch.drift._replace(old_tangent_t=old_tangent_t)
        config = GRPOConfig(grad_reg_coeff=0.1, importance_cap=5.0)
        changed = batch._replace(completions=stale, drift=drift)
        return objective(scores, config, changed, rewards).loss.mean()

    fixed = batch.drift.old_tangent_t, batch.completions.logprobs
    assert all(jnp.all(g == 0) for g in jax.grad(loss, (0, 1))(*fixed))


# --- What is logged, and what the training loop is told.


# A completion of each ratio 0.5, 1, 1.5, 5, twice for Â = 1 and once for Â = −1: the fractions cut.
@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        (dict(), 1 / 12, 4 / 12),
        (dict(dual_clip=3.0), 1 / 12, 5 / 12),
        (dict(surrogate="cispo"), 0.0, 6 / 12),
        (dict(surrogate="unclipped"), 0.0, 0.0),
    ],
)
def test_diagnostics_count_what_the_surrogate_cuts(settings, low, high):
    mask, zero_t = jnp.ones((3, 4, 1), bool), jnp.zeros((3, 4, 1))
    adv_t = jnp.broadcast_to(jnp.array([1.0, 1.0, -1.0])[:, None, None], (3, 4, 1))
    completions = Completions(jnp.zeros((3, 4, 1), int), mask, mask, zero_t)
    log_ratio_t = jnp.broadcast_to(jnp.log(jnp.array([0.5, 1.0, 1.5, 5.0]))[:, None], (3, 4, 1))
    algorithm = make_algorithm(AlgorithmConfig(**settings), iterations=1)
    out = algorithm.loss(
        Scores(log_ratio_t, zero_t + 0.7),
        Batch(None, completions, zero_t, adv_t=adv_t),
        jnp.float32(0.0),
    )
    expected = {
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        "policy/ratio_mean": 2.0,
        "policy/entropy": 0.7,
    }
    logged = {name: x.mean() for name, x in out.means.items()}
    chex.assert_trees_all_close(logged, expected, rtol=1e-6)
    np.testing.assert_allclose(out.maxima["policy/ratio_max"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(out.minima["policy/ratio_min"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(out.maxima["policy/logprob_gap"], np.log(5.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (GRPOConfig(), dict(needs_reference=True)),
        (GRPOConfig(kl_coef=0.0), dict()),
        (GRPOConfig(kl_in="monitor", kl_coef=0.0), dict(needs_reference=True)),
        (DAPOConfig(), dict(sampling_rounds=4)),
        (DAPOConfig(dynamic_sampling=False, mask_dead_groups=True), dict(masks_dead_groups=True)),
        (PPOConfig(), dict(needs_reference=True, critic="head")),
        (PPOConfig(value_model="separate", kl_coef=0.0), dict(critic="separate")),
        (GRPOConfig(kl_coef=0.0, grad_reg_coeff=0.05), dict(needs_drift=True)),
        (GRPOConfig(kl_coef=0.0, importance_cap=2.0), dict(rescores_old=True)),
    ],
)
def test_an_algorithm_asks_for_what_its_config_needs_and_for_nothing_else(config, needs):
    nothing = dict(
        needs_reference=False,
        critic=None,
        needs_drift=False,
        rescores_old=False,
        masks_dead_groups=False,
        sampling_rounds=1,
    )
    algorithm = make_algorithm(config, iterations=1)
    assert {name: getattr(algorithm, name) for name in nothing} == nothing | needs


# After KLs of 0.2 and 0: factors 1.1 and 0.9 for a target of 0.1 and a horizon of 2.
@pytest.mark.parametrize(
    ("settings", "coefs"),
    [
        (dict(), [0.3, 0.3, 0.3]),
        (dict(kl_schedule="linear"), [0.0, 0.1, 0.2]),
        (dict(kl_schedule="adaptive", kl_target=0.1), [0.3, 0.33, 0.297]),
        (dict(kl_schedule="linear", kl_target=0.1), [0.0, 0.1, 0.18]),
    ],
)
def test_the_schedule_decides_how_the_kl_coefficient_moves(settings, coefs):
    config = GRPOConfig(kl_coef=0.3, kl_horizon=2.0, **settings)
    controller = make_algorithm(config, iterations=4).kl
    states = [controller.init()]
    for kl in (0.2, 0.0):
        states.append(controller.update(states[-1], jnp.float32(kl)))
    np.testing.assert_allclose([state.coef for state in states], coefs, rtol=1e-5, atol=1e-8)
