import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import Countdown
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import (
    Rollout,
    make_rollout,
    mask_dead_groups,
    rollout_metrics,
    sample_until_alive,
)
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.types import Completions, Prompts

TOKENIZER = arithmetic_tokenizer()
ENV = Countdown(TOKENIZER, max_completion=8)
MODEL = LanguageModel(ModelConfig(width=16, layers=1, heads=2), TOKENIZER.vocab_size)


@functools.cache
def compiled(prompts, group_size):
    rollout = make_rollout(
        ENV,
        ENV.default_params,
        MODEL,
        TOKENIZER,
        SamplingConfig(max_tokens=8),
        prompts=prompts,
        group_size=group_size,
    )
    return jax.jit(rollout)


def roll(prompts, group_size, key=0):
    params = MODEL.init(jax.random.key(0))
    return jax.device_get(compiled(prompts, group_size)(params, jax.random.key(key)))


def text(tokens, mask):
    return TOKENIZER.decode(np.asarray(tokens)[np.asarray(mask)].tolist())


def test_rewards_are_those_of_the_prompt_that_the_completion_answers():
    rolled = roll(16, 8)
    assert rolled.rewards.shape == (16, 8)
    for b, g in np.ndindex(16, 8):
        tokens = rolled.completions.tokens[b, g]
        is_ended = np.isin(tokens, TOKENIZER.eos_ids).any()
        answer = text(tokens, rolled.completions.loss_mask[b, g]).strip()
        assert (rolled.rewards[b, g] > 0) == (is_ended and answer != "")
    prompt = text(rolled.prompts.tokens[0], rolled.prompts.mask[0])
    numbers, target = prompt.strip().split("=")
    assert host.solve([int(n) for n in numbers.split(",")], int(target)) is not None


def test_a_problem_and_its_completions_do_not_depend_on_how_many_there_are():
    few, many = roll(2, 3), roll(6, 5)
    np.testing.assert_array_equal(few.prompts.tokens, many.prompts.tokens[:2])
    np.testing.assert_array_equal(few.completions.tokens, many.completions.tokens[:2, :3])


def test_other_keys_draw_other_problems_and_the_same_key_the_same():
    first, again, other = roll(6, 5), roll(6, 5), roll(6, 5, key=1)
    np.testing.assert_array_equal(first.completions.tokens, again.completions.tokens)
    assert (first.prompts.tokens != other.prompts.tokens).any()
    assert jnp.any(first.completions.tokens[:, 0] != first.completions.tokens[:, 1])


# Dynamic sampling, on rollouts whose groups are alive or dead by decree.

N = 4  # groups in a batch


def decreed(rounds):
    """A rollout whose round r has the rewards [[0, x], ...] with x = 1 where `rounds[r]` says so.

    Group b of round r bears the number 10·r + b in its tokens, its prompt and its report.
    """
    alive = jnp.array(rounds, jnp.float32)

    def rollout(_, key):
        # What fold_in(base key, r) draws tells the round.
        r = jnp.argmax(
            jnp.array([jnp.all(jax.random.key_data(key) == data) for data in ROUND_KEYS])
        )
        names = 10 * r + jnp.arange(N)
        ones = jnp.ones((N, 2, 3))
        tokens = (names[:, None, None] * ones).astype(jnp.int32)
        # Round r samples r + 1 tokens of each completion.
        mask = (jnp.arange(3)[None, None, :] <= r) & (ones > 0)
        return Rollout(
            Prompts(jnp.stack([names, names], -1), jnp.ones((N, 2), bool)),
            Completions(tokens, mask, mask, -ones),
            jnp.stack([jnp.zeros(N), alive[r]], -1) + r,
            {"is_named": tokens[:, :, 0].astype(jnp.float32)},
        )

    return rollout


ROUND_KEYS = [jax.random.key_data(jax.random.fold_in(jax.random.key(0), r)) for r in range(4)]


def draw_decreed(rounds, max_rounds):
    draw = sample_until_alive(decreed(rounds), max_rounds)
    return jax.device_get(jax.jit(draw)(None, jax.random.key(0)))


