"""What all experiments with a warm start share: settings, the warm start, the run."""

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.logging import RunFolder
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.policy import Policy
from jaxrl_llm.rl_trainer import RLTrainer
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig, make_sft_step
from jaxrl_llm.trainer import FREE_FIELDS, RunConfig, RunResult, count_parameters, train
from jaxrl_llm.training import TrainConfig, init_state
from jaxrl_llm.types import ConfigError


class Setting(NamedTuple):
    """The objects that a config stands for."""

    env: Any
    env_params: Any
    eval_params: Any
    model: LanguageModel


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Reinforcement learning from a warm start."""

    model: ModelConfig = ModelConfig()
    """The policy."""
    sft: SFTConfig = SFTConfig()
    """The warm start; made once, then found again by its settings."""
    sft_seed: int = 0
    """Seed of the warm start, apart from the run's, so that seeds share it."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are drawn in training."""
    train: TrainConfig = TrainConfig()
    """Sizes and order of the updates."""
    optimizer: OptimizerConfig = OptimizerConfig()
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

    def setting(self) -> Setting:
        """Environment and model; raises ConfigError for what cannot work."""
        raise NotImplementedError

    def examples(self, setting: Setting) -> Examples:
        """What the warm start learns from."""
        raise NotImplementedError

    @property
    def warm_start(self) -> dict[str, Any]:
        """Everything that decides the warm start, and nothing else: its hash names its folder."""
        parts = {"model": dataclasses.asdict(self.model), "sft": dataclasses.asdict(self.sft)}
        return parts | {"seed": self.sft_seed}

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


def train_warm_start(config: ExperimentConfig, setting: Setting) -> tuple[RunResult, Path]:
    """Make the warm start that `config` describes, or find it."""
    settings = config.warm_start
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    init_key, state_key = jax.random.split(jax.random.key(config.sft_seed))
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    state = init_state(setting.model.init(init_key), optimizer, state_key)
    kind = f"sft_{setting.env.name.lower()}"
    with RunFolder.open(config.run.root / kind / name, settings) as folder:
        result = train(
            folder,
            state,
            lambda: make_sft_step(setting.model, config.examples(setting), optimizer, config.sft),
            run=dataclasses.replace(config.run, checkpoint_every=100),
            total=config.sft.steps,
            per_call=config.sft.steps_per_call,
            tokens_metric="sft/tokens",
            shown=("loss",),
        )
    if not result.is_complete:
        print(f"interrupted: the warm start is saved in {folder.path}; type the same again")
    return result, folder.path


def make_trainer(
    config: ExperimentConfig, setting: Setting, params: Params, path: Path
) -> RLTrainer:
    """The trainer that a config describes."""
    return RLTrainer(
        env=setting.env,
        policy=Policy(setting.model, setting.env.tokenizer, params),
        optimizer=config.algorithm,
        log_dir=path,
        env_params=setting.env_params,
        eval_params=setting.eval_params,
        sampling=config.sampling,
        train=config.train,
        adam=config.optimizer,
        evaluation=config.eval,
        run=config.run,
        settings=dataclasses.asdict(config),
        name=path.parent.name,
    )


def run_experiment(experiment: str, config: ExperimentConfig) -> bool:
    """Warm start, then reinforcement learning; False when interrupted."""
    started = time.perf_counter()
    setting = config.setting()
    path = config.run.root / experiment / config.run.name
    # Before anything is computed: do the settings go together, and is the folder theirs?
    make_trainer(config, setting, jax.eval_shape(setting.model.init, jax.random.key(0)), path)
    RunFolder.open(path, dataclasses.asdict(config), free=FREE_FIELDS).close()
    warm, warm_path = train_warm_start(config, setting)
    if not warm.is_complete:
        return False
    print(
        f"{count_parameters(warm.params):,} parameters, warm start {warm_path} "
        f"({config.sft.steps} steps)"
    )
    is_complete = make_trainer(config, setting, warm.params, path).run().is_complete
    print(f"with the warm start {time.perf_counter() - started:.0f} s")
    return is_complete
