"""What all ablations share: arms over seeds as sweeps, tables, curves and verdicts."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from experiments import results
from experiments.common import Setting, make_trainer, settings_of, train_warm_start
from experiments.countdown import CountdownConfig
from jaxrl_llm.evaluation import Estimate, EvalConfig
from jaxrl_llm.logging import config_hash, provenance, write_json
from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.plots import plot_bands
from jaxrl_llm.policy import Policy
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.statistics import Verdict, mean_over_seeds, paired_difference, verdict
from jaxrl_llm.sweep import SCALARS, Arm, make_sweep, train_sweep
from jaxrl_llm.trainer import Measured, RunConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError

# A quarter of a minute a run on two cores, in which a warm-started policy visibly learns.
BASE = CountdownConfig(
    algorithm=GRPOConfig(entropy_coef=0.003),
    sampling=SamplingConfig(max_tokens=10, block=5),
    train=TrainConfig(iterations=60, prompts=32, group_size=8, microbatches=4),
    optimizer=OptimizerConfig(learning_rate=8e-4, schedule="linear", b2=0.99),
    eval=EvalConfig(problems=1024, samples=8),
)
CURVES = {
    "rollout/correct": "sampled accuracy in training",
    "rollout/length_mean": "tokens per completion",
    "policy/entropy": "entropy, nats per token",
}


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """An ablation: several settings, each with several seeds."""

    base: CountdownConfig = BASE
    """What all arms share; run and smoke of it are not read."""
    seeds: int = 5
    """Seeds of every arm, from 0; they draw problems and completions. The warm start is one."""
    together: int = 5
    """Runs in one compiled program; they have to agree in all but the seed and the scalars of
    sweep.SCALARS."""
    run: RunConfig = RunConfig()
    """Where the runs and their comparison write; run.seed is not read."""
    smoke: bool = False
    """Tiny sizes and two seeds, to see that everything works."""

    def __post_init__(self):
        if self.seeds < 2:
            raise ConfigError(f"seeds={self.seeds}: no interval; expected at least 2, better 5")
        if self.together < 1:
            raise ConfigError(f"together={self.together}: expected at least 1")
        if self.base.paper or self.base.estimate:
            raise ConfigError("base.paper and base.estimate are for single runs: leave them out")

    def resolved(self):
        base = dataclasses.replace(self.base, run=self.run, smoke=self.smoke).resolved()
        seeds = 2 if self.smoke else self.seeds
        return dataclasses.replace(self, base=base, seeds=seeds, run=base.run)

    def with_base(self, **changes: Any) -> CountdownConfig:
        """The base with fields changed, by part: `algorithm={"kl_coef": 0.1}`."""
        parts = {
            name: dataclasses.replace(getattr(self.base, name), **values)
            for name, values in changes.items()
        }
        return dataclasses.replace(self.base, **parts)


class ArmResult(NamedTuple):
    """What the seeds of one arm came to."""

    config: CountdownConfig
    figures: dict[str, Float[np.ndarray, "n"]]  # of results.COLUMNS, and what they cost
    curves: dict[str, Float[np.ndarray, "n iterations"]]

    def estimate(self, figure: str) -> Estimate:
        return mean_over_seeds(self.figures[figure])


@dataclass(frozen=True)
class Finding:
    """What an ablation says of one claim."""

    claim: str
    """Its number in the study, such as F2."""
    statement: str
    effects: dict[str, Estimate]
    """What the verdict is derived from, in the unit that the name tells."""
    verdict: Verdict

    def __str__(self) -> str:
        told = "; ".join(
            f"{name} {e.value:+.2f} [{e.low:+.2f}, {e.high:+.2f}]"
            for name, e in self.effects.items()
        )
        return f"{self.claim}, {self.statement}: **{self.verdict}** ({told})"


def difference(
    arms: Mapping[str, ArmResult], treated: str, control: str, figure: str = "sampled"
) -> Estimate:
    """Mean difference of two arms over seeds, accuracies in points."""
    scale = 100.0 if figure in ("sampled", "greedy", "unsteadiness") else 1.0
    ours, theirs = (scale * arms[name].figures[figure] for name in (treated, control))
    return paired_difference(ours, theirs)


def compared(
    claim: str,
    statement: str,
    arms: Mapping[str, ArmResult],
    treated: str,
    control: str,
    claimed: Any,
    *,
    figure: str = "sampled",
    unit: str = "points",
    bound: float = 0.0,
) -> Finding:
    """A finding from the difference of two arms."""
    effect = difference(arms, treated, control, figure)
    name = f"{treated} − {control}, {unit}"
    return Finding(claim, statement, {name: effect}, verdict(effect, claimed, bound))


def run_study(
    experiment: str,
    config: StudyConfig,
    arms: Mapping[str, CountdownConfig],
    findings: Callable[[Mapping[str, ArmResult]], Iterable[Finding]],
    header: str | None,
) -> bool:
    """Train the arms of a resolved config and report what they say; False when interrupted."""
    trained = run_arms(experiment, config, arms)
    if trained is None:
        return False
    report(experiment, config, trained, findings(trained), header or "")
    return True


def run_arms(
    experiment: str, config: StudyConfig, arms: Mapping[str, CountdownConfig]
) -> dict[str, ArmResult] | None:
    """Train all seeds of all arms, or find them trained; None when interrupted.

    Args:
        experiment: names the folder.
        config: resolved.
        arms: label → settings; all begin with the warm start of `config.base`.

    Raises:
        ConfigError: settings that cannot work, before anything is compiled.
    """
    setting = config.base.setting()
    path = config.run.root / experiment / config.run.name
    shapes = jax.eval_shape(setting.model.init, jax.random.key(0))
    for arm in arms.values():
        if arm.warm_start != config.base.warm_start:
            raise ConfigError("the arms of a study share one warm start: expected equal sft.*")
        if (arm.eval, arm.sampling.max_tokens) != (
            config.base.eval,
            config.base.sampling.max_tokens,
        ):
            raise ConfigError(
                "the arms of a study are measured alike: expected equal eval.* and "
                "sampling.max_tokens"
            )
        # What a single run would refuse.
        make_trainer(arm, setting, Policy(setting.model, setting.env.tokenizer, shapes), path)
    warm = train_warm_start(config.base, setting)
    if warm.policy is None:
        return None
    measure = make_trainer(config.base, setting, warm.policy, path).measure()
    histories: dict[str, list[tuple[list[dict[str, Any]], float]]] = {name: [] for name in arms}
    for part in programs(arms, config.seeds, config.together):
        if not _train(path, part, arms, setting, warm.policy, measure, histories):
            print(f"interrupted: type the same again to go on in {path}")
            return None
    return {name: _result(arms[name], histories[name]) for name in arms}


def programs(
    arms: Mapping[str, CountdownConfig], seeds: int, together: int
) -> list[list[tuple[str, int]]]:
    """(label, seed) of the runs of each program: those that differ in scalars alone, in order."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, arm in arms.items():
        key = json.dumps(_static(arm), sort_keys=True, default=str)
        groups.setdefault(key, []).extend((name, seed) for seed in range(seeds))
    return [
        runs[first : first + together]
        for runs in groups.values()
        for first in range(0, len(runs), together)
    ]


