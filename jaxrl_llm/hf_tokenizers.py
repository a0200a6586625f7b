"""Tokenizers of pretrained models, from Hugging Face or from a GGUF file, without torch."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.tokenizers import TokenBytes
from jaxrl_llm.types import ConfigError

Message = Mapping[str, str]  # "role" and "content"

_FILES = ["tokenizer*", "chat_template*", "special_tokens_map.json", "generation_config.json"]
_SPARE = re.compile(r"\W*(finetune_right_)?(pad(ding)?|unused|reserved)(\W|_|\d).*", re.IGNORECASE)
_MARK = "What is said."  # stands in for an assistant's turn


class HFTokenizer:
    """A fast tokenizer of `transformers`, as this library asks for one.

    `token_bytes` is what compiled rewards read, and `decode` reads the same table: both say the
    same of every sequence of ids. Byte-level tokens are the bytes they stand for, SentencePiece's
    `▁` is a space and `<0x0A>` a byte. Special tokens stand for nothing; added tokens that are not
    special stand for what they spell.

    SentencePiece begins a text with a space of its own. The table has that space, since in the
    middle of a text it is a real one; `decode` drops one space at the start, so that it undoes
    `encode`. Where an answer may begin with a space, a reward should skip it.

    Attributes:
        tokenizer: that of `transformers`. Change nothing in it but `chat_template`.
        pad_id: the tokenizer's padding; else a special token that is set aside, such as
            <|reserved_special_token_0|>; else `eos_ids[0]`. Nothing here tells padding by its id.
        eos_ids: all ids that end a completion. The first is what the chat template writes after an
            assistant's turn; then those given, then the tokenizer's own.
        vocab_size: the number of ids; those without a token stand for nothing.

    Args:
        tokenizer: a fast one.
        eos_ids: further ids that end a completion.
        vocab_size: the number of rows of the model's embedding, if that is larger.

    Raises:
        ConfigError: no end token, an id or a token beyond `vocab_size`, or a decoder that is
            neither byte-level nor SentencePiece's.
    """

    def __init__(
        self, tokenizer: Any, *, eos_ids: Iterable[int] = (), vocab_size: int | None = None
    ):
        self.tokenizer = tokenizer
        self._backend = _fast_backend(tokenizer)
        added = self._backend.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = _checked_size(vocab_size, max(vocab.values()) + 1)
        self.eos_ids = self._find_eos(eos_ids)
        self.pad_id = self._find_pad()
        read, self._drops_space = _reader(self._backend.decoder)
        self._words = [b""] * self.vocab_size
        for text, i in vocab.items():
            if i not in self._special:
                self._words[i] = read(text, i in added)
        self.token_bytes = _table(self._words)

    @classmethod
    def from_pretrained(
        cls, name_or_folder: str | Path, *, vocab_size: int | None = None
    ) -> "HFTokenizer":
        """The tokenizer of a folder, or of a model of the Hugging Face hub.

        It is tokenizer.json's, to the letter. (`AutoTokenizer` may put the rules of a class in its
        place: as a GPT2Tokenizer, SmolLM2's loses the rule that digits stand alone.) End tokens of
        generation_config.json are added. Without a network the hub's cache is used.

        Raises:
            ConfigError: no such folder or model, no tokenizer.json, a damaged file; see the class.
        """
        folder = _folder(name_or_folder)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"no tokenizer.json in {folder}: expected a fast tokenizer; convert it with "
                f"transformers' AutoTokenizer and save_pretrained"
            )
        try:
            tokenizer = _fast_class().from_pretrained(folder)
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise ConfigError(f"cannot read the tokenizer in {folder}: {_line(error)}") from None
        return cls(tokenizer, eos_ids=_generation_eos(folder), vocab_size=vocab_size)

    @classmethod
    def from_gguf(cls, path: str | Path, *, vocab_size: int | None = None) -> "HFTokenizer":
        """The tokenizer of a GGUF file, rebuilt; see `gguf_tokenizers`.

        Raises:
            ConfigError: a missing or damaged file, a kind that cannot be rebuilt; see the class.
        """
        from jaxrl_llm.gguf_tokenizers import read_gguf_tokenizer

        found = read_gguf_tokenizer(path)
        tokenizer = _fast_class()(tokenizer_object=found.backend, **found.settings)
        return cls(tokenizer, eos_ids=found.eos_ids, vocab_size=vocab_size or found.n_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any that begin or end it.

        A special token that is spelled out becomes that token. Bytes without a token, of which some
        vocabularies have a few, are dropped.
        """
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens stand for nothing, bytes that are no UTF-8 for �."""
        text = b"".join([self._words[i] for i in ids])
        text = text.removeprefix(b" ") if self._drops_space else text
        return text.decode("utf-8", "replace")

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, written by the model's chat template.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with what begins an assistant's turn.

        Raises:
            ConfigError: there is no chat template, or it refuses the messages.
        """
        return self.encode(self._render(messages, add_generation_prompt))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `transformers.AutoTokenizer` loads, in its version 4 too, with equal ids.

        generation_config.json is written, with the end tokens, if the folder has none.
        """
        folder = Path(folder)
        self.tokenizer.save_pretrained(folder)
        config = folder / "tokenizer_config.json"
        settings = json.loads(config.read_text("utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        generation = folder / "generation_config.json"
        if not generation.exists():
            ends = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
            generation.write_text(json.dumps(ends, indent=2) + "\n", "utf-8")

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "this tokenizer has no chat template: take an instruction-tuned model, or set "
                "tokenizer.chat_template"
            )
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise ConfigError(
                "chat templates need the package jinja2: pip install 'jaxrl_llm[hf]'"
            ) from None
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"the chat template refuses the messages: {_line(error)}") from None

    def _find_eos(self, others: Iterable[int]) -> tuple[int, ...]:
        candidates = [self._end_of_turn(), *others, self.tokenizer.eos_token_id]
        ids = tuple(dict.fromkeys(i for i in candidates if i is not None))
        if not ids:
            raise ConfigError(
                "this tokenizer names no end token: set eos_token in tokenizer_config.json, or "
                "eos_token_id in generation_config.json"
            )
        if not all(0 <= i < self.vocab_size for i in ids):
            raise ConfigError(f"eos_ids={list(ids)}: expected ids below {self.vocab_size}")
        return ids

    def _end_of_turn(self) -> int | None:
        """The special token that the chat template writes after what an assistant says."""
        if not self.tokenizer.chat_template:
            return None
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        rest = self._render(turns, add_generation_prompt=False).rpartition(_MARK)[2]
        return next((i for i in self.encode(rest) if i in self._special), None)

    def _find_pad(self) -> int:
        if self.tokenizer.pad_token_id is not None:
            return self.tokenizer.pad_token_id
        texts = {i: self._backend.id_to_token(i) for i in sorted(self._special - {*self.eos_ids})}
        spare = [i for i, text in texts.items() if _SPARE.fullmatch(text)]
        return spare[0] if spare else self.eos_ids[0]


def _fast_class() -> Any:
    """The class of fast tokenizers, imported without the line that torch is missing."""

    def is_other(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_other)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(is_other)
    return PreTrainedTokenizerFast


def _fast_backend(tokenizer: Any) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is no fast tokenizer: expected one with a tokenizer.json"
        )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _checked_size(vocab_size: int | None, n_ids: int) -> int:
    if vocab_size is not None and vocab_size < n_ids:
        raise ConfigError(
            f"the tokenizer has ids up to {n_ids - 1} and the model {vocab_size}: expected a model "
            "with an embedding for each id"
        )
    return vocab_size or n_ids


def _reader(decoder: Any) -> tuple[Callable[[str, bool], bytes], bool]:
    """What reads a token's bytes, and whether a text's first space is not part of it."""
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_reader(), False
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not known.issuperset(kinds):
        raise ConfigError(
            f"cannot tell tokens' bytes from the decoder {kinds}: expected ByteLevel, or "
            "SentencePiece's Replace, ByteFallback, Fuse, Strip and Metaspace"
        )
    drops_space = any(
        step["type"] == "Strip" or step.get("prepend_scheme", "never") != "never" for step in steps
    )
    return _sentencepiece_reader(steps), drops_space


def _byte_level_reader() -> Callable[[str, bool], bytes]:
    """GPT-2 writes a byte that is a printable Latin-1 character as that, others from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    shown = [letter for letter in letters if ord(letter) < 256]
    hidden = sorted(set(range(256)) - set(map(ord, shown)))
    byte_of = dict(zip(letters, [*map(ord, shown), *hidden], strict=True))

    def read(text: str, is_added: bool) -> bytes:
        if is_added or not byte_of.keys() >= set(text):
            return text.encode()
        return bytes(byte_of[letter] for letter in text)

    return read


def _sentencepiece_reader(steps: Sequence[Mapping[str, Any]]) -> Callable[[str, bool], bytes]:
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    swaps = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    swaps += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]

    def read(text: str, is_added: bool) -> bytes:
        del is_added  # the decoder makes no difference
        if has_bytes and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        for old, new in swaps:
            text = text.replace(old, new)
        return text.encode()

    return read


def _table(words: Sequence[bytes]) -> TokenBytes:
    """The words, padded to the longest: all of it, about 20 MB for the largest vocabularies."""
    length = np.array([len(word) for word in words], np.int32)
    padded = b"".join(word.ljust(length.max(), b"\0") for word in words)
    return TokenBytes(np.frombuffer(padded, np.uint8).reshape(len(words), -1).copy(), length)


def _folder(name_or_folder: str | Path) -> Path:
    """The folder itself, or the hub's files in the cache."""
    if Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(name_or_folder), allow_patterns=_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"{name_or_folder} is neither a folder nor a model that can be fetched: {_line(error)}"
        ) from None


def _generation_eos(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ends = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {_line(error)}") from None
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def _line(error: Exception) -> str:
    """The first line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
