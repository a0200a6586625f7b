import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.transformer import (
    LanguageModel,
    ModelConfig,
    RopeScaling,
    rotary_frequencies,
    rotate,
    rotation,
)
from jaxrl_llm.training import score
from jaxrl_llm.types import Completions, ConfigError, Prompts


def repeat_prompts(prompts, completions):
    """The same rows with every prompt written out once per completion: G = 1."""
    g = completions.tokens.shape[1]
    return (
        jax.tree.map(lambda x: jnp.repeat(x, g, 0), prompts),
        jax.tree.map(lambda x: x.reshape(-1, 1, x.shape[-1]), completions),
    )


def test_a_shared_prefix_equals_repeated_prompts_in_value_and_gradient(
    model, params, prompts, completions
):
    weights = jax.random.normal(jax.random.key(0), completions.tokens.shape)
    weights = jnp.where(completions.loss_mask, weights, 0.0)

    def loss(params, prompts, completions, weights):
        return (score(params, model, prompts, completions).logp_t * weights).sum()

    shared = jax.value_and_grad(loss)(params, prompts, completions, weights)
    repeated = jax.value_and_grad(loss)(
        params, *repeat_prompts(prompts, completions), weights.reshape(-1, 1, weights.shape[-1])
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), shared, repeated
    )


def test_every_row_equals_the_same_text_run_without_padding_or_groups(
    model, params, prompts, completions
):
    logp_t = score(params, model, prompts, completions).logp_t
    for b, g in [(0, 0), (3, 2), (4, 3)]:
        text = jnp.concatenate(
            [
                prompts.tokens[b][prompts.mask[b]],
                completions.tokens[b, g][completions.attention_mask[b, g]],
            ]
        )
        n = int(completions.attention_mask[b, g].sum())
        whole = Prompts(text[None, :-1], jnp.ones((1, text.size - 1), bool))
        # One pass over the plain sequence: hidden states of a prompt are those of a text.
        hidden, _ = model.module.apply(
            {"params": params}, whole.tokens[:, None], None, model.prompt_context(whole)
        )
        logits = hidden[0, 0] @ model.head(params)
        plain = jnp.take_along_axis(jax.nn.log_softmax(logits), text[1:, None], 1)[-n:, 0]
        np.testing.assert_allclose(logp_t[b, g, :n], plain, atol=1e-5)


def test_padding_holds_no_information(model, params, prompts, completions):
    garbage = prompts._replace(tokens=jnp.where(prompts.mask, prompts.tokens, 17))
    rubbish = completions._replace(
        tokens=jnp.where(completions.attention_mask, completions.tokens, 19)
    )
    mask = completions.loss_mask
    np.testing.assert_array_equal(
        jnp.where(mask, score(params, model, prompts, completions).logp_t, 0),
        jnp.where(mask, score(params, model, garbage, rubbish).logp_t, 0),
    )


def test_a_token_does_not_see_what_follows(model, params, prompts, completions):
    later = completions._replace(tokens=completions.tokens.at[:, :, 4:].set(5))
    before = score(params, model, prompts, completions).logp_t[:, :, :4]
    np.testing.assert_array_equal(before, score(params, model, prompts, later).logp_t[:, :, :4])


@pytest.mark.parametrize("change", [{"remat": True}, {"scan_unroll": 2}])
def test_options_that_trade_memory_and_time_change_no_gradient(
    change, model, params, prompts, completions
):
    other = LanguageModel(ModelConfig(**{**vars(model.config), **change}), model.vocab_size)

    def gradient(model):
        return jax.grad(lambda p: score(p, model, prompts, completions).logp_t.sum())(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradient(model),
        gradient(other),
    )


def test_bfloat16_is_close_to_float32_and_keeps_float32_weights(prompts, completions):
    config = ModelConfig(width=32, layers=2, heads=4)
    exact, coarse = (
        LanguageModel(ModelConfig(**{**vars(config), "dtype": dtype}), 23)
        for dtype in ("float32", "bfloat16")
    )
    params = coarse.init(jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    difference = (
        score(params, exact, prompts, completions).logp_t
        - score(params, coarse, prompts, completions).logp_t
    )
    assert 0 < jnp.abs(difference).max() < 0.05


def test_rotary_scores_depend_on_relative_position_only():
    config = ModelConfig(width=8, heads=1)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 1, 8))

    def score_at(q_position, k_position):
        at = [rotation(jnp.full((1, 1, 1), p), config) for p in (q_position, k_position)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    np.testing.assert_allclose(score_at(3, 1), score_at(103, 101), rtol=1e-4)
    assert abs(score_at(3, 1) - score_at(5, 1)) > 1e-3


@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling(factor=32.0), RopeScaling(factor=3.0, low_freq_factor=2)]
)
def test_slow_rotations_are_scaled_as_llama_3_1_has_it(scaling):
    """The three cases one by one, by their wavelengths."""
    config = ModelConfig(width=64, heads=1, rope_theta=5e5)
    expected, kinds = [], set()
    for frequency in [5e5 ** (-i / 32) for i in range(32)]:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / scaling.low_freq_factor:
            expected.append(frequency / scaling.factor)
        else:
            low = scaling.low_freq_factor
            smooth = (8192 / wavelength - low) / (4 - low)
            expected.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
        kinds.add(round(frequency / expected[-1], 3))
    assert {1.0, scaling.factor} < kinds
    scaled = rotary_frequencies(ModelConfig(**vars(config) | {"rope_scaling": scaling}))
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)


