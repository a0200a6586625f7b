"""The environments as Gymnasium knows them: one episode at a time, text in, text out."""

from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnax.environments.environment import Environment
from jaxtyping import Array, Int, Key

from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.types import ConfigError


class TextEnv(gymnasium.Env[str, str]):
    """A gymnasium environment over one of ours, for agents that are not trained here.

    An action is the text of one turn or one completion, without an end token, which is appended.
    One that takes more than the A tokens of a turn (end token included) is cut to them and has no
    end, as in a rollout, so the environment calls it malformed or missing. An observation is what
    the environment writes; special tokens stand for nothing, and a character that no token is
    becomes ?. The info holds what rollouts log, as floats.

    It has a `spec`, so that `env.spec.make()` and `gymnasium.make_vec(env.spec, n)` make more.

    >>> from jaxrl_llm.envs.countdown import Countdown
    >>> from jaxrl_llm.tokenizers import arithmetic_tokenizer
    >>> env = TextEnv(Countdown(arithmetic_tokenizer()))
    >>> prompt, info = env.reset(seed=0)
    >>> _, reward, terminated, truncated, info = env.step("1+1")
    >>> reward > 0, terminated, info["is_present"]
    (True, True, 1.0)

    Args:
        env: an environment of ours, or one with the same protocol: `reset_env` and `step_env`
            observe `Prompts` of one row, `step_env` takes the tokens of the action space, and
            `tokenizer` is there.
        env_params: which episodes it draws; by default `env.default_params`.
        seed: of the episodes, unless `reset` is given one; by default they differ each time.
        render_mode: "ansi", the transcript so far, or None.

    Raises:
        ConfigError: the environment has no tokenizer, or the render mode is unknown.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        env: Environment,
        env_params: Any = None,
        *,
        seed: int | None = None,
        render_mode: str | None = "ansi",
    ):
        tokenizer: Tokenizer | None = getattr(env, "tokenizer", None)
        if tokenizer is None:
            raise ConfigError(
                f"{type(env).__name__} has no tokenizer; expected an environment of text, such as "
                "Countdown or DialogueEnv"
            )
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode={render_mode!r}: expected 'ansi' or None")
        self._params = env.default_params if env_params is None else env_params
        self._tokenizer, self._seed, self.render_mode = tokenizer, seed, render_mode
        self._env = env
        self._is_running, self._transcript = False, list[str]()
        self._max_tokens = env.action_space(self._params).shape[0]
        observed: Any = jax.eval_shape(env.reset_env, jax.random.key(0), self._params)[0]
        self.action_space = _texts(tokenizer, self._max_tokens)
        self.observation_space = written = _texts(tokenizer, observed.tokens.size)
        self._known = written.character_set
        # A closure, since gymnasium copies what a spec holds, and environments hold locks.
        self.spec = EnvSpec(
            f"jaxrl_llm/{env.name}-v0",
            entry_point=lambda **given: TextEnv(env, env_params, **given),
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, float]]:
        """Begin an episode; `options` are ignored."""
        super().reset(seed=self._seed if seed is None else seed)
        self._seed = None
        self._key = jax.random.key(self.np_random.integers(2**31))
        observed, self._state = _reset(self._env, self._next_key(), self._params)
        self._is_running, self._transcript = True, [self._decode(observed)]
        return self._transcript[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        """Take a turn.

        Raises:
            ValueError: the action is no text, or the tokenizer cannot encode it.
            gymnasium.error.ResetNeeded: no episode is running.
        """
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("no episode is running; call reset() first")
        tokens = self._encode(action)
        observed, self._state, *outcome = _step(
            self._env, self._next_key(), self._state, tokens, self._params
        )
        reward, is_terminated, is_truncated, info = jax.device_get(outcome)
        self._is_running = not (is_terminated or is_truncated)
        written = self._decode(observed)
        # What is observed at the end belongs to no turn: nobody reads it.
        self._transcript += [action, written] if self._is_running else [action]
        info = {name: float(value) for name, value in info.items()}
        return written, float(reward), bool(is_terminated), bool(is_truncated), info

    def render(self) -> str | None:  # type: ignore[override]
        """The transcript so far, a line for each turn and for all that is written in between."""
        return "\n".join(self._transcript) if self.render_mode == "ansi" else None

    def _next_key(self) -> Key[Array, ""]:
        self._key, key = jax.random.split(self._key)
        return key

    def _encode(self, text: str) -> Int[np.ndarray, "A"]:
        if not isinstance(text, str):
            raise ValueError(f"action {text!r}: expected text")
        try:
            ids = [*self._tokenizer.encode(text), self._tokenizer.eos_ids[0]]
        except (ConfigError, KeyError, ValueError) as error:
            raise ValueError(f"action {text[:80]!r}: {error}") from error
        tokens = np.full(self._max_tokens, self._tokenizer.pad_id, np.int32)
        tokens[: len(ids)] = ids[: self._max_tokens]
        return tokens

    def _decode(self, observed: Any) -> str:
        tokens, mask = jax.device_get(observed)
        text = self._tokenizer.decode(tokens[mask].tolist())
        return "".join(char if char in self._known else "?" for char in text)


# Compiled once for each environment below, however many views there are of it.


@partial(jax.jit, static_argnames="env")
def _reset(env: Environment, key: Key[Array, ""], params: Any) -> tuple[Any, Any]:
    return env.reset_env(key, params)


@partial(jax.jit, static_argnames="env")
def _step(env: Environment, key: Key[Array, ""], state: Any, action: Any, params: Any) -> tuple:
    observed, state, reward, is_terminated, info = env.step_env(key, state, action, params)
    is_truncated = env.is_truncated(state, params) & ~is_terminated
    return observed, state, reward, is_terminated, is_truncated, info


def _texts(tokenizer: Tokenizer, max_tokens: int) -> spaces.Text:
    """All texts of the tokenizer's characters that so many tokens could make."""
    characters = {c for i in range(tokenizer.vocab_size) for c in tokenizer.decode([i])}
    longest = max_tokens * tokenizer.token_bytes.table.shape[1]
    return spaces.Text(longest, min_length=0, charset="".join(sorted(characters)))
