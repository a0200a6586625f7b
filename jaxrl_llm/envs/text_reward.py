"""Rewards in Python: functions of texts, as TRL's users have them, called from the rollout."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.envs.single_turn import EnvParams, SingleTurnEnv, check_chat
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError

RewardFn = Callable[..., Sequence[float | None]]
Row = Mapping[str, Any]  # "prompt", and any other columns
_GIVEN = ("prompts", "completions", "completion_ids")


class TextRewardEnv(SingleTurnEnv):
    """An environment over a list of prompts, rewarded by functions of text.

    The functions have TRL's form, `reward(prompts, completions, **columns) -> list[float]`: each
    is called once for all completions of a rollout (of one device), those of a prompt side by
    side, by keyword, and returns one reward each, or None where it has nothing to say. They get
    of the following what their signature names, all of it with `**kwargs`:

      prompts          what the dataset holds: a text, or a list of messages
      completions      texts without special tokens; where prompts are messages, lists of one
                       message [{"role": "assistant", "content": text}], as in TRL
      completion_ids   their tokens, the end token included
      any column       of the dataset

    A prompt that is text is encoded as it stands; messages get the chat template. The reward is the
    weighted sum; None counts as 0. The info holds `reward/NAME` of each function, `is_correct`
    (the reward is at least `correct_at`) and `is_truncated` (no end token).

    The functions run on the host while the device waits; they must not use JAX. An exception in
    one stops the run with a `JaxRuntimeError` whose text is the function's traceback, and so do
    a wrong number of rewards and rewards that are no finite numbers.

    Args:
        tokenizer: the policy's.
        dataset: rows with "prompt" and the same columns each.
        reward_fns: one function, or several.
        weights: of the functions; by default 1 each.
        held_out: the rows of `params.split` HELD_OUT.
        max_completion: T, in tokens, end token included.
        max_prompt: the longest prompt that is allowed, in tokens.
        correct_at: the reward from which on a completion counts as correct.

    Raises:
        ConfigError: rows that do not fit together, a function that needs a column which is not
            there, weights that are not one finite number for each, or a prompt that is too long.
    """

    on_device = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        dataset: Sequence[Row],
        reward_fns: RewardFn | Sequence[RewardFn],
        weights: Sequence[float] | None = None,
        *,
        held_out: Sequence[Row] = (),
        max_completion: int = 256,
        max_prompt: int | None = None,
        correct_at: float = 1.0,
    ):
        self.rows = [*dataset, *held_out]
        self.is_chat = _check_rows(self.rows, tokenizer)
        self.reward_fns = [reward_fns] if callable(reward_fns) else list(reward_fns)
        self.weights = [1.0] * len(self.reward_fns) if weights is None else list(weights)
        _check_weights(self.weights, len(self.reward_fns))
        self._columns = [name for name in self.rows[0] if name != "prompt"]
        self._wanted = [_wanted(fn, [*_GIVEN, *self._columns]) for fn in self.reward_fns]
        self.names = _distinct([_name(fn) for fn in self.reward_fns])
        self.correct_at = correct_at
        write: Any = tokenizer.chat if self.is_chat else tokenizer.encode  # type: ignore
        super().__init__(
            tokenizer,
            [list(write(row["prompt"])) for row in self.rows],
            len(dataset),
            max_completion=max_completion,
            max_prompt=max_prompt,
        )

    @property
    def default_params(self) -> EnvParams:
        described = repr((self.table.digest, self.names, self.weights, self.correct_at))
        return EnvParams(data=hashlib.sha256(described.encode()).hexdigest()[:16])

    def judge(
        self,
        index: Int[Array, ""],
        tokens: Int[Array, "T"],
        is_said: Bool[Array, "T"],
        params: EnvParams,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        values = jax.pure_callback(
            self._call,
            jax.ShapeDtypeStruct((len(self.reward_fns),), jnp.float32),
            index,
            tokens,
            is_said.sum(),
            vmap_method="broadcast_all",
        )
        reward = (values * jnp.array(self.weights, jnp.float32)).sum()
        info = {f"reward/{name}": values[i] for i, name in enumerate(self.names)}
        return reward, info | {"is_correct": reward >= self.correct_at}

    def _call(
        self, index: Int[Array, "*b"], tokens: Int[Array, "*b T"], n_said: Int[Array, "*b"]
    ) -> Float[np.ndarray, "*b F"]:
        shape = np.shape(index)
        ids = np.asarray(tokens).reshape(-1, np.shape(tokens)[-1]).tolist()
        lengths = np.asarray(n_said).reshape(-1).tolist()
        rows = [self.rows[i] for i in np.asarray(index).reshape(-1)]
        texts = [self.tokenizer.decode(a[:n]) for a, n in zip(ids, lengths, strict=True)]
        given = {
            "prompts": [row["prompt"] for row in rows],
            "completions": [self._as_completion(text) for text in texts],
            "completion_ids": [a[: n + 1] for a, n in zip(ids, lengths, strict=True)],
        }
        given |= {name: [row[name] for row in rows] for name in self._columns}
        values = [
            _checked(name, fn(**{k: given[k] for k in wanted}), len(rows))
            for name, fn, wanted in zip(self.names, self.reward_fns, self._wanted, strict=True)
        ]
        return np.array(values, np.float32).T.reshape(*shape, len(self.reward_fns))

    def _as_completion(self, text: str) -> str | list[dict[str, str]]:
        return [{"role": "assistant", "content": text}] if self.is_chat else text


def _check_rows(rows: Sequence[Row], tokenizer: Any) -> bool:
    """Whether the prompts are messages."""
    if not rows or not all(isinstance(row, Mapping) and "prompt" in row for row in rows):
        raise ConfigError('dataset: expected a list of rows such as {"prompt": "2+2=", ...}')
    is_chat = not isinstance(rows[0]["prompt"], str)
    for i, row in enumerate(rows, 1):
        if set(row) != set(rows[0]):
            raise ConfigError(
                f"row {i} has columns {sorted(row)}, row 1 {sorted(rows[0])}: expected the same"
            )
        if not _is_messages(row["prompt"]) if is_chat else not isinstance(row["prompt"], str):
            raise ConfigError(
                f"row {i}: prompt={str(row['prompt'])[:80]!r}; expected texts in all rows, or "
                'lists of messages {"role": ..., "content": ...} in all'
            )
    taken = sorted(set(_GIVEN) & set(rows[0]))
    if taken:
        raise ConfigError(f"columns {taken} have the names of what reward functions get: rename")
    if is_chat:
        check_chat(tokenizer)
    return is_chat


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt)
    )


def _check_weights(weights: Sequence[float], n: int) -> None:
    if not n or len(weights) != n or not all(map(math.isfinite, weights)):
        raise ConfigError(
            f"{n} reward functions, weights={list(weights)}: expected at least one function, and "
            "one finite weight for each"
        )


def _wanted(fn: RewardFn, names: list[str]) -> list[str]:
    """Which of the names the function takes."""
    if not callable(fn):
        raise ConfigError(f"reward function {fn!r}: expected a function")
    parameters = inspect.signature(fn).parameters.values()
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in names
    ]
    if missing:
        raise ConfigError(
            f"reward function {_name(fn)} needs {missing}: expected columns of the dataset, which "
            f"has {names[len(_GIVEN) :]}"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return names if takes_all else [p.name for p in parameters if p.name in names]


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _distinct(names: list[str]) -> list[str]:
    """Numbered from the second of a name on."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}_{n + 1}" if n else name for name, n in zip(names, before, strict=True)]


def _checked(name: str, values: Any, n: int) -> list[float]:
    """One finite number for each completion; 0 for None."""
    try:
        values = list(values)
    except TypeError:
        raise TypeError(f"reward function {name} returned {values!r}: expected a list") from None
    if len(values) != n:
        raise ValueError(
            f"reward function {name} returned {len(values)} rewards for {n} completions: "
            "expected one for each"
        )
    for i, value in enumerate(values):
        if value is not None and not _is_finite(value):
            raise ValueError(
                f"reward function {name} returned {value!r} for completion {i + 1} of {n}: "
                "expected a finite number, or None"
            )
    return [0.0 if value is None else float(value) for value in values]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
