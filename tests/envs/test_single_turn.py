import random

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.envs.single_turn import PromptTable
from jaxrl_llm.types import ConfigError

PAD = 9


@pytest.mark.parametrize(
    "prompts",
    [
        # The first two share more, at either end, than all do.
        [[1, 2, 3, 4, 5], [1, 2, 3, 7, 4, 5], [1, 6, 5], [1, 2, 5]],
        [[1, 2, 1], [1, 1], [1]],  # beginning and end overlap
        [[1, 2], [1, 2]],  # nothing differs
        [[70_000, 3], [3]],  # more than 16 bits
        [[random.Random(i).randint(1, 2) for _ in range(i % 5 + 1)] for i in range(40)],
    ],
)
def test_every_prompt_is_written_as_it_is_left_padded(prompts):
    table = PromptTable(prompts, PAD)
    longest = max(map(len, prompts))
    assert table.length == longest
    written = jax.jit(jax.vmap(table.write))(jnp.arange(len(prompts)))
    assert written.tokens.dtype == jnp.int32
    for row, ids in enumerate(prompts):
        n_padding = longest - len(ids)
        assert written.tokens[row].tolist() == [PAD] * n_padding + ids
        assert written.mask[row].tolist() == [False] * n_padding + [True] * len(ids)


def test_the_digest_tells_prompts_apart_by_their_tokens_bounds_and_order():
    lists = ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2], [4]], [[1, 2], [3]])
    digests = [PromptTable(prompts, PAD).digest for prompts in lists]
    assert len(set(digests)) == 4 and digests[0] == digests[4]


def test_no_prompts_are_refused():
    with pytest.raises(ConfigError, match="no prompts: expected at least one"):
        PromptTable([], PAD)
