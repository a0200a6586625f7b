import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.logprobs import kl_estimate, token_logprobs


@pytest.fixture
def case():
    hidden = jax.random.normal(jax.random.key(0), (3, 5, 8))
    head = jax.random.normal(jax.random.key(1), (8, 11))
    tokens = jax.random.randint(jax.random.key(2), (3, 5), 0, 11)
    return hidden, head, tokens


def test_logprobs_and_entropies_equal_a_float64_softmax(case):
    hidden, head, tokens = (np.asarray(x) for x in case)
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / 0.7
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logp, entropy = token_logprobs(*case, temperature=0.7)
    expected = np.log(np.take_along_axis(p, tokens[..., None], -1)[..., 0])
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 11 * 4, 11 * 7])
def test_chunks_change_neither_values_nor_gradients(case, max_logits):
    def total(hidden, head, max_logits):
        logp, entropy = token_logprobs(hidden, head, case[2], max_logits=max_logits)
        return (logp + 0.3 * entropy).sum()

    whole = jax.value_and_grad(total, (0, 1))(*case[:2], 10**9)
    parts = jax.value_and_grad(total, (0, 1))(*case[:2], max_logits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)


def test_no_buffer_of_positions_by_vocabulary_exists_at_a_large_vocabulary():
    b, g, t, d, v = 2, 8, 64, 16, 150_000
    shapes = (
        jax.ShapeDtypeStruct((b, g, t, d), jnp.float32),
        jax.ShapeDtypeStruct((d, v), jnp.float32),
        jax.ShapeDtypeStruct((b, g, t), jnp.int32),
    )

    def step(hidden, head, tokens):
        return jax.grad(lambda h, w: token_logprobs(h, w, tokens)[0].sum(), (0, 1))(hidden, head)

    memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    one_buffer = 4 * b * g * t * v
    assert memory.temp_size_in_bytes < one_buffer / 2


def test_kl_estimators_are_those_of_the_definition():
    logp, ref = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    log_rho = np.array([-0.5, 1.0])
    np.testing.assert_allclose(kl_estimate(logp, ref, "k1"), -log_rho, rtol=1e-6)
    np.testing.assert_allclose(kl_estimate(logp, ref, "k2"), log_rho**2 / 2, rtol=1e-6)
    np.testing.assert_allclose(
        kl_estimate(logp, ref, "k3"), np.exp(log_rho) - 1 - log_rho, rtol=1e-6
    )


def test_the_mean_gradients_of_the_estimators_are_those_the_docstring_states():
    # Expectation over all four tokens, exactly: Σ π(a) ∇ k(a).
    theta, ref = jnp.array([0.3, -0.2, 0.9, 0.0]), jnp.array([0.1, 0.4, -0.5, 0.2])
    ref_logp = jax.nn.log_softmax(ref)

    def mean_gradient(estimator):
        p = jax.nn.softmax(theta)

        def loss(x):
            return (p * kl_estimate(jax.nn.log_softmax(x), ref_logp, estimator)).sum()

        return jax.grad(loss)(theta)

    def reverse_kl(x):
        logp = jax.nn.log_softmax(x)
        return (jnp.exp(logp) * (logp - ref_logp)).sum()

    def forward_kl(x):
        return (jnp.exp(ref_logp) * (ref_logp - jax.nn.log_softmax(x))).sum()

    np.testing.assert_allclose(mean_gradient("k1"), 0.0, atol=1e-6)
    np.testing.assert_allclose(mean_gradient("k2"), jax.grad(reverse_kl)(theta), atol=1e-6)
    np.testing.assert_allclose(mean_gradient("k3"), jax.grad(forward_kl)(theta), atol=1e-6)
