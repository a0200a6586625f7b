"""Tasks of lm-eval, as they are, with data from the hub or from local copies.

Needs lm-eval (`pip install 'jaxrl_llm[eval]'`).
"""

import contextlib
import difflib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
from datasets.exceptions import DatasetsError
from lm_eval.tasks import TaskManager

from jaxrl_llm.harness import HarnessLM
from jaxrl_llm.suites import SuiteResult
from jaxrl_llm.types import ConfigError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

_logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """What a policy scored, and what it said."""

    result: SuiteResult
    answers: list[dict[str, Any]]  # question, responses and scores, one for each question


def evaluate_task(
    lm: HarnessLM,
    task: str,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    data: Path | None = None,
    use_cache: Path | None = None,
    manager: TaskManager | None = None,
) -> Measured:
    """Run a task, or all tasks of a group such as bbh, through `lm_eval.simple_evaluate`.

    Metrics are named as lm-eval does, `metric,filter`: a task with several filters, such as the
    strict and the lenient extraction of gsm8k, has all of them. Of a group the questions of all its
    tasks are put together, so a mean weights tasks by their size; metrics that only some of its
    tasks have, and those that are no score in [0, 1] per question, are left out.

    Args:
        lm: the policy.
        task: a name of lm-eval's list: a task, a group or a tag.
        limit: questions of each task, the first; None for all.
        num_fewshot: worked examples before each question, in place of the task's own number.
        chat: write prompts by the tokenizer's chat template, examples as turns of their own.
        data: a folder with local copies, which take the place of the hub's (`local_data`).
        use_cache: where responses are kept while it runs, so that it goes on after an interruption.
        manager: lm-eval's list of tasks, which takes seconds to make.

    Returns:
        The scores; a question is named TASK/DIGEST, by the task within the group.

    Raises:
        ConfigError: no such task, data that cannot be had, or packages that the task lacks.
    """
    manager = TaskManager() if manager is None else manager
    if task not in manager.task_index:
        near = difflib.get_close_matches(task, manager.all_tasks) or ["gsm8k"]
        raise ConfigError(f"lm-eval has no task {task!r}: expected one such as {', '.join(near)}")
    spec: Any = task
    if data is not None:
        spec = {
            "group": f"{task} (local data)",
            "task": [
                leaf | local_data(data, task, (manager.task_index[leaf["task"]].cfg or {}) | leaf)
                for leaf in leaves(manager, task)
            ],
        }
    started = time.perf_counter()
    tasks = _load(manager, task, spec)
    run: Any = lm_eval.simple_evaluate
    found = run(
        lm,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        use_cache=None if use_cache is None else str(use_cache),
        bootstrap_iters=0,
    )
    return read_samples(task, found["samples"], time.perf_counter() - started)


def read_samples(
    suite: str, samples: Mapping[str, Sequence[Mapping[str, Any]]], seconds: float
) -> Measured:
    """Scores and answers from the samples that lm-eval logs, one for each question and filter.

    Raises:
        ConfigError: no metric is a score in [0, 1] in all tasks.
    """
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for name, logged in samples.items():
        for sample in logged:
            place = name, sample["doc_id"]
            question = f"{name}/{sample['doc_hash'][:16]}"
            said = answers.setdefault(
                place, {"question": question, "responses": sample["resps"], "scores": {}}
            )
            for metric in sample["metrics"]:
                said["scores"][f"{metric},{sample['filter']}"] = sample[metric]
    rows = [answers[place] for place in sorted(answers)]
    scores = {
        metric: [float(row["scores"][metric]) for row in rows]
        for metric in (rows[0]["scores"] if rows else ())
        if all(_is_score(row["scores"].get(metric)) for row in rows)
    }
    if not scores:
        raise ConfigError(
            f"task {suite} has no score in [0, 1] per question: expected one such as gsm8k"
        )
    return Measured(SuiteResult(suite, scores, [row["question"] for row in rows], seconds), rows)


