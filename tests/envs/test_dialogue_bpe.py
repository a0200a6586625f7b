"""The dialogue protocol as a byte-level BPE tokenizer writes it, with merges across tags."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_llm.envs.demonstrations import demonstrations
from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.tokenizers import TokenBytes

N = 64


class BPETokenizer:
    """A byte-level BPE of the `tokenizers` library, as the environments want it."""

    pad_id, eos_ids = 0, (1,)

    def __init__(self, corpus):
        self._bpe = tokenizers.Tokenizer(models.BPE())
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<pad>", "<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self._bpe.train_from_iterator(corpus, trainer)
        spelled = [b"", b""] + [self.decode([i]).encode() for i in range(2, self.vocab_size)]
        length = np.array([len(word) for word in spelled], np.int32)
        table = np.frombuffer(b"".join(word.ljust(length.max(), b"\0") for word in spelled), "u1")
        self.token_bytes = TokenBytes(table.reshape(len(spelled), -1), length)

    @property
    def vocab_size(self):
        return self._bpe.get_vocab_size()

    def encode(self, text):
        return self._bpe.encode(text).ids

    def decode(self, ids):
        return self._bpe.decode(list(ids))


def texts(env, max_tokens):
    """N scripted dialogues, as text: what came first, and all that followed."""
    shown = demonstrations(env, env.default_params, N, max_tokens=max_tokens, seed=3)
    decode = env.tokenizer.decode
    return [
        (decode(tokens[is_asked].tolist()), decode(said[is_said].tolist()))
        for tokens, is_asked, said, is_said in zip(
            *jax.device_get(shown.prompts), shown.tokens, shown.attention_mask, strict=True
        )
    ]


@pytest.mark.slow
def test_a_bpe_tokenizer_writes_and_reads_the_same_dialogues():
    # `demonstrations` plays every dialogue through the compiled environment, and raises where one
    # does not end with right answers.
    by_character = texts(DialogueEnv("tool_efficiency"), 128)
    tokenizer = BPETokenizer([text for pair in by_character for text in pair])
    assert any(b"><" in word for word in map(bytes, tokenizer.token_bytes.table))
    by_bpe = texts(
        DialogueEnv("tool_efficiency", tokenizer=tokenizer, max_turn_tokens=40, max_written=40),
        400,
    )
    assert by_bpe == by_character
