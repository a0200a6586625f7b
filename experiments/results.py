"""The published results: `results/*.json`, and RESULTS.md, which is made from them alone."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.suites import SuiteResult, comparison_table

FOLDER = Path(__file__).parents[1] / "results"
PAGE = FOLDER.parent / "RESULTS.md"
COLUMNS = {  # figure → its column and format
    "sampled": ("sampled accuracy", ".3f"),
    "greedy": ("greedy accuracy", ".3f"),
    "length": ("tokens per completion", ".2f"),
    "entropy": ("entropy, nats per token", ".3f"),
    "unsteadiness": ("unsteadiness", ".3f"),
}
ORDER = (
    "ablate_algorithm",
    "ablate_learning_rate",
    "ablate_group_size",
    "ablate_kl_coef",
    "ablate_entropy",
    "ablate_loss_aggregation",
    "ablate_clip_higher",
    "ablate_dynamic_sampling",
    "countdown_3to4",
    "transfer_countdown",
    "evaluate",
)

_INTRODUCTION = """# Results

What the study measured on this code, made by its commands and by nothing else: every number below
is read from the JSON file named beside it, and `python -m experiments.verify_results` runs a part
of it again and says which numbers came out the same.

All arms begin with one warm start, a policy of 0.37 million parameters that half knows Countdown
(3 numbers up to 20, targets up to 100), and are measured on the same 1,024 held-out problems, 8
completions each at temperature 1. Brackets are 95 % intervals over seeds (bootstrap, with the
percentiles widened for few seeds); differences are paired by seed. A verdict says where the
interval of the difference lies: *supported* on the claimed side, *contradicted* on the other, *not
resolved* across it. The seeds draw problems and completions; the warm start is the same for all, so
the intervals say nothing about other warm starts, other models or other tasks. Several claims are
tested, without correction for their number. ablate_loss_aggregation was run on another processor,
whose vectors are longer: it rounds differently, and so trained another warm start. Its arm
*sequence* has the settings of *0.0008* and *G = 8*, and shows how far that alone moves the figures.

The claims F2 to F8 are those of a comparative study of PPO, GRPO and DAPO on language models of
1.5 billion parameters (https://arxiv.org/abs/2512.07611). A model 4,000 times smaller on
completions of ten tokens can support them or not; it cannot settle them. All arms share a
learning rate of 8e-4, chosen beforehand (but for those of ablate_learning_rate, where 1e-4 does as
well, with a higher greedy accuracy): some effects may be those of a rate on the large side. Seconds
are those of a run's share of its program; but for ablate_dynamic_sampling other programs ran beside
it.
"""


def markdown(record: Mapping[str, Any]) -> str:
    """The tables of a record: of arms with what they say of the claims, or of one run."""
    if "stages" in record:
        return _of_stages(record)
    if "arms" not in record:
        return _of_one_run(record)
    titles = [title for title, _ in COLUMNS.values()]
    lines = [
        f"| arm | n | {' | '.join(titles)} | seconds a run |",
        "|" + "---|" * (len(titles) + 3),
    ]
    for name, arm in record["arms"].items():
        cells = [interval(arm["estimates"][figure], form) for figure, (_, form) in COLUMNS.items()]
        n = len(arm["figures"]["sampled"])
        seconds = format(arm["estimates"]["seconds"][0], ".0f")
        lines.append(f"| {name} | {n} | {' | '.join(cells)} | {seconds} |")
    told = [f"- {finding['told']}" for finding in record["findings"]]
    before = record["before"]
    of_problems = tuple(before.get(f"sampled{end}") for end in ("", "_low", "_high"))
    told_before = format(before["sampled"], ".3f")
    if None not in of_problems:
        told_before = f"{interval(of_problems, '.3f')} over problems"
    return "\n".join([*lines, "", f"Sampled accuracy before: {told_before}.", "", *told]) + "\n"


def _of_one_run(record: Mapping[str, Any]) -> str:
    """Before and after, intervals over problems."""
    before, after = record["before"], record["after"]
    lines = ["| held out | before RL | after RL |", "|---|---|---|"]
    for name in before:
        if not name.endswith(("_low", "_high")):
            told = [
                interval((row[name], row[f"{name}_low"], row[f"{name}_high"]), ".3f")
                for row in (before, after)
            ]
            lines.append(f"| {name.removeprefix('eval/')} | {' | '.join(told)} |")
    cost = f"{record['iterations']} iterations, {record['run_seconds']:.0f} s"
    return "\n".join([*lines, "", f"{cost}; intervals are over problems, of one seed."]) + "\n"


def _of_stages(record: Mapping[str, Any]) -> str:
    """Policies on suites of questions, and the time that the answers took."""
    columns = [
        (stage, [SuiteResult(**result) for result in found])
        for stage, found in record["stages"].items()
    ]
    seconds = sum(result.seconds for _, found in columns for result in found)
    return f"{comparison_table(columns)}\nAnswers took {seconds:.0f} s in all.\n"


def interval(estimate: tuple[float, float, float], form: str) -> str:
    value, low, high = (format(x, form) for x in estimate)
    return f"{value} [{low}, {high}]"


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """RESULTS.md of the records, by experiment."""
    parts = [_INTRODUCTION]
    for name in sorted(records, key=_place):
        record = records[name]
        origin = record["provenance"]
        dirty = ", with changes" if origin["is_dirty"] else ""
        command = shlex.join(["python", "-m", f"experiments.{name}", *record.get("arguments", ())])
        figure = "" if "stages" in record else f"\n![curves](results/{name}.png)\n"
        parts.append(
            f"## {name}\n\n{record['claim']}\n\n"
            f"`{command}` · {_sample(record)} · "
            f"{origin['cpus']} CPU cores ({origin['cpu']}) · jax {origin['versions']['jax']} · "
            f"commit {(origin['commit'] or 'unknown')[:7]}{dirty} · "
            f"[results/{name}.json](results/{name}.json)\n\n"
            f"{markdown(record)}{figure}"
        )
    return "\n".join(parts)


def _sample(record: Mapping[str, Any]) -> str:
    if "stages" in record:
        return "intervals over questions, differences paired by question"
    return f"seeds 0 to {record['seeds'] - 1}" if "arms" in record else "seed 0"


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def read(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Records of all published experiments."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write_page(folder: Path = FOLDER) -> None:
    (folder.parent / PAGE.name).write_text(page(read(folder)))
