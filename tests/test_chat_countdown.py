"""Countdown experiments for pretrained models, on a folder with a small random one."""

import json
import re
import sys

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments import chat_countdown, cli, grpo_countdown, sft_countdown
from experiments.chat_countdown import make_env
from experiments.grpo_countdown import Config
from jaxrl_llm.countdown_data import generate
from jaxrl_llm.envs.countdown_traces import trace, trace_examples
from jaxrl_llm.hf_tokenizers import HFTokenizer
from jaxrl_llm.logging import read_rows
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import LanguageModel, ModelConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.rollout import make_rollout
from jaxrl_llm.sampling import SamplingConfig
from jaxrl_llm.training import attach, detach, init_state
from jaxrl_llm.types import ConfigError

SETTINGS = ["--chat.question", "{target} from {numbers}", "--chat.system", "", "--run.quiet"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tokenizer() -> HFTokenizer:
    """Byte-level, with what traces are made of as single tokens."""
    choice = np.random.default_rng(0)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator([trace([19, 5, 3], 42, 3, choice) for _ in range(50)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    return HFTokenizer(fast)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in Hugging Face's format."""
    ours = tokenizer()
    model = LanguageModel(ModelConfig(width=32, layers=2, heads=2), ours.vocab_size)
    path = tmp_path_factory.mktemp("models") / "small"
    Policy(model, ours, model.init(jax.random.key(0))).save(path)
    return path


def invoke(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    config = getattr(module, "Config", sft_countdown.CountdownConfig)
    with pytest.raises(SystemExit) as stopped:
        cli.run(config, module.main, module.__doc__)
    return stopped.value.code


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The folder of a finished run with adapters and a reference policy."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        status = invoke(
            patch,
            grpo_countdown,
            *["--model", folder, "--smoke", "--run.root", root, "--algorithm.kl-coef", "0.01"],
            *["--weights", "float32", "--network.dtype", "float32", "--lora.rank", "2", *SETTINGS],
        )
    assert status == 0
    return root / "grpo_countdown" / "small-smoke"


@pytest.mark.slow
def test_a_run_starts_at_its_reference_and_trains_what_it_sampled(finished):
    first, second = (row for row in read_rows(finished / "metrics.jsonl") if row["step"] > 0)
    # Within float32's rounding of log-probs near 3: they come from two programs.
    assert abs(first["policy/kl_k1"]) < 1e-7 and first["policy/kl_k3"] < 1e-12
    assert max(row["policy/logprob_gap"] for row in (first, second)) <= 1e-5
    assert json.loads((finished / "summary.json").read_text())["iterations"] == 2


@pytest.mark.slow
def test_checkpoints_hold_the_adapters_and_not_what_they_adapt(finished):
    about = (finished / "checkpoints" / "2" / "about.json").read_text()
    assert "lora" in about
    assert "embedding" not in about


@pytest.mark.slow
def test_the_run_leaves_an_adapter_that_loads_and_exports_merged_with_the_same_greedy_tokens(
    finished, tmp_path
):
    trained = Policy.from_pretrained(finished / "policy")
    assert lora.config_of(trained.params).rank == 2
    base = Policy.from_pretrained(trained.source)  # the warm start
    assert not lora.has_adapters(base.params)
    trained.merged().save(tmp_path / "exported")
    exported = Policy.from_pretrained(tmp_path / "exported")
    env = make_env(Config.for_model("x"), trained.tokenizer, generate(8, 0, "small"))
    rollout = make_rollout(
        env,
        env.default_params,
        trained.model,
        trained.tokenizer,
        SamplingConfig(max_tokens=16, greedy=True),
        prompts=4,
        group_size=1,
    )
    tokens = [
        np.asarray(rollout(policy.params, jax.random.key(0)).completions.tokens)
        for policy in (trained, exported)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
def test_the_same_command_finds_the_run_finished(finished, folder, monkeypatch, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    status = invoke(
        monkeypatch,
        grpo_countdown,
        *["--model", folder, "--smoke", "--run.root", finished.parents[1]],
        *["--algorithm.kl-coef", "0.01", "--weights", "float32", "--network.dtype", "float32"],
        *["--lora.rank", "2", *SETTINGS],
    )
    assert status == 0
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_without_a_warm_start_the_problems_of_a_file_are_asked(folder, tmp_path, monkeypatch):
    targets = range(101, 141)
    rows = [{"target": target, "nums": [1, target - 2, 3]} for target in targets]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = invoke(
        monkeypatch,
        grpo_countdown,
        *["--model", folder, "--smoke", "--run.root", tmp_path, "--chat.data", data],
        *["--sft.steps", "0", "--lora.rank", "0", *SETTINGS],
    )
    assert status == 0
    run = tmp_path / "grpo_countdown" / "small-smoke"
    asked = [re.match(r"(\d+) from", row["prompt"]) for row in read_rows(run / "samples.jsonl")]
    assert asked and all(int(found.group(1)) in targets for found in asked)
    assert not list(tmp_path.glob("sft_*"))
    assert (run / "policy" / "model.safetensors").is_file()  # all weights, and no adapter


def test_worked_solutions_are_correct_by_the_environment_that_trains():
    env = make_env(Config.for_model("x"), tokenizer(), generate(40, 0, "3to4"))
    prompts, tokens, mask = trace_examples(
        env, 12, per_problem=2, max_tokens=160, max_failures=2, seed=0
    )
    assert tokens.shape == mask.shape == (12, 2, 160)
    assert prompts.mask[:, -1].all()
    rows = [env.tokenizer.decode(p[m].tolist()) for p, m in zip(*prompts, strict=True)]
    params = env.default_params
    written = {
        env.tokenizer.decode(p[m].tolist()): i
        for i in range(env.n_train)
        for p, m in [jax.device_get(env.table.write(i))]
    }
    _, state = env.reset_env(jax.random.key(0), params)
    for row, traces in zip(rows, tokens, strict=True):
        for ids in traces:
            here = state.replace(index=jax.numpy.int32(written[row]))
            _, _, reward, _, info = env.step_env(jax.random.key(0), here, ids, params)
            assert reward == 1.0 and info["has_think"] and not info["is_truncated"]


def test_worked_solutions_that_do_not_fit_are_refused():
    env = make_env(Config.for_model("x"), tokenizer(), generate(4, 0, "small"))
    with pytest.raises(ConfigError, match="max_tokens=3: no problem has traces that are short"):
        trace_examples(env, 2, per_problem=1, max_tokens=3, max_failures=0, seed=0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--network.width", "64"], "a pretrained model has its own shape"),
        (["--chat.data", "nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["--chat.question", "What?"], "expected {numbers} and {target} in it"),
        (["--lora.targets", "head", "--lora.rank", "2"], "targets head match no projection"),
        (["--parallel.fsdp", "2"], "the sizes do not multiply to the 1 devices"),
    ],
)
def test_bad_settings_are_one_line_and_exit_status_2(
    folder, arguments, told, monkeypatch, capsys, tmp_path
):
    common = ["--model", folder, "--smoke", "--run.root", tmp_path]
    assert invoke(monkeypatch, grpo_countdown, *common, *SETTINGS, *arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "no-such-model"], "no-such-model: no such folder; expected one, a hub name"),
        (["--chat.traces", "2"], "chat.* is for pretrained models"),
    ],
)
def test_models_that_are_not_there_and_chats_with_fresh_ones_are_refused(
    arguments, told, monkeypatch, capsys, tmp_path
):
    assert invoke(monkeypatch, grpo_countdown, "--run.root", tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err


def test_an_estimate_needs_no_weights(folder, tmp_path, monkeypatch, capsys):
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    common = ["--model", tmp_path, "--smoke", "--run.root", tmp_path / "runs", *SETTINGS]
    assert invoke(monkeypatch, grpo_countdown, *common, "--estimate") == 0
    assert "total per device" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert invoke(monkeypatch, grpo_countdown, *common) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_preset_out_of_reach_is_estimated_from_its_shape(monkeypatch, capsys):
    def out_of_reach(*_, **__):
        raise ConfigError("no network")

    monkeypatch.setattr(chat_countdown.HFTokenizer, "from_pretrained", out_of_reach)
    assert invoke(monkeypatch, grpo_countdown, "--model", "qwen2.5-0.5b", "--estimate") == 0
    out = capsys.readouterr().out
    assert "prompts of 160 tokens are assumed (no network)" in out
    # 494,032,768 weights in bfloat16, and adapters of rank 32 in float32.
    adapters = 24 * 32 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)) * 4
    wanted = (494_032_768 * 2 + adapters + 7 * 24 * 4) / 2**20
    assert float(re.search(r"parameters +([\d.]+) MiB", out).group(1)) == pytest.approx(
        wanted, 1e-3
    )


def test_frozen_weights_part_from_the_state_and_join_it_again(folder):
    import optax

    policy = Policy.from_pretrained(folder).with_lora()
    state = init_state(policy.params, optax.sgd(1.0), jax.random.key(0), rollout_lag=1)
    changing, frozen = detach(state)
    n = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in vars(changing).items()}
    whole = sum(x.size for x in jax.tree.leaves(policy.params))
    assert n["params"] == n["lagged_params"] < whole / 2
    assert n["params"] + sum(x.size for x in jax.tree.leaves(frozen)) == whole
    jax.tree.map(np.testing.assert_array_equal, attach(changing, frozen).params, policy.params)
    jax.tree.map(
        np.testing.assert_array_equal, attach(changing, frozen).lagged_params, policy.params
    )
