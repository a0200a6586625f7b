import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.controllers import adaptive, fixed, linear


def coefs(controller, kls):
    """β before each update, and after the last."""
    state = controller.init()
    seen = [state.coef]
    for kl in kls:
        state = controller.update(state, jnp.float32(kl))
        seen.append(state.coef)
    assert state.step == len(kls)
    return seen


# KL/target − 1 for a target of 0.1 and KLs of 0.2, 0.11, 0.0: 1 → cut to 0.2; 0.1; −1 → −0.2.
# With a horizon of 2 the factors are 1.1, 1.05, 0.9.
@pytest.mark.parametrize(
    ("controller", "expected"),
    [
        (fixed(0.3), [0.3, 0.3, 0.3, 0.3]),
        (linear(0.3, 4), [0.0, 0.1, 0.2, 0.3]),
        (linear(0.3, 3), [0.0, 0.15, 0.3, 0.3]),  # stays at the end
        (linear(0.3, 1), [0.0, 0.3, 0.3, 0.3]),
        (
            adaptive(0.3, target=0.1, horizon=2.0),
            [0.3, 0.3 * 1.1, 0.3 * 1.1 * 1.05, 0.3 * 1.1 * 1.05 * 0.9],
        ),
        # The factor under the ramp cannot exceed 1, so only the last KL relaxes it.
        (linear(0.3, 4, target=0.1, horizon=2.0), [0.0, 0.1, 0.2, 0.3 * 0.9]),
    ],
)
def test_coefficients_of_three_updates_are_those_derived_by_hand(controller, expected):
    np.testing.assert_allclose(coefs(controller, [0.2, 0.11, 0.0]), expected, rtol=1e-5, atol=1e-8)


def test_a_steered_ramp_tightens_again_but_never_exceeds_the_ramp():
    # Factors 0.9, 0.9, then 1.1 …: 0.9, 0.81, 0.891, 0.9801, min(1, 1.07811), 1.
    controller = linear(1.0, 7, target=0.1, horizon=2.0)
    result = coefs(controller, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    ramp = np.arange(7) / 6
    scale = [1.0, 0.9, 0.81, 0.891, 0.9801, 1.0, 1.0]
    np.testing.assert_allclose(result, ramp * scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("kl", "rises", "falls"), [(0.02, True, False), (0.01, False, False), (0.005, False, True)]
)
def test_the_adaptive_coefficient_rises_above_its_target_and_falls_below(kl, rises, falls):
    before, after = coefs(adaptive(0.1, target=0.01), [kl])
    assert (after > before * (1 + 1e-6)) == rises
    assert (after < before * (1 - 1e-6)) == falls


@pytest.mark.parametrize("kl", [0.0, 1e9])
def test_a_coefficient_can_come_back_from_any_distance(kl):
    update = adaptive(0.1, target=0.01, horizon=1.0).update
    state = adaptive(0.1, target=0.01).init()
    state, _ = jax.lax.scan(lambda s, _: (update(s, jnp.float32(kl)), None), state, length=500)
    assert 1e-6 < state.coef < 1e4
    away = update(state, jnp.float32(0.01 * 1.2 if kl == 0.0 else 0.0))
    assert abs(away.coef / state.coef - 1) > 0.1


def test_an_adaptive_coefficient_brings_the_kl_to_its_target():
    # A Gaussian policy N(μ, 1), paid a·x, held to N(0, 1) by β·KL with KL = μ²/2: gradient ascent
    # moves μ by a − βμ. At rest β = a/μ, so at the target KL* the coefficient is a/√(2·KL*).
    pull, target = 0.5, 0.02
    controller = adaptive(0.1, target=target)

    @jax.jit
    def closed_loop(state, mean):
        def step(carry, _):
            state, mean = carry
            mean += 0.3 * (pull - state.coef * mean)
            return (controller.update(state, mean**2 / 2), mean), None

        return jax.lax.scan(step, (state, mean), length=400)[0]

    state, mean = closed_loop(controller.init(), jnp.float32(0.0))
    np.testing.assert_allclose(mean**2 / 2, target, rtol=0.01)
    np.testing.assert_allclose(state.coef, pull / np.sqrt(2 * target), rtol=0.01)


@pytest.mark.parametrize(
    "controller", [fixed(0.1), linear(0.1, 5, target=0.01), adaptive(0.1, target=0.01)]
)
def test_updates_compile_and_scan_to_the_same_coefficients(controller):
    kls = [0.02, 0.0, 0.011, 0.5]

    def step(state, kl):
        return controller.update(state, kl), state.coef

    last, seen = jax.jit(lambda xs: jax.lax.scan(step, controller.init(), xs))(jnp.array(kls))
    np.testing.assert_allclose([*seen, last.coef], coefs(controller, kls), rtol=1e-6)
