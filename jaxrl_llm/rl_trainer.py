"""`RLTrainer`: an environment, a policy and an algorithm in, a better policy out."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import fetch, is_first
from jaxrl_llm.evaluation import EvalConfig, make_evaluate
from jaxrl_llm.logging import RunFolder
from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.parallel import ParallelConfig, make_layout
from jaxrl_llm.policy import Policy
from jaxrl_llm.rollout import Rollout, RolloutFn, make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.summary import summarize
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.trainer import FREE_FIELDS, Measured, RunConfig, train
from jaxrl_llm.training import (
    TrainConfig,
    TrainState,
    init_state,
    make_draw,
    make_iteration,
    sampling_params,
)
from jaxrl_llm.types import ConfigError


class TrainingResult(NamedTuple):
    """What `RLTrainer.run` returns."""

    policy: Policy  # the trained one
    history: list[dict[str, Any]]  # the rows of metrics.jsonl
    metrics: dict[str, Any]  # the last row that has an evaluation
    folder: Path
    is_complete: bool  # False after Ctrl-C: run again to go on


class RLTrainer:
    """Trains a policy in an environment.

    A thin shell over `make_rollout`, `make_iteration` and `train`, which the experiments use too.

    >>> trainer = RLTrainer(env=env, policy=policy, optimizer="dapo",
    ...                     total_episodes=500, log_dir="logs/dapo")  # doctest: +SKIP
    >>> result = trainer.run()  # doctest: +SKIP

    Args:
        env: a gymnax environment whose observations are `Prompts` and whose actions are tokens; see
            `rollout.make_rollout`. Its info should hold `is_correct`, which is what is evaluated.
        policy: with the tokenizer that the environment was made for.
        optimizer: an algorithm's name in `losses.family.PRESETS`, or its config.
        log_dir: the run's folder; the same settings again resume it.
        total_episodes: completions to train on, refills of dynamic sampling not counted; rounded up
            to whole iterations. Without it `train.iterations` counts.
        env_params: the environment's, by default its own.
        eval_params: those of the evaluation, by default `env_params`.
        sampling: how completions are drawn; by default as long as `env.max_completion`.
        train: sizes of rollouts and updates.
        adam: learning rate and the like.
        evaluation: how, and how often.
        run: seed, checkpoints, progress bar.
        parallel: devices to train and evaluate on.
        settings: what config.json is to hold, by default everything above.
        name: of the run, for its plots; by default that of the folder.

    Raises:
        ConfigError: an unknown algorithm, a combination that cannot work, a tokenizer that is not
            the environment's, or sizes that do not come apart over the devices.
    """

    def __init__(
        self,
        *,
        env: Any,
        policy: Policy,
        optimizer: str | AlgorithmConfig = "grpo",
        log_dir: str | Path,
        total_episodes: int | None = None,
        env_params: Any = None,
        eval_params: Any = None,
        sampling: SamplingConfig | None = None,
        train: TrainConfig = TrainConfig(prompts=32, group_size=8, microbatches=1),
        adam: OptimizerConfig = OptimizerConfig(),
        evaluation: EvalConfig = EvalConfig(problems=128, samples=4),
        run: RunConfig = RunConfig(),
        parallel: ParallelConfig = ParallelConfig(backend="jit"),
        settings: dict[str, Any] | None = None,
        name: str | None = None,
    ):
        self.env, self.policy, self.folder = env, policy, Path(log_dir)
        self.algorithm = resolve_algorithm(optimizer)
        self.env_params = env.default_params if env_params is None else env_params
        self.eval_params = self.env_params if eval_params is None else eval_params
        self.sampling = sampling or SamplingConfig(max_tokens=env.max_completion)
        self.train = train
        if total_episodes is not None:
            self.train = with_episodes(train, total_episodes)
        self.adam, self.evaluation, self.run_config = adam, evaluation, run
        self.settings, self.name = settings, name or self.folder.name
        check_tokenizer(env.tokenizer, policy)
        self.sampling.check_for_training()
        self.algorithm.check_sizes(
            group_size=self.train.group_size,
            updates_per_rollout=self.train.updates_per_rollout,
            rollout_lag=self.train.rollout_lag,
            max_tokens=self.sampling.max_tokens,
        )
        self.layout = make_layout(parallel)
        devices = self.layout.config
        devices.check_heads(policy.model.config.heads, policy.model.config.n_kv_heads)
        devices.check_rows(self.train.microbatch, "prompts of a microbatch")
        devices.check_rows(evaluation.problems, "problems of an evaluation")

    def config(self) -> dict[str, Any]:
        """Everything that decides the figures."""
        parts = {
            "model": self.policy.model.config,
            "sampling": self.sampling,
            "train": self.train,
            "optimizer": self.adam,
            "algorithm": self.algorithm,
            "eval": self.evaluation,
            "run": self.run_config,
        }
        described = {name: dataclasses.asdict(part) for name, part in parts.items()}
        described["env"] = {
            "name": self.env.name,
            "params": vars(self.env_params),
            "eval_params": vars(self.eval_params),
        }
        described["policy"] = {"digest": digest(self.policy.params)}
        return described

    def run(self) -> TrainingResult:
        """Train to the end, from the newest checkpoint if there is one."""
        started = time.perf_counter()
        model, sizes = self.policy.model, self.train
        algorithm = make_algorithm(self.algorithm, iterations=sizes.iterations)
        optimizer = make_optimizer(self.adam, sizes.updates, value_rate=self.algorithm.value_rate)
        rollout = self.rollout(sizes.prompts, sizes.group_size)
        draw = make_draw(rollout, algorithm, self.layout.axis_name)

        def sample_only(state: TrainState):
            return draw(sampling_params(state), jax.random.fold_in(state.key, state.iteration))

        settings = self.config() if self.settings is None else self.settings
        with RunFolder.open(self.folder, settings, free=FREE_FIELDS) as folder:
            result = train(
                folder,
                init_state(
                    copy_trained(self.layout.shard(self.policy.params)),
                    optimizer,
                    jax.random.key(self.run_config.seed),
                    model=model,
                    algorithm=algorithm,
                    rollout_lag=sizes.rollout_lag,
                ),
                lambda: make_iteration(
                    rollout,
                    model,
                    algorithm,
                    optimizer,
                    sizes,
                    temperature=self.sampling.temperature,
                    axis_name=self.layout.axis_name,
                ),
                run=self.run_config,
                total=sizes.iterations,
                per_call=sizes.iterations_per_call,
                evaluate=self.measure(),
                evaluate_every=self.evaluation.every,
                stages={"rollout": sample_only},
                layout=self.layout,
            )
            trained = self.policy.with_params(result.params)
            if result.is_complete:
                seconds = time.perf_counter() - started
                if is_first():
                    summarize(self.name, folder, result, seconds, sizes)
                trained.save(folder.path / "policy")
            else:
                print(
                    f"interrupted: iteration {result.iteration} is saved in {folder.path}; "
                    "start the same again to go on"
                )
        measured = [row for row in result.history if "eval/greedy" in row]
        last = measured[-1] if measured else {}
        return TrainingResult(trained, result.history, last, self.folder, result.is_complete)

    def rollout(
        self, prompts: int, group_size: int, *, greedy: bool = False, held_out: bool = False
    ) -> RolloutFn:
        """Rollouts with this trainer's settings; held-out ones are greedy or at temperature 1."""
        sampling = self.sampling
        if held_out:
            sampling = dataclasses.replace(sampling, greedy=greedy, temperature=1.0)
        model = self.policy.model

        def make(prompts: int, axis_name: Any) -> RolloutFn:
            return make_rollout(
                self.env,
                self.eval_params if held_out else self.env_params,
                model,
                self.policy.tokenizer,
                sampling,
                prompts=prompts,
                group_size=group_size,
                axis_name=axis_name,
            )

        return self.layout.rollout(make, prompts, model.config.dtype)

    def measure(self) -> Callable[[Params], Measured]:
        """`params -> Measured` on held-out problems: greedy, and at temperature 1."""
        config = self.evaluation
        evaluate = make_evaluate(
            self.rollout(config.problems, 1, greedy=True, held_out=True),
            self.rollout(config.problems, config.samples, held_out=True),
            config,
            compile=self.layout.evaluate,
        )

        def measured(params: Params) -> Measured:
            result, rolled = evaluate(params)
            return Measured(result.metrics(), transcripts(rolled, self.policy.tokenizer))

        return measured


