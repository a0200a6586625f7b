"""What all experiments with a warm start share: settings, the warm start, the run."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Key

from jaxrl_llm.distributed import agree
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.logging import RunFolder, config_hash
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.memory import Estimate, estimate
from jaxrl_llm.models import lora
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.parallel import Layout, ParallelConfig, make_layout
from jaxrl_llm.policy import Policy
from jaxrl_llm.rl_trainer import RLTrainer
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig, make_sft_step
from jaxrl_llm.trainer import FREE_FIELDS, RunConfig, count_parameters, train
from jaxrl_llm.training import TrainConfig, init_state
from jaxrl_llm.types import ConfigError


class Setting(NamedTuple):
    """The objects that a config stands for."""

    env: Any
    env_params: Any
    eval_params: Any
    model: LanguageModel
    start: Callable[[Key[Array, ""], Layout], Policy]  # what the warm start begins with


def fresh_setting(network: ModelConfig, env: Any, env_params: Any, eval_params: Any) -> Setting:
    """A setting with fresh weights for the environment's own tokenizer."""
    model = LanguageModel(network, env.tokenizer.vocab_size)
    return Setting(
        env,
        env_params,
        eval_params,
        model,
        lambda key, layout: Policy(model, env.tokenizer, layout.init(model.init, key)),
    )