def _is_score(value: Any) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def leaves(manager: TaskManager, name: str) -> list[dict[str, Any]]:
    """The tasks behind a name: of each `task`, its own name, and what groups change in it."""
    entry = manager.task_index[name]
    if entry.kind.name not in ("GROUP", "TAG"):
        return [{"task": name}]
    members: Any = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {})["task"]
    found = []
    for member in members:
        changed = {"task": member} if isinstance(member, str) else dict(member)
        task = changed.pop("task", "")
        found += [leaf | changed for leaf in leaves(manager, changed.pop("group", task))]
    return found


def local_data(folder: Path, suite: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a task read local copies of its data.

    For the part NAME of SUITE these are looked for, as .jsonl, .json or .parquet, where the data's
    own name PART is such as `main` or `algebra`; a folder may be a copy of the hub's:

        TASK.jsonl or TASK/SPLIT*.jsonl, SUITE/PART.jsonl or SUITE/PART/SPLIT*.jsonl,
        SUITE.jsonl or SUITE/SPLIT*.jsonl (or SUITE/data/SPLIT*.jsonl)

    Worked examples come from the split that the task takes them from. Where there is none, as with
    a single file, they come from the questions, but never from the one that is asked.

    Args:
        folder: holds the copies.
        suite: the name that was asked for.
        config: of the task: `task`, `dataset_name` and its splits.

    Returns:
        Fields of the task's configuration.

    Raises:
        ConfigError: there is no copy.
    """
    asked = config.get("test_split") or config.get("validation_split") or "train"
    examples = config.get("fewshot_split")
    part = config.get("dataset_name") or "main"
    for base in dict.fromkeys([config["task"], f"{suite}/{part}", suite]):
        for suffix, builder in _BUILDERS.items():
            single = folder / f"{base}{suffix}"
            files = {asked: [single]} if single.is_file() else {}
            for place in (folder / base, folder / base / "data"):
                files = files or _split_files(place, {asked, examples} - {None}, suffix)
            if asked not in files:
                continue
            names = {split: [str(path.resolve()) for path in files[split]] for split in files}
            found = {
                "dataset_path": builder,
                "dataset_name": None,
                "dataset_kwargs": {"data_files": names},
            }
            if examples in (None, *files):
                return found
            _logger.warning("%s: worked examples come from the questions", config["task"])
            return found | {"fewshot_split": asked}
    raise ConfigError(
        f"task {config['task']}: no copy of its data in {folder}: expected {suite}.jsonl, "
        f"{suite}.parquet, or {suite}/{asked}.jsonl with a file for each split"
    )


def _split_files(folder: Path, splits: set[str], suffix: str) -> dict[str, list[Path]]:
    """Files of each split: SPLIT.jsonl, or parts such as SPLIT-00000-of-00002.jsonl."""
    found = {
        split: sorted([*folder.glob(f"{split}{suffix}"), *folder.glob(f"{split}-*{suffix}")])
        for split in splits
    }
    return {split: paths for split, paths in found.items() if paths}


def _load(manager: TaskManager, task: str, spec: Any) -> dict[str, Any]:
    """The task objects, which fetch or read their data when they are made."""
    is_local = not isinstance(spec, str)
    try:
        with _quiet("huggingface_hub"):  # which tells of each of its attempts
            return manager.load([spec])["tasks"]
    except (ImportError, AssertionError) as error:
        raise ConfigError(f"task {task} needs packages: {_line(error)}") from error
    except (OSError, DatasetsError, KeyError, ValueError) as error:
        if is_local:
            raise ConfigError(
                f"task {task}: its local data cannot be used ({_line(error)}): expected the "
                "columns of the public data set"
            ) from error
        raise ConfigError(
            f"task {task}: its data cannot be fetched ({_line(error)}); without a network type "
            f"--data FOLDER, which holds {task}.jsonl or {task}/test.jsonl"
        ) from error


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
