"""Tasks of reasoning-gym: drawn alike everywhere, split by question, scored by themselves."""

import base64
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import graders
from jaxrl_llm.answers import EXPRESSION, AskConfig
from jaxrl_llm.envs import reasoning
from jaxrl_llm.envs.countdown import HELD_OUT
from jaxrl_llm.envs.reasoning import (
    ReasoningConfig,
    draw_questions,
    reasoning_env,
    scoring_pool,
    tasks,
)
from jaxrl_llm.envs.single_turn import EnvState
from jaxrl_llm.graders import is_held_out
from jaxrl_llm.tokenizers import CharTokenizer, arithmetic_tokenizer
from jaxrl_llm.types import ConfigError

reasoning_gym = pytest.importorskip("reasoning_gym")


def test_the_scores_are_those_of_reasoning_gym():
    drawn = draw_questions("countdown", 3, seed=5, held_out=False)
    dataset = reasoning_gym.create_dataset("countdown", seed=5, size=28)
    own = {entry["question"].strip(): entry for entry in dataset}
    calls, expected = [], []
    for question in drawn:
        entry = own[question.text]
        assert pickle.loads(base64.b64decode(question.entry)) == entry
        assert question.answer == entry["answer"]
        for answer in (entry["answer"], f"0 + {entry['answer']}", "1 + 1", "nonsense", "", None):
            calls.append((answer, question.entry))
            expected.append(dataset.score_answer(answer, entry))
    with scoring_pool("countdown", seconds=30.0) as pool:
        assert [grade.value for grade in pool.grade(calls)] == expected
    assert 0.0 < min(expected) < max(expected) == 1.0  # it gives a little for trying


def test_an_answer_that_would_be_computed_forever_costs_one_answer():
    entry = draw_questions("countdown", 1, seed=0, held_out=True)[0]
    with scoring_pool("countdown", seconds=10.0) as pool:
        pool.grade([(None, entry.entry)])
        pool._seconds = 1.0
        grades = pool.grade([(a, entry.entry) for a in (entry.answer, "9**9**9**9", entry.answer)])
    assert [grade.value for grade in grades] == [1.0, 0.0, 1.0]
    assert grades[1].status != "ok"


def test_equal_seeds_draw_equal_questions_and_others_others():
    # It iterates over sets: in this process it would depend on PYTHONHASHSEED.
    first, again, other = (
        draw_questions("word_ladder", 4, seed=seed, held_out=False) for seed in (0, 0, 10_000)
    )
    assert first == again
    assert len({question.text for question in first}) == 4
    assert not {q.text for q in first} & {q.text for q in other}


def test_no_seed_and_no_size_makes_a_training_question_held_out():
    # Three or four coins: so few questions that the seed's draws hold all of them.
    few = {"max_trials": 4, "allow_at_least": 0}
    splits = {
        held_out: {
            question.text
            for question in draw_questions("coin_flip", n, seed=0, held_out=held_out, options=few)
        }
        for n, held_out in ((3, False), (3, True))
    }
    assert len(splits[False]) == len(splits[True]) == 3 and not splits[False] & splits[True]
    assert [is_held_out(text) for text in splits[True]] == [True] * 3
    with pytest.raises(ConfigError, match=r"coin_flip: \d distinct questions in 96 draws"):
        draw_questions("coin_flip", 20, seed=0, held_out=True, options=few)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no task 'chainsum' .*expected chain_sum"):
        draw_questions("chainsum", 1, seed=0, held_out=False)
    with pytest.raises(ConfigError, match="no option 'max_term': expected max_terms"):
        draw_questions("chain_sum", 1, seed=0, held_out=False, options={"max_term": 3})
    with pytest.raises(ConfigError, match="no option 'size'"):
        draw_questions("chain_sum", 1, seed=0, held_out=False, options={"size": 3})
    with pytest.raises(ConfigError, match="cannot be drawn with .*AssertionError"):
        draw_questions("chain_sum", 1, seed=0, held_out=False, options={"max_terms": -1})
    assert len(tasks()) > 100 and "gsm_symbolic" in tasks()


