"""Playing by hand: the command, from its arguments and what is typed to what is printed."""

import re
import runpy
import subprocess
import sys

import pytest

from jaxrl_llm.envs import host, play
from jaxrl_llm.envs.tools import Tool
from jaxrl_llm.types import ConfigError

COMMAND = [sys.executable, "-m", "jaxrl_llm.envs.play"]
END = "\nThe end.\n"


def dialogue_player(prompt):
    """Gives up on every question."""
    return "<answer>0</answer>"


def countdown_player(prompt):
    numbers, target = prompt.split("=")
    return str(host.solve([int(number) for number in numbers.split(",")], int(target)))


def played(process, player):
    """All that is printed while the player answers whatever line comes last before a prompt."""
    text, seen = "", 0
    while letter := process.stdout.read(1):
        text += letter
        if text.endswith("\n> "):
            process.stdin.write(player(text.splitlines()[-2]) + "\n")
            process.stdin.flush()
            seen += 1
    return text, seen


@pytest.mark.parametrize("name, player", [("countdown", countdown_player)])
def test_an_episode_is_played_through_a_pipe_to_its_end(name, player):
    with subprocess.Popen(
        [*COMMAND, name, "--seed", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        text, n_turns = played(process, player)
        assert (process.stderr.read(), process.wait()) == ("", 0)
    assert n_turns == 1
    before, after = text.split(END)
    assert "each used exactly once" in before and "Episode 3; Ctrl-D" in before
    assert before.splitlines()[-1] == "> (reward +1.00, so far +1.00)"
    statistics = dict(line.split() for line in after.splitlines())
    assert statistics == dict(
        reward="1", is_correct="1", is_present="1", is_solvable="1", is_truncated="0"
    )