def resolve_algorithm(optimizer: str | AlgorithmConfig) -> AlgorithmConfig:
    """An algorithm's config from its name.

    Raises:
        ConfigError: no such name.
    """
    if isinstance(optimizer, AlgorithmConfig):
        return optimizer
    if optimizer not in PRESETS:
        raise ConfigError(
            f"optimizer={optimizer!r}: expected one of {', '.join(PRESETS)}, or a config such as "
            "GRPOConfig(kl_coef=0.01)"
        )
    return PRESETS[optimizer]()


def with_episodes(train: TrainConfig, total_episodes: int) -> TrainConfig:
    """As many iterations as it takes for `total_episodes` completions."""
    if total_episodes < 1:
        raise ConfigError(f"total_episodes={total_episodes}: expected at least 1")
    iterations = math.ceil(total_episodes / (train.prompts * train.group_size))
    per_call = min(train.iterations_per_call, iterations)
    return dataclasses.replace(train, iterations=iterations, iterations_per_call=per_call)


def copy_trained(params: Params) -> Params:
    """A copy of what training changes, since it is donated; frozen weights are shared."""
    changing, frozen = lora.partition(params)
    return lora.combine(jax.tree.map(jax.numpy.copy, changing), frozen)


def check_tokenizer(tokenizer: Tokenizer, policy: Policy) -> None:
    """Refuse a policy that reads and writes other tokens than the environment."""
    ours, theirs = policy.tokenizer.token_bytes, tokenizer.token_bytes
    is_same = ours.table.shape == theirs.table.shape and (ours.table == theirs.table).all()
    if not is_same or policy.tokenizer.eos_ids != tokenizer.eos_ids:
        raise ConfigError(
            "the environment was made for another tokenizer than the policy's: make it with "
            "tokenizer=policy.tokenizer, or the policy with tokenizer=env.tokenizer"
        )


def digest(params: Params) -> str:
    """Of the weights that a run starts from."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        hashed.update(np.asarray(fetch(leaf)).tobytes())
    return hashed.hexdigest()[:16]


def transcripts(rolled: Rollout, tokenizer: Tokenizer, n: int = 8) -> list[dict[str, Any]]:
    """The first samples of the first n problems, as text."""
    few = jax.device_get(jax.tree.map(lambda x: x[:n], rolled))

    def text(tokens, mask) -> str:
        return tokenizer.decode(tokens[mask].tolist())

    return [
        {
            "prompt": text(few.prompts.tokens[i], few.prompts.mask[i]),
            "completion": text(few.completions.tokens[i, 0], few.completions.attention_mask[i, 0]),
            "reward": float(few.rewards[i, 0]),
        }
        for i in range(len(few.rewards))
    ]
