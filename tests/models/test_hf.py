import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxrl_llm.models import hf, lora
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.types import ConfigError, Prompts

safetensors = pytest.importorskip("safetensors.numpy")

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["llama", "llama_tied", "llama_scaled", "qwen2", "qwen3"]
SCALED = json.loads((GOLDEN / "llama_scaled" / "config.json").read_text())["rope_parameters"]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def logits_of(model, params, tokens):
    prompts = Prompts(jnp.asarray(tokens), jnp.ones(tokens.shape, bool))
    hidden, _ = model.module.apply(
        {"params": params}, prompts.tokens[:, None], None, model.prompt_context(prompts)
    )
    return hidden[:, 0] @ model.head(params)


@pytest.fixture(scope="module")
def loaded():
    return {name: hf.load_pretrained(GOLDEN / name) for name in FAMILIES}


@pytest.fixture
def folder(tmp_path):
    """A copy of the tied Llama, to damage."""
    return Path(shutil.copytree(GOLDEN / "llama_tied", tmp_path / "model"))


def read(folder):
    return safetensors.load_file(folder / "model.safetensors")


def rewrite(folder, change):
    """Apply `change` to the folder's dictionary of tensors."""
    tensors = read(folder)
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def split(folder, shards):
    """The folder's tensors as shards, given by their tensors' names."""
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    index = {}
    for i, names in enumerate(shards):
        file = f"model-{i}.safetensors"
        safetensors.save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def assert_equal(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)
    assert jax.tree.structure(params) == jax.tree.structure(others)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, loaded):
    golden = np.load(GOLDEN / name / "logits.npz")
    np.testing.assert_allclose(
        logits_of(*loaded[name], golden["tokens"]), golden["logits"], atol=1e-4, rtol=0
    )


def test_bfloat16_weights_are_the_rounded_float32_ones(loaded):
    model, params = hf.load_pretrained(GOLDEN / "llama_tied", dtype="bfloat16")
    assert model.config.dtype == "bfloat16"
    assert_equal(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded["llama_tied"][1]))


def test_options_that_the_configuration_does_not_say_are_passed_on(loaded):
    model, params = hf.load_pretrained(GOLDEN / "llama_tied", remat=True, compute_dtype="bfloat16")
    assert (model.config.remat, model.config.dtype) == (True, "bfloat16")
    assert_equal(params, loaded["llama_tied"][1])


def test_shards_hold_the_same_model_as_one_file(folder, loaded):
    names = sorted(read(folder))
    split(folder, [names[::2], names[1::2]])
    assert_equal(hf.load_pretrained(folder)[1], loaded["llama_tied"][1])


def test_a_tied_head_may_be_written_out(folder, loaded):
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_equal(hf.load_pretrained(folder)[1], loaded["llama_tied"][1])


def test_rotary_frequencies_in_old_files_are_not_weights(folder, loaded):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    rewrite(folder, lambda t: t.update(frequencies))
    assert_equal(hf.load_pretrained(folder)[1], loaded["llama_tied"][1])


# --- In a process of its own: with two devices, and its memory measured from the start.

PROBE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxrl_llm.models import hf, weights
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig

golden, folder = sys.argv[1:]
model, params = hf.load_pretrained(golden)
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))

def place(path, array):
    spec = P(None, "tensor") if path[-1] == "kernel" else P()
    return jax.device_put(array, NamedSharding(mesh, spec))

alike, write = [], weights._write

def spy(stack, layer, index):
    alike.append([x.addressable_shards[0].data.shape[-1] for x in (stack, layer)])
    return write(stack, layer, index)

weights._write = spy
_, sharded = hf.load_pretrained(golden, place=place)
weights._write = write
jax.tree.map(np.testing.assert_array_equal, sharded, params)
gate = sharded["blocks"]["gate"]["kernel"]

def resident(which):
    line = next(line for line in open("/proc/self/status") if line.startswith(which))
    return int(line.split()[1]) * 1024

