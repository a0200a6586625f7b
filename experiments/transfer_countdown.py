"""Claim: what Countdown teaches a model, and what of it carries over to other tasks.

The pipeline of a comparative study in one command, for any model: the base, its warm start, and
that trained on by PPO, GRPO, DAPO, and DAPO without dynamic sampling; each measured on the same
questions of every suite, in one table with paired differences to the base. A pretrained model is
asked tasks of reasoning-gym, which are drawn offline and stand in for the published sets, and with
--tasks those of lm-eval; the tiny policy, which reads nothing but Countdown, is asked three
distributions of it, of which it has seen one. Interrupted anywhere, the same command goes on.

Command   python -m experiments.transfer_countdown
          python -m experiments.transfer_countdown --model smollm2-135m --iterations 30
Expected  RESULTS.md
Time      about 25 minutes on 2 CPU cores (the tiny policy)
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli
from experiments.common import run_experiment, train_warm_start
from experiments.countdown import CountdownConfig
from jaxrl_llm.answers import AskConfig
from jaxrl_llm.envs.countdown import HELD_OUT, Countdown, countdown_params
from jaxrl_llm.envs.expression import grade
from jaxrl_llm.grading import Grade
from jaxrl_llm.logging import RunFolder, write_json
from jaxrl_llm.parallel import SINGLE
from jaxrl_llm.policy import Policy
from jaxrl_llm.suite_eval import OFFLINE_SUITES, Suite, evaluate_suite, reasoning_suite
from jaxrl_llm.suites import SuiteResult, comparison_table, kept_result, stages_record
from jaxrl_llm.tokenizers import arithmetic_tokenizer
from jaxrl_llm.trainer import FREE_FIELDS, RunConfig
from jaxrl_llm.types import ConfigError

ARMS: dict[str, tuple[str, dict[str, Any]]] = {  # experiment and changes of its algorithm
    "PPO": ("ppo_countdown", {}),
    "GRPO": ("grpo_countdown", {}),
    "DAPO": ("dapo_countdown", {}),
    "DAPO without dynamic sampling": ("dapo_countdown", {"dynamic_sampling": False}),
}
DISTRIBUTIONS: dict[str, dict[str, int]] = {  # of Countdown, for the tiny policy
    "countdown, as trained": {},
    "countdown, targets 101 to 200": {"min_target": 101, "max_target": 200},
    "countdown, numbers up to 50": {"min_number": 21, "max_number": 50},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """From a base model to the transfer table."""

    model: str = "tiny"
    """As of grpo_countdown: tiny, or a pretrained model."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Algorithms to train with."""
    suites: tuple[str, ...] | None = None
    """What is measured: tasks of reasoning-gym; by default the ten of suite_eval.OFFLINE_SUITES,
    and three distributions of Countdown for the tiny policy, which has no others."""
    questions: int = 200
    """Questions of each suite."""
    samples: int = 1
    """Completions of each question; above 1 also at temperature 1, for pass@k and maj@k."""
    max_tokens: int = 256
    """Longest answer of a suite, in tokens."""
    tasks: str = ""
    """Tasks of lm-eval to measure too, such as gsm8k,bbh."""
    data: Path | None = None
    """Folder with local copies of their data; see experiments.evaluate."""
    iterations: int | None = None
    """Iterations of every algorithm; by default those of its experiment."""
    run: RunConfig = RunConfig()
    """Where everything is written: ROOT/transfer_countdown/NAME."""
    smoke: bool = False
    """Tiny sizes, to see that everything works."""

    def __post_init__(self):
        unknown = sorted(set(self.arms) - set(ARMS))
        if unknown:
            raise ConfigError(f"arms: no {', '.join(unknown)}; expected some of {', '.join(ARMS)}")
        if self.model == "tiny" and (self.suites is not None or self.tasks):
            raise ConfigError(
                "suites and tasks are for models that read text: add --model, such as smollm2-135m"
            )
        for name in ("questions", "samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")

    def resolved(self) -> "Config":
        if not self.smoke:
            return self
        name = "smoke" if self.run.name == "default" else self.run.name
        run = dataclasses.replace(self.run, name=name)
        few = None if self.suites is None and self.model == "tiny" else ("chain_sum",)
        return dataclasses.replace(self, questions=8, max_tokens=16, run=run, suites=few)

    @property
    def folder(self) -> Path:
        return self.run.root / "transfer_countdown" / self.run.name

    def arm(self, name: str) -> CountdownConfig:
        """The settings of one algorithm's run."""
        module, changes = ARMS[name]
        arm = importlib.import_module(f"experiments.{module}").Config.for_model(self.model)
        algorithm = dataclasses.replace(arm.algorithm, **changes)
        run = dataclasses.replace(self.run, root=self.folder, name="run")
        train = arm.train
        if self.iterations is not None:
            train = dataclasses.replace(
                train,
                iterations=self.iterations,
                iterations_per_call=min(train.iterations_per_call, self.iterations),
            )
        arm = dataclasses.replace(
            arm, algorithm=algorithm, train=train, run=run, smoke=self.smoke
        ).resolved()
        return arm


