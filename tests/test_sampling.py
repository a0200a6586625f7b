import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm import sampling
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import row_keys
from jaxrl_llm.sampling import (
    MAX_WINDOWS,
    SamplingConfig,
    inverse_cdf_sample,
    keep_top_k,
    keep_top_p,
    packed_rows,
    sample,
    windows,
)
from jaxrl_llm.trainer import peak_memory
from jaxrl_llm.training import score
from jaxrl_llm.types import ConfigError, Prompts

END, PAD = 2, 0
T = 9


def keys_of(b, g, seed=0):
    return jax.vmap(lambda k: row_keys(k, g))(row_keys(jax.random.key(seed), b))


def draw_completions(model, params, prompts, keys, eos_ids=(END,), pad_id=PAD, **settings):
    config = SamplingConfig(**{"max_tokens": T, "block": 4, **settings})
    run = jax.jit(
        lambda params: sample(params, model, prompts, keys, config, eos_ids=eos_ids, pad_id=pad_id)
    )
    return run(params)


@pytest.mark.parametrize("max_tokens", [1, 2, T])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_the_scorers(model, params, prompts, max_tokens, temperature):
    completions = draw_completions(
        model, params, prompts, keys_of(5, 6), max_tokens=max_tokens, temperature=temperature
    )
    logp_t = score(params, model, prompts, completions, temperature=temperature).logp_t
    gap = jnp.where(completions.loss_mask, logp_t - completions.logprobs, 0.0)
    assert jnp.abs(gap).max() <= 1e-5
    assert completions.logprobs.min() < -0.5  # there was something to compare


def test_bfloat16_is_sampled_through_several_windows_of_the_cache(prompts):
    config = ModelConfig(width=32, layers=1, heads=6, kv_heads=2, head_width=64, dtype="bfloat16")
    small = LanguageModel(config, 23)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.init(jax.random.key(0)))
    drawn = draw_completions(small, params, prompts, keys_of(5, 6), eos_ids=(), max_tokens=14)
    logp_t = score(params, small, prompts, drawn).logp_t
    np.testing.assert_allclose(logp_t, drawn.logprobs, atol=0.05)


def test_rows_end_with_their_first_end_token_and_masks_say_so(model, params, prompts):
    completions = draw_completions(model, params, prompts, keys_of(5, 40))
    tokens, mask = np.asarray(completions.tokens), np.asarray(completions.loss_mask)
    seen = set()
    for row, selected in zip(tokens.reshape(-1, T), mask.reshape(-1, T), strict=True):
        ends = np.flatnonzero(row == END)
        length = ends[0] + 1 if len(ends) else T  # the end token belongs to the loss
        assert selected.tolist() == [i < length for i in range(T)]
        assert (row[length:] == PAD).all()
        seen |= {"first" if length == 1 else "ended" if len(ends) else "cut"}
    assert seen == {"first", "ended", "cut"}
    assert (tokens == PAD)[mask].any()  # a sampled padding id is a token like any other
    np.testing.assert_array_equal(completions.attention_mask, completions.loss_mask)
    assert jnp.all(jnp.where(completions.loss_mask, 0.0, completions.logprobs) == 0)


def test_padding_may_be_an_end_id(model, params, prompts):
    keys = keys_of(5, 8)
    usual = draw_completions(model, params, prompts, keys)
    same = draw_completions(model, params, prompts, keys, pad_id=END)
    np.testing.assert_array_equal(usual.loss_mask, same.loss_mask)
    np.testing.assert_array_equal(jnp.where(usual.loss_mask, usual.tokens, END), same.tokens)


def test_any_of_several_end_ids_ends_a_row(model, params, prompts):
    completions = draw_completions(model, params, prompts, keys_of(5, 16), eos_ids=(END, 7))
    last = completions.loss_mask.sum(-1) - 1
    ends = jnp.take_along_axis(completions.tokens, last[..., None], -1)
    assert {END, 7} <= set(np.asarray(ends).ravel().tolist())
    inner = jnp.arange(T).reshape(1, 1, -1) < last[..., None]
    assert not (jnp.isin(completions.tokens, jnp.array([END, 7])) & inner).any()


def test_without_end_ids_every_row_has_full_length(model, params, prompts):
    assert draw_completions(model, params, prompts, keys_of(5, 2), eos_ids=()).loss_mask.all()


@pytest.mark.parametrize("block", [1, 3, 64])
def test_tokens_do_not_depend_on_how_the_loop_is_cut(model, params, prompts, block):
    keys = keys_of(5, 6)
    reference = draw_completions(model, params, prompts, keys)
    np.testing.assert_array_equal(
        reference.tokens, draw_completions(model, params, prompts, keys, block=block).tokens
    )


def test_the_last_rows_of_each_group_go_on_alone_as_they_would_have_among_all(
    model, params, prompts, monkeypatch
):
    keys = keys_of(5, 12)

    def lengths_of_both(t_max):
        config = {"max_tokens": t_max, "block": 3, "eos_ids": (2, 5)}
        assert packed_rows(12, t_max, 3) == 3
        packed = draw_completions(model, params, prompts, keys, **config)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "PACKED", 100)
            together = draw_completions(model, params, prompts, keys, **config)
        for name in ("tokens", "loss_mask", "attention_mask"):
            np.testing.assert_array_equal(getattr(packed, name), getattr(together, name))
        np.testing.assert_allclose(packed.logprobs, together.logprobs, atol=1e-5)
        return np.asarray(together.loss_mask.sum(-1))

    lengths = lengths_of_both(28)
    leaving = min(t for t in range(1, 28, 3) if ((lengths > t).sum(1) <= 3).all())
    still = lengths[lengths > leaving]
    assert len(still) > 3 and (still < 28).any() and (still == 28).any()
    lengths_of_both(leaving + 1)  # a single position is left


