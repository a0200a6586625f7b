"""Pretrained tokenizers read from files and written to them."""

import json
import logging
import subprocess
import sys

import pytest
from tokenizers import decoders

from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.types import ConfigError

pytest.importorskip("jinja2")

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1 and 2
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 + 3?"}]


@pytest.fixture
def written(tmp_path, backend, template):
    """`written(**settings)` is a folder as the hub has them."""

    def of(config=None, **settings):
        backend("digits").save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": STOP, "chat_template": template} | settings
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return of


def test_the_rules_of_tokenizer_json_win_over_those_of_a_named_class(backend, written):
    """SmolLM2's folder names GPT2Tokenizer, which has no rule for digits."""
    folder = written(tokenizer_class="GPT2Tokenizer", config={"model_type": "llama"})
    tokenizer = HFTokenizer.from_pretrained(folder)
    for text in ["make 24 of 12, 3", "a  1   22", "2024", "12 + 12 = 24"]:
        assert tokenizer.encode(text) == backend("digits").encode(text).ids
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).encode("a  1") != tokenizer.encode("a  1")


@pytest.mark.parametrize("ends, expected", [(0, (2, 0)), ([0, 1], (2, 0, 1)), (None, (2,))])
def test_end_tokens_of_the_generation_config_count(tmp_path, ends, expected, written):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert HFTokenizer.from_pretrained(written()).eos_ids == expected


@pytest.mark.parametrize(
    "kind, model_type",
    [
        ("digits", None),
        ("digits", "llama"),
        ("qwen", None),
        ("qwen", "qwen3"),
        ("sentencepiece", None),
        ("unigram", None),
    ],
)
def test_transformers_loads_what_was_saved_with_equal_ids(
    tmp_path, kind, model_type, wrapped, random_strings
):
    from transformers import AutoTokenizer

    tokenizer = wrapped(kind, bos_token=START, eos_token=END, eos_ids=[1])
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer.save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), HFTokenizer.from_pretrained(tmp_path)
    for text in random_strings[:300]:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids == ours.encode(text)
    prompt = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert theirs.encode(prompt, add_special_tokens=False) == tokenizer.chat(TURNS)
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token) == (END, START, STOP)
    assert (ours.eos_ids, ours.pad_id) == (tokenizer.eos_ids, tokenizer.pad_id) == ((2, 1, 0), 2)
    assert (ours.token_bytes.table == tokenizer.token_bytes.table).all()


def test_saving_keeps_a_generation_config_that_is_there(tmp_path, shared):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    shared("digits").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_older_transformers_know_the_class_that_is_saved(tmp_path, shared):
    shared("digits").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_vocabulary_larger_than_the_embedding_is_refused(backend, written):
    folder, n_ids = written(), backend("digits").get_vocab_size()
    assert HFTokenizer.from_pretrained(folder, vocab_size=n_ids).vocab_size == n_ids
    with pytest.raises(ConfigError, match=f"ids up to {n_ids - 1} and the model {n_ids - 1}"):
        HFTokenizer.from_pretrained(folder, vocab_size=n_ids - 1)


def test_folders_without_a_fast_tokenizer_and_damaged_files_are_refused(tmp_path, written):
    with pytest.raises(ConfigError, match="no tokenizer.json in"):
        HFTokenizer.from_pretrained(tmp_path)
    folder = written()
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot read .*generation_config.json"):
        HFTokenizer.from_pretrained(folder)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot read the tokenizer in") as caught:
        HFTokenizer.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_fetched_is_refused_in_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    with pytest.raises(ConfigError, match="^/no/such/folder is neither a folder nor a model"):
        HFTokenizer.from_pretrained("/no/such/folder")

    def fetch(name, **_):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConfigError, match="^some/model is neither .*: no connection$"):
        HFTokenizer.from_pretrained("some/model")


def test_a_model_of_the_hub_is_read_from_the_fetched_folder(monkeypatch, written):
    import huggingface_hub

    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(written())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert HFTokenizer.from_pretrained("some/model").eos_ids == (2,)
    assert asked[0][0] == "some/model"
    assert not any(pattern.startswith("*") for pattern in asked[0][1])  # no weights


def test_tokenizers_that_are_not_fast_and_decoders_that_are_unknown_are_refused(
    wrapped, digits_tokenizer
):
    with pytest.raises(ConfigError, match="object is no fast tokenizer"):
        HFTokenizer(object())
    for decoder, name in ((decoders.WordPiece(), "WordPiece"), (None, "None")):
        source = digits_tokenizer()
        source.decoder = decoder
        with pytest.raises(ConfigError, match=rf"decoder \['?{name}'?\]: expected ByteLevel"):
            wrapped(source)


def test_importing_and_loading_say_nothing(written):
    """transformers prints that torch is missing, which nothing here needs; other lines stay."""
    folder = written()
    program = f"""
import sys, jaxrl_llm.hf_tokenizers as module
assert not {{"transformers", "tokenizers", "gguf"}} & set(sys.modules)
tokenizer = module.HFTokenizer.from_pretrained({str(folder)!r})
assert tokenizer.eos_ids == (2,) and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    HFTokenizer.from_pretrained(folder)
    assert not logging.getLogger("transformers").filters
