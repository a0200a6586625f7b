"""Claim: what a policy scores on public tasks, by their own code, and what training changed.

Tasks are lm-eval's, unchanged: prompts, worked examples, extraction and scores. Suites are tasks of
reasoning-gym, which are drawn offline and scored by itself; they stand in for the public sets where
there is no network. With --base both policies get the same questions; the table has the paired
difference, its interval and an exact test. What is finished is found again; what was interrupted
goes on.

Command   python -m experiments.evaluate --model FOLDER --tasks gsm8k,minerva_math,bbh,mmlu_pro
          python -m experiments.evaluate --model FOLDER --base smollm2-135m --limit 200
          python -m experiments.evaluate --tasks gsm8k --data tests/harness --num-fewshot 2
              --max-gen-toks 25 --batch-size 25     fifty simple problems, without a network
          python -m experiments.evaluate --suites offline --limit 200 --max-gen-toks 64
              --batch-size 32     ten suites, on SmolLM2-135M-Instruct: RESULTS.md
Expected  fifty problems: 0.480 [0.348, 0.615] by strict and by lenient extraction, each answer as
          by lm-eval's own model on torch
Time      fifty problems: 2.5 minutes on 2 shared CPU cores; 5 seconds when it is repeated; ten
          suites: 9 minutes on 2 quiet ones with AVX-512, 37 on shared ones with AVX2
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from experiments import cli
from jaxrl_llm.logging import config_hash, write_json
from jaxrl_llm.models import hf
from jaxrl_llm.policy import Policy
from jaxrl_llm.suite_eval import OFFLINE_SUITES, evaluate_suite, reasoning_suite
from jaxrl_llm.suites import SuiteResult, comparison_table, kept_result, stages_record
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    """A policy, perhaps beside the one it was trained from, on tasks of lm-eval."""

    model: str = "smollm2-135m"
    """A folder that Policy.save wrote, or of transformers or PEFT; a GGUF file; a preset's name, or
    one of the Hugging Face hub."""
    base: str | None = None
    """What it is compared with: another of these."""
    tasks: str | None = None
    """Names of lm-eval's tasks or groups, with commas between them; by default
    gsm8k,minerva_math,bbh,mmlu_pro, or none with --suites."""
    suites: tuple[str, ...] = ()
    """Tasks of reasoning-gym by name; offline means the ten of suite_eval.OFFLINE_SUITES."""
    limit: int | None = None
    """Questions of each task, the first ones; without it all, and 200 of a suite."""
    data: Path | None = None
    """Folder with local copies of the data: TASK.jsonl, TASK.parquet, or TASK/SPLIT.jsonl."""
    num_fewshot: int | None = None
    """Worked examples before each question; without it the task's own number."""
    chat: bool = False
    """Ask by the model's chat template; suites always do."""
    max_length: int | None = None
    """Longest prompt and answer together, in tokens; by default the tokenizer's, or else 2048."""
    max_gen_toks: int = 256
    """Longest answer in tokens, where a task does not say."""
    batch_size: int = 8
    """Rows computed at once."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and computation."""
    root: Path = Path("runs")
    """Results are written to ROOT/evaluate/NAME."""
    name: str = "default"
    """Name of the results."""
    smoke: bool = False
    """Two made-up questions for a model with fresh weights, to see that everything works."""

    def __post_init__(self):
        if not (self.names or self.suites) or len(set(self.names)) < len(self.names):
            raise ConfigError(f"tasks={self.tasks!r}: expected distinct names, such as gsm8k,bbh")
        for name in ("limit", "max_length", "max_gen_toks", "batch_size"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ConfigError(f"{name}={size}: expected at least 1")
        if self.base == self.model:
            raise ConfigError(f"base={self.base}: that is the model; expected another one")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"num_fewshot={self.num_fewshot}: expected 0 or more")
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"data: {self.data} is no folder: expected one with gsm8k.jsonl")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name={self.name!r}: expected a plain folder name, such as final")

    @property
    def names(self) -> list[str]:
        published = "" if self.suites else "gsm8k,minerva_math,bbh,mmlu_pro"
        tasks = published if self.tasks is None else self.tasks
        return [name for name in (part.strip() for part in tasks.split(",")) if name]

    @property
    def suite_names(self) -> tuple[str, ...]:
        return OFFLINE_SUITES if self.suites == ("offline",) else self.suites

    @property
    def folder(self) -> Path:
        return self.root / "evaluate" / self.name


class Candidate:
    """A policy by its name, loaded when something is to be measured."""

    def __init__(self, name: str, config: Config):
        self.name, self.config = name, config
        self.path = hf.resolve(name)
        self.digest = fingerprint([self.path])

    @cached_property
    def policy(self) -> Policy:
        weights = self.config.weights
        return Policy.from_pretrained(self.name, dtype=weights, compute_dtype=weights)

    @cached_property
    def lm(self) -> Any:
        from jaxrl_llm.harness import HarnessLM

        config = self.config
        return HarnessLM(
            self.policy,
            batch_size=config.batch_size,
            max_length=config.max_length,
            max_gen_toks=config.max_gen_toks,
        )