def _static(arm: CountdownConfig) -> dict[str, Any]:
    """The settings of an arm without those that may differ within a program."""
    described = settings(arm)
    for path in SCALARS:
        part, name = path.split(".")
        del described[part][name]
    return described


def _train(
    path: Path,
    runs: Sequence[tuple[str, int]],
    arms: Mapping[str, CountdownConfig],
    setting: Setting,
    policy: Policy,
    measure: Callable[[Params], Measured],
    histories: dict[str, list[Any]],
) -> bool:
    """Train one program's runs and file their rows and seconds; False when interrupted."""
    names = [f"{slug(name)}-seed-{seed}" for name, seed in runs]
    base = arms[runs[0][0]]
    sweep = make_sweep(
        [
            Arm(
                seed=seed,
                algorithm=arms[name].algorithm,
                optimizer=arms[name].optimizer,
                sampling=arms[name].sampling,
            )
            for name, seed in runs
        ],
        lambda sampling: make_rollout(
            setting.env,
            setting.env_params,
            setting.model,
            setting.env.tokenizer,
            sampling,
            prompts=base.train.prompts,
            group_size=base.train.group_size,
        ),
        setting.model,
        base.train,
    )
    told = sorted({name for name, _ in runs})
    print(f"{', '.join(told)}: seeds {', '.join(str(seed) for _, seed in runs)}")
    result = train_sweep(
        path / f"from-{names[0]}",
        {
            folder: settings_of(_with_seed(arms[name], seed), setting)
            for folder, (name, seed) in zip(names, runs, strict=True)
        },
        sweep,
        policy.params,
        run=base.run,
        train=base.train,
        evaluate=measure,
    )
    for (name, _), rows, seconds in zip(runs, result.histories, result.seconds, strict=True):
        histories[name].append((rows, seconds))
    return result.is_complete