def test_without_reasoning_gym_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(reasoning.__dict__, "_registry", reasoning._registry)
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        tasks()


SMALL = ReasoningConfig(
    options={"max_terms": 2, "max_digits": 2}, questions=6, held_out=3, ask=EXPRESSION
)


def judged(env, index, texts):
    """Rewards and infos of completions of one prompt, as a rollout steps."""
    end = env.tokenizer.eos_ids[0]
    ids = [[*env.tokenizer.encode(text), end] for text in texts]
    tokens = jnp.array([[*row, *[0] * env.max_completion][: env.max_completion] for row in ids])
    state = EnvState(time=jnp.int32(0), index=jnp.int32(index))
    step = jax.jit(jax.vmap(env.step_env, in_axes=(None, None, 0, None)))
    _, _, rewards, _, info = step(jax.random.key(0), state, tokens, env.default_params)
    return np.asarray(rewards).tolist(), {k: np.asarray(v).tolist() for k, v in info.items()}


@pytest.fixture(scope="module")
def env():
    return reasoning_env(arithmetic_tokenizer(), SMALL, max_completion=8)


def test_the_environment_pays_for_the_score_and_for_the_format(env):
    questions = draw_questions("chain_sum", 6, seed=0, held_out=False, options=SMALL.options)
    assert env.rows[2]["prompt"] == f"{questions[2].fields['expression']}="
    right = questions[2].answer
    rewards, info = judged(env, 2, [right, f" {right}", "", "1234567"])
    np.testing.assert_allclose(rewards, [1.1, 1.1, 0.0, 0.1], rtol=1e-6)
    assert info["reward/score"] == [1.0, 1.0, 0.0, 0.0]
    assert info["is_correct"] == [1.0, 1.0, 0.0, 0.0]


def test_training_and_measurement_ask_other_questions(env):
    prompts = [row["prompt"] for row in env.rows]
    assert len(prompts) == 9 and not set(prompts[:6]) & set(prompts[6:])
    params = env.default_params.replace(split=HELD_OUT)
    drawn = {int(env.reset_env(jax.random.key(i), params)[1].index) for i in range(20)}
    assert drawn <= {6, 7, 8}


class ChatTokenizer(CharTokenizer):
    def __init__(self):
        super().__init__("".join(map(chr, range(32, 127))) + "\n")

    def chat(self, messages, add_generation_prompt=True):
        return [i for m in messages for i in (self.bos_id, *self.encode(m["content"]))]


def test_a_chat_model_is_asked_in_messages_and_answers_in_tags():
    config = ReasoningConfig(questions=2, held_out=1, ask=AskConfig(system="Be brief."))
    env = reasoning_env(ChatTokenizer(), config, max_completion=60)
    question = pickle.loads(base64.b64decode(env.rows[1]["entry"]))
    system, user = env.rows[1]["prompt"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"].startswith(question["question"] + "\n\n")
    said = [f"So <answer>{question['answer']}</answer>", question["answer"], "<answer>no</answer>"]
    np.testing.assert_allclose(judged(env, 1, said)[0], [1.1, 0.0, 0.1], rtol=1e-6)


def test_settings_that_cannot_be_are_refused():
    for wrong in ({"questions": 0}, {"held_out": -1}, {"seed": -1}):
        with pytest.raises(ConfigError, match="expected"):
            ReasoningConfig(**wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files that a library leaves open
def test_every_task_is_drawn_alike_twice_and_accepts_its_own_answer():
    # These have no single answer, or none for their default settings.
    open_ended = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    for task in sorted({*tasks()} - {"composite", "knight_swap", "sokoban"}):
        drawn, again = (graders.questions(task, {})(2, 3, True) for _ in range(2))
        assert drawn == again, task
        score = graders.reasoning(task, {})
        values = [score(question["answer"], question["entry"]) for question in drawn]
        assert task in open_ended or values == [1.0, 1.0], task
