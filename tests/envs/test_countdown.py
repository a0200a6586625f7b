"""The Countdown environment against the host solver and against answers made by hand."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import (
    BOTH,
    HELD_OUT,
    MAX_NUMBER,
    MAX_TARGET,
    TRAIN,
    Countdown,
    EnvParams,
    EnvState,
    _one_solution,
    check_params,
    countdown_params,
    is_reachable,
    problem_key_hash,
    sft_examples,
)
from jaxrl_llm.tokenizers import CharTokenizer, arithmetic_tokenizer
from jaxrl_llm.types import ConfigError, Prompts

TOKENIZER = arithmetic_tokenizer()
END = TOKENIZER.end_id
T = 16


@cache
def environment(max_numbers: int = 3) -> Countdown:
    return Countdown(TOKENIZER, max_numbers=max_numbers, max_completion=T)


@cache
def compiled_reset(max_numbers: int):
    return jax.jit(jax.vmap(environment(max_numbers).reset_env, (0, None)))


def drawn(params: EnvParams, n: int, seed: int = 0) -> tuple[Prompts, EnvState]:
    """n problems, a multiple of 250: what is observed, and the states."""
    reset = compiled_reset(int(params.max_numbers))
    keys = jax.random.split(jax.random.key(seed), (n // 250, 250))
    parts = [jax.device_get(reset(part, params)) for part in keys]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def as_lists(state: EnvState) -> list[tuple[list[int], int]]:
    rows = zip(np.asarray(state.numbers), np.asarray(state.target), strict=True)
    return [(numbers[numbers > 0].tolist(), int(target)) for numbers, target in rows]


def keys_of(state: EnvState) -> set[tuple[int, ...]]:
    return {(target, *sorted(numbers)) for numbers, target in as_lists(state)}


@pytest.mark.parametrize(
    "preset, split, n",
    [
        ("small", TRAIN, 2000),
        ("small", HELD_OUT, 2000),
        pytest.param("3to4", TRAIN, 1000, marks=pytest.mark.slow),
        ("3to4", HELD_OUT, 1000),
        ("3to6", TRAIN, 250),
        pytest.param("3to6", HELD_OUT, 2000, marks=pytest.mark.slow),
    ],
)
def test_every_drawn_problem_is_solvable_in_range_and_in_its_split(preset, split, n):
    params = countdown_params(preset, split=split)
    _, state = drawn(params, n)
    assert state.is_solvable.all()
    counts = set()
    for row, (numbers, target) in enumerate(as_lists(state)):
        assert params.min_number <= min(numbers) and max(numbers) <= params.max_number
        assert params.min_target <= target <= params.max_target
        assert host.split_of(numbers, target, params.held_out_every) == split
        counts.add(len(numbers))
        if len(numbers) < 6 or row % 10 == 0:  # the solver is slow for six
            assert host.solve(numbers, target) is not None
    assert counts == set(range(params.min_numbers, params.max_numbers + 1))


def test_training_and_held_out_problems_share_no_key():
    _, train = drawn(countdown_params("small", split=TRAIN), 2000)
    _, held_out = drawn(countdown_params("small", split=HELD_OUT), 2000)
    assert not keys_of(train) & keys_of(held_out)


def test_both_splits_together_hold_one_held_out_problem_in_eight():
    _, state = drawn(countdown_params("small", split=BOTH), 2000)
    n_held_out = sum(host.split_of(numbers, target, 8) for numbers, target in as_lists(state))
    assert abs(n_held_out - 250) < 4 * (2000 * 7 / 64) ** 0.5


def test_targets_and_counts_are_uniform():
    _, state = drawn(countdown_params("small"), 5000, seed=1)
    observed = np.bincount(state.target, minlength=101)[1:]
    assert ((observed - 50) ** 2 / 50).sum() < 148.2  # χ² with 99 degrees of freedom, p = 0.001
    _, state = drawn(countdown_params("3to4"), 1000)
    assert abs((state.numbers[:, 3] > 0).sum() - 500) < 4 * 250**0.5


def test_the_same_key_draws_the_same_problem_and_others_draw_others():
    params = countdown_params("small")
    first, again, other = (drawn(params, 2000, seed)[1] for seed in (0, 0, 1))
    assert (first.numbers == again.numbers).all() and (first.target == again.target).all()
    assert (first.target != other.target).mean() > 0.9


def test_a_row_does_not_depend_on_its_batch():
    params, keys = countdown_params("small"), jax.random.split(jax.random.key(0), (1, 250))[0]
    together = drawn(params, 250)
    for row in (0, 5, 249):
        alone = environment().reset(keys[row], params)
        same = jax.tree.map(lambda a, b, row=row: (a[row] == b).all(), together, alone)
        assert jax.tree.all(same)


def test_params_may_be_arrays_and_are_vmapped():
    env, key = environment(), jax.random.key(0)
    params = countdown_params(
        split=jnp.array([TRAIN, HELD_OUT]),
        held_out_every=jnp.array([8, 5]),
        max_number=jnp.array([20, 9]),
    )
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, params)
    keys = jax.random.split(key, 50)
    reset = jax.vmap(jax.vmap(env.reset_env, (0, None)), (None, axes))
    _, state = jax.jit(reset)(keys, params)
    for i, (split, every, most) in enumerate([(0, 8, 20), (1, 5, 9)]):
        for numbers, target in as_lists(jax.tree.map(lambda x, i=i: x[i], state)):
            assert host.split_of(numbers, target, every) == split and max(numbers) <= most


def test_the_compiled_hash_equals_the_host_hash():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 101, (6, 3000))
    targets = rng.integers(1, 1000, 3000)
    hashes = jax.vmap(problem_key_hash, (1, 0))(jnp.array(numbers), jnp.array(targets))
    expected = [host.problem_key_hash(n, t) for n, t in zip(numbers.T, targets, strict=True)]
    assert np.array_equal(np.asarray(hashes), np.array(expected, np.uint32))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_reachability_is_exact_in_integer_steps(count):
    """Against the set of all results of the four steps, by plain recursion on integers."""

    def reachable(values: tuple[int, ...]) -> set[int]:
        if len(values) == 1:
            return set(values)
        found: set[int] = set()
        for i in range(len(values)):
            for j in range(i):
                small, large = sorted((values[i], values[j]))
                rest = tuple(v for k, v in enumerate(values) if k not in (i, j))
                results = {small + large, large - small, small * large}
                if small and large % small == 0:
                    results.add(large // small)
                for result in results:
                    found |= reachable(tuple(sorted((*rest, result))))
        return found

    rng = np.random.default_rng(count)
    n_problems, check = {3: (20, 60), 4: (8, 60), 5: (2, 60)}[count]
    batch = jax.jit(jax.vmap(is_reachable, (None, 0, None)))
    for problem in range(n_problems):
        values = rng.integers(1, rng.choice([13, 101]), count)
        if problem == 0:
            values = np.array([7, 7, 9, 9, 2])[:count]  # 0/0 is no quotient
        exact = reachable(tuple(sorted(values.tolist())))
        targets = rng.integers(1, MAX_TARGET + 1, check)
        inside = [v for v in exact if 1 <= v <= MAX_TARGET][: check // 2]
        targets[: len(inside)] = inside
        found = batch(jnp.array(values)[:, None], jnp.array(targets), jnp.int32(count))
        assert found[:, 0].tolist() == [int(t) in exact for t in targets]


def test_prompts_read_as_the_tokenizer_writes_them():
    env, rng = environment(6), np.random.default_rng(0)
    numbers = rng.integers(1, 10 ** rng.integers(1, 3, (300, 1)) + 1, (300, 6))
    numbers[np.arange(6) >= rng.integers(1, 7, (300, 1))] = 0
    targets = rng.integers(1, 10 ** rng.integers(1, 4, 300))
    prompts = jax.jit(jax.vmap(env.render))(jnp.array(numbers), jnp.array(targets))
    for row, target in enumerate(targets):
        ids = TOKENIZER.encode(env.prompt_text(numbers[row][numbers[row] > 0], target))
        n_padding = env.prompt_length - len(ids)
        assert prompts.tokens[row].tolist() == [TOKENIZER.pad_id] * n_padding + ids
        assert prompts.mask[row].tolist() == [False] * n_padding + [True] * len(ids)


def test_the_longest_prompt_fills_the_prompt_length_and_the_format_is_free():
    tokenizer = CharTokenizer("0123456789,+-*/()= makeof.")
    env = Countdown(tokenizer, max_numbers=4, prompt_format="make {target} of {numbers}.")
    render = jax.jit(env.render)
    longest = render(jnp.full(4, MAX_NUMBER), jnp.int32(MAX_TARGET))
    assert longest.mask.all()
    assert tokenizer.decode(longest.tokens.tolist()) == "make 999 of 100,100,100,100."
    short = render(jnp.array([7, 10, 0, 0]), jnp.int32(70))
    assert tokenizer.decode(short.tokens[short.mask].tolist()) == "make 70 of 7,10."
    assert short.mask[-1] and int(short.mask.sum()) == len("make 70 of 7,10.")


def answer(text: str, *, ended: bool = True, then: str = "") -> jax.Array:
    """A completion of T tokens: `text`, the end token, and what follows it."""
    ids = TOKENIZER.encode(text) + [END] * ended + TOKENIZER.encode(then)
    return jnp.array(ids + [TOKENIZER.pad_id] * (T - len(ids)))


@cache
def compiled_step(env: Countdown):
    return jax.jit(env.step_env)


def graded(env: Countdown, action, numbers, target, **params):
    state = EnvState(
        time=jnp.int32(0),
        numbers=jnp.array(numbers),
        target=jnp.int32(target),
        is_solvable=jnp.array(True),
    )
    _, stepped, reward, terminated, info = compiled_step(env)(
        jax.random.key(0), state, action, countdown_params(**params)
    )
    assert terminated and stepped.time == 1
    return float(reward), {name: float(value) for name, value in info.items()}


@pytest.mark.parametrize(
    "completion, reward, present, correct, truncated",
    [
        (answer("3*7+12"), 1.0, 1, 1, 0),  # 33
        (answer("12+3*7 "), 1.0, 1, 1, 0),
        (answer("3*7-12"), 0.1, 1, 0, 0),
        (answer("3*7"), 0.1, 1, 0, 0),
        (answer("3*7+12="), 0.1, 1, 0, 0),
        (answer(")("), 0.1, 1, 0, 0),
        (answer(""), 0.0, 0, 0, 0),
        (answer("   "), 0.0, 0, 0, 0),
        (answer("3*7+12", ended=False), 0.0, 0, 0, 1),
        (answer("", ended=False), 0.0, 0, 0, 1),
        (answer("3*7+12", then="+1"), 1.0, 1, 1, 0),  # what follows the end is not read
        (answer("", then="3*7+12"), 0.0, 0, 0, 0),
        (answer("3*7", then="+12"), 0.1, 1, 0, 0),
    ],
)
def test_rewards_of_answers_made_by_hand(completion, reward, present, correct, truncated):
    got, info = graded(environment(), completion, [3, 12, 7], 33)
    assert got == pytest.approx(reward)
    assert info == {
        "is_present": present,
        "is_correct": correct,
        "is_truncated": truncated,
        "is_solvable": 1,
    }


def test_the_end_token_may_be_the_last_of_the_completion():
    text = "3*7+ 12 " + " " * (T - 9)
    assert graded(environment(), answer(text), [3, 12, 7], 33)[0] == 1.0


def test_rewards_are_parameters():
    rewards = dict(reward_missing=-2.0, reward_wrong=0.5, reward_correct=3.0)
    for text, expected in (("", -2.0), ("3", 0.5), ("3*7+12", 3.0)):
        assert graded(environment(), answer(text), [3, 12, 7], 33, **rewards)[0] == expected


class PaddingIsAnEnd(CharTokenizer):
    """Two end tokens, of which one is also the padding."""

    eos_ids = (2, 0)


def test_any_end_token_ends_the_answer_also_one_that_pads():
    env = Countdown(
        PaddingIsAnEnd(TOKENIZER.alphabet, TOKENIZER.symbols[len(TOKENIZER.alphabet) :]),
        max_completion=T,
    )
    for end in (2, 0):
        ids = TOKENIZER.encode("3*7+12") + [end] + TOKENIZER.encode("+1") + [2]
        action = jnp.array(ids + [0] * (T - len(ids)))
        assert graded(env, action, [3, 12, 7], 33)[0] == 1.0


def test_the_solver_is_graded_correct():
    env, params = environment(4), countdown_params("3to4")
    _, state = drawn(params, 250)
    actions = jnp.stack([answer(str(host.solve(*problem))) for problem in as_lists(state)])
    step = jax.jit(jax.vmap(env.step_env, (None, 0, 0, None)))
    _, _, reward, _, info = step(jax.random.key(0), state, actions, params)
    assert (reward == 1.0).all() and info["is_correct"].all()
    # The same answers to the next problem are wrong, unless the problems are alike.
    shifted = jax.tree.map(lambda x: np.roll(x, 1, axis=0), state)
    _, _, reward, _, _ = step(jax.random.key(0), shifted, actions, params)
    assert (reward == jnp.float32(0.1)).mean() > 0.95


def test_the_public_interface_is_that_of_gymnax():
    env, params = environment(), countdown_params("small")
    observed, state = env.reset(jax.random.key(0), params)
    assert isinstance(observed, Prompts) and state.time == 0
    result = env.step(jax.random.key(1), state, answer("1"), params)
    next_observed, next_state, reward, terminated, truncated, info = result
    assert terminated and not truncated and reward == jnp.float32(0.1)
    assert next_state.time == 0  # gymnax starts the next episode
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a == b).all(), info["final_observation"], observed)
    )
    assert not (next_observed.tokens == observed.tokens).all()
    assert env.name == "Countdown" and env.default_params == countdown_params("small")
    assert env.action_space(params).contains(answer("1"))
    assert env.observation_space(params).contains(observed)


def test_an_unreachable_range_ends_and_says_so():
    params = countdown_params("small", max_number=3, min_target=500, max_target=600)
    _, state = drawn(params, 250)
    assert not state.is_solvable.any()
    _, _, reward, _, info = compiled_step(environment())(
        jax.random.key(0), jax.tree.map(lambda x: x[0], state), answer("1"), params
    )
    assert info["is_solvable"] == 0 and reward == jnp.float32(0.1)


def test_a_target_out_of_reach_is_replaced_by_one_within_reach():
    # Of 1..3 three numbers make at most 27.
    _, state = drawn(countdown_params("small", max_number=3, max_target=50), 250)
    assert state.is_solvable.mean() > 0.85
    assert state.target[state.is_solvable].max() <= 27


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(min_numbers=2), "min_numbers=2, max_numbers=3: expected 3 <="),
        (dict(max_numbers=4), "max_numbers=4: expected 3 <= min_numbers <= max_numbers <= 3"),
        (dict(min_number=0), "min_number=0"),
        (dict(max_number=101), "max_number=101.*<= 100"),
        (dict(min_number=9, max_number=5), "min_number=9, max_number=5"),
        (dict(min_target=60, max_target=50), "min_target=60, max_target=50"),
        (dict(min_target=5000, max_target=6000, max_number=9), "<= 999"),
        (dict(min_target=800, max_target=900, max_number=9), "64 of 64 searches.*in 800..900"),
        (dict(split=2), "split=2"),
        (dict(held_out_every=1), "held_out_every=1"),
    ],
)
def test_params_that_cannot_work_are_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_params(countdown_params("small", **overrides), environment())
    assert "\n" not in str(caught.value)


def test_params_that_work_are_accepted():
    check_params(countdown_params("small"), environment())


def test_unknown_presets_fields_tokenizers_and_formats_are_refused():
    with pytest.raises(ConfigError, match="small, 3to4, 3to6"):
        countdown_params("huge")
    with pytest.raises(ConfigError, match="min_numers"):
        countdown_params("small", min_numers=3)
    with pytest.raises(ConfigError, match="','"):
        Countdown(CharTokenizer("0123456789= "))
    with pytest.raises(ConfigError, match="3 to 6"):
        Countdown(TOKENIZER, max_numbers=7)
    for wrong in ("{numbers}", "{numbers}{numbers}{target}", "{numbers}={goal}", "1"):
        with pytest.raises(ConfigError, match="once each"):
            Countdown(TOKENIZER, prompt_format=wrong)


def test_sft_examples_are_solutions_of_training_problems_with_an_end():
    env, n = environment(), 300
    prompts, tokens, mask = sft_examples(env, countdown_params("small", split=HELD_OUT), n, 7, T)
    assert tokens.shape == mask.shape == (n, T) and prompts.tokens.shape == (n, env.prompt_length)
    texts = set()
    for row in range(n):
        numbers, target = TOKENIZER.decode(prompts.tokens[row].tolist()).strip().split("=")
        values = [int(number) for number in numbers.split(",")]
        text = TOKENIZER.decode(tokens[row].tolist())
        assert text in host.solutions(values, int(target))
        assert host.split_of(values, int(target), 8) == TRAIN
        length = len(TOKENIZER.encode(text))
        assert mask[row].tolist() == [i <= length for i in range(T)]
        assert tokens[row, length] == END and (tokens[row, length + 1 :] == 0).all()
        texts.add(text)
    assert len(texts) > 0.9 * n
    same = sft_examples(env, countdown_params("small"), n, 7, T)[1]
    assert (same == tokens).all()


def test_sft_solutions_are_chosen_uniformly_among_the_distinct():
    choice = np.random.default_rng(0)
    texts = [_one_solution([6, 4, 2], 12, choice) for _ in range(900)]
    for text in ("6*(4-2)", "6*4/2", "6+4+2"):
        assert abs(texts.count(text) - 300) < 4 * 200**0.5


def test_sft_says_when_a_solution_does_not_fit():
    with pytest.raises(ConfigError, match="max_completion=5 cannot hold the solution"):
        sft_examples(environment(), countdown_params("small"), 20, 0, 5)
