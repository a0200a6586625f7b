"""Countdown for pretrained language models: how they are asked, and settings for each.

Prompts are chats, completions think within `<think>` and answer within `<answer>`, and the warm
start shows worked solutions that try an equation or two in vain.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments.common import AdapterConfig, Setting
from jaxrl_llm import countdown_data
from jaxrl_llm.countdown_data import Problems
from jaxrl_llm.envs.countdown import HELD_OUT
from jaxrl_llm.envs.countdown_chat import QUESTION, SYSTEM, CountdownChat, EnvParams
from jaxrl_llm.envs.countdown_traces import trace_examples
from jaxrl_llm.evaluation import EvalConfig
from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.models import gguf, hf
from jaxrl_llm.models.presets import PRESETS, packaged_gguf
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig, Params
from jaxrl_llm.optimizer import OptimizerConfig
from jaxrl_llm.parallel import Layout
from jaxrl_llm.policy import Policy
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.sft import Examples, SFTConfig
from jaxrl_llm.training import TrainConfig
from jaxrl_llm.types import ConfigError

if TYPE_CHECKING:
    from experiments.countdown import CountdownConfig


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How a pretrained model is asked, and with which problems."""

    data: str | None = None
    """Problems: a parquet or JSONL file, a folder of them, or a data set of the hub, such as
    Jiayi-Pan/Countdown-Tasks-3to4; None: generated as task.preset says."""
    problems: int = 20_000
    """Training problems, the first of the data or generated; each is tokenised at the start."""
    held_out: int = 1024
    """Further problems for measurement, which share no key with these."""
    system: str | None = SYSTEM
    """The system message; None for chat templates that allow none."""
    question: str = QUESTION
    """The user's message, with {numbers} and {target}."""
    prefill: str = ""
    """How the response begins."""
    traces: int = 4
    """Worked solutions of each problem of the warm start, which share its prompt."""
    max_failures: int = 2
    """Equations that a worked solution tries in vain, at most."""


GUESSED_PROMPT = 160  # tokens; the long question has 125 for SmolLM2's tokenizer

# A short prompt: on a CPU every token counts.
_SHORT = "Make {target} from {numbers}. Think in <think></think>, then <answer>equation</answer>."

# What a CPU manages within an hour.
_ON_CPU: dict[str, Any] = {
    "lora": AdapterConfig(rank=16),
    "chat": ChatConfig(system="", question=_SHORT),
    "sft": SFTConfig(
        steps=120,
        batch=4,
        examples=480,
        microbatches=4,
        steps_per_call=5,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=10, schedule="cosine"),
    ),
    "sampling": SamplingConfig(max_tokens=80, block=16),
    "train": TrainConfig(
        iterations=30, prompts=8, group_size=8, microbatches=8, iterations_per_call=1
    ),
    "optimizer": OptimizerConfig(learning_rate=2e-4, warmup=3, schedule="linear"),
    "eval": EvalConfig(problems=128, samples=2, every=15),
}

# What an accelerator with 16 GB manages; see the README for each model.
_ON_ACCELERATOR: dict[str, Any] = {
    "network": ModelConfig(dtype="bfloat16", remat=True),
    "weights": "bfloat16",
    "lora": AdapterConfig(rank=32),
    "sft": SFTConfig(
        steps=200,
        batch=16,
        examples=4_000,
        microbatches=8,
        steps_per_call=10,
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup=10, schedule="cosine"),
    ),
    "sampling": SamplingConfig(max_tokens=256, block=32),
    "train": TrainConfig(
        iterations=200, prompts=16, group_size=8, microbatches=16, iterations_per_call=5
    ),
    "optimizer": OptimizerConfig(learning_rate=5e-5, warmup=5),
    "eval": EvalConfig(problems=256, samples=2, every=50),
}


def settings(model: str) -> dict[str, Any]:
    """Fields of `CountdownConfig` that suit a model."""
    return _ON_CPU if model == "smollm2-135m" else _ON_ACCELERATOR


def small(config: "CountdownConfig") -> Any:
    """Tiny sizes for the model as it is."""
    return dataclasses.replace(
        config,
        chat=dataclasses.replace(config.chat, problems=64, held_out=16),
        sft=dataclasses.replace(
            config.sft, steps=min(2, config.sft.steps), batch=2, microbatches=1, examples=8
        ),
        sampling=dataclasses.replace(
            config.sampling, max_tokens=min(64, config.sampling.max_tokens)
        ),
        train=dataclasses.replace(
            config.train,
            iterations=2,
            prompts=2,
            group_size=min(4, config.train.group_size),
            microbatches=1,
            iterations_per_call=1,
        ),
        eval=dataclasses.replace(config.eval, problems=4, samples=2, every=2),
        run=dataclasses.replace(config.run, name=f"{config.run.name}-smoke"),
    )


