import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.losses.regularizers import jacobian_drift

OLD = jnp.array([[3.0, 4.0], [0.0, 2.0]])
NEW = jnp.array([[3.0, 6.0], [1.0, 0.0]])


def test_the_drift_and_its_gradient_are_those_derived_by_hand():
    # ‖(0, 2)‖²/25 and ‖(1, −2)‖²/4; the gradient is 2(new − old) over the same.
    np.testing.assert_allclose(jacobian_drift(NEW, OLD), [4 / 25, 5 / 4], rtol=1e-6)
    np.testing.assert_allclose(jacobian_drift(NEW, OLD, eps=5.0), [4 / 30, 5 / 9], rtol=1e-6)
    gradient = jax.grad(lambda x: jacobian_drift(x, OLD).sum())(NEW)
    np.testing.assert_allclose(gradient, [[0, 4 / 25], [2 / 4, -4 / 4]], rtol=1e-6)


def test_an_unmoved_jacobian_has_drift_zero_and_gradient_zero():
    old = OLD.at[1].set(0.0)  # of a first token
    drift, gradient = jax.value_and_grad(lambda x: jacobian_drift(x, old).sum())(old)
    assert drift == 0
    assert jnp.all(gradient == 0)


def test_no_gradient_reaches_the_old_jacobian():
    assert jnp.all(jax.grad(lambda old: jacobian_drift(NEW, old).sum())(OLD) == 0)
