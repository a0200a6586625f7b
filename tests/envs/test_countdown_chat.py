"""Chat Countdown against a grader on the host that shares nothing with it."""

import ast
import dataclasses
import json
import random
import re
from fractions import Fraction
from functools import cache
from operator import add, mul, sub, truediv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_llm.countdown_data import Problems, generate
from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import BOTH, HELD_OUT, TRAIN
from jaxrl_llm.envs.countdown_chat import ANSWER_BYTES, CountdownChat
from jaxrl_llm.envs.single_turn import EnvState
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.rl_trainer import RLTrainer
from jaxrl_llm.tokenizers import CharTokenizer, TokenBytes
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError

T = 96
FUNCTIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
WHITE = " \t\n\v\f\r"
PROBLEMS = Problems(
    np.array([[3, 12, 7, 0], [19, 36, 55, 7], [8, 3, 8, 3], [100, 5, 0, 0]]),
    np.array([33, 65, 24, 20]),
)


class BPETokenizer:
    """A byte-level BPE with a chat template, two end tokens and merges across tags."""

    pad_id, eos_ids = 0, (1, 0)

    def __init__(self, corpus):
        self._bpe = tokenizers.Tokenizer(models.BPE())
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<pad>", "<end>", "<|system|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self._bpe.train_from_iterator(corpus, trainer)
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        spelled = [b""] * 5 + [
            bytes(byte_of[char] for char in self._bpe.id_to_token(i))
            for i in range(5, self.vocab_size)
        ]
        length = np.array([len(word) for word in spelled], np.int32)
        table = np.frombuffer(b"".join(word.ljust(length.max(), b"\0") for word in spelled), "u1")
        self.token_bytes = TokenBytes(table.reshape(len(spelled), -1), length)

    @property
    def vocab_size(self):
        return self._bpe.get_vocab_size()

    def encode(self, text):
        return self._bpe.encode(text).ids

    def decode(self, ids):
        return self._bpe.decode(list(ids))

    def chat(self, messages, add_generation_prompt=True):
        roles = {role: self._bpe.token_to_id(f"<|{role}|>") for role in ("system", "user")}
        ids = [i for m in messages for i in (roles[m["role"]], *self.encode(m["content"]), 1)]
        return ids + [self._bpe.token_to_id("<|assistant|>")] * add_generation_prompt


