import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment

from jaxrl_llm.envs.dialogue import DialogueEnv, dialogue_tokenizer
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.training import score
from jaxrl_llm.types import Batch, Prompts, Scores

A, P, T = 4, 3, 26


class TwoEnds(CharTokenizer):
    eos_ids = (2, 9)


class PaddingIsAnEnd(CharTokenizer):
    eos_ids = (2, 9)
    pad_id = 2


@struct.dataclass
class EchoParams(environment.EnvParams):
    max_turns: int = 5


@struct.dataclass
class EchoState(environment.EnvState):
    time: jax.Array
    said: jax.Array


class Echo(environment.Environment):
    """Writes back 0 to 3 letters, as the turn says; "a" ends it, else five turns do."""

    max_turns, max_turn_tokens, prompt_length = 5, A, P

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @property
    def default_params(self):
        return EchoParams()

    def write(self, first, n):
        at = jnp.arange(P)
        mask = at >= P - n
        return Prompts(jnp.where(mask, 3 + (first + at) % 5, self.tokenizer.pad_id), mask)

    def reset_env(self, key, params):
        first = jax.random.randint(key, (), 0, 5)
        return self.write(first, 1 + first % 3), EchoState(time=jnp.int32(0), said=first)

    def step_env(self, key, state, action, params):
        is_said = jnp.cumsum(jnp.isin(action, jnp.array(self.tokenizer.eos_ids))) == 0
        said = state.said + jnp.where(is_said, action, 0).sum()
        state = EchoState(time=state.time + 1, said=said)
        is_over = ((action == 3) & is_said).any() | (state.time >= params.max_turns)
        n = jnp.where(is_over, 0, (said + state.time) % (P + 1))
        info = {"is_correct": is_over, "said": said.astype(jnp.float32)}
        return self.write(said, n), state, jnp.sin(said), is_over, info


MODEL = LanguageModel(ModelConfig(width=16, layers=1, heads=2), vocab_size=11)
PARAMS = jax.tree.map(lambda x: 4.0 * x, MODEL.init(jax.random.key(0)))
ECHO = Echo(TwoEnds("abcdefgh"))


@functools.cache
def echoed(b=5, g=6, *, env=ECHO, model=MODEL, max_turns=5, **settings):
    """A rollout of the small model."""
    sampling = SamplingConfig(**{"max_tokens": T, "block": 5} | settings)
    rollout = make_rollout(
        env, EchoParams(max_turns=max_turns), model, env.tokenizer, sampling, prompts=b,
        group_size=g,
    )  # fmt: skip
    return jax.device_get(jax.jit(rollout)(PARAMS, jax.random.key(0)))


# A policy that speaks: whole turns are tokens, and likely ones.

TURNS = [
    "<call>calc 37*48</call>", "<call>lookup chair price</call>", "<call>search lamp</call>",
    "<call>lookup A item</call>", "<answer>12</answer>", "<answer>oslo</answer>",
]  # fmt: skip
USUAL = dialogue_tokenizer()
SPOKEN = CharTokenizer(USUAL.alphabet, USUAL.words + TURNS)
DIALOGUE = DialogueEnv("tool_efficiency", tokenizer=SPOKEN, max_turn_tokens=6)


@functools.cache
def speaker():
    """The model, with 6·e₀ in every embedding, which the output of likely tokens looks for."""

    def enlarged(path, x):
        return x if path[-1].key == "scale" else 10.0 * x

    config = ModelConfig(width=32, layers=1, heads=2, tie_embeddings=False)
    model = LanguageModel(config, SPOKEN.vocab_size)
    params = jax.tree_util.tree_map_with_path(enlarged, model.init(jax.random.key(3)))
    params["embedding"] = params["embedding"].at[:, 0].set(6.0)
    likely = jnp.array([SPOKEN.end_id, *(SPOKEN.encode(turn)[0] for turn in TURNS)])
    params["head"] = params["head"].at[0].set(0.0).at[0, likely].set(1.0)
    params["head"] = params["head"].at[0, SPOKEN.end_id].set(1.25)
    return model, params


@functools.cache
def spoken():
    model, params = speaker()
    sampling = SamplingConfig(max_tokens=48, block=64)
    rollout = make_rollout(
        DIALOGUE, DIALOGUE.default_params, model, SPOKEN, sampling, prompts=6, group_size=8
    )
    return jax.device_get(jax.jit(rollout)(params, jax.random.key(1)))