def main(config: Config) -> bool:
    config = config.resolved()
    settings = dataclasses.asdict(config)
    with RunFolder.open(config.folder, settings, free=FREE_FIELDS | {"data"}):
        columns = []
        for stage, policy in stages(config):
            if policy is None:
                return False
            columns.append((stage, measured(config, stage, policy)))
        shown = [(stage, [scores(result) for result in found]) for stage, found in columns]
        table = comparison_table(shown)
        print(f"\n{table}")
        (config.folder / "table.md").write_text(table, encoding="utf-8")
        write_json(
            config.folder / "results.json",
            stages_record("transfer_countdown", shown) | {"smoke": config.smoke},
        )
    print(f"{config.folder}: table.md, results.json; what was answered in results/")
    return True


def stages(config: Config) -> Iterator[tuple[str, Path | str | None]]:
    """(stage, its policy), made or found; None for one that was interrupted."""
    first = config.arm(config.arms[0]) if config.arms else config.arm("GRPO")
    setting = first.setting()
    if config.model == "tiny":
        base = config.folder / "base"
        if not base.exists():
            init_key, _ = jax.random.split(jax.random.key(first.sft_seed))
            setting.start(init_key, SINGLE).save(base)
        yield "base", base
    else:
        yield "base", config.model
    warm = train_warm_start(first, setting)
    yield "SFT", warm.policy and warm.path and warm.path / "policy"
    for name in config.arms:
        arm = config.arm(name)
        slug = name.lower().replace(" ", "_")
        done = run_experiment(slug, arm)
        yield name, config.folder / slug / arm.run.name / "policy" if done else None


def measured(config: Config, stage: str, name: Path | str) -> list[SuiteResult]:
    """One policy on all suites: found, or else measured and kept."""
    folder = config.folder / "results"
    folder.mkdir(exist_ok=True)
    loaded: list[Policy] = []

    def policy() -> Policy:
        if not loaded:
            loaded.append(Policy.from_pretrained(name))
        return loaded[0]

    results = []
    for suite_name, make in suites(config).items():
        path = folder / f"{stage}, {suite_name}.json".replace(" ", "_").replace(",", "")

        def measure(name=suite_name, make=make, path=path) -> SuiteResult:
            print(f"{stage}: {name}", flush=True)
            return evaluate_suite(
                policy(),
                make(),
                config.samples,
                max_tokens=config.max_tokens,
                answers=path.with_suffix(".answers.json"),
            )

        results.append(kept_result(path, measure, {}))
    if config.tasks:
        results += by_lm_eval(config, name)
    return results


def by_lm_eval(config: Config, name: Path | str) -> list[SuiteResult]:
    """One policy on tasks of lm-eval, which keep their own files."""
    from experiments import evaluate

    asked = evaluate.Config(
        model=str(name),
        tasks=config.tasks,
        data=config.data,
        limit=config.questions,
        max_gen_toks=config.max_tokens,
        root=config.folder,
    )
    candidate = evaluate.Candidate(str(name), asked)
    return [evaluate.measured(candidate, task) for task in asked.names]


def suites(config: Config) -> dict[str, Callable[[], Suite]]:
    """Name → what makes the suite."""
    n = config.questions
    if config.model == "tiny":
        return {
            name: lambda name=name: countdown_suite(name, n, DISTRIBUTIONS[name])
            for name in DISTRIBUTIONS
        }
    chosen = OFFLINE_SUITES if config.suites is None else config.suites
    return {name: lambda name=name: reasoning_suite(name, n) for name in chosen}


def countdown_suite(name: str, n: int, changes: dict[str, int], seed: int = 1_000_003) -> Suite:
    """n held-out problems of a distribution, asked as the tiny policy is trained."""
    params = countdown_params("small", split=HELD_OUT, **changes)
    env = Countdown(arithmetic_tokenizer())
    keys = jax.random.split(jax.random.key(seed), n)
    _, problems = jax.jit(jax.vmap(env.reset_env, (0, None)))(keys, params)
    numbers, targets = np.asarray(problems.numbers), np.asarray(problems.target)
    length = 64  # bytes; longer answers are wrong
    compiled = jax.jit(jax.vmap(grade))

    def graded(calls) -> list[Grade]:
        calls = list(calls)
        texts = [(answer or "").encode()[:length] for answer, _ in calls]
        asked = [i for _, i in calls]
        padded = jnp.array([list(text.ljust(length, b"\0")) for text in texts], jnp.uint8)
        lengths = jnp.array([len(text) for text in texts])
        verdicts = compiled(padded, lengths, numbers[asked], targets[asked])
        return [Grade(float(right)) for right in np.asarray(verdicts.is_correct)]

    return Suite(
        name=name,
        questions=[env.prompt_text(*problem) for problem in zip(numbers, targets, strict=True)],
        fields=[{} for _ in range(n)],
        references=["expression"] * n,
        grade=graded,
        ask=AskConfig(question="{question}", chat=False),
    )


def scores(result: SuiteResult) -> SuiteResult:
    """What belongs into the table: not how many answers were cut off, or none."""
    kept = {
        name: values
        for name, values in result.scores.items()
        if not name.endswith(("answered", "truncated", "ungraded"))
    }
    return dataclasses.replace(result, scores=kept)


if __name__ == "__main__":
    cli.run(Config, main, __doc__)
