"""TRL's GRPOTrainer, one iteration for each line on stdin: runs in the peer's own environment.

See `experiments.bench_peers` for the lines that go in and out.
"""

import json
import os
import resource
import sys
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

sizes = json.loads(sys.argv[1])
# Replies go to the real stdout alone; whatever the libraries print goes to the log.
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(sizes["threads"])


def reply(**fields):
    print(json.dumps(fields), file=replies, flush=True)


def make_tokenizer():
    """One word is one token; token 0 ends and pads, and is never drawn."""
    words = {f"w{i}": i for i in range(sizes["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w0", pad_token="w0", padding_side="left"
    )


def make_model():
    network = sizes["network"]
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=network["width"],
        intermediate_size=network["mlp_width"],
        num_hidden_layers=network["layers"],
        num_attention_heads=network["heads"],
        num_key_value_heads=network["kv_heads"],
        head_dim=network["head_width"],
        tie_word_embeddings=network["tie_embeddings"],
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, network["dtype"]))


def odd_share(completion_ids, **_):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


class OnDemand(transformers.TrainerCallback):
    """Begins a step when a line comes in, and replies with the seconds that it took."""

    def on_step_begin(self, *_, **__):
        assert sys.stdin.readline().strip() == "step"
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        seconds = time.perf_counter() - self.start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reply(seconds=seconds, resident_peak_bytes=peak)


def train(microbatches, steps, folder):
    b, g, t = (sizes[name] for name in ("prompts", "group_size", "completion_tokens"))
    draw = torch.randint(1, sizes["vocab"], (b * steps, sizes["prompt_tokens"]))
    prompts = [" ".join(f"w{i}" for i in row) for row in draw.tolist()]
    settings = dict(
        per_device_train_batch_size=b * g // microbatches,
        gradient_accumulation_steps=microbatches,
        num_generations=g,
        max_completion_length=t,
        generation_kwargs={"min_new_tokens": t, "max_new_tokens": t},
        temperature=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        learning_rate=3e-4,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
    )
    quiet = dict(report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
    model = make_model()
    lengths = set()

    def reward(completion_ids, **_):
        lengths.update(map(len, completion_ids))
        return odd_share(completion_ids)

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(folder, max_steps=steps, use_cpu=True, **settings, **quiet),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
        callbacks=[OnDemand()],
    )
    assert not trainer.model.is_gradient_checkpointing, "it would compute the forward pass twice"
    reply(
        settings=settings | {"threads": torch.get_num_threads()},
        parameters=sum(p.numel() for p in model.parameters()),
        versions={m.__name__: m.__version__ for m in (trl, transformers, torch)},
    )
    trainer.train()
    assert lengths == {t}, lengths


with tempfile.TemporaryDirectory() as folder:
    while line := sys.stdin.readline():
        train(**json.loads(line), folder=folder)
