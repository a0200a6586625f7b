"""Tunix's GRPOLearner, one iteration for each line on stdin: runs in the peer's own environment.

See `experiments.bench_peers` for the lines that go in and out.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time

sizes = json.loads(sys.argv[1])
# Replies go to the real stdout alone; whatever the libraries print goes to the log.
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402


def reply(**fields):
    print(json.dumps(fields), file=replies, flush=True)


class Words:
    """One word is one token; token 0 pads, and the end is a token that there is not."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        return 0  # which the sampler takes as none

    def eos_id(self):
        return sizes["vocab"]

    def pad_id(self):
        return 0


def make_model():
    network = sizes["network"]
    config = llama.ModelConfig(
        num_layers=network["layers"],
        vocab_size=sizes["vocab"],
        embed_dim=network["width"],
        hidden_dim=network["mlp_width"],
        num_heads=network["heads"],
        head_dim=network["head_width"],
        num_kv_heads=network["kv_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
        weight_tying=network["tie_embeddings"],
    )
    return llama.Llama3(config, rngs=nnx.Rngs(0))


def train(microbatches, steps):
    b, g, p, t = (
        sizes[name] for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens")
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    settings = dict(
        mini_batch_size=b,
        train_micro_batch_size=b // microbatches,
        rollout_micro_batch_size=b,
        compute_logps_micro_batch_size=b,
    )
    sampling = dict(
        max_tokens_to_generate=t,
        max_prompt_length=p,
        kv_cache_size=p + t,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    algorithm = dict(num_generations=g, num_iterations=1, beta=0.0, epsilon=0.2)
    with mesh:
        model = make_model()
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.0)
                ),
                eval_every_n_steps=10**9,
                max_steps=10**9,
                **settings,
            ),
            rollout_config=base_rollout.RolloutConfig(**sampling),
        ),
    )
    lengths = set()

    def odd_share(prompts, completions, **_):
        rows = [[int(word) for word in text.split()] for text in completions]
        lengths.update(map(len, rows))
        return [sum(i % 2 for i in row) / len(row) for row in rows]

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(**algorithm),
        reward_fns=odd_share,
    )
    weights = jax.tree.leaves(nnx.state(model))
    reply(
        settings=settings | sampling | algorithm,
        parameters=sum(x.size for x in weights),
        versions={
            name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")
        },
    )
    random = np.random.default_rng(0)

    def batches():
        """The learner asks for the next batch when it is done with the one before."""
        for _ in range(steps):
            assert sys.stdin.readline().strip() == "step"
            start = time.perf_counter()
            rows = random.integers(1, sizes["vocab"], (b, p))
            yield {"prompts": np.array([" ".join(map(str, row)) for row in rows])}
            jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            reply(seconds=seconds, resident_peak_bytes=peak)

    with mesh:
        learner.train(batches())
    assert lengths == {t}, lengths


while line := sys.stdin.readline():
    train(**json.loads(line))
