"""Puts what runs came to into results/ and RESULTS.md.

Of an ablation its results.json and curves.png, of a single run its summary.json and learning curve,
of policies on suites of questions their results.json.
A smoke run is refused, and so is one of changed code, which no commit stands for.

Command   python -m experiments.publish runs/ablate_kl_coef/default runs/countdown_3to4/default
Expected  RESULTS.md, made anew from all of results/*.json
Time      a second
"""

import importlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from experiments import cli, results
from jaxrl_llm.logging import write_json
from jaxrl_llm.types import ConfigError

_KEPT = ("experiment", "before", "after", "iterations", "run_seconds")
_PLACES = ("--root", "--run.root", "--name", "--run.name")
_ORIGIN = ("commit", "is_dirty", "versions", "python", "platform", "cpus", "cpu", "device")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which runs to publish."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of finished ablations or runs."""
    results: Path = results.FOLDER
    """Folder of the records; RESULTS.md lies beside it."""
    changed: bool = False
    """Also of changed code; RESULTS.md says so."""


def main(config: Config) -> None:
    if not config.folders:
        raise ConfigError("no folder: expected some, such as runs/ablate_kl_coef/default")
    config.results.mkdir(exist_ok=True)
    for folder in config.folders:
        record, figure = read(folder)
        if record.get("smoke"):
            raise ConfigError(f"{folder}: a smoke run is no result; run it without --smoke")
        if record["provenance"]["is_dirty"] and not config.changed:
            raise ConfigError(
                f"{folder}: made by code that was not committed; commit and run it again, or add "
                "--changed, and RESULTS.md says so"
            )
        name = record["experiment"]
        write_json(config.results / f"{name}.json", record)
        if figure:
            shutil.copyfile(figure, config.results / f"{name}.png")
    results.write_page(config.results)
    print(
        f"{config.results.parent / results.PAGE.name}: {len(results.read(config.results))} records"
    )


def read(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """The record of a folder, and its figure where it has one.

    Raises:
        ConfigError: it holds nothing finished.
    """
    if (folder / "results.json").is_file():
        record = json.loads((folder / "results.json").read_text())
        if "stages" in record:
            record["claim"] = claim(record["experiment"])
            record["arguments"] = arguments(record["provenance"]["command"])
        record["provenance"] = {name: record["provenance"].get(name) for name in _ORIGIN}
        return record, None if "stages" in record else folder / "curves.png"
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"{folder}: neither results.json nor summary.json there; expected the folder of a "
            "finished ablation or run, such as runs/ablate_kl_coef/default"
        )
    summary = json.loads((folder / "summary.json").read_text())
    record = {name: summary[name] for name in _KEPT}
    record["claim"] = claim(summary["experiment"])
    record["provenance"] = {name: summary.get(name) for name in _ORIGIN}
    return record, folder / "plots" / "learning.png"


def claim(experiment: str) -> str:
    header = importlib.import_module(f"experiments.{experiment}").__doc__ or ""
    return header.strip().splitlines()[0]


def arguments(command: list[str]) -> list[str]:
    """What was typed after the experiment's name, but for where the results were to lie."""
    typed = [
        part
        for word in command[command.index("-m") + 2 :]
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    places = {i for i, word in enumerate(typed) if word in _PLACES}
    return [word for i, word in enumerate(typed) if not {i, i - 1} & places]


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
