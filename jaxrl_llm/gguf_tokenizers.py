"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` library.

A GGUF file lists tokens and merges, and names the rule that cuts a text before merging; the rule
itself is not in the file. The rules here are those of the models' own tokenizer.json. A rule that
differs in a detail still decodes every text correctly, but gives the model other ids than those it
was trained on: so what is not known here is refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxrl_llm.types import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

Vocab = dict[str, int]

# The pattern of GPT-4's tokenizer, in which Llama 3 and Qwen 2 vary how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"  # how SentencePiece writes a space


class GGUFTokenizer(NamedTuple):
    """What a GGUF file says about its tokenizer."""

    backend: Tokenizer
    settings: dict[str, Any]  # of a `transformers` tokenizer: bos_token, chat_template, …
    eos_ids: list[int]  # end of the text, of a turn, of a message: those that the file names
    n_ids: int  # ids, those that stand for nothing included


def read_gguf_tokenizer(path: str | Path) -> GGUFTokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises:
        ConfigError: the file is missing or damaged, or its tokenizer is none of those known here.
    """
    return rebuild(read_metadata(path))


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The architecture, its context length, and all that is said about the tokenizer."""
    if not Path(path).is_file():
        raise ConfigError(f"no GGUF file {path}: expected the path of a file")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            "reading a GGUF file needs the package gguf: pip install 'jaxrl_llm[hf]'"
        ) from None
    try:
        fields = GGUFReader(path).fields
        wanted = ("tokenizer.", "general.architecture")
        return {
            key: field.contents()
            for key, field in fields.items()
            if key.startswith(wanted) or key.endswith(".context_length")
        }
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError(f"{path} is no GGUF file, or a damaged one: {error}") from None


def rebuild(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Supported are byte-level BPE ("gpt2") with the pre-tokenizers `gpt-2`, `smollm`, `qwen2` and
    `llama-bpe`, and SentencePiece's BPE with scores and bytes ("llama") for the architecture
    `llama`, which Mistral's files have too.

    Raises:
        ConfigError: something else, or metadata that contradict themselves.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError("the GGUF file holds no tokenizer: expected tokenizer.ggml.tokens")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    named = _named_ids(metadata, len(tokens))
    backend = _builder(metadata)(metadata, _vocab(tokens, types))
    special = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)} | set(
        named.values()
    )
    defined = [i for i, kind in enumerate(types) if kind == USER_DEFINED and i not in special]
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in defined])
    texts = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    settings = {f"{new}_token": tokens[named[old]] for old, new in texts.items() if old in named}
    eos_ids = [named[name] for name in ("eot", "eos", "eom") if name in named]
    return GGUFTokenizer(backend, settings | _options(metadata), eos_ids, len(tokens))


def _vocab(tokens: list[str], types: list[int]) -> Vocab:
    if len(types) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    n_used = len(tokens) - types.count(UNUSED)
    if len(vocab) != n_used:
        raise ConfigError(f"the GGUF file lists {n_used - len(vocab)} tokens twice")
    return vocab


def _named_ids(metadata: Mapping[str, Any], n: int) -> Vocab:
    """The ids of tokens that have a task, such as "eos"."""
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in names}
    ids = {name: int(metadata[key]) for name, key in keys.items() if key in metadata}
    wrong = {name: i for name, i in ids.items() if not 0 <= i < n}
    if wrong:
        raise ConfigError(f"the GGUF file names tokens that it does not list: {wrong} of {n}")
    return ids


def _options(metadata: Mapping[str, Any]) -> dict[str, Any]:
    lengths = [value for key, value in metadata.items() if key.endswith(".context_length")]
    # Without the key, llama.cpp begins a text with BOS for SentencePiece only.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", _is_sentencepiece(metadata))
    has_bos = "tokenizer.ggml.bos_token_id" in metadata
    options = {
        "add_bos_token": bool(adds_bos) and has_bos,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": int(lengths[0]) if lengths else None,
        "clean_up_tokenization_spaces": False,
    }
    return {name: value for name, value in options.items() if value is not None}


def _is_sentencepiece(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama"


def _builder(metadata: Mapping[str, Any]) -> Callable[[Mapping[str, Any], Vocab], Tokenizer]:
    model = metadata.get("tokenizer.ggml.model")
    architecture = metadata.get("general.architecture")
    if model == "gpt2":
        return _byte_level
    if _is_sentencepiece(metadata) and architecture == "llama":
        return _sentencepiece
    raise ConfigError(
        f"cannot rebuild the GGUF file's tokenizer {model!r} of architecture {architecture!r}: "
        "expected 'gpt2', or 'llama' of architecture 'llama'; give the Hugging Face folder instead"
    )


def _byte_level(metadata: Mapping[str, Any], vocab: Vocab) -> Tokenizer:
    """Byte-level BPE: each byte is written as a character, and characters are merged by rank."""
    name = metadata.get("tokenizer.ggml.pre")
    rules = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        # Digits are cut out first; GPT-2's rule then sees each piece alone, so spaces before a
        # digit stay together as they do at the end of a text.
        "smollm": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        "qwen2": _split_words(digits=""),
        "llama-bpe": _split_words(digits="{1,3}"),
    }
    if name not in rules:
        raise ConfigError(
            f"cannot rebuild the GGUF file's pre-tokenizer {name!r}: expected one of "
            f"{', '.join(rules)}; give the Hugging Face folder instead"
        )
    merges = _merges_in(metadata, vocab)
    # Llama 3's tokenizer takes a word that is a token whole, even where merges do not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # type: ignore
    tokenizer.pre_tokenizer = rules[name]  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    return tokenizer


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _merges_in(metadata: Mapping[str, Any], vocab: Vocab) -> list[tuple[str, str]]:
    if "tokenizer.ggml.merges" not in metadata:
        raise ConfigError("the GGUF file's tokenizer has no merges: expected tokenizer.ggml.merges")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ConfigError(f"the GGUF file merges {' '.join(merge)!r}: expected two tokens")
    return merges


def _sentencepiece(metadata: Mapping[str, Any], vocab: Vocab) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours that make a token, the best-scored are merged first.

    Characters without a token are spelled in bytes. Every text, and every piece of one after a
    special token, begins with a space unless the file says otherwise.
    """
    scores = list(metadata.get("tokenizer.ggml.scores", []))
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    if len(scores) != n_tokens:
        raise ConfigError(f"the GGUF file has {n_tokens} tokens and {len(scores)} scores")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * n_tokens)
    mergeable = {token: scores[i] for token, i in vocab.items() if types[i] == NORMAL}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(mergeable),
            unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    begins_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if begins_with_space else []
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore
        [*prefix, normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore
    return tokenizer


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best-scored token first."""
    found = [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda token: -scores[token])
        for cut in range(1, len(token))
    ]
    return [(left, right) for left, right in found if left in scores and right in scores]
