"""A Llama by transformers that samples or trains: runs in the peer's own environment.

See `experiments.bench_peers` for the lines that go in and out: a step is one `generate`, or one
AdamW step.
"""

import json
import os
import sys
import time

import torch
import transformers

sizes = json.loads(sys.argv[1])
# Replies go to the real stdout alone; whatever the libraries print goes to the log.
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(sizes["threads"])
dtype = getattr(torch, sizes["network"]["dtype"])
b, g, p, t = (sizes[n] for n in ("prompts", "group_size", "prompt_tokens", "completion_tokens"))


def reply(**fields):
    print(json.dumps(fields), file=replies, flush=True)


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
        rms_norm_eps=network["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": network["rope_theta"]},
        tie_word_embeddings=network["tie_embeddings"],
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a completion
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def random_tokens(*shape):
    return torch.randint(1, sizes["vocab"], shape)


def decode(model):
    """B prompts, G completions of each."""
    prompts = random_tokens(b, p)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True)
    model.to(dtype).eval()

    def step():
        with torch.inference_mode():
            whole = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                num_return_sequences=g,
                min_new_tokens=t,
                max_new_tokens=t,
                **settings,
            )
        assert whole.shape == (b * g, p + t), whole.shape

    return step, settings | {"weights": sizes["network"]["dtype"]}


def update(model, microbatches):
    """B sequences of which T tokens are fed, and the T that follow each are scored."""
    tokens = random_tokens(b, 1 + t)
    settings = dict(lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    model.train()
    assert not model.is_activation_checkpointing, "it would compute the forward pass twice"

    def step():
        optimizer.zero_grad()
        for part in tokens.chunk(microbatches):
            with autocast:
                logits = model(part[:, :-1], use_cache=False).logits
            logps = torch.log_softmax(logits.float(), -1).gather(-1, part[:, 1:, None])
            (-logps.sum() / (b * t)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, settings | {"autocast": dtype == torch.bfloat16, "weights": "float32"}


def resident_peak():
    """Bytes; `ru_maxrss` would begin with what the process that started this one held."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def matmul_flops():
    """FLOP/s of the fastest of a few large matmuls."""
    side, seconds = sizes["matmul_side"], []
    square = torch.ones((side, side), dtype=dtype)
    for _ in range(4):
        start = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


while line := sys.stdin.readline():
    told = json.loads(line)
    model = make_model()
    phase = sizes["phase"]
    step, settings = decode(model) if phase == "decode" else update(model, told["microbatches"])
    reply(
        settings=settings | {"threads": torch.get_num_threads()},
        attention=model.config._attn_implementation,
        parameters=sum(x.numel() for x in model.parameters()),
        versions={m.__name__: m.__version__ for m in (transformers, torch)},
        matmul_flops=matmul_flops(),
    )
    for _ in range(told["steps"]):
        assert sys.stdin.readline().strip() == "step"
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        reply(seconds=seconds, resident_peak_bytes=resident_peak())
