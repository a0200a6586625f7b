"""What each of two processes does; `test_distributed.py` starts them: FOLDER MESH STEPS."""

import sys

import eight_devices

from jaxrl_llm.distributed import agree, any_process, is_first
from jaxrl_llm.policy import Policy
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.types import ConfigError

ALPHABET = "".join(chr(ord("!") + i) for i in range(eight_devices.V - 3))


def refuse():
    raise ConfigError("refused")


def main(folder: str, mesh: str, steps: str) -> None:
    assert agree(lambda: [1, "two"]) == [1, "two"]
    assert any_process(is_first()) and not any_process(False)
    try:
        agree(refuse)
        raise AssertionError("not refused")
    except ConfigError as error:
        assert str(error) == "refused"
    result = eight_devices.supervised(folder, mesh, int(steps))
    assert result.iteration == int(steps) and len(result.history) == int(steps)
    policy = Policy(eight_devices.MODEL, CharTokenizer(ALPHABET), result.params)
    policy.save(f"{folder}/policy")


if __name__ == "__main__":
    main(*sys.argv[1:])