def setting(config: "CountdownConfig") -> Setting:
    """The chat environment and the pretrained model.

    Raises:
        ConfigError: no such model or data, or options of a fresh model's shape.
    """
    numerics = numerics_of(config.network)
    path = hf.resolve(config.model)
    model = describe(path, numerics)
    tokenizer = read_tokenizer(path, model.vocab_size)
    training, held_out = problems(config)
    env = make_env(config, tokenizer, training, held_out)
    rewards = {k: v for k, v in vars(config.task).items() if k != "preset"}
    params = dataclasses.replace(env.default_params, **rewards)
    assert isinstance(params, EnvParams)
    evaluated = dataclasses.replace(params, split=HELD_OUT)

    others = {name: value for name, value in numerics.items() if name != "dtype"}

    def start(key: Any, layout: Layout) -> Policy:
        del key
        return Policy.from_pretrained(
            config.model,
            dtype=config.weights,
            compute_dtype=config.network.dtype,
            layout=layout,
            **others,
        )

    return Setting(env, params, evaluated, model, start)


def describe(path: Path, numerics: dict[str, Any]) -> LanguageModel:
    """The model of a folder or a GGUF file, without its weights."""
    is_gguf = path.suffix == ".gguf"
    return (gguf.describe if is_gguf else hf.describe)(path, **numerics)


def read_tokenizer(path: Path, vocab_size: int) -> HFTokenizer:
    """The tokenizer of a folder, a GGUF file or a name of the hub."""
    is_gguf = path.suffix == ".gguf"
    read = HFTokenizer.from_gguf if is_gguf else HFTokenizer.from_pretrained
    return read(path, vocab_size=vocab_size)


def make_env(
    config: "CountdownConfig", tokenizer: Any, training: Problems, held_out: Problems | None = None
) -> CountdownChat:
    """The environment, asked as the config says."""
    chat = config.chat
    return CountdownChat(
        tokenizer,
        training,
        held_out,
        system=chat.system,
        question=chat.question,
        prefill=chat.prefill,
        max_completion=config.sampling.max_tokens,
    )


def outline(config: "CountdownConfig") -> tuple[LanguageModel, Params, int]:
    """The model, shapes of its parameters and the longest prompt, without loading weights.

    Presets' shapes are known, and of their files only the tokenizer's are fetched; where that
    fails, the length is a guess.
    """
    numerics = numerics_of(config.network)
    preset = PRESETS.get(config.model)
    if preset is not None and preset.shape is not None:
        model = LanguageModel(dataclasses.replace(preset.shape, **numerics), preset.vocab_size)
        path = (preset.package and packaged_gguf(preset.package)) or Path(str(preset.hub))
    else:
        path = hf.resolve(config.model)
        model = describe(path, numerics)
    try:
        tokenizer = read_tokenizer(path, model.vocab_size)
        length = make_env(config, tokenizer, problems(config)[0]).prompt_length
    except ConfigError as error:
        if preset is None:
            raise
        length = GUESSED_PROMPT
        print(f"prompts of {length} tokens are assumed ({error})")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    as_kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.weights), shapes)
    return model, as_kept, length


def numerics_of(network: ModelConfig) -> dict[str, Any]:
    """What a pretrained model's shape leaves open.

    Raises:
        ConfigError: more than that is set.
    """
    chosen = {
        name: getattr(network, name) for name in ("dtype", "attention", "remat", "scan_unroll")
    }
    if network != ModelConfig(**chosen):
        raise ConfigError(
            "network: a pretrained model has its own shape; expected no more than network.dtype, "
            "network.attention, "
            "network.remat and network.scan-unroll"
        )
    return chosen


def problems(config: "CountdownConfig") -> tuple[Problems, Problems]:
    """Training problems and held-out ones."""
    chat = config.chat
    if chat.data is None:
        # Twice as many as are held out are spare: keys repeat.
        n = chat.problems + 2 * chat.held_out
        drawn = countdown_data.generate(n, config.sft_seed, config.task.preset)
    else:
        drawn = countdown_data.read_problems(chat.data)
    training, held_out = countdown_data.split(drawn, chat.held_out, seed=0)
    first = np.arange(min(chat.problems, len(training)))
    return training.take(first), held_out


def examples(config: "CountdownConfig", setting: Setting) -> Examples:
    """Worked solutions for the warm start."""
    return Examples(
        *trace_examples(
            setting.env,
            config.sft.examples,
            per_problem=config.chat.traces,
            max_tokens=config.sampling.max_tokens,
            max_failures=config.chat.max_failures,
            seed=config.sft_seed,
        )
    )
