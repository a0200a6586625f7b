import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.types import Batch, Drift, LossOutput, Scores


@pytest.fixture(scope="session")
def rewards():
    """Rewards of 5 × 4 completions; those of group 3 are equal."""
    return jax.random.uniform(jax.random.key(10), (5, 4)).at[3].set(0.35)


@pytest.fixture(scope="session")
def batch(prompts, completions):
    """Ragged completions: one is empty, one has an unsampled token in its middle.

    The behaviour, old and reference policies are about 0.3 nats apart.
    """
    mask = completions.loss_mask.at[0, 0, 1].set(False)
    assert mask[0, 0, 0] and mask[0, 0, 2]
    keys = jax.random.split(jax.random.key(11), 6)
    normal = [jax.random.normal(key, mask.shape) for key in keys[:3]]
    shape = (*mask.shape, 3)
    return Batch(
        prompts,
        completions._replace(loss_mask=mask),
        old_logp_t=completions.logprobs + 0.3 * normal[0],
        ref_logp_t=completions.logprobs + 0.3 * normal[1],
        value_t=0.5 * normal[2],
        drift=Drift(*(jax.random.normal(key, shape) for key in keys[3:])),
    )


@pytest.fixture(scope="session")
def scores(batch):
    """Of a policy whose ratio to the old one is close to 1 in some completions only."""
    keys = jax.random.split(jax.random.key(12), 4)
    shape = batch.old_logp_t.shape
    distance = jnp.array([2e-4, 0.1, 0.5, 0.5])[None, :, None]
    return Scores(
        batch.old_logp_t + distance * jax.random.normal(keys[0], shape),
        jax.random.uniform(keys[1], shape),
        batch.value_t + 0.3 * jax.random.normal(keys[2], shape),
        batch.drift.old_tangent_t + jax.random.normal(keys[3], (*shape, 3)),
    )


@pytest.fixture(scope="session")
def objective(batch, rewards):
    """`(scores, config, batch, rewards) -> LossOutput`: advantages and loss, as in training."""

    def run(
        scores: Scores, config: AlgorithmConfig, batch: Batch = batch, rewards=rewards
    ) -> LossOutput:
        algorithm = make_algorithm(config, iterations=1)
        kl_coef = jnp.float32(config.kl_coef)
        if algorithm.critic is None:
            scores = scores._replace(value_t=None)
        if not algorithm.needs_drift:
            scores = scores._replace(tangent_t=None)
        batch = algorithm.advantages(batch, rewards, kl_coef, None)
        return algorithm.loss(scores, batch, kl_coef)

    return run
