"""What environments of one turn over a list of prompts share: the prompts, and who draws them."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl_llm.envs.countdown import BOTH, HELD_OUT, TRAIN
from jaxrl_llm.envs.text import Tokens, join, left_padded
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError, Prompts

Message = Mapping[str, str]  # "role" and "content"


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows how its model is talked to."""

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]: ...


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Which prompts are drawn. These fields are static."""

    split: int = struct.field(pytree_node=False, default=TRAIN)  # or HELD_OUT, or BOTH
    # A digest of the prompts, so that a run's settings hold it: one cannot go on with others.
    data: str = struct.field(pytree_node=False, default="")


@struct.dataclass
class EnvState(environment.EnvState):
    """One episode."""

    time: Int[Array, ""]
    index: Int[Array, ""]  # of the prompt, among the training ones and then the held-out ones


class PromptTable:
    """N tokenised prompts, any of which can be written inside a compiled program.

    What all begin and end with, such as the frame of a chat template, is kept once.

    Args:
        prompts: token ids, at least one of each.
        pad_id: fills the left.
        max_prompt: the longest that is allowed, in tokens.

    Raises:
        ConfigError: no prompt, an empty one, or one that is too long; they are counted from 1.
    """

    def __init__(self, prompts: list[list[int]], pad_id: int, max_prompt: int | None = None):
        _check_prompts(prompts, max_prompt)
        self.length, self.pad_id = max(map(len, prompts)), pad_id
        head = _n_shared(min(prompts), max(prompts))  # the extremes share what all share
        rests = [ids[head:][::-1] for ids in prompts]
        tail = _n_shared(min(rests), max(rests))
        middles = [ids[head : len(ids) - tail] for ids in prompts]
        lengths = np.array([len(ids) for ids in middles])
        ids = np.zeros((len(prompts), lengths.max()), np.min_scalar_type(max(map(max, prompts))))
        ids[np.arange(lengths.max())[None, :] < lengths[:, None]] = np.concatenate(middles)
        self._ids, self._lengths = jnp.asarray(ids), jnp.asarray(lengths, jnp.int32)
        self._head, self._tail = prompts[0][:head], rests[0][:tail][::-1]
        self.digest = hashlib.sha256(
            b"".join(np.array([len(p), *p], "<i4").tobytes() for p in prompts)
        ).hexdigest()[:16]

    def write(self, index: Int[Array | np.ndarray, ""]) -> Prompts:
        """Prompt number `index`, left-padded to the longest."""
        ids = self._ids[index].astype(jnp.int32)
        middle = Tokens(ids, jnp.arange(ids.size) < self._lengths[index])
        whole = join(_fixed(self._head), middle, _fixed(self._tail))
        return left_padded(whole, self.length, self.pad_id)


class SingleTurnEnv(environment.Environment):
    """An environment whose episode is one prompt and one completion.

    Subclasses define `judge`. `reset` draws one of the prompts of `params.split`, uniformly; `step`
    takes the completion, of which everything from the first end token on is ignored. To
    `judge`'s info `is_truncated` is added: there was no end token.

    Args:
        tokenizer: the policy's.
        prompts: token ids of the training prompts and, after them, of the held-out ones.
        n_train: how many are for training.
        max_completion: T, in tokens, end token included.
        max_prompt: the longest prompt that is allowed, in tokens.

    Raises:
        ConfigError: see `PromptTable`; or `max_completion` is below 1.
    """

    on_device = True  # whether rewards are computed without leaving the device

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        n_train: int,
        *,
        max_completion: int,
        max_prompt: int | None = None,
    ):
        if max_completion < 1:
            raise ConfigError(f"max_completion={max_completion}: expected at least 1 token")
        self.tokenizer, self.max_completion, self.n_train = tokenizer, max_completion, n_train
        self.table = PromptTable(prompts, tokenizer.pad_id, max_prompt)
        self._ranges = {
            TRAIN: (0, n_train),
            HELD_OUT: (n_train, len(prompts)),
            BOTH: (0, len(prompts)),
        }

    def judge(
        self,
        index: Int[Array, ""],
        tokens: Int[Array, "T"],
        is_said: Bool[Array, "T"],
        params: Any,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The reward of a completion of prompt `index`, and what to report of it.

        `is_said` holds for the tokens before the end.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def default_params(self) -> EnvParams:
        return EnvParams(data=self.table.digest)

    @property
    def prompt_length(self) -> int:
        """P: the longest prompt, in tokens."""
        return self.table.length

    def reset_env(self, key: Key[Array, ""], params: EnvParams) -> tuple[Prompts, EnvState]:
        """Draw a prompt.

        Raises:
            ConfigError: there is none in this split.
        """
        low, high = self._ranges.get(params.split, (0, 0))
        if low == high:
            raise ConfigError(
                f"no prompts in split {params.split}: expected {TRAIN} (training), {HELD_OUT} "
                f"(held out; give {self.name} some as held_out=) or {BOTH} (both)"
            )
        index = jax.random.randint(key, (), low, high)
        return self.table.write(index), EnvState(time=jnp.int32(0), index=index)

    def step_env(
        self, key: Key[Array, ""], state: EnvState, action: Int[Array, "T"], params: EnvParams
    ) -> tuple[Prompts, EnvState, Float[Array, ""], Bool[Array, ""], dict[str, Float[Array, ""]]]:
        del key  # nothing is random
        is_end = jnp.isin(action, np.array(self.tokenizer.eos_ids))
        reward, info = self.judge(state.index, action, jnp.cumsum(is_end) == 0, params)
        info["is_truncated"] = ~is_end.any()
        return (
            self.table.write(state.index),
            dataclasses.replace(state, time=state.time + 1),
            reward.astype(jnp.float32),
            jnp.array(True),
            {name: value.astype(jnp.float32) for name, value in info.items()},
        )

    def is_terminated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        return state.time > 0

    def is_truncated(self, state: EnvState, params: EnvParams) -> Bool[Array, ""]:
        """Never: an episode ends with its only completion, not by a time limit."""
        return jnp.array(False)

    def action_space(self, params: EnvParams) -> spaces.Box:
        return spaces.Box(0, self.tokenizer.vocab_size - 1, (self.max_completion,), jnp.int32)

    def observation_space(self, params: EnvParams) -> spaces.Dict:
        last_id, shape = self.tokenizer.vocab_size - 1, (self.prompt_length,)
        tokens, mask = spaces.Box(0, last_id, shape, jnp.int32), spaces.Box(0, 1, shape, jnp.bool_)
        return spaces.Dict({"tokens": tokens, "mask": mask})


def check_chat(tokenizer: Any) -> None:
    """Refuse a tokenizer that has no chat template."""
    if not hasattr(tokenizer, "chat"):
        raise ConfigError(
            f"{type(tokenizer).__name__} has no method `chat`: expected a tokenizer with a chat "
            "template, such as hf_tokenizers.HFTokenizer"
        )


def _check_prompts(prompts: list[list[int]], max_prompt: int | None) -> None:
    if not prompts:
        raise ConfigError("no prompts: expected at least one")
    for i, ids in enumerate(prompts, 1):
        if not len(ids):
            raise ConfigError(f"prompt {i} has no tokens: expected at least one")
        if max_prompt is not None and len(ids) > max_prompt:
            raise ConfigError(
                f"prompt {i} has {len(ids)} tokens: expected at most max_prompt={max_prompt}; "
                "leave it out, or raise max_prompt"
            )


def _n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists have in common from the left."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _fixed(ids: Sequence[int]) -> Tokens:
    return Tokens(jnp.array(ids, jnp.int32), jnp.ones(len(ids), bool))
