import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment

from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.rl_trainer import RLTrainer, check_tokenizer, resolve_algorithm, with_episodes
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError, Prompts

CONFIG = ModelConfig(width=16, layers=1, heads=2)


@struct.dataclass
class CopyParams(environment.EnvParams):
    max_turns: int = 2


@struct.dataclass
class CopyState(environment.EnvState):
    time: jax.Array
    letter: jax.Array


class CopyEnv(environment.Environment):
    """As a user would write it: say the letter that you are shown, then the next one."""

    max_turns, max_turn_tokens, max_completion, prompt_length = 2, 2, 5, 1
    tokenizer = CharTokenizer("abc")

    @property
    def name(self):
        return "Copy"

    @property
    def default_params(self):
        return CopyParams()

    def shown(self, letter):
        return Prompts(letter[None], jnp.ones(1, bool))

    def reset_env(self, key, params):
        letter = jax.random.randint(key, (), 3, 6)
        return self.shown(letter), CopyState(time=jnp.int32(0), letter=letter)

    def step_env(self, key, state, action, params):
        is_right = jnp.where(action[0] == state.letter, 1.0, 0.0)
        letter = jax.random.randint(key, (), 3, 6)
        is_over = state.time + 1 >= params.max_turns
        state = CopyState(time=state.time + 1, letter=letter)
        return self.shown(letter), state, is_right / 2, is_over, {"is_correct": is_right}


def trainer_of(tmp_path, env, optimizer, **settings):
    sizes = TrainConfig(
        iterations=2, prompts=4, group_size=4, microbatches=1, iterations_per_call=2
    )
    usual = dict(
        env=env,
        policy=Policy.from_scratch(CONFIG, tokenizer=env.tokenizer),
        optimizer=optimizer,
        log_dir=tmp_path / "run",
        train=sizes,
        adam=OptimizerConfig(learning_rate=1e-2, warmup=0),
        evaluation=EvalConfig(problems=8, samples=2, every=100),
        run=RunConfig(quiet=True),
    )
    return RLTrainer(**(usual | settings))


def is_equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["grpo", "ppo", "dapo"])
def test_every_algorithm_learns_a_users_own_environment_of_two_turns(tmp_path, optimizer):
    sizes = TrainConfig(
        iterations=60, prompts=16, group_size=8, microbatches=1, iterations_per_call=60
    )
    trainer = trainer_of(tmp_path, CopyEnv(), optimizer, train=sizes)
    before = jax.tree.map(np.asarray, trainer.policy.params)
    result = trainer.run()
    rewards = [row["reward/mean"] for row in result.history if "reward/mean" in row]
    assert len(rewards) == 60 and result.is_complete
    assert rewards[0] < 0.3 and np.mean(rewards[-5:]) > 0.8  # by chance 1/6
    assert result.metrics["eval/greedy"] > 0.8 and result.metrics["step"] == 60
    assert max(float(row.get("policy/logprob_gap", 0.0)) for row in result.history) <= 1e-5
    assert is_equal(before, trainer.policy.params)  # the one that was given is left alone
    saved = Policy.from_pretrained(result.folder / "policy")
    assert is_equal(saved.params, result.policy.params)
    assert not is_equal(saved.params, before)


@pytest.mark.slow
def test_dapo_runs_on_dialogues_and_reports_their_statistics(tmp_path):
    trainer = trainer_of(
        tmp_path,
        DialogueEnv("dialogue_quality", max_turn_tokens=8),
        "dapo",
        sampling=SamplingConfig(max_tokens=24, block=64),
    )
    result = trainer.run()
    last = result.history[-1]
    reported = "success correct turns calls calls_malformed truncated calls/calc".split()
    assert {f"rollout/{name}" for name in reported} <= set(last)
    assert {"eval/greedy", "eval/success", "eval/turns", "eval/calls_malformed_low"} <= set(last)
    assert 1 <= last["rollout/turns"] <= 8 and last["policy/logprob_gap"] <= 1e-5
    assert all(np.isfinite(x) for x in last.values() if isinstance(x, float))
    config = json.loads((result.folder / "config.json").read_text())
    assert json.dumps(config).count('"weights"') == 2
    lines = (result.folder / "samples.jsonl").read_text().splitlines()
    (sample, *_) = map(json.loads, lines)
    assert "<user>" in json.dumps(sample)