def bytes_to_unicode():
    """GPT-2's alphabet: printable bytes are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class ChatCharTokenizer(CharTokenizer):
    """Characters, tags as single tokens, and the content of the last message as the chat."""

    def chat(self, messages, add_generation_prompt=True):
        return [self.bos_id, *self.encode(messages[-1]["content"])]


def small_chat_tokenizer():
    return ChatCharTokenizer("0123456789[], +-*/()<>answer", ["<answer>", "</answer>"])


@cache
def bpe():
    corpus = [
        f"<think>{numbers} make {target}?</think> <answer>({text})</answer>\n\n"
        for numbers, target, text in solved(generate(300, seed=5))
    ]
    return BPETokenizer(corpus)


@cache
def environment(prefill=""):
    return CountdownChat(bpe(), PROBLEMS, prefill=prefill, max_completion=T)


@cache
def compiled_step(env):
    return jax.jit(jax.vmap(env.step_env, (None, 0, 0, None)))


def solved(problems):
    for numbers, target in zip(problems.numbers, problems.targets, strict=True):
        values = numbers[numbers > 0].tolist()
        yield values, int(target), host.solve(values, int(target))


def padded(ids, tokenizer, length=T):
    return np.array([*ids, *[tokenizer.pad_id] * length][:length], np.int32)


def graded(env, completions, indices, **params):
    """Rewards and infos of completions (token ids, end token included) of problems."""
    states = EnvState(time=jnp.zeros(len(indices), jnp.int32), index=jnp.array(indices, jnp.int32))
    tokens = np.stack([padded(ids, env.tokenizer, env.max_completion) for ids in completions])
    params = dataclasses.replace(env.default_params, **params)
    _, _, reward, terminated, info = compiled_step(env)(jax.random.key(0), states, tokens, params)
    assert terminated.all()
    return np.asarray(reward), {name: np.asarray(value) for name, value in info.items()}


def value_of(node, literals):
    match node:
        case ast.Constant(value=int(value)):
            literals.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in FUNCTIONS:
            return FUNCTIONS[type(op)](value_of(left, literals), value_of(right, literals))
    raise SyntaxError


def is_solution(text, numbers, target):
    if len(text) > ANSWER_BYTES or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return False
    literals = []
    try:
        value = value_of(ast.parse(text, mode="eval").body, literals)
    except (SyntaxError, ZeroDivisionError):
        return False
    return sorted(literals) == sorted(numbers) and value == target


def judged_on_the_host(text, numbers, target):
    """Correct, well-formed, thought: with regular expressions and `fractions`."""
    answers = [*re.finditer(r"<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)]
    if not answers:
        return False, False, False
    content = re.sub(f"[{WHITE}]", " ", answers[-1][1]).strip(" ")
    is_single = text.count("<answer>") == text.count("</answer>") == 1
    thought = re.search(r"<think>.*?</think>", text, re.DOTALL)
    return (
        is_solution(content, numbers, target),
        is_single and content != "",
        thought is not None and thought.end() <= answers[-1].start(),
    )


def random_text(rng, solution, numbers):
    """Usually something like a response, with an answer that is often right."""
    white = lambda: rng.choice(["", "", " ", "\n", "\t "])  # noqa: E731
    shuffled = "+".join(map(str, rng.sample(numbers, len(numbers))))
    answers = [
        f"<answer>{white()}{rng.choice([solution, solution, shuffled, ''])}{white()}</answer>"
        for _ in range(rng.choices((0, 1, 2), (1, 8, 2))[0])
    ]
    thought = rng.choice(["", f"<think>{shuffled}</think>", "<think>", "so × ÷ ٣ 答</think>"])
    text = white().join([thought, *answers, rng.choice(["", "", "done", thought])])
    return mutate(rng, text) if rng.random() < 0.5 else text


def mutate(rng, text):
    pieces = [*"0123456789+-*/() <>=.é", "<answer>", "</answer>", "<think>", "</think>", "\n"]
    for _ in range(rng.choice((1, 1, 2))):
        at, other = (rng.randrange(len(text) + 1) for _ in range(2))
        text = rng.choice(
            (
                text[:at] + rng.choice(pieces) + text[at:],
                text[:at] + rng.choice(pieces) + text[at + 1 :],
                text[:at] + text[at + 1 :],
                text[:at] + text[min(at, other) : max(at, other)] + text[at:],
            )
        )
    return text


def random_completion(rng, tokenizer, solution, numbers):
    ids = tokenizer.encode(random_text(rng, solution, numbers))
    if ids and rng.random() < 0.1:  # any token, which may be no whole character
        ids[rng.randrange(len(ids))] = rng.randrange(5, tokenizer.vocab_size)
    if rng.random() < 0.1:
        return [*ids, *tokenizer.encode("7") * T][:T]  # no end
    after = tokenizer.encode("<answer>1</answer>") * (rng.random() < 0.1)
    return [*ids[: T - 1], rng.choice(tokenizer.eos_ids), *after][:T]


@pytest.mark.parametrize(
    "prefill", [pytest.param("", marks=pytest.mark.slow), "Let me see. <think>"]
)
def test_ten_thousand_mutated_completions_are_graded_as_on_the_host(prefill):
    env, tokenizer, rng = environment(prefill), bpe(), random.Random(len(prefill))
    problems, size, n = list(solved(PROBLEMS)), 1250, 10_000 if not prefill else 2_500
    counts = np.zeros(4)
    for _ in range(n // size):
        indices = [rng.randrange(len(problems)) for _ in range(size)]
        rows = [random_completion(rng, tokenizer, problems[i][2], problems[i][0]) for i in indices]
        reward, info = graded(env, rows, indices)
        for row, (ids, index) in enumerate(zip(rows, indices, strict=True)):
            ids = padded(ids, tokenizer).tolist()
            ends = [at for at, token in enumerate(ids) if token in tokenizer.eos_ids]
            text = prefill + tokenizer.decode(ids[: ends[0]] if ends else ids)
            verdict = judged_on_the_host(text, *problems[index][:2])
            got = tuple(bool(info[k][row]) for k in ("is_correct", "has_format", "has_think"))
            assert got == verdict, (text, got, verdict)
            assert info["is_truncated"][row] == (not ends)
            expected = 1.0 if verdict[0] else 0.1 if verdict[1] else 0.0
            assert reward[row] == np.float32(expected)
            counts += (*verdict, not ends)
    assert (counts > 0.02 * n).all() and (counts[:3] < 0.9 * n).all()


RIGHT = "<answer>3*7+12</answer>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>3*7=21</think> <answer>3*7+12</answer>", 1.0),
        (RIGHT, 1.0),
        ("<answer>\n (3 * 7)\t+ 12\r\n</answer>", 1.0),
        ("<answer>3*7</answer> no, <answer>3*7+12</answer>", 1.0),  # the last counts
        ("<answer>3*7+12</answer> no, <answer>3*7</answer>", 0.0),  # and two are no format
        ("<answer><answer>3*7+12</answer>", 1.0),
        ("<answer>3*7+12</answer></answer>", 1.0),
        ("<answer>3*7+12=33</answer>", 0.1),
        ("<answer>3×7+12</answer>", 0.1),
        ("<answer>3*7</answer>", 0.1),
        ("<answer>3*7+12*1</answer>", 0.1),
        ("<answer>33</answer>", 0.1),
        ("<answer>nothing</answer>", 0.1),
        ("<answer>3*7+12</answer", 0.0),
        ("<answer>3*7+12", 0.0),
        ("3*7+12</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer> \n</answer>", 0.0),
        ("</answer>3*7+12<answer>", 0.0),
        ("<Answer>3*7+12</Answer>", 0.0),
        ("3*7+12", 0.0),
        ("", 0.0),
    ],
)
def test_rewards_of_responses_made_by_hand(text, reward):
    got, _ = graded(environment(), [[*bpe().encode(text), 1]], [0])
    assert got[0] == np.float32(reward)


def test_an_answer_that_is_too_long_is_wrong_and_still_an_answer():
    env = CountdownChat(bpe(), PROBLEMS, max_completion=300)
    n = (ANSWER_BYTES - len("3*7+12")) // 2
    for extra, reward in ((0, 1.0), (1, 0.1)):
        answer = "(" * (n + extra) + "3*7+12" + ")" * (n + extra)
        ids = bpe().encode(f"<answer>  {answer}  </answer>")
        assert graded(env, [[*ids, 1]], [0])[0][0] == np.float32(reward)


def test_what_follows_the_first_end_token_is_not_read():
    ids, wrong = bpe().encode(RIGHT), bpe().encode("<answer>3</answer>")
    for end in bpe().eos_ids:
        reward, info = graded(environment(), [[*ids, end, *wrong], [*wrong, end, *ids]], [0, 0])
        assert reward.tolist() == [1.0, np.float32(0.1)] and not info["is_truncated"].any()


def test_an_answer_counts_without_an_end_token_since_a_tag_closes_it():
    fill = bpe().encode(" so")[:1] * T
    reward, info = graded(environment(), [[*bpe().encode(RIGHT), *fill][:T]], [0])
    assert reward[0] == 1.0 and info["is_truncated"][0] == 1


def test_the_prefill_ends_the_prompt_and_begins_the_response():
    env = CountdownChat(bpe(), PROBLEMS, prefill="<think>Hm</think><answer>", max_completion=T)
    prompt = env.table.write(jnp.int32(0))
    assert bpe().decode(prompt.tokens[prompt.mask].tolist()).endswith("<think>Hm</think><answer>")
    reward, info = graded(env, [[*bpe().encode("3*7+12</answer>"), 1], [1]], [0, 0])
    assert reward.tolist() == [1.0, 0.0] and info["has_think"].tolist() == [1.0, 0.0]


def test_a_text_of_more_than_eight_bytes_a_token_counts_as_no_answer():
    words = ["<answer>", "</answer>", " " * 60, " " * 17]
    tokenizer = ChatCharTokenizer("0123456789[], +-*/()<>answer", words)
    env = CountdownChat(
        tokenizer, PROBLEMS, system=None, question="{numbers} {target}", max_completion=20
    )
    full = [
        word for text in (RIGHT, words[2], words[2], words[3]) for word in tokenizer.encode(text)
    ]
    assert sum(map(len, map(tokenizer.decode, ([i] for i in full)))) == 160
    rows = [[*full, 2], [*full, *tokenizer.encode(" "), 2]]
    assert graded(env, rows, [0, 0])[0].tolist() == [1.0, 0.0]


def test_rewards_are_parameters_and_may_be_traced():
    rows = [[*bpe().encode(text), 1] for text in (RIGHT, "<answer>3</answer>", "")]
    worth = dict(reward_correct=jnp.float32(2), reward_wrong=jnp.float32(-1), reward_missing=-3.0)
    assert graded(environment(), rows, [0, 0, 0], **worth)[0].tolist() == [2, -1, -3]


def test_prompts_are_those_of_the_chat_template_left_padded():
    env = environment()
    prompts = jax.jit(jax.vmap(env.table.write))(jnp.arange(len(PROBLEMS)))
    asked = "[19, 36, 55, 7], create an equation that equals 65."
    lengths = set()
    for row, (numbers, target, _) in enumerate(solved(PROBLEMS)):
        ids = bpe().chat(env.messages(numbers, target))
        n_padding = env.prompt_length - len(ids)
        assert prompts.tokens[row].tolist() == [0] * n_padding + ids
        assert prompts.mask[row].tolist() == [False] * n_padding + [True] * len(ids)
        assert (asked in bpe().decode(ids)) == (row == 1)
        lengths.add(len(ids))
    assert max(lengths) == env.prompt_length and len(lengths) > 1
    roles = [message["role"] for message in env.messages([1], 1)]
    assert roles == ["system", "user"]
    plain = CountdownChat(bpe(), PROBLEMS, system=None)
    assert [message["role"] for message in plain.messages([1], 1)] == ["user"]


def test_a_split_draws_its_own_problems_and_all_of_them():
    held_out = Problems(np.array([[1, 2, 3], [4, 5, 6]]), np.array([6, 15]))
    env = CountdownChat(bpe(), PROBLEMS, held_out, max_completion=T)
    keys = jax.random.split(jax.random.key(0), 1200)
    for split, expected in ((TRAIN, range(4)), (HELD_OUT, range(4, 6)), (BOTH, range(6))):
        params = dataclasses.replace(env.default_params, split=split)
        _, states = jax.jit(jax.vmap(env.reset_env, (0, None)))(keys, params)
        drawn, counts = np.unique(states.index, return_counts=True)
        assert drawn.tolist() == list(expected)
        n, p = 1200, 1 / len(expected)
        assert (abs(counts - n * p) < 5 * (n * p * (1 - p)) ** 0.5).all()
    reward, _ = graded(env, [[*bpe().encode("<answer>4+5+6</answer>"), 1]] * 2, [5, 4])
    assert reward.tolist() == [1.0, np.float32(0.1)]


def trainer_of(tmp_path, tokenizer, problems, **settings):
    env = CountdownChat(
        tokenizer,
        problems,
        problems,
        system=None,
        question="{numbers} {target}",
        prefill="<answer>",
        max_completion=4,
    )
    usual = dict(
        env=env,
        policy=Policy.from_scratch(ModelConfig(width=16, layers=1, heads=2), tokenizer=tokenizer),
        optimizer="grpo",
        log_dir=tmp_path / "run",
        eval_params=dataclasses.replace(env.default_params, split=HELD_OUT),
        train=TrainConfig(
            iterations=2, prompts=4, group_size=4, microbatches=1, iterations_per_call=2
        ),
        adam=OptimizerConfig(learning_rate=2e-2, warmup=0),
        evaluation=EvalConfig(problems=8, samples=2, every=100),
        run=RunConfig(quiet=True),
    )
    return RLTrainer(**(usual | settings))


@pytest.mark.slow
def test_rl_trainer_learns_to_answer_at_all(tmp_path):
    # From random weights no answer is right: what can be learned is the format.
    sizes = TrainConfig(
        iterations=60, prompts=8, group_size=16, microbatches=1, iterations_per_call=60
    )
    result = trainer_of(tmp_path, small_chat_tokenizer(), PROBLEMS, train=sizes).run()
    formats = [row["rollout/has_format"] for row in result.history if "rollout/has_format" in row]
    rewards = [row["reward/mean"] for row in result.history if "reward/mean" in row]
    assert len(formats) == 60 and formats[0] < 0.2 and np.mean(formats[-5:]) > 0.5
    assert np.mean(rewards[-5:]) > 0.05
    assert {"rollout/has_think", "rollout/truncated", "eval/greedy"} <= set().union(*result.history)


def test_the_settings_of_a_run_tell_other_problems_prompts_and_splits_apart(tmp_path):
    tokenizer, others = small_chat_tokenizer(), PROBLEMS.take(np.array([0, 1, 3]))
    first, again, other = (
        trainer_of(tmp_path, tokenizer, problems).config()
        for problems in (PROBLEMS, PROBLEMS.take(np.arange(4)), others)
    )
    assert json.dumps(first["env"]) == json.dumps(again["env"]) != json.dumps(other["env"])
    assert first["env"]["params"]["data"] == first["env"]["eval_params"]["data"] != ""
    assert first["env"]["params"]["split"] == TRAIN != first["env"]["eval_params"]["split"]
    assert environment().default_params != environment("<think>").default_params


def test_what_cannot_work_is_refused_in_one_line_before_anything_compiles(tmp_path):
    for make, message in (
        (lambda: CountdownChat(CharTokenizer("abc"), PROBLEMS), "no method `chat`"),
        (lambda: CountdownChat(bpe(), PROBLEMS, question="{numbers}"), "{target}"),
        (lambda: CountdownChat(bpe(), PROBLEMS, max_prompt=20), "prompt 1 has .* max_prompt=20"),
        (lambda: CountdownChat(bpe(), PROBLEMS, max_completion=0), "max_completion=0"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    env = environment()
    for split, message in ((HELD_OUT, "no prompts in split 1.*held_out="), (7, "split 7")):
        params = dataclasses.replace(env.default_params, split=split)
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(env.reset_env, jax.random.key(0), params)


def test_the_public_interface_is_that_of_gymnax():
    env = environment()
    params = env.default_params
    observed, _ = env.reset(jax.random.key(0), params)
    action = padded([*bpe().encode(RIGHT), 1], bpe())
    _, next_state, _, terminated, truncated, info = env.step(
        jax.random.key(1), EnvState(time=jnp.int32(0), index=jnp.int32(0)), action, params
    )
    assert terminated and not truncated and next_state.time == 0 and info["is_correct"] == 1
    assert env.name == "CountdownChat" and env.on_device
    assert env.action_space(params).contains(jnp.asarray(action))
    assert env.observation_space(params).contains(observed)
