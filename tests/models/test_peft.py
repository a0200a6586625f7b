import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import hf, lora, peft
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.types import ConfigError, Prompts

safetensors = pytest.importorskip("safetensors.numpy")

GOLDEN = Path(__file__).parent / "golden"
LAYER = "base_model.model.model.layers.1"
QUERY = f"{LAYER}.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base():
    return hf.load_pretrained(GOLDEN / "llama_tied")


@pytest.fixture(scope="module")
def adapted(base):
    """With the adapters that PEFT wrote."""
    return peft.load_adapters(GOLDEN / "adapters", base[1])


@pytest.fixture
def folder(tmp_path):
    """A copy of the adapters, to damage."""
    return Path(shutil.copytree(GOLDEN / "adapters", tmp_path / "adapters"))


def read(folder):
    return safetensors.load_file(folder / "adapter_model.safetensors")


def rewrite(folder, change):
    tensors = read(folder)
    change(tensors)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")


def configure(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(folder, params) -> str:
    with pytest.raises(ConfigError) as caught:
        peft.load_adapters(folder, params)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def assert_equal(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_logits_are_those_of_peft(base, adapted):
    model, params = base
    golden = np.load(GOLDEN / "adapters" / "logits.npz")
    tokens = jnp.asarray(golden["tokens"])
    prompts = Prompts(tokens, jnp.ones(tokens.shape, bool))

    def logits_of(params):
        hidden, _ = model.module.apply(
            {"params": params}, tokens[:, None], None, model.prompt_context(prompts)
        )
        return hidden[:, 0] @ model.head(params)

    np.testing.assert_allclose(logits_of(adapted), golden["logits"], atol=1e-4, rtol=0)
    assert np.abs(logits_of(params) - golden["logits"]).max() > 1


def test_the_configuration_is_read_as_ours(adapted):
    targets = ("query", "value", "gate", "down")
    assert lora.config_of(adapted) == LoRAConfig(rank=3, alpha=5.0, targets=targets)


def test_adapters_are_float32_beside_bfloat16_weights(base, adapted):
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base[1])
    ours = peft.load_adapters(GOLDEN / "adapters", coarse)
    assert_equal(lora.without_adapters(ours), coarse)
    assert_equal(lora.partition(ours)[0], lora.partition(adapted)[0])


def test_what_is_written_has_the_names_shapes_and_values_that_peft_gives_them(adapted, tmp_path):
    peft.save_adapters(tmp_path, adapted, base="some/model")
    ours, theirs = read(tmp_path), read(GOLDEN / "adapters")
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_array_equal(ours[name], expected, err_msg=name)


def test_the_written_configuration_says_what_pefts_own_says(adapted, tmp_path):
    peft.save_adapters(tmp_path, adapted, base="some/model")
    ours, theirs = (
        json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path, GOLDEN / "adapters")
    )
    assert ours.pop("base_model_name_or_path") == "some/model" == peft.base_of(tmp_path)
    assert set(ours.pop("target_modules")) == set(theirs["target_modules"])
    assert ours == {field: theirs[field] for field in ours}


@pytest.mark.parametrize("rank, alpha", [(1, 16.0), (3, 16.0), (7, 3.0), (3, 1 / 3), (64, 0.01)])
def test_what_is_written_comes_back_to_the_last_bit(rank, alpha, base, tmp_path):
    config = LoRAConfig(rank=rank, alpha=alpha, targets=("out", "up"))
    params = lora.add_adapters(base[1], config, jax.random.key(0))
    params["blocks"]["up"]["lora"]["b"] += 0.1
    peft.save_adapters(tmp_path, params, base="some/model")
    assert_equal(peft.load_adapters(tmp_path, base[1]), params)
    said = json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"]
    assert said == pytest.approx(alpha, rel=1e-6)
    assert said == alpha or alpha == 1 / 3


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "LOHA"},
        {"peft_type": None},
        {"task_type": "SEQ_CLS"},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"use_rslora": True},
        {"use_dora": True},
        {"use_qalora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"layers_to_transform": [0]},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.weight"]},
        {"init_lora_weights": "pissa"},
        {"revision": "v2"},
        {"something_new": {"factor": 2}},
    ],
)
def test_adapters_of_another_kind_are_refused_by_field_and_value(fields, base, folder):
    configure(folder, **fields)
    ((field, value),) = fields.items()
    assert f"{field}={value!r} is not supported" in refusal(folder, base[1])


@pytest.mark.parametrize("fields", [{"r": 0}, {"r": "8"}, {"lora_alpha": None}, {"lora_alpha": -1}])
def test_sizes_that_cannot_work_are_refused(fields, base, folder):
    configure(folder, **fields)
    with pytest.raises(ConfigError, match="r=|alpha="):
        peft.load_adapters(folder, base[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
        {"exclude_modules": ["lm_head"]},
        {"peft_version": "0.15.0"},
    ],
)
def test_what_changes_no_output_is_accepted(fields, base, adapted, folder):
    configure(folder, **fields)
    assert_equal(peft.load_adapters(folder, base[1]), adapted)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(QUERY), QUERY),
        (lambda t: t.update({QUERY: t[QUERY][:2].copy()}), "has shape [2, 24]; expected [3, 24]"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[QUERY]}),
            "lm_head.lora_A.weight has no place",
        ),
        (lambda t: t.update({QUERY.replace("A.w", "A.other.w"): t.pop(QUERY)}), QUERY),
        (lambda t: t.clear(), "expected some of query"),
    ],
    ids=["missing", "another rank", "unmatched", "another name", "none"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, said, base, folder):
    rewrite(folder, change)
    with pytest.raises(ConfigError) as caught:
        peft.load_adapters(folder, base[1])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_layer_without_adapters_is_refused(base, folder):
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith(LAYER)])
    assert f"no tensor {LAYER}" in refusal(folder, base[1])


@pytest.mark.parametrize("text", ["", "{", "[1]", None])
def test_a_damaged_configuration_is_refused(text, base, folder):
    path = folder / "adapter_config.json"
    path.write_text(text) if text is not None else path.unlink()
    assert "adapter_config.json" in refusal(folder, base[1])


def test_a_damaged_or_missing_file_of_tensors_is_refused(base, folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert file.name in refusal(folder, base[1])
    file.unlink()
    assert file.name in refusal(folder, base[1])


def test_a_configuration_that_names_no_base_is_refused(folder):
    assert peft.base_of(folder) == "tests/models/golden/llama_tied"
    configure(folder, base_model_name_or_path=None)
    with pytest.raises(ConfigError, match="base_model_name_or_path=None"):
        peft.base_of(folder)
