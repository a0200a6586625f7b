import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.surrogate import clipped_surrogate_loss

CLIP = dict(clip_low=0.2, clip_high=0.28)


def loss_at(ratio, adv):
    log_ratio = jnp.log(jnp.array([ratio]))
    return clipped_surrogate_loss(log_ratio, jnp.zeros(1), jnp.array([float(adv)]), **CLIP)[0]


# r·Â counts unless clipping makes the objective smaller: derived by hand from eq. 7.
@pytest.mark.parametrize(
    ("ratio", "adv", "loss", "slope"),
    [
        (0.5, 1, -0.5, -0.5),  # below the range and good: pulled up
        (1.0, 1, -1.0, -1.0),
        (1.5, 1, -1.28, 0.0),  # good and already above 1 + ε_high: clipped
        (5.0, 1, -1.28, 0.0),
        (0.5, -1, 0.8, 0.0),  # bad and already below 1 − ε_low: clipped
        (1.0, -1, 1.0, 1.0),
        (1.5, -1, 1.5, 1.5),  # bad and more likely than before: pushed down, unbounded
        (5.0, -1, 5.0, 5.0),
    ],
)
def test_loss_and_its_slope_in_logp_are_those_of_the_sign_table(ratio, adv, loss, slope):
    np.testing.assert_allclose(loss_at(ratio, adv), loss, rtol=1e-6)

    def of_logp(logp):
        return clipped_surrogate_loss(
            logp[None], jnp.zeros(1), jnp.array([float(adv)]), **CLIP
        ).sum()

    np.testing.assert_allclose(jax.grad(of_logp)(jnp.log(ratio)), slope, rtol=1e-6, atol=1e-7)


def test_clip_low_and_clip_high_are_not_interchangeable():
    assert loss_at(1.25, 1) == pytest.approx(-1.25)  # inside 1 + 0.28
    assert loss_at(0.75, -1) == pytest.approx(0.8)  # outside 1 − 0.2
