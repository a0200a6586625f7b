import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.envs.rewards import REWARDS, EpisodeStatistics, make_reward
from jaxrl_llm.types import ConfigError


def statistics(**counts):
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(EpisodeStatistics)), 0.0)
    counts = {"questions": 2, "by_tool": jnp.zeros(3)} | counts
    return EpisodeStatistics(**{k: jnp.float32(x) for k, x in (zeros | counts).items()})


@pytest.mark.parametrize(
    "name, counts, expected",
    [
        ("task_success", dict(), 0.0),
        ("task_success", dict(correct=1, answered=2, calls=9, malformed=3), 0.5),
        ("task_success", dict(correct=2), 1.0),
        ("task_success", dict(questions=1, correct=1), 1.0),
        ("tool_efficiency", dict(), 0.0),
        ("tool_efficiency", dict(correct=2, calls=3), 0.94),
        ("tool_efficiency", dict(correct=1, calls=1, failed=1), 0.38),
        ("tool_efficiency", dict(calls=1, unknown=1), -0.12),
        ("tool_efficiency", dict(malformed=2), -0.2),  # not a call: it costs nothing besides
        ("tool_efficiency", dict(calls=2, redundant=1, unnecessary=1), -0.24),  # both at once
        ("tool_efficiency", dict(calls=2, succeeded=2, by_tool=jnp.array([2, 0, 0])), -0.04),
        ("dialogue_quality", dict(), 0.5),  # nothing went wrong yet
        ("dialogue_quality", dict(answered=2, turns=2, tokens=32), 1.0),
        ("dialogue_quality", dict(answered=2, turns=4, malformed=1, tokens=20), 0.875),
        ("dialogue_quality", dict(answered=1, turns=4, malformed=4, tokens=64), 0.15),
        ("dialogue_quality", dict(answered=2, turns=2, tokens=40, correct=1, calls=9), 0.975),
        ("dialogue_quality", dict(questions=1, answered=1, turns=1, tokens=24), 0.95),
    ],
)
def test_rewards_are_worth_what_hand_made_statistics_are(name, counts, expected):
    assert make_reward(name)(statistics(**counts)) == pytest.approx(expected)


def test_a_mix_is_the_weighted_sum():
    s = statistics(correct=1, answered=2, calls=2, turns=4, malformed=1, tokens=20)
    # 0.5; 0.5 − 0.04 − 0.1; 0.875
    mix = make_reward({"task_success": 2.0, "tool_efficiency": -1.0, "dialogue_quality": 0.5})
    assert jax.jit(mix)(s) == pytest.approx(2 * 0.5 - 0.36 + 0.4375)
    assert make_reward({"task_success": 0.25})(s) == pytest.approx(0.125)


def test_a_function_is_taken_as_it_is():
    def brevity(s):
        return -s.tokens

    assert make_reward(brevity) is brevity
    assert make_reward(REWARDS["task_success"]) is REWARDS["task_success"]


@pytest.mark.parametrize(
    "unknown, named",
    [
        ("succes", "succes"),
        ("", "nothing"),
        ({}, "nothing"),
        ({"task_success": 1.0, "brevity": 0.1, "a": 1}, "a, brevity"),
    ],
)
def test_unknown_rewards_are_refused_in_one_line_that_lists_the_known(unknown, named):
    with pytest.raises(ConfigError, match=f"no reward called {named}; expected .*") as caught:
        make_reward(unknown)
    assert all(name in str(caught.value) for name in REWARDS)
    assert "\n" not in str(caught.value)
