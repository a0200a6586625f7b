import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrl_llm.envs.dialogue import dialogue_tokenizer
from jaxrl_llm.models import lora
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import ModelConfig, RopeScaling
from jaxrl_llm.policy import SIZES, Policy
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.types import ConfigError

TOKENIZER = CharTokenizer("abc01", ["ab", "10"])
CONFIG = ModelConfig(width=8, layers=1, heads=2, kv_heads=1, qkv_bias=True, tie_embeddings=False)


@pytest.fixture(scope="module")
def policy():
    return Policy.from_scratch(CONFIG, tokenizer=TOKENIZER, seed=3)


def is_equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b)
    )


def test_a_saved_policy_comes_back_to_the_last_bit(policy, tmp_path):
    policy.save(tmp_path / "policy")
    back = Policy.from_pretrained(str(tmp_path / "policy"))
    assert is_equal(back.params, policy.params)
    assert back.model.config == CONFIG and back.model.vocab_size == TOKENIZER.vocab_size
    for text in ("ab10", "ba01", ""):
        assert back.tokenizer.encode(text) == TOKENIZER.encode(text)
    assert back.tokenizer.eos_ids == TOKENIZER.eos_ids
    np.testing.assert_array_equal(back.tokenizer.token_bytes.table, TOKENIZER.token_bytes.table)


def test_scaled_rotary_positions_come_back(tmp_path):
    config = ModelConfig(width=8, layers=1, heads=2, rope_scaling=RopeScaling(factor=2.0))
    Policy.from_scratch(config, tokenizer=TOKENIZER).save(tmp_path)
    assert Policy.from_pretrained(tmp_path).model.config == config


def test_weights_and_computation_get_the_types_that_are_asked_for(policy, tmp_path):
    adapted = policy.with_lora(LoRAConfig(rank=2))
    adapted.save(tmp_path)
    back = Policy.from_pretrained(tmp_path, dtype="bfloat16", compute_dtype="bfloat16")
    assert back.model.config == dataclasses.replace(CONFIG, dtype="bfloat16")
    adapters, frozen = lora.partition(back.params)
    assert is_equal(adapters, lora.partition(adapted.params)[0])
    coarse = jax.tree.map(lambda x: x.astype("bfloat16"), policy.params)
    assert is_equal(lora.without_adapters(frozen), coarse)


def test_saving_again_replaces_what_was_there(policy, tmp_path):
    other = Policy.from_scratch(CONFIG, tokenizer=TOKENIZER, seed=4)
    assert not is_equal(other.params, policy.params)
    policy.save(tmp_path)
    other.save(tmp_path)
    assert is_equal(Policy.from_pretrained(tmp_path).params, other.params)


def test_the_seed_decides_the_weights(policy):
    assert is_equal(Policy.from_scratch(CONFIG, tokenizer=TOKENIZER, seed=3).params, policy.params)


def test_named_sizes_are_as_large_as_documented():
    for size, millions in (("tiny", 0.37), ("small", 5.0)):
        model = Policy.from_scratch(CONFIG).model.__class__(SIZES[size], 138)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        n_weights = sum(x.size for x in jax.tree.leaves(shapes))
        assert n_weights == pytest.approx(millions * 1e6, rel=0.15)


def test_without_a_tokenizer_it_speaks_the_dialogues():
    policy, usual = Policy.from_scratch(CONFIG), dialogue_tokenizer()
    assert policy.model.vocab_size == usual.vocab_size
    text = "<call>lookup chair price</call>"
    assert policy.tokenizer.encode(text) == usual.encode(text)


def test_what_cannot_work_is_refused_in_one_line(tmp_path):
    class Foreign:
        vocab_size, pad_id, eos_ids = 5, 0, (1,)

    foreign = Policy.from_scratch(CONFIG, tokenizer=Foreign())
    (tmp_path / "empty").mkdir()
    for action, message in (
        (lambda: Policy.from_scratch("huge"), "no model size 'huge': expected one of tiny, small"),
        (lambda: Policy.from_pretrained(tmp_path / "empty"), "no policy.json, .*there; expected"),
        (lambda: Policy.from_pretrained(tmp_path / "no"), "no such folder; expected"),
        (lambda: foreign.save(tmp_path / "x"), "cannot save a policy with a Foreign"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_the_folder_says_in_plain_text_what_it_holds(policy, tmp_path):
    policy.save(tmp_path)
    described = json.loads((tmp_path / "policy.json").read_text())
    assert described["model"]["width"] == 8
    assert described["alphabet"] == "abc01" and described["words"] == ["ab", "10"]


def test_a_policy_with_adapters_is_saved_with_them_and_merges_to_one_without(policy, tmp_path):
    config = LoRAConfig(rank=2, alpha=3.0, targets=("value", "up"))
    adapted = policy.with_lora(config, seed=1)
    adapted.params["blocks"]["up"]["lora"]["b"] += 0.5
    adapted.save(tmp_path)
    back = Policy.from_pretrained(tmp_path)
    assert is_equal(back.params, adapted.params)
    merged = adapted.merged()
    assert jax.tree.structure(merged.params) == jax.tree.structure(policy.params)
    (kernel, was) = (p.params["blocks"]["up"]["kernel"] for p in (merged, policy))
    a = np.asarray(adapted.params["blocks"]["up"]["lora"]["a"])
    expected = was + 3.0 / 2 * 0.5 * a.sum(-1, keepdims=True)
    np.testing.assert_allclose(kernel, expected, rtol=1e-5, atol=1e-6)
