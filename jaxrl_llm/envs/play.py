"""Play an episode of an environment in the terminal: you are the agent.

python -m jaxrl_llm.envs.play dialogue --reward tool_efficiency
python -m jaxrl_llm.envs.play countdown --seed 3
"""

import random
import sys
from typing import Literal

import tyro

from jaxrl_llm.envs.countdown import Countdown
from jaxrl_llm.envs.dialogue import DialogueEnv
from jaxrl_llm.envs.gymnasium_view import TextEnv
from jaxrl_llm.envs.tools import Tool
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.types import ConfigError

HELP = {
    "dialogue": """\
You are the agent. A line is one turn, and either

    <call>NAME ARGUMENTS</call>    or    <answer>TEXT</answer>

The tools:
{tools}
An episode has one question or two, and at most {turns} turns of {tokens} tokens.""",
    "countdown": """\
"3,7,12=24 " asks for 24 from the numbers 3, 7 and 12, each used exactly once, with + - * / and
parentheses. Answer with one line, such as 12*(7-3)/2. There is one try.""",
}


def make_env(name: str, reward: str | None) -> tuple[TextEnv, str]:
    """The environment, and what a player has to know.

    Raises:
        ConfigError: no such reward, or one for an environment that has its own.
    """
    if name == "countdown":
        if reward is not None:
            raise ConfigError(
                f"--reward {reward}: countdown has a reward of its own; expected none, or dialogue "
                "in place of countdown"
            )
        return TextEnv(Countdown(arithmetic_tokenizer(), max_completion=32)), HELP[name]
    env = DialogueEnv(reward or "task_success", max_turn_tokens=48)
    tools = "\n".join(map(describe, env.tools.device_tools()))
    return TextEnv(env), HELP[name].format(
        tools=tools, turns=env.max_turns, tokens=env.max_turn_tokens
    )


def describe(tool: Tool) -> str:
    """What a player has to know of a tool, in two lines."""
    properties = tool.properties.items()
    arguments = "; ".join(f"{name.upper()} is {each['description']}" for name, each in properties)
    names = " ".join(name.upper() for name, _ in properties)
    return f"    {tool.name} {names}: {tool.description}\n        {arguments}."


def play(env: TextEnv, seed: int) -> dict[str, float]:
    """One episode between `env` and standard input; the statistics of its end.

    Raises:
        EOFError, KeyboardInterrupt: the player has had enough.
    """
    written, info = env.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        print(written)
        try:
            written, reward, is_terminated, is_truncated, info = env.step(input("> "))
        except ValueError as error:
            print(f"not sent: {error}")
            continue
        is_over, total = is_terminated or is_truncated, total + reward
        print(f"(reward {reward:+.2f}, so far {total:+.2f})")
    return {"reward": total} | info


def main(
    env: Literal["dialogue", "countdown"],
    /,
    seed: int | None = None,
    reward: str | None = None,
) -> None:
    """Play an episode: read what the environment writes, type what the agent says.

    Args:
        env: Which environment.
        seed: Of the episode (none: another one each time).
        reward: Of dialogue: task_success, tool_efficiency or dialogue_quality.
    """
    seed = random.randrange(2**31) if seed is None else seed
    if seed < 0:
        raise ConfigError(f"--seed {seed}: expected a number from 0")
    view, help_text = make_env(env, reward)
    print(f"{help_text}\nEpisode {seed}; Ctrl-D or Ctrl-C ends it.\n")
    try:
        statistics = play(view, seed)
    except (EOFError, KeyboardInterrupt):
        print("\nThe episode was not finished. Good-bye.")
        return
    print("\nThe end.")
    for name, value in statistics.items():
        print(f"    {name:20} {value:g}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