def replay(env, state, params, step, tokens):
    """The masks, reward and end of one row, by giving the environment one turn after the other.

    Whatever is no turn of the agent must be exactly what the environment wrote.
    """
    length, ids, is_sampled, total, is_over = len(tokens), tokens.tolist(), [], 0.0, False
    info, end = None, env.tokenizer.eos_ids
    while not is_over and len(is_sampled) < length:
        begin = len(is_sampled)
        turn = ids[begin : begin + env.max_turn_tokens]
        stop = next((i for i, token in enumerate(turn, 1) if token in end), len(turn))
        is_sampled += [True] * stop
        if stop < env.max_turn_tokens and turn[stop - 1] not in end:
            break  # cut off by the end of the transcript: not answered
        action = turn[:stop] + [env.tokenizer.pad_id] * (env.max_turn_tokens - stop)
        written, state, reward, is_over, info = jax.device_get(
            step(jax.random.key(9), state, jnp.array(action), params)
        )
        total += float(reward)
        reply = [] if is_over else written.tokens[written.mask].tolist()
        room = length - len(is_sampled)
        assert ids[len(is_sampled) :][: len(reply)] == reply[:room]
        is_sampled += [False] * len(reply[:room])
    return is_sampled, total, bool(is_over), info


def check_replay(env, params, rolled, key):
    """Every row against `replay`; returns the lengths."""
    b, g, t_max = rolled.completions.tokens.shape
    reset_key = jax.random.split(key, 3)[0]
    step, reset = jax.jit(env.step_env), jax.jit(env.reset_env)
    lengths = np.zeros((b, g), int)
    for i in range(b):
        observed, state = reset(jax.random.fold_in(reset_key, i), params)
        np.testing.assert_array_equal(observed.tokens, rolled.prompts.tokens[i])
        np.testing.assert_array_equal(observed.mask, rolled.prompts.mask[i])
        for j in range(g):
            tokens, loss_mask, attention_mask, logprobs = (x[i, j] for x in rolled.completions)
            is_sampled, total, is_over, info = replay(env, state, params, step, tokens)
            n = lengths[i, j] = len(is_sampled)
            assert loss_mask.tolist() == is_sampled + [False] * (t_max - n)
            assert attention_mask.tolist() == [True] * n + [False] * (t_max - n)
            assert (tokens[n:] == env.tokenizer.pad_id).all()
            assert (logprobs[~loss_mask] == 0).all() and (logprobs[loss_mask] < 0).all()
            assert rolled.rewards[i, j] == pytest.approx(total, abs=1e-5)
            assert rolled.info["is_truncated"][i, j] == (not is_over)
            for name, x in (info or {}).items():
                assert rolled.info[name][i, j] == x
    return lengths


def test_transcripts_are_the_agents_turns_and_exactly_what_the_environment_wrote():
    rolled = echoed()
    lengths = check_replay(ECHO, EchoParams(), rolled, jax.random.key(0))
    assert np.unique(lengths).size > 4  # rows end at different places, some are cut off
    tokens, loss_mask, attention_mask, _ = rolled.completions
    assert lengths.min() < 10 and 0 < rolled.info["is_truncated"].mean() < 1
    sampled = tokens[loss_mask]
    assert {0, *ECHO.tokenizer.eos_ids} <= set(
        sampled.tolist()
    )  # padding was sampled, and both ends
    assert (attention_mask & ~loss_mask).sum() > 20


@pytest.mark.parametrize("max_tokens", [1, 14])
def test_a_shorter_transcript_is_the_beginning_of_the_longer_one(max_tokens):
    rolled, longer = echoed(max_tokens=max_tokens), echoed()
    check_replay(ECHO, EchoParams(), rolled, jax.random.key(0))
    for short, long in zip(rolled.completions, longer.completions, strict=True):
        np.testing.assert_allclose(short, long[..., :max_tokens], atol=1e-5)
    assert rolled.info["is_truncated"].any()


def test_padding_may_be_an_end_token():
    env = Echo(PaddingIsAnEnd("abcdefgh"))
    rolled, usual = echoed(env=env), echoed()
    check_replay(env, EchoParams(), rolled, jax.random.key(0))
    for name in ("loss_mask", "attention_mask"):
        np.testing.assert_array_equal(
            getattr(rolled.completions, name)[rolled.prompts.mask.all(1)],
            getattr(usual.completions, name)[rolled.prompts.mask.all(1)],
        )