def fingerprint(paths: list[Path]) -> str:
    """A digest of the names, sizes and times of change of files, and of those in folders."""
    files = [
        (path.parent, f) for path in paths for f in ([path] if path.is_file() else path.rglob("*"))
    ]
    told = sorted(
        (str(f.relative_to(above)), f.stat().st_size, f.stat().st_mtime_ns)
        for above, f in files
        if f.is_file()
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def settings_of(candidate: Candidate, task: str) -> dict[str, Any]:
    """All that a result depends on."""
    config = candidate.config
    kept = ("limit", "num_fewshot", "chat", "max_length", "max_gen_toks", "weights")
    copies = None if config.data is None else fingerprint(sorted(config.data.glob(f"{task}*")))
    return {
        "task": task,
        "model": candidate.name,
        "model_digest": candidate.digest,
        "data_digest": copies,
        "lm_eval": version("lm-eval"),
        **{name: getattr(config, name) for name in kept},
    }


def measured(candidate: Candidate, task: str) -> SuiteResult:
    """The result of one policy on one task: found, or else measured and kept."""
    config, settings = candidate.config, settings_of(candidate, task)
    path = place(candidate, task, settings)
    responses = path.with_suffix(".responses")

    def measure() -> SuiteResult:
        from jaxrl_llm.harness_tasks import evaluate_task

        done = evaluate_task(
            candidate.lm,
            task,
            limit=config.limit,
            num_fewshot=config.num_fewshot,
            chat=config.chat,
            data=config.data,
            use_cache=responses,
        )
        write_json(path.with_suffix(".answers.json"), done.answers)
        return done.result

    result = kept_result(path, measure, {"settings": settings})
    Path(f"{responses}_rank0.db").unlink(missing_ok=True)  # as lm-eval names it
    return result


def place(candidate: Candidate, name: str, settings: dict[str, Any]) -> Path:
    """The file of a result, after telling whether it is there."""
    folder = candidate.config.folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{Path(candidate.name).name}-{config_hash(settings)}.json"
    found = f" found {path}" if path.is_file() else ""
    print(f"{name}, {candidate.name}:{found}", flush=True)
    return path


def asked(candidate: Candidate, suite: str) -> SuiteResult:
    """As `measured`, of a task of reasoning-gym."""
    config = candidate.config
    settings: dict[str, Any] = {
        "suite": suite,
        "model": candidate.name,
        "model_digest": candidate.digest,
        "questions": config.limit or 200,
        "max_tokens": config.max_gen_toks,
        "weights": config.weights,
        "reasoning_gym": version("reasoning-gym"),
    }

    path = place(candidate, suite, settings)

    def measure() -> SuiteResult:
        return evaluate_suite(
            candidate.policy,
            reasoning_suite(suite, settings["questions"]),
            max_tokens=config.max_gen_toks,
            batch=config.batch_size,
            answers=path.with_suffix(".answers.json"),
        )

    return kept_result(path, measure, {"settings": settings})


def main(config: Config) -> None:
    for package in ["lm-eval"] * bool(config.names) + ["reasoning-gym"] * bool(config.suites):
        try:
            version(package)
        except ModuleNotFoundError:
            raise ConfigError(f"this needs {package}: pip install 'jaxrl_llm[eval]'") from None
    if config.smoke:
        config = smoke(config)
    candidates = [Candidate(name, config) for name in (config.base, config.model) if name]
    columns = [
        (
            candidate.name,
            [measured(candidate, task) for task in config.names]
            + [asked(candidate, suite) for suite in config.suite_names],
        )
        for candidate in candidates
    ]
    table = comparison_table(columns)
    print(f"\n{table}")
    (config.folder / "table.md").write_text(table, encoding="utf-8")
    write_json(config.folder / "results.json", stages_record("evaluate", columns))
    print(f"{config.folder}: results.json, table.md; answers in results/")


def smoke(config: Config) -> Config:
    """This config with a fresh model and two questions, written beside the results."""
    import string

    from jaxrl_llm.models.transformer import ModelConfig
    from jaxrl_llm.tokenizers import CharTokenizer

    folder = config.root / "evaluate" / "smoke"
    sizes = ModelConfig(width=16, layers=1, heads=2)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    questions = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in (1, 2)]
    lines = "".join(json.dumps(row) + "\n" for row in questions)
    (folder / "data" / "gsm8k.jsonl").write_text(lines)
    Policy.from_scratch(sizes, tokenizer=CharTokenizer(string.printable)).save(folder / "policy")
    return dataclasses.replace(
        config,
        model=str(folder / "policy"),
        base=None,
        tasks="gsm8k",
        suites=(),
        data=folder / "data",
        num_fewshot=1,
        max_length=256,
        max_gen_toks=16,
        name="smoke",
    )


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
