"""Playing by hand: the command, from its arguments and what is typed to what is printed."""

import io
import runpy
import subprocess
import sys

import pytest

from jaxrl_llm.envs import host, play

THE_END, NOT_FINISHED = "\nThe end.\n", "\nThe episode was not finished. Good-bye.\n"


@pytest.fixture
def command(monkeypatch, capsys):
    """`command(*arguments, typed=bytes)` runs the module; its exit status, and all it prints."""

    def run(*arguments, typed=b""):
        monkeypatch.setattr(sys, "argv", ["play", *arguments])
        stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            runpy.run_path(play.__file__, run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def statistics(printed):
    """The table after the end."""
    _, table = printed.split(THE_END)
    return {name: float(value) for name, value in map(str.split, table.splitlines())}


@pytest.mark.slow
def test_a_dialogue_is_played_through_a_pipe_to_its_end():
    turns = ["<call>calc 37*48</call>", *["no idea"] * 7]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.envs.play", "dialogue", "--reward", "tool_efficiency"],
        input="".join(turn + "\n" for turn in turns),
        capture_output=True,
        text=True,
    )
    printed = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "    <call>NAME ARGUMENTS</call>    or    <answer>TEXT</answer>\n" in printed
    for tool in ("calc EXPRESSION: ", "lookup SUBJECT FIELD: ", "search QUERY: "):
        assert f"\n    {tool}" in printed
    assert printed.count("\n<user>") == 1 and "\n<result>1776</result>\n> " in printed
    assert printed.count("\n<result>error: malformed</result>\n> ") == 6  # the last is not read
    result = statistics(printed)
    # 0.02 for the call, 0.1 for each malformed turn, 0.1 for the call if no tool is needed.
    expected = -0.02 - 0.7 - 0.1 * result["calls_unnecessary"]
    assert result["reward"] == pytest.approx(expected)
    assert f"(reward -0.10, so far {expected:+.2f})\n{THE_END}" in printed
    counts = {"turns": 8, "calls": 1, "calls_succeeded": 1, "calls_malformed": 7, "success": 0}
    assert counts.items() <= result.items()


def test_a_right_answer_is_worth_its_reward_in_the_episode_of_the_seed(command):
    problem, _ = play.make_env("countdown", None)[0].reset(seed=3)
    numbers, target = problem.split("=")
    answer = str(host.solve([int(number) for number in numbers.split(",")], int(target)))
    status, printed, errors = command("countdown", "--seed", "3", typed=answer.encode() + b"\n")
    assert (status, errors) == (0, "")
    assert "each used exactly once" in printed
    assert f"\nEpisode 3; Ctrl-D or Ctrl-C ends it.\n\n{problem}\n> (reward +1.00," in printed
    flags = dict(is_correct=1, is_present=1, is_solvable=1, is_truncated=0)
    assert statistics(printed) == {"reward": 1} | flags


@pytest.mark.parametrize("typed", [b"", b"caf\xc3\xa9\n", b"\xff\xfe\n"])
def test_the_end_of_input_ends_an_episode_and_what_no_agent_can_say_is_not_sent(command, typed):
    status, printed, errors = command("countdown", typed=typed)
    assert (status, errors) == (0, "") and printed.endswith("\n> " + NOT_FINISHED)
    assert printed.count("> not sent: ") == len(typed.splitlines())
    assert THE_END not in printed and "(reward" not in printed


def test_input_may_end_in_the_middle_of_a_dialogue(command):
    status, printed, errors = command("dialogue", typed=b"no idea\n")
    assert (status, errors) == (0, "")
    malformed = "<result>error: malformed</result>"
    assert printed.endswith(f"> (reward +0.00, so far +0.00)\n{malformed}\n> {NOT_FINISHED}")


def test_input_beyond_the_end_of_an_episode_is_not_read(command):
    status, printed, errors = command("countdown", typed=b"1\n2\n")
    assert (status, errors) == (0, "")
    assert printed.count("> ") == 1 and statistics(printed)["reward"] == pytest.approx(0.1)


def test_ctrl_c_ends_an_episode_as_the_end_of_input_does(command, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    status, printed, errors = command("countdown")
    assert (status, errors) == (0, "") and printed.endswith(NOT_FINISHED)


@pytest.mark.parametrize("arguments", [["chess"], [], ["dialogue", "countdown"]])
def test_an_unknown_environment_is_refused_with_the_known_ones(command, arguments):
    status, printed, errors = command(*arguments)
    assert (status, printed) == (2, "") and "Traceback" not in errors
    if arguments == ["chess"]:
        words = " ".join(errors.replace("│", " ").split())
        assert "invalid choice 'chess'" in words
        assert "Expected one of ('dialogue', 'countdown')" in words


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["dialogue", "--seed", "-1"], "--seed -1: expected a number from 0"),
        (["dialogue", "--reward", "money"], "no reward called money; expected task_success, "),
        (["countdown", "--reward", "task_success"], "countdown has a reward of its own; expected"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(command, arguments, message):
    status, printed, errors = command(*arguments)
    assert (status, printed) == (2, "")
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
