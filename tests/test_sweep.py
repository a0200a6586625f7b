import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.grpo import GRPOConfig
from jaxrl_llm.losses.objective import make_algorithm
from jaxrl_llm.losses.ppo import PPOConfig
from jaxrl_llm.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.rollout import Rollout, completion_keys
from jaxrl_llm.sampling import SamplingConfig, sample
from jaxrl_llm.sweep import SCALARS, Arm, make_sweep, train_sweep
from jaxrl_llm.trainer import Measured, RunConfig
from jaxrl_llm.training import TrainConfig, init_state, make_iteration, scan_iterations
from jaxrl_llm.types import ConfigError, Prompts

ADAM = OptimizerConfig(learning_rate=5e-3, warmup=5)
TRAIN = TrainConfig(iterations=3, prompts=6, group_size=8, microbatches=1, epochs=2)


@pytest.fixture(scope="module")
def bandits(toy):
    """Rollouts with given sampling settings, rewarded for one of the tokens."""
    prompts = Prompts(jnp.arange(6)[:, None], jnp.ones((6, 1), bool))

    def of(sampling):
        def rollout(params, key):
            keys = completion_keys(key, 6, 8)
            completions = sample(params, toy, prompts, keys, sampling, eos_ids=(4,), pad_id=0)
            return Rollout(prompts, completions, (completions.tokens == 5).mean(-1), {})

        return rollout

    return of


def single(arm, params, model, bandits, iterations):
    """The last state and the metrics of one arm, trained as always."""
    algorithm = make_algorithm(arm.algorithm, iterations=TRAIN.iterations)
    optimizer = make_optimizer(arm.optimizer, TRAIN.updates, value_rate=arm.algorithm.value_rate)
    key = jax.random.key(arm.seed)
    state = init_state(params, optimizer, key, model=model, algorithm=algorithm)
    step = make_iteration(
        bandits(arm.sampling),
        model,
        algorithm,
        optimizer,
        TRAIN,
        temperature=arm.sampling.temperature,
    )
    return jax.jit(scan_iterations(step, iterations))(state)


def of_run(tree, n):
    return jax.tree.map(lambda x: x[n], tree)


def changed(arm, path, value):
    part, name = path.split(".")
    replaced = dataclasses.replace(getattr(arm, part), **{name: value})
    return dataclasses.replace(arm, **{part: replaced})


BASE = Arm(
    algorithm=GRPOConfig(kl_coef=0.05, entropy_coef=0.01),
    optimizer=ADAM,
    sampling=SamplingConfig(max_tokens=3),
)
VALUES = {
    "algorithm.kl_coef": 0.5,
    "algorithm.clip_low": 0.01,
    "algorithm.clip_high": 0.01,
    "algorithm.entropy_coef": 0.2,
    "optimizer.learning_rate": 2e-2,
    "sampling.temperature": 1.5,
}


@pytest.mark.slow
def test_runs_of_one_program_equal_single_runs(toy, toy_params, bandits):
    assert set(VALUES) == set(SCALARS)
    arms = [BASE, dataclasses.replace(BASE, seed=1)]
    arms += [changed(BASE, path, value) for path, value in VALUES.items()]
    sweep = make_sweep(arms, bandits, toy, TRAIN)
    together, metrics = jax.jit(scan_iterations(sweep.iteration, 2))(sweep.init(toy_params))
    reached = []
    for n, arm in enumerate(arms):
        alone, expected = single(arm, toy_params, toy, bandits, 2)
        chex.assert_trees_all_close(of_run(together, n).params, alone.params, atol=1e-5, rtol=1e-4)
        for name, x in expected.items():
            np.testing.assert_allclose(metrics[name][:, n], x, atol=1e-4, rtol=1e-3, err_msg=name)
        reached.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(alone.params)]))
    # Each value makes a difference that these tolerances see.
    for other in reached[1:]:
        assert np.abs(other - reached[0]).max() > 1e-4


@pytest.mark.slow
def test_a_value_model_is_trained_in_each_run(toy, toy_params, bandits):
    arms = [
        Arm(seed=seed, algorithm=PPOConfig(), optimizer=ADAM, sampling=BASE.sampling)
        for seed in (0, 5)
    ]
    sweep = make_sweep(arms, bandits, toy, TRAIN)
    together, _ = jax.jit(sweep.iteration)(sweep.init(toy_params))
    for n, arm in enumerate(arms):
        alone, _ = single(arm, toy_params, toy, bandits, 1)
        chex.assert_trees_all_close(of_run(together, n).critic, alone.critic, atol=1e-5)


