from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import transformer
from jaxrl_llm.models.attention import attend, choose_backend, fused_attend
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.types import Completions, ConfigError, KeyValues, Prompts

B, K, R, G, E = 2, 2, 3, 4, 8


def drawn(p, s):
    """Queries, own and prompt's keys and values, and masks; prompts are padded on the left."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, K, R, G, s, E), (B, K, G, s, E), (B, K, G, s, E), (B, K, p, E), (B, K, p, E)
    q, k, v, pk, pv = (jax.random.normal(key, x) for key, x in zip(keys, shapes, strict=True))
    own_mask = jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (B, G, s, s))
    own_mask = own_mask.at[0, 1, :, 2:].set(False)  # a short completion
    prefix_mask = jnp.arange(p)[None] >= jnp.array([[0], [2]])
    return q, KeyValues(k, v), own_mask, KeyValues(pk, pv), prefix_mask


@pytest.mark.parametrize(("p", "s"), [(5, 4), (4, 7)])
def test_the_fused_form_is_attention_over_prompt_and_completion(p, s):
    q, own, own_mask, prefix, prefix_mask = drawn(p, s)

    def total(function, **settings):
        def weighted(q, own, prefix):
            out = function(q, own, own_mask, prefix, prefix_mask, **settings)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

        return jax.value_and_grad(weighted, (0, 1, 2), has_aux=True)(q, own, prefix)

    expected, found = total(attend), total(fused_attend, implementation="xla")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, expected)
    np.testing.assert_allclose(found[0][1], expected[0][1], atol=1e-6)


def test_the_fused_form_serves_prompts_alone():
    q, own, own_mask, _, _ = drawn(4, 5)
    found = fused_attend(q, own, own_mask, implementation="xla")
    np.testing.assert_allclose(found, attend(q, own, own_mask), atol=1e-6)


CPU = jax.devices("cpu")[0]
T4 = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")


def test_the_backend_is_the_one_that_the_device_has():
    assert choose_backend("auto", "bfloat16", 64, H100) == "cudnn"
    assert choose_backend("xla", "bfloat16", 64, H100) == "xla"
    for dtype, head_size, device in (
        ("float32", 64, H100),
        ("bfloat16", 36, H100),
        ("bfloat16", 256, H100),
        ("bfloat16", 64, T4),
        ("bfloat16", 64, CPU),
    ):
        assert choose_backend("auto", dtype, head_size, device) == "xla"
        with pytest.raises(ConfigError, match="attention=cudnn cannot be"):
            choose_backend("cudnn", dtype, head_size, device)


def test_cudnn_takes_these_shapes_forward_and_backward(monkeypatch):
    """Lowered for a GPU that is not here: JAX checks what cuDNN asks of shapes and types."""
    checks = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(checks + "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(checks + "check_compute_capability", lambda _: True)
    monkeypatch.setattr(checks + "is_cuda_compute_capability_equal", lambda _: False)
    q, own, own_mask, prefix, prefix_mask = drawn(5, 7)

    def total(q, own, prefix):
        return fused_attend(q, own, own_mask, prefix, prefix_mask).astype(jnp.float32).sum()

    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, own, prefix))
    gradient = jax.jit(jax.grad(total, (0, 1, 2))).trace(*args)
    program = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in program


def test_a_model_scores_the_same_with_fused_attention_and_samples_without(
    monkeypatch, params, model
):
    tokens = jax.random.randint(jax.random.key(0), (2, 3, 6), 0, model.vocab_size)
    mask = jnp.ones(tokens.shape, bool).at[0, 1, 3:].set(False)
    completions = Completions(tokens, mask, mask, jnp.zeros(tokens.shape))
    prompts = Prompts(tokens[:, 0, :5], jnp.array([[True] * 5, [False] * 2 + [True] * 3]))

    weights = jnp.cos(jnp.arange(model.config.width)).reshape(1, 1, 1, -1)

    def hidden(params):
        found = LanguageModel(model.config, model.vocab_size)  # traced anew
        states = found.completion_hidden(params, prompts, completions)
        return jnp.where(mask[..., None], states, 0.0) * weights

    def gradient():
        return jax.jit(jax.grad(lambda p: hidden(p).sum()))(params)

    expected = gradient()
    calls = []

    def counted(*args):
        calls.append(args[0].shape[-2])
        return fused_attend(*args, implementation="xla")

    monkeypatch.setattr(transformer, "choose_backend", lambda *_: "cudnn")
    monkeypatch.setattr(transformer, "fused_attend", counted)
    found = gradient()
    assert set(calls) == {5}  # prompts of 5, and 6 tokens of which the last is not fed
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(ours - theirs).max() <= 1e-4 * jnp.abs(theirs).max()


def test_cudnn_is_refused_before_anything_is_compiled():
    with pytest.raises(ConfigError, match="cpu is no NVIDIA GPU"):
        LanguageModel(ModelConfig(width=32, heads=4, dtype="bfloat16", attention="cudnn"), 10)