def _with_seed(arm: CountdownConfig, seed: int) -> CountdownConfig:
    return dataclasses.replace(arm, run=dataclasses.replace(arm.run, seed=seed))


def slug(label: str) -> str:
    """A label as a folder's name.

    >>> slug("G = 16, 32 prompts")
    'G-16-32-prompts'
    """
    return re.sub(r"[^\w.]+", "-", label.replace("β", "beta")).strip("-")


def _result(arm: CountdownConfig, histories: Sequence[tuple[Any, float]]) -> ArmResult:
    size = arm.train.prompts * arm.train.group_size
    per_seed = [figures(rows) | {"seconds": seconds} for rows, seconds in histories]
    for one in per_seed:
        one["completions"] = size * one["rounds"] * arm.train.iterations
    return ArmResult(
        arm,
        {name: np.array([one[name] for one in per_seed]) for name in per_seed[0]},
        {
            tag: np.array([[row[tag] for row in rows if tag in row] for rows, _ in histories])
            for tag in CURVES
        },
    )


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of one run.

    Held-out accuracies after training, and before it, with its interval over problems; length and
    entropy over the last tenth of the iterations; unsteadiness, the deviation of the training
    accuracy of single iterations from its trend (a straight line) over the last half, in units of
    accuracy.
    """
    trained = [row for row in rows if "reward/mean" in row]
    last = trained[-max(1, len(trained) // 10) :]
    half = np.array([row["rollout/correct"] for row in trained[len(trained) // 2 :]])
    at = np.arange(len(half))
    trend = np.polyval(np.polyfit(at, half, min(1, len(half) - 1)), at)
    return {
        "before": rows[0]["eval/sampled"],
        "before_low": rows[0]["eval/sampled_low"],
        "before_high": rows[0]["eval/sampled_high"],
        "sampled": rows[-1]["eval/sampled"],
        "greedy": rows[-1]["eval/greedy"],
        "length": float(np.mean([row["rollout/length_mean"] for row in last])),
        "entropy": float(np.mean([row["policy/entropy"] for row in last])),
        "unsteadiness": float(np.std(half - trend)),
        "rounds": float(np.mean([row.get("rollout/rounds", 1.0) for row in trained])),
    }


def report(
    experiment: str,
    config: StudyConfig,
    arms: Mapping[str, ArmResult],
    findings: Iterable[Finding],
    header: str,
) -> None:
    """Print the table and the verdicts; write table.md, results.json and curves.png.

    Args:
        experiment: names the folder, and the files in results/.
        config: resolved.
        arms: what `run_arms` returned.
        findings: what they say of the claims.
        header: the experiment's docstring, whose first line is the claim.
    """
    path = config.run.root / experiment / config.run.name
    findings = list(findings)
    start = next(iter(arms.values())).figures
    record = {
        "experiment": experiment,
        "claim": header.strip().splitlines()[0],
        "seeds": config.seeds,
        "smoke": config.smoke,
        "before": {
            f"sampled{end}": float(start[f"before{end}"][0]) for end in ("", "_low", "_high")
        },
        "arms": {name: described(arm) for name, arm in arms.items()},
        "findings": [
            {
                "claim": finding.claim,
                "statement": finding.statement,
                "effects": {name: list(e[:3]) for name, e in finding.effects.items()},
                "verdict": finding.verdict,
                "told": str(finding),
            }
            for finding in findings
        ],
        "provenance": provenance(),
    }
    write_json(path / "results.json", record)
    table = results.markdown(record)
    (path / "table.md").write_text(table)
    curves = {
        label: {name: arm.curves[tag] for name, arm in arms.items()}
        for tag, label in CURVES.items()
    }
    plot_bands(curves, path / "curves.png", title=experiment.replace("_", " "))
    print(f"\n{table}\n{path}: table.md, results.json, curves.png")


def described(arm: ArmResult) -> dict[str, Any]:
    """An arm as its record: settings, what every seed came to, means with intervals."""
    return {
        "config_hash": config_hash(settings(arm.config)),
        "config": settings(arm.config),
        "figures": {name: list(map(float, values)) for name, values in arm.figures.items()},
        "estimates": {name: list(arm.estimate(name)[:3]) for name in (*results.COLUMNS, "seconds")},
    }


def settings(arm: CountdownConfig) -> dict[str, Any]:
    """All that decides the figures of an arm, but for the seed."""
    described = dataclasses.asdict(arm)
    for name in ("run", "parallel", "estimate", "smoke"):
        del described[name]
    return described
