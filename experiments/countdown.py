"""What all Countdown experiments share: the task, the warm start, the measurement, the report."""

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_llm.envs.countdown import (
    HELD_OUT,
    Countdown,
    EnvParams,
    check_params,
    countdown_params,
    sft_examples,
)
from jaxrl_llm.evaluation import EvalConfig, make_evaluate
from jaxrl_llm.logging import RunFolder, provenance, read_rows, write_summary
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.plots import Panel, plot_curves
from jaxrl_llm.rollout import Rollout, make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig, make_sft_step
from jaxrl_llm.tokenizers import Tokenizer, arithmetic_tokenizer
from jaxrl_llm.trainer import (
    FREE_FIELDS,
    Measured,
    RunConfig,
    RunResult,
    count_parameters,
    train,
)
from jaxrl_llm.training import (
    TrainConfig,
    TrainState,
    init_state,
    make_draw,
    make_iteration,
    sampling_params,
)
from jaxrl_llm.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which Countdown problems, and what an answer is worth."""

    preset: Literal["small", "3to4", "3to6"] = "small"
    """small: 3 numbers up to 20, targets up to 100; 3to4: as the public data set; 3to6: harder."""
    reward_missing: float = 0.0
    """Reward without an answer."""
    reward_wrong: float = 0.1
    """Reward of a wrong answer."""
    reward_correct: float = 1.0
    """Reward of a correct answer."""

    def params(self, **overrides: Any) -> EnvParams:
        rewards = {k: v for k, v in vars(self).items() if k != "preset"}
        return countdown_params(self.preset, **rewards, **overrides)

    @property
    def solution_tokens(self) -> int:
        """Longest solution of n numbers, in tokens: n − 1 operators, n − 2 parentheses, the end."""
        return 4 * self.params().max_numbers - 4


# Stopped while it still learns: what is left to learn is reinforcement learning's to show.
WARM_START = SFTConfig(
    steps=180,
    examples=30_000,
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup=30, weight_decay=0.01),
)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Everything that decides the warm start, and nothing else: its hash names its folder."""

    task: TaskConfig = TaskConfig()
    """Problems."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    sft: SFTConfig = WARM_START
    """Supervised fine-tuning on solver-made solutions."""
    max_tokens: int = 8
    """Longest completion, in tokens."""
    seed: int = 0
    """Seed of initial weights, problems and order."""


@dataclass(frozen=True, kw_only=True)
class CountdownConfig:
    """Reinforcement learning on Countdown, from a warm start."""

    task: TaskConfig = TaskConfig()
    """Problems and rewards."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    sft: SFTConfig = WARM_START
    """The warm start; made once, then found again by its settings."""
    sft_seed: int = 0
    """Seed of the warm start, apart from the run's, so that seeds share it."""
    sampling: SamplingConfig = SamplingConfig(max_tokens=8, block=4)
    """How completions are drawn in training."""
    train: TrainConfig = TrainConfig(iterations=460, prompts=128, group_size=8)
    """Sizes and order of the updates."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, schedule="linear", b2=0.999)
    """Optimizer of the policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The objective."""
    paper: bool = False
    """Take the algorithm as published in place of the settings for this task; its soft overlong
    penalty then acts on the last fifth of max_tokens."""
    eval: EvalConfig = EvalConfig()
    """Measurement on held-out problems."""
    run: RunConfig = RunConfig()
    """Where the run writes."""
    smoke: bool = False
    """Tiny sizes, to see in seconds that everything works; the run is called smoke."""

    def resolved(self):
        """The config to run: with `paper` the published algorithm, with `smoke` tiny sizes."""
        config = self.published() if self.paper else self
        if not self.smoke:
            return config
        return dataclasses.replace(
            config,
            model=ModelConfig(width=32, layers=2, heads=2),
            sft=dataclasses.replace(self.sft, steps=20, batch=64, examples=512, steps_per_call=10),
            train=dataclasses.replace(
                self.train, iterations=4, prompts=8, group_size=4, iterations_per_call=2
            ),
            eval=dataclasses.replace(self.eval, problems=64, samples=4, every=2),
            run=dataclasses.replace(
                self.run,
                name="smoke" if self.run.name == "default" else self.run.name,
                checkpoint_every=2,
            ),
        )

    def published(self):
        """This config with the algorithm as in its paper."""
        if self.algorithm != type(self)().algorithm:
            raise ConfigError(
                "--paper takes all of algorithm.* from the paper: leave it out to set some of them"
            )
        published = type(self.algorithm)()
        if self.algorithm.overlong_cache > 0:
            cache = max(1, self.sampling.max_tokens // 5)
            published = dataclasses.replace(published, overlong_cache=cache)
        return dataclasses.replace(self, algorithm=published)

    @property
    def warm_start(self) -> WarmStartConfig:
        return WarmStartConfig(
            task=TaskConfig(preset=self.task.preset),
            model=self.model,
            sft=self.sft,
            max_tokens=min(self.sampling.max_tokens, self.task.solution_tokens),
            seed=self.sft_seed,
        )


class Setting(NamedTuple):
    """The objects that a config stands for."""

    env: Countdown
    env_params: EnvParams
    tokenizer: Tokenizer
    model: LanguageModel


def make_setting(task: TaskConfig, model: ModelConfig, max_tokens: int) -> Setting:
    """Environment, tokenizer and model.

    Raises:
        ConfigError: problems that cannot be drawn, or sizes that do not fit.
    """
    tokenizer = arithmetic_tokenizer()
    params = task.params()
    env = Countdown(tokenizer, max_numbers=params.max_numbers, max_completion=max_tokens)
    check_params(params, env)
    return Setting(env, params, tokenizer, LanguageModel(model, tokenizer.vocab_size))


def measure(setting: Setting, sampling: SamplingConfig, config: EvalConfig):
    """`params -> Measured` on held-out problems: greedy, and at temperature 1."""

    def rollout(sampling: SamplingConfig, samples: int):
        return make_rollout(
            setting.env,
            setting.env_params.replace(split=HELD_OUT),
            setting.model,
            setting.tokenizer,
            sampling,
            prompts=config.problems,
            group_size=samples,
        )

    replace = dataclasses.replace
    evaluate = make_evaluate(
        rollout(replace(sampling, greedy=True), 1),
        rollout(replace(sampling, temperature=1.0), config.samples),
        config,
    )

    def measured(params: Params) -> Measured:
        result, rolled = evaluate(params)
        return Measured(result.metrics(), transcripts(rolled, setting.tokenizer))

    return measured


def transcripts(rolled: Rollout, tokenizer: Tokenizer, n: int = 8) -> list[dict[str, Any]]:
    """The first samples of the first n problems, as text."""
    few = jax.device_get(jax.tree.map(lambda x: x[:n], rolled))
    return [
        {
            "prompt": tokenizer.decode(few.prompts.tokens[i][few.prompts.mask[i]].tolist()),
            "completion": tokenizer.decode(
                few.completions.tokens[i, 0][few.completions.loss_mask[i, 0]].tolist()
            ),
            "reward": float(few.rewards[i, 0]),
        }
        for i in range(len(few.rewards))
    ]


def train_warm_start(config: WarmStartConfig, run: RunConfig) -> tuple[RunResult, RunFolder]:
    """Make the warm start that `config` describes, or find it: its folder is named by its hash."""
    settings = dataclasses.asdict(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    setting = make_setting(config.task, config.model, config.max_tokens)
    init_key, state_key = jax.random.split(jax.random.key(config.seed))
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    state = init_state(setting.model.init(init_key), optimizer, state_key)

    def make_step():
        examples = sft_examples(
            setting.env, setting.env_params, config.sft.examples, config.seed, config.max_tokens
        )
        return make_sft_step(setting.model, Examples(*examples), optimizer, config.sft)

    with RunFolder.open(run.root / "sft_countdown" / digest, settings) as folder:
        result = train(
            folder,
            state,
            make_step,
            run=dataclasses.replace(run, checkpoint_every=100),
            total=config.sft.steps,
            per_call=config.sft.steps_per_call,
            tokens_metric="sft/tokens",
            shown=("loss",),
        )
    return result, folder


def run_countdown(experiment: str, config: CountdownConfig) -> bool:
    """Warm start, reinforcement learning, measurement, report. False when interrupted."""
    started = time.perf_counter()
    setting = make_setting(config.task, config.model, config.sampling.max_tokens)
    config.sampling.check_for_training()
    config.algorithm.check_sizes(
        group_size=config.train.group_size,
        updates_per_rollout=config.train.updates_per_rollout,
        rollout_lag=config.train.rollout_lag,
        max_tokens=config.sampling.max_tokens,
    )
    path = config.run.root / experiment / config.run.name
    with RunFolder.open(path, dataclasses.asdict(config), free=FREE_FIELDS) as folder:
        warm, warm_folder = train_warm_start(config.warm_start, config.run)
        if not warm.is_complete:
            return report_interrupt(warm_folder, warm)
        print(
            f"{count_parameters(warm.params):,} parameters, warm start {warm_folder.path} "
            f"({config.sft.steps} steps)"
        )
        rollout = make_rollout(
            setting.env,
            setting.env_params,
            setting.model,
            setting.tokenizer,
            config.sampling,
            prompts=config.train.prompts,
            group_size=config.train.group_size,
        )
        algorithm = make_algorithm(config.algorithm, iterations=config.train.iterations)
        optimizer = make_optimizer(
            config.optimizer, config.train.updates, value_rate=config.algorithm.value_rate
        )
        draw = make_draw(rollout, algorithm)

        def sample_only(state: TrainState):
            return draw(sampling_params(state), jax.random.fold_in(state.key, state.iteration))

        result = train(
            folder,
            init_state(
                warm.params,
                optimizer,
                jax.random.key(config.run.seed),
                model=setting.model,
                algorithm=algorithm,
                rollout_lag=config.train.rollout_lag,
            ),
            lambda: make_iteration(
                rollout,
                setting.model,
                algorithm,
                optimizer,
                config.train,
                temperature=config.sampling.temperature,
            ),
            run=config.run,
            total=config.train.iterations,
            per_call=config.train.iterations_per_call,
            evaluate=measure(setting, config.sampling, config.eval),
            evaluate_every=config.eval.every,
            stages={"rollout": sample_only},
        )
        if not result.is_complete:
            return report_interrupt(folder, result)
        report(experiment, folder, result, time.perf_counter() - started, config.train)
    return True


def report_interrupt(folder: RunFolder, result: RunResult) -> bool:
    """Say what was saved and how to go on."""
    print(
        f"interrupted: iteration {result.iteration} is saved in {folder.path}; "
        "type the same command again to go on"
    )
    return False


def report(
    experiment: str, folder: RunFolder, result: RunResult, seconds: float, sizes: TrainConfig
) -> None:
    """Print before and after with intervals, draw the curves, write summary.json."""
    measured = [row for row in result.history if "eval/greedy" in row]
    before, after = measured[0], measured[-1]
    names = [
        name for name in before if name.startswith("eval/") and not name.endswith(("_low", "_high"))
    ]

    def cell(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"

    print("held-out accuracy      before RL               after RL                gain")
    for name in names:
        print(
            f"{name.removeprefix('eval/'):<22} {cell(before, name):<23} {cell(after, name):<23} "
            f"{100 * (after[name] - before[name]):+.1f} points"
        )

    timing = read_rows(folder.timing)
    sampling = sampling_cost(result.history, timing, sizes)
    if sampling["extra_completions"]:
        print(
            f"dynamic sampling: {sampling['rounds_mean']:.2f} rollouts an iteration, "
            f"{sampling['extra_completions']:,} completions and about "
            f"{sampling['extra_seconds']:.0f} s more than with one; "
            f"{100 * sampling['filled']:.1f} % of the batch filled"
        )
    draw(experiment, folder, result.history, measured)

    def spent(*stages: str) -> float:
        """Seconds of the whole run, of all the processes it took."""
        return sum(row.get(f"time/{stage}_seconds", 0.0) for row in timing for stage in stages)

    is_new = result.compile_seconds > 0  # otherwise the run was found finished
    if is_new or not folder.summary.exists():
        summary = {
            "experiment": experiment,
            "before": {k: v for k, v in before.items() if k.startswith("eval/")},
            "after": {k: v for k, v in after.items() if k.startswith("eval/")},
            "final": after,
            "iterations": result.iteration,
            "sampling": sampling,
            "training_seconds": spent("train", "evaluate"),
            "run_seconds": spent("train", "evaluate", "compile", "checkpoint"),
            "wall_seconds": seconds,
            "compile_seconds": result.compile_seconds,
            "compiled_memory_mb": result.peak_memory_mb,
        }
        write_summary(folder, summary | provenance())
    print(f"{folder.path}: summary.json, plots/, metrics.jsonl, samples.jsonl, checkpoints/")
    print(
        f"wall time {seconds:.0f} s, compiling the iteration {result.compile_seconds:.0f} s of it"
    )


def sampling_cost(
    rows: list[dict[str, Any]], timing: list[dict[str, Any]], sizes: TrainConfig
) -> dict[str, Any]:
    """What was sampled, and how much of it dynamic sampling added.

    Seconds are estimated: the time of one iteration's rollouts, measured alone at each evaluation,
    shared out evenly among its rounds.
    """
    trained = [row for row in rows if "reward/mean" in row]
    rounds = [row.get("rollout/rounds", 1.0) for row in trained]
    alone = [row["time/rollout_seconds"] for row in timing if "time/rollout_seconds" in row]
    rollout_seconds = sum(alone) / max(len(alone), 1) * len(trained)
    per_round = sizes.prompts * sizes.group_size
    return {
        "rounds_mean": sum(rounds) / len(rounds),
        "rounds_max": max(rounds),
        "filled": sum(row.get("rollout/filled", 1.0) for row in trained) / len(trained),
        "completions": round(sum(rounds)) * per_round,
        "extra_completions": round(sum(rounds) - len(rounds)) * per_round,
        "rollout_seconds": rollout_seconds,
        "extra_seconds": rollout_seconds * (1.0 - len(rounds) / sum(rounds)),
    }


def draw(
    experiment: str, folder: RunFolder, rows: list[dict[str, Any]], measured: list[dict[str, Any]]
) -> None:
    """plots/learning.png: reward and held-out accuracy on top, what explains them below."""

    def points(name: str) -> tuple[tuple[float, float, float, float], ...]:
        keys = ("step", name, f"{name}_low", f"{name}_high")
        return tuple(tuple(float(row[key]) for key in keys) for row in measured)

    panels = [
        Panel(metric="reward/mean", label="mean reward", smooth=10),
        Panel(
            metric="rollout/correct",
            label="accuracy",
            title="sampled accuracy",
            smooth=10,
            points=points("eval/sampled"),
            points_label="held out, 95 %",
        ),
        Panel(
            metric="eval/greedy",
            label="accuracy",
            title="greedy accuracy, held out",
            points=points("eval/greedy"),
            points_label="95 % interval",
        ),
        Panel(metric="policy/entropy", label="nats per token", smooth=10),
        Panel(
            metric="policy/kl_k3", label="nats per token", title="KL to the reference", smooth=10
        ),
        Panel(metric="reward/dead_groups", label="fraction", title="dead groups", smooth=10),
        Panel(metric="kl/coef", label="β", title="KL coefficient"),
        Panel(metric="value/explained_variance", label="fraction", title="explained variance"),
        Panel(metric="rollout/rounds", label="rollouts", title="rollouts per iteration", smooth=10),
        Panel(metric="policy/jacobian_drift", label="relative", title="Jacobian drift", smooth=10),
    ]
    moving = [p for p in panels if len({row[p.metric] for row in rows if p.metric in row}) > 1]
    plot_curves(rows, folder.plots / "learning.png", moving or panels[:1], title=experiment)
