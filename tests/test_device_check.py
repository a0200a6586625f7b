import json
import sys

import jax.numpy as jnp
import pytest

from experiments import cli, device_check


@pytest.mark.slow
def test_nothing_is_wrong_on_a_cpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["device_check", "--smoke", "--root", str(tmp_path)])
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        cli.run(device_check.Config, device_check.main, device_check.__doc__)
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "wrong: " not in printed and printed.count("right: ") == 6
    result = json.loads((tmp_path / "device_check" / "result.json").read_text())
    assert set(result["gaps"]) == set(device_check.GAPS)
    assert set(result["bench"]["phases"]) >= {"decode", "update"}


def test_a_difference_is_relative_to_the_largest_value():
    expected = {"a": jnp.array([4.0, -8.0]), "b": jnp.array([0.5])}
    found = {"a": jnp.array([4.0, -6.0]), "b": jnp.array([0.6])}
    assert device_check.difference(found, expected) == pytest.approx(0.25)