def names_of(rolled):
    """The groups of the batch, by their number; each must be of one piece."""
    names = rolled.prompts.tokens[:, 0]
    assert (rolled.completions.tokens == names[:, None, None]).all()
    assert (rolled.info["is_named"] == names[:, None]).all()
    return names.tolist()


def test_alive_groups_fill_the_batch_in_the_order_of_drawing_and_a_surplus_is_dropped():
    rolled, metrics = draw_decreed([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], 4)
    assert names_of(rolled) == [1, 3, 21, 22]
    np.testing.assert_array_equal(rolled.rewards, [[0, 1], [0, 1], [2, 3], [2, 3]])
    np.testing.assert_array_equal(rolled.completions.loss_mask.sum(-1)[:, 0], [1, 1, 3, 3])
    assert metrics["rollout/rounds"] == 3
    assert metrics["rollout/filled"] == 1


def test_metrics_of_dynamic_sampling_are_of_all_groups_drawn():
    _, metrics = draw_decreed([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], 4)
    # Means of the rounds' rewards: (0 + 2/8), 1, (2 + 3/8); of their reports: those of 10·r + 1.5.
    np.testing.assert_allclose(metrics["reward/mean"], (0.25 + 1.0 + 2.375) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout/named"], 11.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["reward/dead_groups"], (2 + 4 + 1) / 12, rtol=1e-6)
    # Round r samples r + 1 tokens of each of its 8 completions.
    np.testing.assert_allclose(metrics["rollout/length_mean"], 2.0, rtol=1e-6)
    assert metrics["rollout/length_max"] == 3
    assert metrics["rollout/tokens"] == 8 * (1 + 2 + 3)


def test_groups_that_are_missing_after_the_last_round_have_no_weight():
    rolled, metrics = draw_decreed([[0, 0, 1, 0], [1, 0, 0, 0]], 2)
    assert names_of(rolled)[:2] == [2, 10]
    np.testing.assert_array_equal(rolled.completions.loss_mask.any((1, 2)), [1, 1, 0, 0])
    assert metrics["rollout/rounds"] == 2
    assert metrics["rollout/filled"] == 0.5


def test_dynamic_sampling_ends_when_every_group_is_dead():
    rolled, metrics = draw_decreed([[0, 0, 0, 0]] * 3, 3)
    assert not rolled.completions.loss_mask.any()
    assert metrics["rollout/rounds"] == 3
    assert metrics["rollout/filled"] == 0
    assert metrics["reward/dead_groups"] == 1
    assert rolled.prompts.mask.all()  # a prompt of all padding would attend to nothing


def test_one_round_of_alive_groups_is_that_rollout_bit_for_bit(bandit, toy_params):
    rollout = bandit(lambda tokens: tokens[..., 0] + jnp.arange(8.0)[None] / 100)
    rolled, metrics = jax.jit(sample_until_alive(rollout, 4))(toy_params, jax.random.key(1))
    expected = jax.jit(rollout)(toy_params, jax.random.fold_in(jax.random.key(1), 0))
    chex.assert_trees_all_equal(rolled, expected)
    chex.assert_trees_all_close(
        {k: metrics[k] for k in rollout_metrics(expected)}, rollout_metrics(expected), rtol=1e-6
    )
    assert metrics["rollout/rounds"] == 1


def test_masking_dead_groups_takes_their_tokens_out_of_the_loss_and_changes_nothing_else(
    prompts, completions
):
    rewards = jnp.array([[0, 1, 0, 0], [0.1] * 4, [1, 1, 1, 1], [0, 0, 0, 1e-9], [0, 0, 0.5, 1]])
    rolled = Rollout(prompts, completions, rewards, {})
    masked = mask_dead_groups(rolled)
    is_alive = np.array([True, False, False, False, True])
    expected = np.asarray(completions.loss_mask) & is_alive[:, None, None]
    np.testing.assert_array_equal(masked.completions.loss_mask, expected)
    restored = masked.completions._replace(loss_mask=completions.loss_mask)
    chex.assert_trees_all_equal(masked._replace(completions=restored), rolled)