@pytest.mark.slow
def test_the_same_settings_go_on_where_the_run_ended_and_others_are_refused(tmp_path):
    first = trainer_of(tmp_path, CopyEnv(), "grpo").run()
    again = trainer_of(tmp_path, CopyEnv(), "grpo").run()
    assert is_equal(first.policy.params, again.policy.params)
    assert first.history == again.history
    with pytest.raises(ConfigError, match="learning_rate"):
        trainer_of(tmp_path, CopyEnv(), "grpo", adam=OptimizerConfig(learning_rate=0.5)).run()
    for changed in (
        dict(env_params=CopyParams(max_turns=1)),
        dict(eval_params=CopyParams(max_turns=1)),
        dict(policy=Policy.from_scratch(CONFIG, tokenizer=CopyEnv.tokenizer, seed=1)),
    ):
        with pytest.raises(ConfigError):
            trainer_of(tmp_path, CopyEnv(), "grpo", **changed).run()


@pytest.mark.slow
def test_held_out_rollouts_have_their_own_parameters_and_temperature(tmp_path):
    trainer = trainer_of(
        tmp_path,
        CopyEnv(),
        "grpo",
        eval_params=CopyParams(max_turns=1),
        sampling=SamplingConfig(max_tokens=5, temperature=0.5),
    )
    params, key = trainer.policy.params, jax.random.key(0)
    lengths = {
        held_out: trainer.rollout(3, 2, held_out=held_out)(params, key).completions.attention_mask
        for held_out in (True, False)
    }
    assert lengths[True].sum(-1).max() <= 2 < lengths[False].sum(-1).min()
    assert trainer.sampling.temperature == 0.5


@pytest.mark.parametrize(("episodes", "iterations"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_episodes_are_rounded_up_to_whole_iterations(tmp_path, episodes, iterations):
    trainer = trainer_of(tmp_path, CopyEnv(), "grpo", total_episodes=episodes)
    assert trainer.train.iterations == iterations
    assert trainer.train.iterations_per_call == min(2, iterations)


def test_completions_are_as_long_as_the_environment_says(tmp_path):
    assert trainer_of(tmp_path, CopyEnv(), "grpo").sampling.max_tokens == 5


def test_algorithms_go_by_name_or_config():
    assert resolve_algorithm("ppo") == PPOConfig()
    config = PPOConfig(entropy_coef=0.01)
    assert resolve_algorithm(config) is config


def test_what_cannot_work_is_refused_in_one_line_before_anything_is_written(tmp_path):
    env = CopyEnv()
    stranger = Policy.from_scratch(CONFIG, tokenizer=CharTokenizer("abd"))
    for change, message in (
        (dict(optimizer="adam"), "optimizer='adam': expected one of ppo, "),
        (dict(policy=stranger), "made for another tokenizer than the policy's"),
        (dict(total_episodes=0), "total_episodes=0: expected at least 1"),
        (dict(sampling=SamplingConfig(greedy=True)), "greedy=True in a training rollout"),
        (dict(train=TrainConfig(prompts=4, group_size=1, microbatches=1)), "group_size"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            trainer_of(tmp_path, env, change.pop("optimizer", "grpo"), **change)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_tokenizers_are_the_same_if_they_write_the_same_and_end_alike():
    class OtherEnd(CharTokenizer):
        eos_ids = (1,)

    policy = Policy.from_scratch(CONFIG, tokenizer=CharTokenizer("abc"))
    check_tokenizer(CharTokenizer("abc"), policy)
    for other in (CharTokenizer("acb"), CharTokenizer("abcd"), OtherEnd("abc")):
        with pytest.raises(ConfigError, match="another tokenizer"):
            check_tokenizer(other, policy)


def test_sizes_are_left_as_they_are_but_for_the_iterations():
    sizes = TrainConfig(prompts=8, group_size=4, microbatches=2, epochs=3)
    changed = with_episodes(sizes, 100)
    assert dataclasses.replace(sizes, iterations=4, iterations_per_call=4) == changed
