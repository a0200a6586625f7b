"""Python rewards: what the functions are given, and what becomes of what they return."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs.countdown import HELD_OUT
from jaxrl_llm.envs.single_turn import EnvState
from jaxrl_llm.envs.text_reward import TextRewardEnv
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.rl_trainer import RLTrainer
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError

T = 6
DATA = [
    {"prompt": "a", "answer": 1, "tags": ["x"]},
    {"prompt": "bca", "answer": 2, "tags": []},
    {"prompt": "cc", "answer": 3, "tags": ["y", "z"]},
]


class ChatTokenizer(CharTokenizer):
    """Messages one after the other, each begun by the begin token."""

    def chat(self, messages, add_generation_prompt=True):
        ids = [i for m in messages for i in (self.bos_id, *self.encode(m["content"]))]
        return [*ids, self.bos_id] if add_generation_prompt else ids


TOKENIZER = ChatTokenizer("abc")
A, B, C, END, BEGIN = 3, 4, 5, 2, 1


def environment(fns, data=DATA, **settings):
    return TextRewardEnv(TOKENIZER, data, fns, **({"max_completion": T} | settings))


def stepped(env, indices, completions):
    """Rewards and infos of [B, G] completions, lists of tokens, as a rollout steps."""
    tokens = np.array([[[*ids, *[0] * T][:T] for ids in group] for group in completions])
    states = EnvState(time=jnp.zeros(len(indices), jnp.int32), index=jnp.array(indices))
    step = jax.vmap(
        jax.vmap(env.step_env, in_axes=(None, None, 0, None)), in_axes=(None, 0, 0, None)
    )
    step = jax.jit(step)
    _, _, reward, _, info = step(jax.random.key(0), states, tokens, env.default_params)
    return np.asarray(reward), {name: np.asarray(value) for name, value in info.items()}


GROUPS = [[[A, B, END, C], [END]], [[C] * T, [BEGIN, A, END]]]


def test_a_function_gets_the_texts_and_columns_of_its_rows_in_groups_and_once():
    calls = []

    def reward(prompts, completions, **given):
        calls.append((prompts, completions, given))
        return [10.0, 20.0, 30.0, 40.0]

    rewards, _ = stepped(environment(reward), [2, 1], GROUPS)
    assert rewards.tolist() == [[10, 20], [30, 40]]
    [(prompts, completions, given)] = calls
    assert prompts == ["cc", "cc", "bca", "bca"]
    assert completions == ["ab", "", "cccccc", "a"]  # special tokens stand for nothing
    assert given == {
        "completion_ids": [[A, B, END], [END], [C] * T, [BEGIN, A, END]],
        "answer": [3, 3, 2, 2],
        "tags": [["y", "z"], ["y", "z"], [], []],
    }


def test_a_function_gets_only_what_its_signature_names():
    def by_answer(completions, answer):
        return [len(c) - a for c, a in zip(completions, answer, strict=True)]

    def by_ids(completion_ids, bonus=0.5):
        return [len(ids) + bonus for ids in completion_ids]

    env = environment([by_answer, by_ids], weights=[1.0, -2.0])
    rewards, info = stepped(env, [2, 1], GROUPS)
    assert info["reward/by_answer"].tolist() == [[-1, -3], [4, -1]]
    assert info["reward/by_ids"].tolist() == [[3.5, 1.5], [6.5, 3.5]]
    assert rewards.tolist() == [[-8, -6], [-9, -8]]


def test_messages_get_the_chat_template_and_completions_are_messages_too():
    data = [
        {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]},
        {"prompt": [{"role": "user", "content": "b"}]},
    ]
    calls = []

    def reward(prompts, completions):
        calls.append((prompts, completions))
        return [len(c[0]["content"]) for c in completions]

    env = environment(reward, data)
    rewards, _ = stepped(env, [0, 1], GROUPS)
    assert rewards.tolist() == [[2, 0], [6, 1]]
    [(prompts, completions)] = calls
    assert prompts == [data[0]["prompt"]] * 2 + [data[1]["prompt"]] * 2
    assert completions[0] == [{"role": "assistant", "content": "ab"}]
    shown = env.table.write(jnp.int32(0))
    assert shown.tokens.tolist() == [BEGIN, A, BEGIN, B, C, BEGIN] and shown.mask.all()
    shown = env.table.write(jnp.int32(1))
    assert shown.tokens.tolist() == [0, 0, 0, BEGIN, B, BEGIN]
    assert shown.mask.tolist() == [False] * 3 + [True] * 3


def test_prompts_of_text_are_encoded_as_they_stand():
    env = environment(broken)
    for row, expected in enumerate(([0, 0, A], [B, C, A], [0, C, C])):
        shown = env.table.write(jnp.int32(row))
        assert shown.tokens.tolist() == expected
        assert shown.mask.tolist() == [token > 0 for token in expected]
    assert env.prompt_length == 3


def test_none_is_no_reward_and_the_other_functions_count():
    def sometimes(completions):
        return [None if not c else 1 for c in completions]

    def always(completions):
        return np.full(len(completions), 0.25)

    rewards, info = stepped(environment([sometimes, always]), [0, 1], GROUPS)
    assert rewards.tolist() == [[1.25, 0.25], [1.25, 1.25]]
    assert info["is_correct"].tolist() == [[1, 0], [1, 1]]
    assert info["is_truncated"].tolist() == [[0, 0], [1, 0]]


def test_what_counts_as_correct_is_a_parameter():
    env = environment(lambda completions: [len(c) for c in completions], correct_at=2.0)
    assert stepped(env, [0, 1], GROUPS)[1]["is_correct"].tolist() == [[1, 0], [1, 0]]


def test_functions_of_one_name_are_told_apart_and_any_callable_will_do():
    class Constant:
        def __call__(self, completions):
            return [7] * len(completions)

    def twice(completions, factor):
        return [factor] * len(completions)

    env = environment(
        [Constant(), Constant(), partial(twice, factor=3), lambda completions: [1] * 4]
    )
    assert env.names == ["Constant", "Constant_2", "partial", "<lambda>"]
    assert stepped(env, [0, 1], GROUPS)[0].tolist() == [[18, 18], [18, 18]]


def broken(completions):
    raise KeyError("my reward broke")


def short(completions):
    return [1.0] * (len(completions) - 1)


def returning(value):
    def odd(completions):
        return [0.0, value, 0.0, 0.0]

    return odd


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fn", "messages"),
    [
        (broken, ["in broken", "KeyError: 'my reward broke'", "test_text_reward.py"]),
        (short, ["reward function short returned 3 rewards for 4 completions"]),
        (returning(math.nan), ["reward function odd returned nan for completion 2 of 4"]),
        (returning(math.inf), ["reward function odd returned inf for completion 2 of 4"]),
        (returning("1"), ["reward function odd returned '1' for completion 2 of 4"]),
        (lambda completions: None, ["reward function <lambda> returned None: expected a list"]),
        (lambda completions: 1.0, ["reward function <lambda> returned 1.0: expected a list"]),
    ],
)
def test_what_a_function_does_wrong_stops_the_run_and_names_it(fn, messages):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        stepped(environment(fn), [0, 1], GROUPS)
    for message in messages:
        assert message in str(caught.value)


def test_what_cannot_work_is_refused_in_one_line_before_anything_compiles():
    def needy(completions, solution):
        return []

    chat = [{"prompt": [{"role": "user", "content": "a"}]}]
    for data, fns, settings, message in (
        ([], len, {}, "expected a list of rows"),
        ([{"question": "a"}], len, {}, "expected a list of rows"),
        (["a"], len, {}, "expected a list of rows"),
        ([{"prompt": "a"}, {"prompt": "b", "n": 1}], len, {}, r"row 2 has columns \['n', 'prompt'"),
        ([{"prompt": "a"}, *chat], len, {}, "row 2: prompt=.*expected texts in all"),
        ([*chat, {"prompt": "a"}], len, {}, "row 2: prompt='a'"),
        ([{"prompt": [{"role": "user"}]}], len, {}, "row 1: prompt="),
        ([{"prompt": 5}], len, {}, "row 1: prompt='5'"),
        ([{"prompt": "a", "completions": 1}], len, {}, "completions.*rename"),
        ([{"prompt": "a"}, {"prompt": "abc"}], len, {"max_prompt": 2}, "prompt 2 has 3 tokens"),
        ([{"prompt": "a"}, {"prompt": ""}], len, {}, "prompt 2 has no tokens"),
        (DATA, needy, {}, r"needy needs \['solution'\].*\['answer', 'tags'\]"),
        (DATA, [], {}, "0 reward functions"),
        (DATA, ["len"], {}, "'len': expected a function"),
        (DATA, [broken, short], {"weights": [1.0]}, r"2 reward functions, weights=\[1.0\]"),
        (DATA, broken, {"weights": [math.nan]}, "one finite weight"),
        (DATA, broken, {"max_completion": 0}, "max_completion=0"),
    ):
        fns = (lambda completions: []) if fns is len else fns
        with pytest.raises(ConfigError, match=message) as caught:
            environment(fns, data, **settings)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="CharTokenizer has no method `chat`"):
        TextRewardEnv(CharTokenizer("abc"), chat, broken)


def test_held_out_rows_come_after_those_of_training():
    env = environment(broken, DATA[:1], held_out=DATA[1:])
    params = dataclasses.replace(env.default_params, split=HELD_OUT)
    for split_params, expected in ((env.default_params, {"a"}), (params, {"bca", "cc"})):
        shown, _ = jax.vmap(env.reset_env, (0, None))(
            jax.random.split(jax.random.key(0), 60), split_params
        )
        assert {TOKENIZER.decode(tokens) for tokens in shown.tokens.tolist()} == expected


def test_other_prompts_functions_or_weights_are_other_settings():
    envs = [
        environment(broken),
        environment(broken, DATA[:2]),
        environment(short),
        environment(broken, weights=[2.0]),
        environment(broken, correct_at=0.5),
    ]
    assert len({env.default_params.data for env in envs}) == 5
    assert environment(broken).default_params == envs[0].default_params
    assert not envs[0].on_device


def share_of_letter(prompts, completions, letter):
    return [c.count(x) / T for c, x in zip(completions, letter, strict=True)]


def trainer_of(tmp_path, fn, iterations, **sizes):
    data = [{"prompt": x, "letter": y} for x, y in ("ab", "bc", "ca")]
    env = environment(fn, data, correct_at=0.8)
    return RLTrainer(
        env=env,
        policy=Policy.from_scratch(ModelConfig(width=16, layers=1, heads=2), tokenizer=TOKENIZER),
        optimizer="grpo",
        log_dir=tmp_path / "run",
        train=TrainConfig(
            iterations=iterations, microbatches=1, iterations_per_call=iterations, **sizes
        ),
        adam=OptimizerConfig(learning_rate=3e-2, warmup=0),
        evaluation=EvalConfig(problems=8, samples=2, every=100),
        run=RunConfig(quiet=True),
    )


@pytest.mark.slow
def test_rl_trainer_learns_from_a_function_of_texts(tmp_path):
    result = trainer_of(tmp_path, share_of_letter, 60, prompts=8, group_size=16).run()
    rewards = [row["reward/mean"] for row in result.history if "reward/mean" in row]
    assert len(rewards) == 60 and rewards[0] < 0.2 and np.mean(rewards[-5:]) > 0.3
    reported = {"rollout/reward/share_of_letter", "rollout/correct", "eval/greedy"}
    assert reported <= set().union(*result.history)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_function_that_breaks_stops_rl_trainer(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="my reward broke"):
        trainer_of(tmp_path, broken, 2, prompts=2, group_size=2).run()