class WarmStart(NamedTuple):
    """What reinforcement learning begins with; no policy after an interrupt."""

    policy: Policy | None
    path: Path | None  # where it is kept; None where there is no supervised training


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters, where not all weights are to be trained."""

    rank: int = 0
    """Rank; 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = lora.PROJECTIONS
    """Names of the projections that get one."""

    def add_to(self, params: Params, seed: int) -> Params:
        """The parameters with fresh adapters, or as they are."""
        if not self.rank:
            return params
        return lora.add_adapters(params, LoRAConfig(**vars(self)), jax.random.key(seed))


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Reinforcement learning from a warm start."""

    network: ModelConfig = ModelConfig()
    """The policy's shape and numerics."""
    lora: AdapterConfig = AdapterConfig()
    """Train low-rank adapters only, in the warm start (merged after it) and then again."""
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
    estimate: bool = False
    """Print the memory that training will take, by what takes it, and stop: nothing is loaded,
    compiled or allocated."""
    parallel: ParallelConfig = ParallelConfig()
    """Devices that the work is spread over."""
    matmul_precision: Literal["high", "highest"] | None = None
    """Of float32 matmuls on GPUs and TPUs: by default their fastest, which round to TF32 or
    bfloat16; highest is float32 throughout."""
    smoke: bool = False
    """Tiny sizes, to see in seconds that everything works; the run is called smoke."""

    def outline(self) -> tuple[LanguageModel, Params, int]:
        """The model, shapes of its parameters, and the longest prompt, in tokens."""
        setting = self.setting()
        shapes = jax.eval_shape(setting.model.init, jax.random.key(0))
        return setting.model, shapes, setting.env.prompt_length

    def setting(self) -> Setting:
        """Environment and model; raises ConfigError for what cannot work."""
        raise NotImplementedError

    def examples(self, setting: Setting) -> Examples:
        """What the warm start learns from."""
        raise NotImplementedError

    @property
    def warm_start(self) -> dict[str, Any]:
        """Everything that decides the warm start, and nothing else: its hash names its folder."""
        parts = {"network": self.network, "lora": self.lora, "sft": self.sft}
        described = {name: dataclasses.asdict(part) for name, part in parts.items()}
        precision = self.matmul_precision
        numerics = {"matmul_precision": precision} if precision else {}
        return described | {"seed": self.sft_seed} | numerics

    def resolved(self):
        """The config to run: with `paper` the published algorithm, with `smoke` tiny sizes."""
        config = self.published() if self.paper else self
        return config.small() if self.smoke else config

    def small(self):
        """This config with tiny sizes."""
        return dataclasses.replace(
            self,
            network=dataclasses.replace(
                self.network,
                width=32,
                layers=2,
                heads=2,
                kv_heads=None,
                head_width=None,
                mlp_width=None,
            ),
            sft=dataclasses.replace(self.sft, steps=20, batch=64, examples=512, steps_per_call=10),
            train=dataclasses.replace(
                self.train,
                iterations=4,
                prompts=8 * self.train.minibatches,
                group_size=min(4, self.train.group_size),
                microbatches=1,  # so that 8 devices can share its prompts
                iterations_per_call=2,
            ),
            eval=dataclasses.replace(self.eval, problems=64, samples=4, every=2),
            run=dataclasses.replace(
                self.run,
                name="smoke" if self.run.name == "default" else self.run.name,
                checkpoint_every=2,
            ),
        )

    def defaults(self):
        """The config without anything chosen on the command line."""
        return type(self)()

    def published(self):
        """This config with the algorithm as in its paper."""
        if self.algorithm != self.defaults().algorithm:
            raise ConfigError(
                "--paper takes all of algorithm.* from the paper: leave it out to set some of them"
            )
        published = type(self.algorithm)()
        if self.algorithm.overlong_cache > 0:
            cache = max(1, self.sampling.max_tokens // 5)
            published = dataclasses.replace(published, overlong_cache=cache)
        return dataclasses.replace(self, algorithm=published)


def train_warm_start(config: ExperimentConfig, setting: Setting) -> WarmStart:
    """Make the warm start that `config` describes, or find it."""
    init_key, state_key = jax.random.split(jax.random.key(config.sft_seed))
    layout = make_layout(config.parallel)
    policy = setting.start(init_key, layout)
    if not config.sft.steps:
        return WarmStart(policy, None)
    policy = dataclasses.replace(policy, params=config.lora.add_to(policy.params, config.sft_seed))
    settings = config.warm_start
    name = config_hash(settings)
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    rows = config.sft.batch // config.sft.microbatches
    layout.config.check_rows(rows, "examples of a microbatch of the warm start")
    path = config.run.root / f"sft_{setting.env.name.lower()}" / name
    with RunFolder.open(path, settings) as folder:
        result = train(
            folder,
            init_state(layout.shard(policy.params), optimizer, state_key),
            lambda: make_sft_step(
                setting.model,
                config.examples(setting),
                optimizer,
                config.sft,
                axis_name=layout.axis_name,
            ),
            run=dataclasses.replace(
                config.run, checkpoint_every=min(100, 10 * config.sft.steps_per_call)
            ),
            total=config.sft.steps,
            per_call=config.sft.steps_per_call,
            tokens_metric="sft/tokens",
            shown=("loss",),
            layout=layout,
        )
        if not result.is_complete:
            print(f"interrupted: the warm start is saved in {path}; type the same again")
            return WarmStart(None, path)
        kept = path / "policy"
        policy = dataclasses.replace(policy, params=result.params).merged()
        policy = dataclasses.replace(policy, source=str(kept.absolute()))
        if not agree(kept.exists):
            policy.save(kept)
    return WarmStart(policy, path)


def make_trainer(
    config: ExperimentConfig, setting: Setting, policy: Policy, path: Path
) -> RLTrainer:
    """The trainer that a config describes."""
    return RLTrainer(
        env=setting.env,
        policy=policy,
        optimizer=config.algorithm,
        parallel=config.parallel,
        log_dir=path,
        env_params=setting.env_params,
        eval_params=setting.eval_params,
        sampling=config.sampling,
        train=config.train,
        adam=config.optimizer,
        evaluation=config.eval,
        run=config.run,
        settings=settings_of(config, setting),
        name=path.parent.name,
    )


def estimate_memory(config: ExperimentConfig) -> Estimate:
    """Of reinforcement learning with this config.

    Raises:
        ConfigError: the devices do not divide the work.
    """
    model, shapes, prompt_length = config.outline()
    return estimate(
        model,
        jax.eval_shape(lambda params: config.lora.add_to(params, 0), shapes),
        algorithm=config.algorithm,
        train=config.train,
        sampling=config.sampling,
        optimizer=config.optimizer,
        prompt_length=prompt_length,
        mesh=config.parallel.planned(),
    )


def settings_of(config: ExperimentConfig, setting: Setting) -> dict[str, Any]:
    """What config.json holds: the config, and a digest of the data where there are some."""
    described = dataclasses.asdict(config)
    for name in ("estimate", "parallel"):
        del described[name]
    digest = getattr(setting.env_params, "data", None)
    return described | ({} if digest is None else {"data": digest})


def run_experiment(experiment: str, config: ExperimentConfig) -> bool:
    """Warm start, then reinforcement learning; False when interrupted."""
    if config.estimate:
        print(estimate_memory(config))
        return True
    started = time.perf_counter()
    setting = config.setting()
    path = config.run.root / experiment / config.run.name
    # Before anything is computed: do the settings go together, and is the folder theirs?
    shapes = jax.eval_shape(setting.model.init, jax.random.key(0))
    make_trainer(config, setting, Policy(setting.model, setting.env.tokenizer, shapes), path)
    folder = RunFolder.open(path, settings_of(config, setting), free=FREE_FIELDS)
    folder.close()
    try:
        warm = train_warm_start(config, setting)
    except ConfigError:
        folder.forget()
        raise
    if warm.policy is None:
        return False
    n_parameters = count_parameters(warm.policy.params)
    made = f"warm start {warm.path} ({config.sft.steps} steps)" if warm.path else "no warm start"
    print(f"{n_parameters:,} parameters, {made}")
    params = config.lora.add_to(warm.policy.params, config.run.seed)
    policy = dataclasses.replace(warm.policy, params=params)
    is_complete = make_trainer(config, setting, policy, path).run().is_complete
    print(f"with the warm start {time.perf_counter() - started:.0f} s")
    return is_complete