@pytest.mark.parametrize(
    ("settings", "rows"), [((16, 64, 16), 4), ((16, 12, 8), 0), ((3, 64, 16), 0), ((7, 400, 8), 1)]
)
def test_short_completions_and_small_groups_are_not_packed(settings, rows):
    assert packed_rows(*settings) == rows


def test_a_row_does_not_depend_on_the_rows_beside_it(model, params, prompts):
    keys = keys_of(5, 6)
    together = draw_completions(model, params, prompts, keys)
    alone = draw_completions(model, params, jax.tree.map(lambda x: x[3:4], prompts), keys[3:4, 2:3])
    np.testing.assert_array_equal(alone.tokens[0, 0], together.tokens[3, 2])
    shuffled = draw_completions(
        model, params, jax.tree.map(lambda x: x[::-1], prompts), keys[::-1, ::-1]
    )
    np.testing.assert_array_equal(shuffled.tokens[::-1, ::-1], together.tokens)


def test_the_same_keys_repeat_and_other_keys_differ(model, params, prompts):
    first = draw_completions(model, params, prompts, keys_of(5, 6))
    again = draw_completions(model, params, prompts, keys_of(5, 6))
    other = draw_completions(model, params, prompts, keys_of(5, 6, seed=1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    assert (first.tokens[:, 0] != first.tokens[:, 1]).any()  # completions of one prompt, too


def test_greedy_takes_the_most_likely_token_everywhere(model, params, prompts):
    completions = draw_completions(model, params, prompts, keys_of(5, 1), greedy=True)
    hidden = model.completion_hidden(params, prompts, completions)
    best = (hidden @ model.head(params)).argmax(-1)
    np.testing.assert_array_equal(jnp.where(completions.loss_mask, best, PAD), completions.tokens)


def test_a_hundred_thousand_draws_in_bfloat16_follow_the_float32_softmax():
    config = ModelConfig(width=32, layers=1, heads=2, dtype="bfloat16")
    model = LanguageModel(config, 64)
    params = jax.tree.map(lambda x: 6.0 * x, model.init(jax.random.key(5)))
    prompts = Prompts(jnp.array([[5, 9, 11]]), jnp.ones((1, 3), bool))
    n = 100_000
    tokens = draw_completions(
        model, params, prompts, keys_of(1, n), max_tokens=1, eos_ids=()
    ).tokens
    last, _ = model.prefill(params, prompts)
    logits = jnp.matmul(last[0], model.head(params), preferred_element_type=jnp.float32)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=64)
    common = n * p >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * n
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert common.sum() > 30
    assert p[common].min() < 1e-3  # rare tokens are among them
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_inverse_cdf_maps_intervals_to_tokens_and_never_draws_the_impossible():
    logits = jnp.log(jnp.array([0.0, 0.25, 0.0, 0.75, 0.0]))
    uniform = jnp.array([0.0, 0.249, 0.251, 0.999, 1 - 2**-23])
    tokens = inverse_cdf_sample(uniform, jnp.broadcast_to(logits, (5, 5)))
    assert tokens.tolist() == [1, 1, 3, 3, 3]


def test_top_k_and_top_p_keep_the_sets_they_are_defined_by():
    logits = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2]))
    assert jnp.isfinite(keep_top_k(logits, 2)).tolist() == [False, True, True, False]
    assert jnp.isfinite(keep_top_p(logits, 0.65)).tolist() == [False, True, True, False]
    assert jnp.isfinite(keep_top_p(logits, 0.75)).tolist() == [False, True, True, True]
    assert jnp.isfinite(keep_top_k(logits, 9)).all()
    assert jnp.isfinite(keep_top_p(logits, 1.0)).all()


@pytest.mark.parametrize("change", [{"greedy": True}, {"top_k": 5}, {"top_p": 0.9}])
def test_training_rollouts_refuse_what_is_no_sample_of_the_policy(change):
    with pytest.raises(ConfigError, match="leave .* to evaluation"):
        dataclasses.replace(SamplingConfig(), **change).check_for_training()
    SamplingConfig().check_for_training()


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"max_tokens": 0}]
)
def test_settings_that_cannot_work_are_refused(change):
    with pytest.raises(ConfigError):
        SamplingConfig(**change)


@pytest.mark.parametrize(("steps", "block"), [(1, 8), (8, 8), (15, 8), (1000, 16), (7, 1)])
def test_windows_cover_every_step_once_and_stay_few(steps, block):
    cut = windows(steps, block)
    assert [i for begin, end in cut for i in range(begin, end)] == list(range(steps))
    assert len(cut) <= MAX_WINDOWS + 1
    assert all((end - begin) % block == 0 for begin, end in cut[:-1])


@pytest.mark.slow
def test_to_go_on_alone_needs_no_memory(model, params, prompts, monkeypatch):
    """The copy of the rows that still run is smaller than that of the cache which grew before."""

    def planned():
        keys, config = keys_of(5, 12), SamplingConfig(max_tokens=129, block=16)
        run = jax.jit(
            lambda params: sample(params, model, prompts, keys, config, eos_ids=(END,), pad_id=PAD)
        )
        return peak_memory(run.lower(params).compile())

    packed = planned()
    monkeypatch.setattr(sampling, "PACKED", 100)
    assert packed <= 1.02 * planned()
    monkeypatch.setattr(sampling, "PACKED", 1)
    assert planned() > 1.1 * packed  # a whole copy would
