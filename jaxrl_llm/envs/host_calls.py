"""Tools on the host, called from within a compiled rollout."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm.envs.device_tools import Answer
from jaxrl_llm.envs.text import Text, Tokens
from jaxrl_llm.envs.tools import ToolManager
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError

_MAX_THREADS = 32  # calls at a time


class HostCaller:
    """Calls the host's tools of a manager from a compiled program.

    The program waits for one callback, which serves all rows that `vmap` lays side by side. Their
    calls run at once, 32 at a time, each for no longer than its tool's `timeout` (and, while calls
    that hang hold all places, as long again until it gives up). `manager.statistics` counts them;
    to the manager none is redundant, as it does not know which calls are of one episode.

    Args:
        manager: tools that are registered later are not called.
        tokenizer: encodes the results; see `encode_known`.
        max_tokens: S, the longest result; more is cut off.
    """

    def __init__(self, manager: ToolManager, tokenizer: Tokenizer, max_tokens: int):
        self.names = [tool.name for tool in manager.host_tools()]
        self._manager, self._tokenizer, self._max_tokens = manager, tokenizer, max_tokens
        ids, mask = (jax.ShapeDtypeStruct((max_tokens,), kind) for kind in (jnp.int32, bool))
        self._shapes: Any = Answer(Tokens(ids, mask), jax.ShapeDtypeStruct((), bool))  # type: ignore
        self._max_chars = max_tokens * tokenizer.token_bytes.table.shape[1]

    def __call__(self, tool: Int[Array, ""], arguments: Text) -> Answer:
        """The answer of tool number `tool` of `names`; a negative number calls none."""
        return jax.pure_callback(
            self._call_rows,
            self._shapes,
            tool,
            arguments,
            vmap_method="broadcast_all",
        )

    def _call_rows(self, tool: Int[Array, "*b"], arguments: Text) -> Answer:
        which, raw, length = map(np.asarray, (tool, *arguments))
        rows = list(map(tuple, np.argwhere(which >= 0)))
        names = [self.names[which[row]] for row in rows]
        texts = [raw[row][: length[row]].tobytes().decode(errors="replace") for row in rows]
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            results = list(pool.map(self._manager.call, names, texts))
        answers: Any = jax.tree.map(
            lambda x: np.zeros((*which.shape, *x.shape), x.dtype), self._shapes
        )
        for row, result in zip(rows, results, strict=True):
            ids = encode_known(self._tokenizer, result.text[: self._max_chars])[: self._max_tokens]
            answers.tokens.ids[row][: len(ids)] = ids
            answers.tokens.mask[row][: len(ids)] = True
            answers.is_ok[row] = result.status == "ok"
        return answers


def encode_known(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text of which the tokenizer may not know every character.

    Unknown characters become ?, or nothing where ? is unknown too. Special tokens, which stand for
    no bytes, are left out: no text that a tool returns can end a turn.

    >>> from jaxrl_llm.tokenizers import CharTokenizer
    >>> tokenizer = CharTokenizer("cafe?")
    >>> tokenizer.decode(encode_known(tokenizer, "café"))
    'caf?'
    """
    if not _is_known(tokenizer, text):
        known = {char for char in {*text, "?"} if _is_known(tokenizer, char)}
        substitute = "?" if "?" in known else ""
        text = "".join(char if char in known else substitute for char in text)
    n_bytes = tokenizer.token_bytes.length
    return [token for token in tokenizer.encode(text) if n_bytes[token] > 0]


def _is_known(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except (ConfigError, ValueError, KeyError):
        return False
    return True
