import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.sft import Examples, SFTConfig, make_sft_step, sft_loss
from jaxrl_llm.training import init_state, scan_iterations
from jaxrl_llm.types import ConfigError


@pytest.fixture
def examples(prompts, completions):
    return Examples(prompts, completions.tokens[:, 0], completions.loss_mask[:, 0])


def test_the_loss_is_the_mean_negative_logprob_of_the_selected_tokens(model, params, examples):
    # An untrained head of zeros is uniform: log V nats for every token.
    flat = params | {"head": jnp.zeros_like(params["head"])}
    np.testing.assert_allclose(
        sft_loss(flat, model, examples).loss.mean(), np.log(model.vocab_size), rtol=1e-6
    )
    assert sft_loss(flat, model, examples).loss.weight == examples.mask.sum()


def test_it_learns_its_examples_by_heart(model, params, examples):
    config = SFTConfig(steps=80, batch=5, examples=5)
    optimizer = make_optimizer(config.optimizer, config.steps)
    step = make_sft_step(model, examples, optimizer, config)
    state = init_state(params, optimizer, jax.random.key(0))
    _, metrics = jax.jit(scan_iterations(step, config.steps))(state)
    assert metrics["loss"][0] > 2
    assert metrics["loss"][-1] < 0.1


def test_every_epoch_sees_every_example_once(model, params, prompts, completions):
    # Example i has i + 1 tokens to learn, so the token counts of the batches tell who was in.
    mask = jnp.arange(7)[None, :] <= jnp.arange(4)[:, None]
    few = jax.tree.map(lambda x: x[:4], prompts)
    examples = Examples(few, completions.tokens[:4, 0], mask)
    config = SFTConfig(steps=8, batch=2, examples=4)
    optimizer = make_optimizer(config.optimizer, config.steps)
    step = make_sft_step(model, examples, optimizer, config)
    state = init_state(params, optimizer, jax.random.key(0))
    _, metrics = jax.jit(scan_iterations(step, 8))(state)
    per_epoch = np.asarray(metrics["sft/tokens"]).reshape(4, 2)
    assert (per_epoch.sum(1) == 1 + 2 + 3 + 4).all()
    assert len(set(per_epoch[:, 0].tolist())) > 1


@pytest.mark.parametrize("settings", [{"batch": 100, "examples": 10}, {"steps": -1}])
def test_sizes_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        SFTConfig(**settings)
