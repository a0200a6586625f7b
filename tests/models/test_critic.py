import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.models.critic import init_critic, values
from jaxrl_llm.optimizer import Trained
from jaxrl_llm.training import accumulate_gradient, score
from jaxrl_llm.types import Batch

KINDS = ["head", "separate"]


def awake(critic):
    """The critic with a head that is not 0."""
    kernel = jax.random.normal(jax.random.key(9), critic["head"]["kernel"].shape)
    return critic | {"head": {"kernel": kernel, "bias": jnp.float32(0.5)}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_predictions_are_exactly_zero(kind, model, params, prompts, completions):
    critic = init_critic(kind, model, params)
    assert jnp.all(score(params, model, prompts, completions, critic=critic).value_t == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_a_head_on_the_hidden_states_that_predict_the_token(
    kind, model, params, prompts, completions
):
    critic = awake(init_critic(kind, model, params))
    other = jax.tree.map(lambda x: 1.5 * x, params)
    hidden = model.completion_hidden(params, prompts, completions)
    value_t = values(critic, model, prompts, completions, hidden)
    w = np.asarray(critic["head"]["kernel"], np.float64)
    np.testing.assert_allclose(value_t, np.asarray(hidden, np.float64) @ w + 0.5, rtol=1e-4)
    # Only a head follows when the policy moves on.
    moved = model.completion_hidden(other, prompts, completions)
    after = values(critic, model, prompts, completions, moved)
    assert jnp.all(after == value_t) == (kind == "separate")
    # The value before token t is known before token t.
    later = completions._replace(tokens=completions.tokens.at[:, :, 4:].set(5))
    unseen = score(params, model, prompts, later, critic=critic).value_t
    np.testing.assert_allclose(unseen[:, :, :5], value_t[:, :, :5], rtol=1e-5)
    assert jnp.abs(unseen[:, :, 5:] - value_t[:, :, 5:]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_loss_trains_the_policy_through_a_head_and_leaves_it_alone_otherwise(
    kind, model, params, prompts, completions
):
    # Without advantages and at the first update only the value loss is left.
    algorithm = make_algorithm(PPOConfig(value_model=kind, kl_coef=0.0), iterations=1)
    critic = awake(init_critic(kind, model, params))
    zero_t = jnp.zeros(completions.tokens.shape)
    batch = Batch(
        prompts,
        completions,
        old_logp_t=score(params, model, prompts, completions).logp_t,
        value_t=zero_t,
        adv_t=zero_t,
        return_t=zero_t,
    )

    def objective(trained, batch):
        scores = score(trained.policy, model, prompts, completions, critic=trained.critic)
        return algorithm.loss(scores, batch, jnp.float32(0))

    grads, metrics = accumulate_gradient(objective, Trained(params, critic), batch)
    assert metrics["value/loss"] > 0.1
    policy, blocks = grads.policy, grads.policy["blocks"]
    assert jnp.all(policy["head"] == 0)  # the output projection takes no part in values
    assert all(bool(jnp.any(x != 0)) == (kind == "head") for x in jax.tree.leaves(blocks))
    assert jnp.any(grads.critic["head"]["kernel"] != 0)
    if kind == "separate":
        chex.assert_trees_all_equal(policy, jax.tree.map(jnp.zeros_like, policy))
        assert all(jnp.any(x != 0) for x in jax.tree.leaves(grads.critic["trunk"]["blocks"]))


@pytest.mark.parametrize("kind", ["head", pytest.param("separate", marks=pytest.mark.slow)])
def test_a_value_rate_of_zero_leaves_the_critic_as_it_was(kind, begin, run, bandit):
    config = PPOConfig(value_model=kind, value_rate=0.0)
    start, _ = begin(config, bandit(), 3)
    state, metrics = run(config, bandit(), 3)
    chex.assert_trees_all_equal(state.critic, start.critic)
    assert jnp.any(state.params["embedding"] != start.params["embedding"])
    assert jnp.all(metrics["value/mean"] == 0)


@pytest.mark.parametrize("kind", ["head", pytest.param("separate", marks=pytest.mark.slow)])
def test_explained_variance_rises_where_the_prompt_decides_the_reward(kind, run, bandit):
    def reward_of(tokens):
        return jnp.broadcast_to((jnp.arange(6) // 2)[:, None] / 2, tokens.shape[:2])

    config = PPOConfig(value_model=kind, value_coef=1.0, kl_coef=0.0, gae_lambda=1.0)
    _, metrics = run(config, bandit(reward_of), 60)
    variance = metrics["value/explained_variance"]
    assert variance[0] == 0
    assert variance[-5:].min() > 0.8
    np.testing.assert_allclose(metrics["value/mean"][-1], 0.5, atol=0.1)
    assert metrics["value/loss"][-1] < 0.1 * metrics["value/loss"][0]