# Four stacks, each much larger than a tensor.
config = ModelConfig(width=512, layers=32, heads=8, mlp_width=64)
model = LanguageModel(config, 1024)
hf.save_pretrained(folder, model, jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(model.init, jax.random.key(0))
))
hf.load_pretrained(golden)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = resident("VmRSS")
_, params = hf.load_pretrained(folder)
jax.block_until_ready(params)
print(json.dumps({
    "spec": list(gate.sharding.spec),
    "alike": alike,
    "gate": [list(gate.shape), list(gate.addressable_shards[0].data.shape)],
    "growth": resident("VmHWM") - before,
    "size": sum(x.nbytes for x in jax.tree.leaves(params)),
    "largest": params["embedding"].nbytes,
}))
"""


# glibc then returns what is freed to the system at once, so that only what is in use counts.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "100000"}


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("Linux tells a process's peak memory, others do not")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::UserWarning",
            "-c",
            PROBE,
            GOLDEN / "llama_tied",
            tmp_path_factory.mktemp("large"),
        ],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **RETURNED},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_host_holds_the_model_and_one_tensor_at_most(probe):
    assert probe["growth"] < probe["size"] + probe["largest"] + 25e6  # compiled code
    assert probe["growth"] > 0.9 * probe["size"]  # or nothing was measured


@pytest.mark.slow
def test_layers_stay_on_the_devices_that_they_are_put_on(probe):
    assert probe["spec"] == [None, None, "tensor"]
    (layers, width, hidden), shard = probe["gate"]
    assert shard == [layers, width, hidden // 2]
    assert all(stack == layer for stack, layer in probe["alike"]), "no stack is whole, at any time"


# --- Export.


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_exported_loads_as_the_same_model(name, loaded, tmp_path):
    model, params = loaded[name]
    hf.save_pretrained(tmp_path, model, params)
    again, others = hf.load_pretrained(tmp_path)
    assert_equal(others, params)
    assert (again.config, again.vocab_size) == (model.config, model.vocab_size)


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_tensors_have_the_names_and_values_that_transformers_gives_them(
    name, loaded, tmp_path
):
    hf.save_pretrained(tmp_path, *loaded[name])
    ours, theirs = read(tmp_path), read(GOLDEN / name)
    assert ours.keys() == theirs.keys()
    for tensor, expected in theirs.items():
        np.testing.assert_array_equal(ours[tensor], expected.astype(np.float32), err_msg=tensor)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_the_exported_configuration_as_its_own(name, loaded, tmp_path):
    from transformers import AutoConfig

    longest = 512 if name == "llama_scaled" else 64
    hf.save_pretrained(tmp_path, *loaded[name], max_position_embeddings=longest)
    ours, theirs = (AutoConfig.from_pretrained(f).to_dict() for f in (tmp_path, GOLDEN / name))
    assert ours.pop("head_dim") == theirs.pop("head_dim", 24 // 4)  # which Qwen2 may leave out
    passing = {"initializer_range", "_name_or_path", "eos_token_id", "dtype", "rope_theta"}
    passing |= {"transformers_version"}
    for said in (ours, theirs):
        for field in passing & said.keys():
            del said[field]
    assert ours == theirs


def test_older_readers_find_what_is_rotary_too(loaded, tmp_path):
    hf.save_pretrained(tmp_path, *loaded["llama_scaled"])
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["rope_scaling"] | {"rope_theta": said["rope_theta"]} == SCALED


def test_bfloat16_weights_are_exported_as_such(tmp_path):
    hf.save_pretrained(tmp_path, *hf.load_pretrained(GOLDEN / "llama", dtype="bfloat16"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    ours, theirs = read(tmp_path), read(GOLDEN / "llama")
    assert {str(x.dtype) for x in ours.values()} == {"bfloat16"}
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_large_model_is_exported_in_shards_and_earlier_weights_are_replaced(loaded, tmp_path):
    model, params = loaded["qwen3"]
    hf.save_pretrained(tmp_path, model, params)
    hf.save_pretrained(tmp_path, model, params, max_shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    n = len(files)
    assert n > 1 and files[0] == f"model-00001-of-{n:05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = {file: safetensors.load_file(tmp_path / file) for file in files}
    assert index["weight_map"] == {name: file for file in files for name in tensors[file]}
    sizes = [sum(x.nbytes for x in shard.values()) for shard in tensors.values()]
    assert (
        max(sizes) <= 20_000
        and n <= 2 * sum(sizes) / 20_000
        and sum(sizes) == index["metadata"]["total_size"]
    )
    assert_equal(hf.load_pretrained(tmp_path)[1], params)
    hf.save_pretrained(tmp_path, model, params)
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}


def test_adapters_are_exported_merged(loaded, tmp_path):
    model, params = loaded["llama_tied"]
    config = lora.LoRAConfig(rank=2, alpha=6.0, targets=("query",))
    adapted = lora.add_adapters(params, config, jax.random.key(0))
    a, b = np.random.default_rng(0).normal(size=(2, 2, 24, 2)).astype(np.float32)
    b = b.reshape(2, 2, 24)
    adapted["blocks"]["query"]["lora"] |= {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    hf.save_pretrained(tmp_path, model, adapted)
    expected = read(GOLDEN / "llama_tied")[QUERY] + 3.0 * (a[1] @ b[1]).T
    np.testing.assert_allclose(read(tmp_path)[QUERY], expected, atol=1e-5)


def test_the_tokenizer_and_its_end_tokens_are_exported(loaded, tmp_path):
    def save_pretrained(folder):
        (folder / "tokenizer.json").write_text("{}")

    tokenizer = SimpleNamespace(pad_id=0, eos_ids=(2, 5), save_pretrained=save_pretrained)
    hf.save_pretrained(tmp_path / "new", *loaded["llama"], tokenizer=tokenizer)
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    for file in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / "new" / file).read_text())
        assert (said["eos_token_id"], said["pad_token_id"]) == ([2, 5], 0)


# --- What cannot be loaded.


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gpt2"},
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": SCALED | {"high_freq_factor": 0.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"final_logit_softcapping": 30.0},
        {"num_local_experts": 8},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_arithmetic_that_differs_is_refused_by_field_and_value(fields, folder):
    configure(folder, **fields)
    message = refusal(hf.load_pretrained, folder)
    field, value = list(fields.items())[-1]
    assert field.replace("rope_scaling", "rope_parameters") in message
    assert (value["factor"] if "rope" in field else value).__repr__() in message


def test_sliding_windows_are_refused_where_they_are_used_only(tmp_path, loaded):
    folder = Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "model"))
    configure(folder, use_sliding_window=False, sliding_window=8, layer_types=None)
    assert_equal(hf.load_pretrained(folder)[1], loaded["qwen2"][1])
    configure(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in refusal(hf.load_pretrained, folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "no config.json" in refusal(hf.load_pretrained, tmp_path)
    assert "no config.json" in refusal(hf.load_pretrained, tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[1]", "nothing"])
def test_a_damaged_configuration_is_refused(text, folder):
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(hf.load_pretrained, folder)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "vocab_size"])
def test_a_size_that_is_not_positive_is_refused(field, folder):
    configure(folder, **{field: 0})
    assert f"{field}=0" in refusal(hf.load_pretrained, folder)


def test_a_field_of_the_wrong_type_is_refused(folder):
    configure(folder, hidden_size="large")
    assert "hidden_size" in refusal(hf.load_pretrained, folder)


def test_a_folder_with_pickled_weights_only_says_what_to_do(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(hf.load_pretrained, folder)
    assert ".bin" in message and "convert" in message


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(hf.load_pretrained, folder)


@pytest.mark.parametrize("left", [0, 5, 100, 5000, 43_000])
def test_a_truncated_file_is_refused_by_name(left, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert str(file) in refusal(hf.load_pretrained, folder)


def test_a_damaged_header_is_refused_unless_all_tensors_are_still_there(folder, loaded):
    file = folder / "model.safetensors"
    sound = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", sound[:8])
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 + length, 60):
        damaged = sound.copy()
        damaged[place] ^= 1 << rng.integers(0, 8)
        file.write_bytes(damaged)
        try:
            _, params = hf.load_pretrained(folder)
        except ConfigError:
            continue
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, loaded["llama_tied"][1])


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(QUERY), QUERY),
        (lambda t: t.update({"model.layers.2.mlp.bias": t[QUERY]}), "model.layers.2.mlp.bias"),
        (lambda t: t.update({QUERY: t[QUERY][:-1].copy()}), f"{QUERY} has shape [23, 24]"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), f"{QUERY} is I8"),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "lm_head.weight is not the embedding",
        ),
    ],
    ids=["missing", "unmatched", "another shape", "quantised", "another head"],
)
def test_tensors_that_do_not_fit_are_refused_by_file_and_name(change, said, folder):
    rewrite(folder, change)
    message = refusal(hf.load_pretrained, folder)
    assert said in message and str(folder) in message


def test_an_untied_model_needs_its_head(folder):
    configure(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(hf.load_pretrained, folder)


def test_a_vocabulary_larger_than_the_embedding_is_refused(folder):
    configure(folder, vocab_size=50)
    message = refusal(hf.load_pretrained, folder)
    assert "model.embed_tokens.weight has shape [48, 24]; expected [50, 24]" in message


def test_a_tensor_in_two_shards_is_refused_by_name(folder):
    names = sorted(read(folder))
    split(folder, [names, [QUERY]])
    message = refusal(hf.load_pretrained, folder)
    assert QUERY in message and "model-0.safetensors" in message and "model-1" in message


def test_a_shard_that_is_not_there_is_refused_by_name(folder):
    names = sorted(read(folder))
    split(folder, [names[:3], names[3:]])
    (folder / "model-1.safetensors").unlink()
    assert "model-1.safetensors, which is not there" in refusal(hf.load_pretrained, folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(text, folder):
    split(folder, [sorted(read(folder))])
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(hf.load_pretrained, folder)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert "pip install 'jaxrl_llm[hf]'" in refusal(hf.load_pretrained, GOLDEN / "llama")


# --- What cannot be exported.


def test_options_that_no_architecture_has_are_refused(model, params, tmp_path):
    message = refusal(hf.save_pretrained, tmp_path / "new", model, params)
    assert "qkv_bias and qk_norm" in message
    odd = LanguageModel(ModelConfig(width=10, heads=4, head_width=4, layers=1), 8)
    message = refusal(hf.save_pretrained, tmp_path / "new", odd, odd.init(jax.random.key(0)))
    assert "width=10" in message
    assert not (tmp_path / "new").exists()


def test_parameters_of_another_model_are_refused(loaded, tmp_path):
    model, params = loaded["llama"][0], loaded["llama_tied"][1]
    message = refusal(hf.save_pretrained, tmp_path / "new", model, params)
    assert "blocks/key/kernel" in message and "[2, 24, 12]; expected [2, 24, 24]" in message
    without = {name: x for name, x in loaded["llama"][1].items() if name != "head"}
    assert "head: nothing" in refusal(hf.save_pretrained, tmp_path / "new", model, without)


def test_a_tokenizer_that_transformers_does_not_have_is_refused(loaded, tmp_path):
    message = refusal(
        hf.save_pretrained, tmp_path, *loaded["llama"], tokenizer=arithmetic_tokenizer()
    )
    assert "CharTokenizer" in message


def test_every_golden_weight_has_a_value_of_its_own(loaded):
    """So that no two tensors can be swapped unnoticed, nor a transposed square one."""
    for _, params in loaded.values():
        leaves = [np.asarray(x) for x in flatten_dict(params).values()]
        assert all(np.unique(x).size > 0.1 * x.size for x in leaves)