def test_tied_models_have_no_output_matrix():
    tied, untied = (
        LanguageModel(ModelConfig(width=16, layers=1, heads=2, tie_embeddings=t), 7)
        for t in (True, False)
    )
    assert "head" not in tied.init(jax.random.key(0))
    assert untied.init(jax.random.key(0))["head"].shape == (16, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30, "heads": 4}, "not a multiple of heads"),
        ({"heads": 4, "kv_heads": 3}, "not a multiple of kv_heads"),
        ({"width": 12, "heads": 4}, "odd"),
        ({"width": 0}, "width=0: expected at least 1"),
        ({"layers": 0}, "layers=0: expected at least 1"),
        ({"heads": 0}, "heads=0: expected at least 1"),
        ({"kv_heads": -2}, "kv_heads=-2: expected at least 1"),
        ({"mlp_width": 0}, "mlp_width=0: expected at least 1"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
    ],
)
def test_shapes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"factor": 0.0}, {"high_freq_factor": 1.0}, {"low_freq_factor": -1.0}]
)
def test_scalings_that_cannot_work_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        RopeScaling(**settings)


def test_the_tangent_is_the_explicit_jacobian_times_the_direction(
    model, params, prompts, completions
):
    prompts = jax.tree.map(lambda x: x[:3], prompts)
    completions = jax.tree.map(lambda x: x[:3, :2, :4], completions)
    embeddings = model.embed(params, completions.tokens)
    direction = jax.random.normal(jax.random.key(6), embeddings.shape)

    def hidden(embeddings):
        # `completion_hidden` reads tokens: here each has a row of the vocabulary to itself.
        table = embeddings.reshape(-1, embeddings.shape[-1])
        free = completions._replace(
            tokens=jnp.arange(len(table)).reshape(completions.tokens.shape) + model.vocab_size
        )
        extended = params | {"embedding": jnp.concatenate([params["embedding"], table])}
        extended["head"] = extended["embedding"].T  # unused, but of the size that is expected
        larger = LanguageModel(model.config, len(extended["embedding"]))
        return larger.completion_hidden(extended, prompts, free)

    tangent = model.completion_tangent(params, prompts, completions, embeddings, direction)
    jacobian = jax.jit(jax.jacfwd(hidden))(embeddings)
    expected = np.einsum("bgtdBGTD,BGTD->bgtd", *(np.float64(x) for x in (jacobian, direction)))
    np.testing.assert_allclose(tangent, expected, rtol=1e-3, atol=1e-4)
    assert jnp.all(tangent[:, :, 0] == 0)  # the prompt alone predicts the first token
    assert jnp.abs(tangent[:, :, 1:]).max() > 0.1


def test_the_tangent_of_one_token_completions_is_zero(model, params, prompts):
    mask = jnp.ones((5, 2, 1), bool)
    one = Completions(jnp.full((5, 2, 1), 4), mask, mask, jnp.zeros((5, 2, 1)))
    embeddings = model.embed(params, one.tokens)
    tangent = model.completion_tangent(params, prompts, one, embeddings, embeddings)
    assert tangent.shape == (5, 2, 1, model.config.width)
    assert jnp.all(tangent == 0)


def test_one_token_completions_are_scored_from_the_prompt_alone(model, params, prompts):
    one = Completions(
        jnp.full((5, 2, 1), 4),
        jnp.ones((5, 2, 1), bool),
        jnp.ones((5, 2, 1), bool),
        jnp.zeros((5, 2, 1)),
    )
    longer = jax.tree.map(lambda x: jnp.repeat(x, 3, -1), one)
    np.testing.assert_allclose(
        score(params, model, prompts, one).logp_t[..., 0],
        score(params, model, prompts, longer).logp_t[..., 0],
        atol=1e-6,
    )
