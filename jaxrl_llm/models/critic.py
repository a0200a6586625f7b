"""The value model: expected return before each completion token, 0 until it has learned."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.types import Completions, Prompts


def init_critic(
    kind: Literal["head", "separate"], model: LanguageModel, policy_params: Params
) -> Params:
    """Parameters of a value model that predicts exactly 0.

    Args:
        kind: "head" reads the policy's hidden states, and its loss trains them too; "separate" has
            a transformer of its own that begins as a copy of the policy's.
        model: the policy's functions.
        policy_params: the policy's parameters.
    """
    head = {"kernel": jnp.zeros(model.config.width), "bias": jnp.zeros(())}
    if kind == "head":
        return {"head": head}
    return {"head": head, "trunk": jax.tree.map(jnp.copy, lora.merge(policy_params))}


def values(
    critic: Params,
    model: LanguageModel,
    prompts: Prompts,
    completions: Completions,
    policy_hidden: Float[Array, "B G T D"],
) -> Float[Array, "B G T"]:
    """V(sₜ) = w·hₜ + b, with hₜ the hidden state that predicts token t.

    Args:
        critic: parameters of `init_critic`.
        model: the policy's functions.
        prompts: B prompts.
        completions: G completions of each.
        policy_hidden: the policy's hidden states, which a "head" reads.
    """
    hidden = policy_hidden
    if "trunk" in critic:
        hidden = model.completion_hidden(critic["trunk"], prompts, completions)
    kernel, bias = critic["head"]["kernel"], critic["head"]["bias"]
    return jnp.einsum("bgtd,d->bgt", hidden.astype(jnp.float32), kernel) + bias
