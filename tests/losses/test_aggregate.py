import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.aggregate import aggregate

LOSS = jnp.array([[[1.0, 2.0, 3.0], [4.0, jnp.nan, jnp.nan]]])
MASK = jnp.array([[[True, True, True], [True, False, False]]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", (1 + 2 + 3 + 4) / 4),
        ("sequence", (2.0 + 4.0) / 2),
        ("constant", (6.0 + 4.0) / (2 * 3)),
    ],
)
def test_each_average_is_the_published_one(how, expected):
    np.testing.assert_allclose(aggregate(LOSS, MASK, how).mean(), expected, rtol=1e-6)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_parts_add_up_to_the_whole(how, completions):
    loss = jax.random.normal(jax.random.key(0), completions.tokens.shape)
    loss += jnp.arange(5.0)[:, None, None]
    mask = completions.loss_mask
    whole = aggregate(loss, mask, how).mean()
    parts = aggregate(loss[:2], mask[:2], how) + aggregate(loss[2:], mask[2:], how)
    np.testing.assert_allclose(parts.mean(), whole, rtol=1e-6)
    mean_of_means = (
        aggregate(loss[:2], mask[:2], how).mean() + aggregate(loss[2:], mask[2:], how).mean()
    ) / 2
    assert abs(mean_of_means - whole) > 1e-3  # which is why totals and weights are kept apart


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_masked_tokens_change_neither_loss_nor_gradient(how):
    def loss(x):
        return aggregate(x, MASK, how).mean()

    clean = jnp.where(MASK, LOSS, 0.0)
    assert loss(LOSS) == loss(clean)
    np.testing.assert_array_equal(jax.grad(loss)(LOSS), jax.grad(loss)(clean))
    assert jnp.all(jnp.where(MASK, 0.0, jax.grad(loss)(clean)) == 0)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_nothing_selected_gives_zero_and_a_zero_gradient(how):
    nothing = jnp.zeros_like(MASK)
    value, gradient = jax.value_and_grad(lambda x: aggregate(x, nothing, how).mean())(LOSS)
    assert value == 0
    assert jnp.all(gradient == 0)
