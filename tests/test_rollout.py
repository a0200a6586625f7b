import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import Countdown
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.tokenizers import arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()
ENV = Countdown(TOKENIZER, max_completion=8)


def roll(prompts, group_size, key=0):
    model = LanguageModel(ModelConfig(width=16, layers=1, heads=2), TOKENIZER.vocab_size)
    rollout = make_rollout(
        ENV,
        ENV.default_params,
        model,
        TOKENIZER,
        SamplingConfig(max_tokens=8),
        prompts=prompts,
        group_size=group_size,
    )
    return jax.device_get(jax.jit(rollout)(model.init(jax.random.key(0)), jax.random.key(key)))


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
    first, again, other = roll(8, 2), roll(8, 2), roll(8, 2, key=1)
    np.testing.assert_array_equal(first.completions.tokens, again.completions.tokens)
    assert (first.prompts.tokens != other.prompts.tokens).any()
    assert jnp.any(first.completions.tokens[:, 0] != first.completions.tokens[:, 1])