@pytest.mark.parametrize("block", [1, 64])
def test_a_dialogue_does_not_depend_on_how_the_loop_is_cut(block):
    for got, expected in zip(echoed(block=block).completions, echoed().completions, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_dialogue_does_not_depend_on_the_dialogues_beside_it():
    few, many = echoed(2, 3), echoed()
    np.testing.assert_array_equal(few.completions.tokens, many.completions.tokens[:2, :3])
    np.testing.assert_array_equal(few.completions.loss_mask, many.completions.loss_mask[:2, :3])
    np.testing.assert_allclose(few.rewards, many.rewards[:2, :3], atol=1e-6)
    assert (many.completions.tokens[:, 0] != many.completions.tokens[:, 1]).any()


class Counted(LanguageModel):
    """Counts the positions that it decodes."""

    def __init__(self):
        super().__init__(MODEL.config, MODEL.vocab_size)
        self.n_decoded = 0

    def decode(self, *arguments):
        def count():
            self.n_decoded += 1

        jax.debug.callback(count)
        return super().decode(*arguments)


def test_the_loop_stops_when_every_dialogue_has_ended():
    model = Counted()
    rolled = echoed(model=model, max_turns=1)
    jax.effects_barrier()
    assert rolled.completions.attention_mask[..., A:].sum() == 0  # one turn each
    # Windows of 15 and 10 steps in blocks of 5: the first block holds a whole turn.
    assert model.n_decoded == 5


scored = functools.partial(jax.jit, static_argnums=1)(score)


@pytest.mark.parametrize("name", ["echo", pytest.param("dialogue", marks=pytest.mark.slow)])
def test_sampled_logprobs_are_the_scorers_on_whole_dialogues(name):
    rolled = echoed() if name == "echo" else spoken()
    model, params = (MODEL, PARAMS) if name == "echo" else speaker()
    completions = rolled.completions
    logp_t = scored(params, model, rolled.prompts, completions).logp_t
    gap = jnp.where(completions.loss_mask, logp_t - completions.logprobs, 0.0)
    assert jnp.abs(gap).max() <= 1e-5
    is_late = completions.loss_mask & (np.cumsum(~completions.loss_mask, -1) > 2)
    assert is_late.sum() > 20  # after the environment has written
    assert completions.logprobs[is_late].std() > 0.1


def test_sampled_tokens_are_given_what_the_environment_wrote():
    rolled = echoed()
    completions = rolled.completions
    written = completions.attention_mask & ~completions.loss_mask
    i, j, t = np.argwhere(written & (np.arange(T) < T - 8)[None, None])[0]
    tokens = completions.tokens.copy()
    tokens[i, j, t] = 3 + (tokens[i, j, t] - 2) % 5
    changed = completions._replace(tokens=tokens)
    before = scored(PARAMS, MODEL, rolled.prompts, completions).logp_t
    after = scored(PARAMS, MODEL, rolled.prompts, changed).logp_t
    is_moved = np.abs(np.asarray(after - before)) > 1e-4
    later = completions.loss_mask[i, j] & (np.arange(T) > t)
    assert later.sum() > 0 and is_moved[i, j][later].all()
    assert not is_moved[i, j, :t].any()
    assert is_moved.sum() == is_moved[i, j].sum()


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo"])
def test_what_the_environment_wrote_has_exactly_no_weight(name):
    rolled = echoed()
    completions = jax.tree.map(jnp.asarray, rolled.completions)
    algorithm = make_algorithm(PRESETS[name](entropy_coef=0.01), iterations=1)
    noise = 0.3 * jax.random.normal(jax.random.key(2), (4, *completions.tokens.shape))
    reference = noise[3] if algorithm.needs_reference else None
    values = noise[2] if algorithm.critic else None
    batch = Batch(rolled.prompts, completions, completions.logprobs, reference, values)
    batch = algorithm.advantages(batch, jnp.asarray(rolled.rewards), jnp.float32(0.1), None)
    assert batch.adv_t is not None and (batch.adv_t[~rolled.completions.loss_mask] == 0).all()

    def loss(scores):
        return algorithm.loss(scores, batch, jnp.float32(0.1)).loss.total

    scores = Scores(completions.logprobs + noise[0], 1.0 + noise[1], values)
    gradient = jax.jit(jax.grad(loss))(scores)
    for grad_t in jax.tree.leaves(gradient):
        grad_t = np.asarray(grad_t)
        assert (grad_t[~rolled.completions.loss_mask] == 0).all()
    of_sampled = np.asarray(gradient.logp_t)[rolled.completions.loss_mask]
    assert (of_sampled != 0).mean() > 0.5


@pytest.mark.slow
def test_dialogues_with_tools_replay_and_are_worth_what_their_statistics_are():
    rolled = spoken()
    lengths = check_replay(DIALOGUE, DIALOGUE.default_params, rolled, jax.random.key(1))
    info = rolled.info
    assert np.unique(lengths).size > 4 and 0 < info["is_truncated"].mean() < 1
    wasted = sum(
        info[f"calls_{kind}"]
        for kind in ("redundant", "malformed", "failed", "unknown", "unnecessary")
    )
    worth = info["success"] - 0.02 * info["calls"] - 0.1 * wasted
    np.testing.assert_allclose(rolled.rewards, worth, atol=1e-5)
    for name in ("calls_succeeded", "calls_redundant", "calls_malformed", "answered"):
        assert info[name].sum() > 0, name
