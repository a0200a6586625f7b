"""Pretrained tokenizers as ours: their bytes, conversations, ends and padding."""

import sys
import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.types import ConfigError

pytest.importorskip("jinja2")

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1 and 2


def table_text(tokenizer: HFTokenizer, ids) -> bytes:
    table, length = tokenizer.token_bytes
    return b"".join(bytes(table[i, : length[i]]) for i in ids)


def test_the_table_spells_ten_thousand_strings_as_the_library_decodes_them(
    any_kind, backend, shared, random_strings
):
    tokenizer, library = shared(any_kind), backend(any_kind)
    begins_with_space = any_kind in ("sentencepiece", "unigram")
    encoded = library.encode_batch(random_strings, add_special_tokens=False)
    for text, found in zip(random_strings, encoded, strict=True):
        decoded = library.decode(found.ids)
        spelled = table_text(tokenizer, found.ids).decode()
        assert spelled == (" " + decoded if begins_with_space and found.ids else decoded), text
        assert tokenizer.encode(text) == found.ids
        assert tokenizer.decode(found.ids) == decoded


@pytest.mark.parametrize("kind", ["digits", "qwen"])
def test_ids_that_spell_no_utf8_are_decoded_as_the_library_does(kind, backend, shared):
    tokenizer, rng = shared(kind), np.random.default_rng(0)
    for _ in range(10_000):
        ids = rng.integers(tokenizer.vocab_size, size=rng.integers(12)).tolist()
        assert tokenizer.decode(ids) == backend(kind).decode(ids)


def test_byte_tokens_that_spell_no_utf8_keep_what_can_be_read(backend, shared):
    """The library replaces each byte of such a run, also those that can be read."""
    tokenizer = shared("sentencepiece")
    ids = [backend("sentencepiece").token_to_id(name) for name in ("<0x41>", "<0xFF>", "a")]
    assert (
        tokenizer.decode(ids) == "A\ufffda" and backend("sentencepiece").decode(ids) != "A\ufffda"
    )
    assert table_text(tokenizer, ids) == b"A\xffa"


@pytest.mark.parametrize("kind", ["digits", "qwen"])
def test_a_text_survives_encoding_and_decoding(kind, shared, random_strings):
    for text in random_strings[:2000]:
        kept = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        assert shared(kind).decode(shared(kind).encode(text)) == kept


def test_digits_stand_alone_and_spaces_before_them_together(shared):
    tokenizer = shared("digits")
    words = [tokenizer.decode([i]) for i in tokenizer.encode("make 2024   12")]
    assert "".join(words) == "make 2024   12"
    assert words[-6:] == ["0", "2", "4", "   ", "1", "2"]


def test_special_tokens_stand_for_nothing_and_others_for_what_they_spell(wrapped, backend):
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


def test_an_added_token_stands_for_its_text_even_where_its_letters_could_be_bytes(
    wrapped, digits_tokenizer
):
    source = digits_tokenizer()
    source.add_tokens(["é", "Ġx", "日本 語"])
    tokenizer = wrapped(source)
    for text in ("é", "Ġx", "日本 語"):
        assert tokenizer.encode(text) == [source.token_to_id(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_of_a_byte_level_vocabulary_is_in_the_table_once(shared):
    tokenizer = shared("digits")
    lengths = tokenizer.token_bytes.length
    single = sorted(int(tokenizer.token_bytes.table[i, 0]) for i in np.flatnonzero(lengths == 1))
    assert single == list(range(256))


def test_metaspace_decoders_are_read_too(wrapped):
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
def test_a_conversation_is_the_template_s_text_with_special_ids(kind, shared):
    tokenizer = shared(kind)
    write = tokenizer.encode
    expected = [1, *write("system\nBe brief."), 2, *write("\n")]
    expected += [1, *write("user\n12 + 3?"), 2, *write("\n")]
    assert tokenizer.chat(TURNS, add_generation_prompt=False) == expected
    assert tokenizer.chat(TURNS) == [*expected, 1, *write("assistant\n")]


def test_a_template_that_begins_the_text_adds_its_begin_token_once(wrapped, shared, template):
    settings = dict(bos_token=END, add_bos_token=True, chat_template="{{ bos_token }}" + template)
    ids = wrapped("digits", **settings).chat(TURNS)
    assert ids[:2] == [0, 1] and ids.count(0) == 1
    assert wrapped("digits", **settings).encode("12") == shared("digits").encode("12")


@pytest.mark.parametrize("text", ["x" * 3000, ""])
def test_neither_truncation_nor_padding_of_the_file_changes_ids(text, wrapped, digits_tokenizer):
    source = digits_tokenizer()
    expected = source.encode(text).ids
    source.enable_truncation(7)
    source.enable_padding(length=20)
    assert wrapped(source).encode(text) == expected


def test_a_missing_package_is_named(monkeypatch, wrapped):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"package jinja2: pip install 'jaxrl_llm\[hf\]'"):
        wrapped("digits")


def test_a_conversation_without_a_template_and_one_it_refuses_are_named(wrapped, shared, template):
    with pytest.raises(ConfigError, match="no chat template"):
        wrapped("digits", chat_template=None).chat(TURNS)
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(ConfigError, match="refuses the messages: no system role"):
        wrapped("digits", chat_template=refusing + template).chat(TURNS)
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
def test_ends_come_from_the_template_the_settings_and_the_tokenizer(settings, expected, wrapped):
    assert wrapped("digits", **settings).eos_ids == expected


def test_a_tokenizer_without_an_end_and_ends_out_of_range_are_refused(wrapped):
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
def test_padding_is_the_tokenizer_s_or_a_spare_special_token_or_the_end(
    names, pad_token, expected, wrapped, digits_tokenizer
):
    source = digits_tokenizer()
    source.add_special_tokens(names)
    tokenizer = wrapped(source, pad_token=pad_token)
    assert tokenizer.pad_id == source.token_to_id(expected)


def test_padding_is_no_end_where_another_token_is_spare(wrapped, digits_tokenizer):
    source = digits_tokenizer()
    source.add_special_tokens(["<unused0>", "<unused1>"])
    first, second = (source.token_to_id(name) for name in ("<unused0>", "<unused1>"))
    assert wrapped(source, pad_token=None, eos_ids=[first]).pad_id == second
