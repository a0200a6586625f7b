"""Every preset (ppo, grpo, dapo, family) against a float64 loop written from its paper."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group_normalized
from jaxrl_llm.losses.dapo import DAPOConfig, dapo_loss
from jaxrl_llm.losses.family import PRESETS, GSPOConfig, ReinforcePPConfig
from jaxrl_llm.losses.grpo import GRPOConfig, grpo_loss
from jaxrl_llm.losses.objective import make_algorithm, policy_loss
from jaxrl_llm.losses.ppo import PPOConfig, ppo_loss
from jaxrl_llm.types import Batch, Completions, Scores

# Terms that any algorithm can have, and a discount for those that discount.
EXTRAS = dict(overlong_cache=4, overlong_penalty=0.5, entropy_coef=0.05, importance_cap=1.2)
DISCOUNTED = ("ppo", "reinforcepp")


# --- From rewards to advantages, A[b, g, t].


def rows(c):
    return [(b, g) for b, g in np.ndindex(c.mask.shape[:2]) if c.mask[b, g].any()]


def tokens(c, b, g):
    return [t for t in range(c.mask.shape[2]) if c.mask[b, g, t]]


def of_completions(c, baseline_and_scale):
    """(R − baseline)/scale at every token, from the rewards of the group and the index in it."""
    adv = np.zeros(c.mask.shape)
    for b, g in rows(c):
        baseline, scale = baseline_and_scale(c.rewards[b], g)
        for t in tokens(c, b, g):
            adv[b, g, t] = (c.rewards[b, g] - baseline) / scale
    return adv


def over_group_deviation(rewards, _):
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return mean, (np.sqrt(variance) + 1e-6 if max(rewards) > min(rewards) else np.inf)


def minus_group_mean(rewards, _):
    return sum(rewards) / len(rewards), 1.0


def minus_the_others(rewards, g):
    return sum(r for i, r in enumerate(rewards) if i != g) / (len(rewards) - 1), 1.0


def along_tokens(c, *, beta, lam, values):
    """PPO: rₜ = −β·log(π/π_ref), the score at the last token, and GAE backwards."""
    adv = np.zeros(c.mask.shape)
    for b, g in rows(c):
        next_value = next_adv = 0.0
        score = c.rewards[b, g]
        for t in reversed(tokens(c, b, g)):
            reward = score - beta * (c.behavior[b, g, t] - c.ref[b, g, t])
            delta = reward + c.gamma * next_value - values[b, g, t]
            adv[b, g, t] = delta + c.gamma * lam * next_adv
            next_value, next_adv, score = values[b, g, t], adv[b, g, t], 0.0
    return adv


def whitened(c, adv):
    chosen = [adv[b, g, t] for b, g in rows(c) for t in tokens(c, b, g)]
    mean = sum(chosen) / len(chosen)
    std = np.sqrt(sum((a - mean) ** 2 for a in chosen) / len(chosen))
    return np.where(c.mask, (adv - mean) / std, 0.0)


def group_relative(c):
    return of_completions(c, over_group_deviation), None


def centered(c):
    return of_completions(c, minus_group_mean), None


def centered_over_batch_deviation(c):
    return whitened(c, of_completions(c, minus_group_mean)), None


def rloo(c):
    rewards = np.array(c.rewards)
    for b, g in rows(c):
        for t in tokens(c, b, g):
            rewards[b, g] -= 0.03 * (c.behavior[b, g, t] - c.ref[b, g, t])
    charged = SimpleNamespace(**{**vars(c), "rewards": rewards})
    return of_completions(charged, minus_the_others), None


def whitened_gae(c):
    adv = along_tokens(c, beta=0.05, lam=0.95, values=c.old_value)
    return whitened(c, adv), adv + c.old_value


def whitened_reward_to_go(c):
    adv = along_tokens(c, beta=0.01, lam=1.0, values=np.zeros(c.mask.shape))
    return whitened(c, adv), None


# --- The loss of token t of completion (b, g): the surrogate, and what is added to it.


def clipped(ratio, adv, low=0.2, high=0.2):
    return -min(ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv)


def token_ratio(c, at):
    return np.exp(c.logp[at] - c.old[at])


def sequence_log_ratio(c, at):
    b, g, _ = at
    return sum(c.logp[b, g, t] - c.old[b, g, t] for t in tokens(c, b, g))


def ppo_token(c, adv, returns, at):
    moved = min(max(c.value[at], c.old_value[at] - 0.2), c.old_value[at] + 0.2)
    error = max((c.value[at] - returns[at]) ** 2, (moved - returns[at]) ** 2)
    return clipped(token_ratio(c, at), adv[at]), 0.1 * error / 2


def grpo_token(c, adv, _, at):
    rho = np.exp(c.ref[at] - c.logp[at])
    return clipped(token_ratio(c, at), adv[at]), 0.04 * (rho - np.log(rho) - 1)


def dapo_token(c, adv, _, at):
    return clipped(token_ratio(c, at), adv[at], 0.2, 0.28), 0.0


def clipped_token(c, adv, _, at):
    return clipped(token_ratio(c, at), adv[at]), 0.0


def gspo_token(c, adv, _, at):
    ratio = np.exp(sequence_log_ratio(c, at) / len(tokens(c, *at[:2])))
    return clipped(ratio, adv[at], 3e-4, 4e-4), 0.0


def cispo_token(c, adv, _, at):
    weight = min(np.exp(c.fixed_logp[at] - c.old[at]), 1.2)
    return -weight * adv[at] * c.logp[at], 0.0


def rloo_token(c, adv, _, at):
    return -np.exp(sequence_log_ratio(c, at)) * adv[at], 0.0


def baseline_token(c, adv, _, at):
    k2 = (c.logp[at] - c.ref[at]) ** 2 / 2
    return clipped(token_ratio(c, at), adv[at]), 0.01 * k2


# --- Averages.


def over_tokens(c, loss):
    return sum(loss[b, g, t] for b, g in rows(c) for t in tokens(c, b, g)) / c.mask.sum()


def over_completions(c, loss):
    means = [sum(loss[b, g, t] for t in tokens(c, b, g)) / len(tokens(c, b, g)) for b, g in rows(c)]
    return sum(means) / len(means)


def over_a_constant(c, loss):
    return sum(loss[b, g, t] for b, g in rows(c) for t in tokens(c, b, g)) / (len(rows(c)) * 7)


PAPERS = {
    "ppo": (whitened_gae, ppo_token, over_tokens),
    "grpo": (group_relative, grpo_token, over_completions),
    "dapo": (group_relative, dapo_token, over_tokens),
    "drgrpo": (centered, clipped_token, over_a_constant),
    "gspo": (group_relative, gspo_token, over_completions),
    "cispo": (group_relative, cispo_token, over_tokens),
    "rloo": (rloo, rloo_token, over_completions),
    "reinforcepp": (whitened_reward_to_go, clipped_token, over_tokens),
    "reinforcepp_baseline": (centered_over_batch_deviation, baseline_token, over_tokens),
}


def paper_loss(name, c, adv, returns):
    _, of_token, average = PAPERS[name]
    loss = np.zeros(c.mask.shape)
    for b, g in rows(c):
        for t in tokens(c, b, g):
            at = (b, g, t)
            surrogate, added = of_token(c, adv, returns, at)
            loss[at] = c.weight[at] * surrogate + added - c.entropy_coef * c.entropy[at]
    return average(c, loss)


@pytest.fixture
def numbers(batch, scores, rewards):
    """What the loops read, in float64; `numbers(True)` with the extras on."""

    def make(with_extras):
        c = SimpleNamespace(
            logp=scores.logp_t,
            fixed_logp=scores.logp_t,
            entropy=scores.entropy_t,
            value=scores.value_t,
            old=batch.old_logp_t,
            behavior=batch.completions.logprobs,
            ref=batch.ref_logp_t,
            old_value=batch.value_t,
            rewards=rewards,
        )
        c = SimpleNamespace(**{k: np.array(v, np.float64) for k, v in vars(c).items()})
        c.mask = np.asarray(batch.completions.loss_mask)
        c.weight, c.entropy_coef, c.gamma = np.ones(c.mask.shape), 0.0, 1.0
        if with_extras:
            c.weight = np.minimum(np.exp(c.old - c.behavior), 1.2)
            c.entropy_coef, c.gamma = 0.05, 0.9
            for b, g in rows(c):  # L_max 7, L_cache 4
                length = len(tokens(c, b, g))
                c.rewards[b, g] += 0.5 * ((3 - length) / 4 if length > 3 else 0.0)
        return c

    return make


def slopes(f, x):
    """Central differences of f() over every entry of x, which f reads."""
    result, step = np.zeros(x.shape), 1e-6
    for at in np.ndindex(x.shape):
        here = x[at]
        x[at] = here + step
        above = f()
        x[at] = here - step
        result[at] = (above - f()) / (2 * step)
        x[at] = here
    return result


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_and_its_gradient_are_those_of_its_paper(
    name, with_extras, scores, objective, numbers, batch, rewards
):
    extras = EXTRAS | (dict(gamma=0.9) if name in DISCOUNTED else {}) if with_extras else {}
    config = PRESETS[name](**extras)
    c = numbers(with_extras)
    adv, returns = PAPERS[name][0](c)
    with_adv = make_algorithm(config, iterations=1).advantages(
        batch, rewards, jnp.float32(config.kl_coef), None
    )
    np.testing.assert_allclose(with_adv.adv_t, adv, rtol=1e-4, atol=1e-5)
    if returns is not None:
        np.testing.assert_allclose(with_adv.return_t, returns, rtol=1e-4, atol=1e-5)

    value, gradient = jax.value_and_grad(lambda s: objective(s, config).loss.mean())(scores)
    np.testing.assert_allclose(value, paper_loss(name, c, adv, returns), rtol=1e-4, atol=1e-6)
    expected = {"logp_t": c.logp, "entropy_t": c.entropy}
    if name == "ppo":
        expected["value_t"] = c.value
    for field, x in expected.items():
        np.testing.assert_allclose(
            getattr(gradient, field),
            slopes(lambda: paper_loss(name, c, adv, returns), x),
            rtol=1e-3,
            atol=1e-6,
        )


# dL/dlog π of completions of one token with ratio 0.5, 1, 1.5, 5, first for Â = 1, then for −1:
# −r Â, and 0 where the ratio is past its bound on the side to which the advantage pushes.
NO_KL = dict(kl_in="none", kl_coef=0.0)
CLIPPED = [-0.5, -1.0, 0.0, 0.0], [0.0, 1.0, 1.5, 5.0]
SIGNS = dict.fromkeys(PRESETS, CLIPPED) | {
    "cispo": ([-0.5, -1.0, -1.2, -1.2], [0.5, 1.0, 1.2, 1.2]),
    "rloo": ([-0.5, -1.0, -1.5, -5.0], [0.5, 1.0, 1.5, 5.0]),
}


@pytest.fixture
def pull(prompts):
    """dL/dlog π [2, 4, T] of log-ratios [4, T], for Â = 1 and Â = −1."""

    def gradient(config, log_ratio_t):
        shape = (2, *log_ratio_t.shape)
        mask, old_logp_t = jnp.ones(shape, bool), jnp.full(shape, -2.0)
        batch = Batch(
            prompts,
            Completions(jnp.zeros(shape, int), mask, mask, old_logp_t),
            old_logp_t,
            adv_t=jnp.broadcast_to(jnp.array([1.0, -1.0])[:, None, None], shape),
        )

        def total(logp_t):
            scores = Scores(logp_t, jnp.zeros(shape))
            return policy_loss(scores, batch, jnp.float32(0.0), config=config).loss.total

        return jax.grad(total)(old_logp_t + log_ratio_t[None])

    return gradient


@pytest.mark.parametrize("name", PRESETS)
def test_the_pull_on_each_token_is_that_of_the_sign_table(name, pull):
    log_ratio_t = jnp.log(jnp.array([0.5, 1.0, 1.5, 5.0]))[:, None]
    slopes = pull(PRESETS[name](**NO_KL), log_ratio_t)[..., 0]
    np.testing.assert_allclose(slopes, SIGNS[name], rtol=1e-5, atol=1e-7)


def test_dual_clip_lets_go_of_a_bad_token_that_has_become_far_too_likely(pull):
    log_ratio_t = jnp.log(jnp.array([0.5, 1.0, 1.5, 5.0]))[:, None]
    slopes = pull(GRPOConfig(dual_clip=3.0, **NO_KL), log_ratio_t)[..., 0]
    np.testing.assert_allclose(slopes, [CLIPPED[0], [0.0, 1.0, 1.5, 0.0]], rtol=1e-5, atol=1e-7)


# Two tokens of ratios r² and 1: their product is r², its geometric mean r.
@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("gspo", np.array(CLIPPED) / 2),  # d r / d log π of either token is r/2
        ("rloo", [[-0.25, -1.0, -2.25, -25.0], [0.25, 1.0, 2.25, 25.0]]),
    ],
)
def test_a_ratio_of_the_sequence_pulls_on_all_its_tokens_alike(name, table, pull):
    log_ratio_t = 2 * jnp.log(jnp.array([0.5, 1.0, 1.5, 5.0]))[:, None] * jnp.array([[1.0, 0.0]])
    slopes = pull(PRESETS[name](**NO_KL), log_ratio_t)
    np.testing.assert_allclose(slopes, np.repeat(np.array(table)[..., None], 2, -1), rtol=1e-5)


# --- The functions of arrays are the presets.


def test_the_functions_of_arrays_are_their_presets(scores, batch, rewards, objective):
    mask, adv = batch.completions.loss_mask, group_normalized(rewards)
    with_adv = make_algorithm(PPOConfig(), iterations=1).advantages(
        batch, rewards, jnp.float32(0.05), None
    )
    for preset, loss in {
        PPOConfig(entropy_coef=0.01): ppo_loss(
            scores.logp_t,
            batch.old_logp_t,
            with_adv.adv_t,
            scores.value_t,
            batch.value_t,
            with_adv.return_t,
            scores.entropy_t,
            mask,
            entropy_coef=0.01,
        ),
        GRPOConfig(): grpo_loss(scores.logp_t, batch.old_logp_t, batch.ref_logp_t, adv, mask),
        DAPOConfig(): dapo_loss(scores.logp_t, batch.old_logp_t, adv, mask),
    }.items():
        np.testing.assert_allclose(loss, objective(scores, preset).loss, rtol=1e-6)


# --- Identities between presets.


def test_gspo_of_single_tokens_is_grpo_with_its_clips(scores, batch, objective):
    def first(x):
        return x[:, :, :1]

    single = batch._replace(
        completions=jax.tree.map(first, batch.completions),
        old_logp_t=first(batch.old_logp_t),
        ref_logp_t=None,
    )
    scores = Scores(first(scores.logp_t), first(scores.entropy_t))
    results = [
        jax.value_and_grad(lambda s: objective(s, config, single).loss.mean())(scores)
        for config in (GSPOConfig(), GRPOConfig(clip_low=3e-4, clip_high=4e-4, **NO_KL))
    ]
    chex.assert_trees_all_close(*results, rtol=1e-6)


def test_dapo_with_a_symmetric_clip_and_no_resampling_is_grpo_over_tokens_without_kl():
    dapo = DAPOConfig(clip_high=0.2, dynamic_sampling=False)
    assert vars(dapo) == vars(GRPOConfig(aggregation="token", **NO_KL))


def test_ppo_without_values_is_reinforce(scores, batch, rewards):
    """λ = 1, V = 0 and no whitening leave the reward-to-go; undiscounted, that is the reward."""

    def advantages(config):
        valueless = batch._replace(value_t=jnp.zeros_like(batch.old_logp_t))
        algorithm = make_algorithm(config, iterations=1)
        return algorithm.advantages(valueless, rewards, jnp.float32(config.kl_coef), None).adv_t

    kl_free = advantages(PPOConfig(gae_lambda=1.0, whiten=False, **NO_KL))
    mask = batch.completions.loss_mask
    np.testing.assert_allclose(kl_free, jnp.where(mask, rewards[..., None], 0.0), rtol=1e-6)
    for gamma in (1.0, 0.9):
        settings = dict(gamma=gamma, whiten=False, kl_coef=0.05)
        np.testing.assert_array_equal(
            advantages(PPOConfig(gae_lambda=1.0, **settings)),
            advantages(ReinforcePPConfig(**settings)),
        )