def test_an_arm_keeps_its_own_coefficients_beside_one_with_larger_ones(toy, toy_params, bandits):
    pulled = changed(changed(BASE, "algorithm.kl_coef", 0.5), "algorithm.entropy_coef", 0.2)
    arms = [changed(BASE, "algorithm.kl_coef", 0.0), pulled]
    sweep = make_sweep(arms, bandits, toy, TRAIN)
    together, metrics = jax.jit(sweep.iteration)(sweep.init(toy_params))
    alone, _ = single(arms[0], toy_params, toy, bandits, 1)
    chex.assert_trees_all_close(of_run(together, 0).params, alone.params, atol=1e-5)
    assert metrics["kl/coef"].tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ([], "no arms"),
        (
            [BASE, changed(BASE, "algorithm.aggregation", "token")],
            "differ in algorithm.aggregation",
        ),
        ([BASE, dataclasses.replace(BASE, sampling=SamplingConfig(max_tokens=4))], "max_tokens"),
        (
            [BASE, Arm(algorithm=PPOConfig(), optimizer=ADAM, sampling=BASE.sampling)],
            "a sweep for each value",
        ),
    ],
)
def test_arms_of_different_programs_are_refused(toy, bandits, arms, message):
    with pytest.raises(ConfigError, match=message):
        make_sweep(arms, bandits, toy, TRAIN)


@pytest.mark.slow
def test_seeds_alone_need_no_vector_of_values(toy, toy_params, bandits):
    arms = [dataclasses.replace(BASE, seed=seed) for seed in range(3)]
    sweep = make_sweep(arms, bandits, toy, TRAIN)
    state = sweep.init(toy_params)
    _, metrics = jax.jit(sweep.iteration)(state)
    assert state.iteration.shape == (3,) and metrics["reward/mean"].shape == (3,)
    assert len(set(metrics["policy/entropy"].tolist())) == 3
    assert jnp.isfinite(metrics["loss"]).all()


class StopsOnce:
    """An `Interrupt` that is requested after the first call."""

    checks = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def requested(self):
        self.checks += 1
        return self.checks > 1


def measured(params):
    size = sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(params))
    return Measured({"eval/sampled": size}, [])


@pytest.mark.slow
def test_a_sweep_that_was_stopped_goes_on_to_the_same_bytes(
    toy, toy_params, bandits, tmp_path, monkeypatch
):
    arms = [BASE, changed(dataclasses.replace(BASE, seed=1), "algorithm.kl_coef", 0.5)]
    train = dataclasses.replace(TRAIN, iterations_per_call=1)
    sweep = make_sweep(arms, bandits, toy, train)
    runs = {f"run-{n}": {"arm": dataclasses.asdict(arm)} for n, arm in enumerate(arms)}

    def go(name):
        return train_sweep(
            tmp_path / name,
            runs,
            sweep,
            toy_params,
            run=RunConfig(quiet=True),
            train=train,
            evaluate=measured,
        )

    whole = go("whole")
    with monkeypatch.context() as patched:
        patched.setattr("jaxrl_llm.trainer.Interrupt", StopsOnce)
        stopped = go("stopped")
    assert whole.is_complete and not stopped.is_complete
    assert [len(rows) for rows in stopped.histories] == [2, 2]
    resumed = go("stopped")
    assert resumed.is_complete and resumed.histories == whole.histories
    chex.assert_trees_all_equal(resumed.params, whole.params)
    for name in runs:
        files = [tmp_path / folder / name / "metrics.jsonl" for folder in ("whole", "stopped")]
        assert files[0].read_bytes() == files[1].read_bytes()
    first, second = whole.histories
    assert first[0] == second[0] and first[-1]["eval/sampled"] != second[-1]["eval/sampled"]
    assert [row["kl/coef"] for row in second[1:]] == [0.5] * 3
    again = go("whole")  # nothing is left to do, and nothing is done
    assert again.histories == whole.histories and again.seconds == whole.seconds
    runs["run-1"] = {"arm": dataclasses.asdict(BASE)}
    with pytest.raises(ConfigError, match="run-1.arm.seed was 1, now 0"):
        go("whole")
