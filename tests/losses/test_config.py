from dataclasses import asdict, fields

import pytest

from jaxrl_llm.losses.config import AlgorithmConfig
from jaxrl_llm.losses.family import PRESETS
from jaxrl_llm.types import ConfigError

# The table of the papers: what each preset sets; everything else is GRPO's, without its KL.
DIFFERENCES = {
    "ppo": dict(
        advantage="gae",
        whiten=True,
        aggregation="token",
        kl_in="reward",
        kl_coef=0.05,
        kl_estimator="k1",
    ),
    "grpo": dict(kl_coef=0.04),
    "dapo": dict(clip_high=0.28, aggregation="token", kl_in="none", dynamic_sampling=True),
    "drgrpo": dict(advantage="group_centered", aggregation="constant", kl_in="none"),
    "gspo": dict(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl_in="none"),
    "cispo": dict(surrogate="cispo", aggregation="token", kl_in="none"),
    "rloo": dict(
        advantage="leave_one_out",
        surrogate="unclipped",
        ratio="sequence",
        kl_in="reward",
        kl_coef=0.03,
        kl_estimator="k1",
    ),
    "reinforcepp": dict(
        advantage="reward_to_go",
        whiten=True,
        aggregation="token",
        kl_in="reward",
        kl_coef=0.01,
        kl_estimator="k1",
    ),
    "reinforcepp_baseline": dict(
        advantage="group_centered",
        whiten=True,
        aggregation="token",
        kl_coef=0.01,
        kl_estimator="k2",
    ),
}


def test_presets_differ_from_the_base_in_the_published_fields_only():
    base = asdict(AlgorithmConfig())
    assert {
        name: {field: x for field, x in asdict(preset()).items() if x != base[field]}
        for name, preset in PRESETS.items()
    } == DIFFERENCES


def test_the_base_has_the_published_values_that_presets_share():
    shared = dict(
        clip_low=0.2,
        clip_high=0.2,
        gamma=1.0,
        gae_lambda=0.95,
        value_coef=0.1,
        value_clip=0.2,
        entropy_coef=0.0,
        kl_coef=0.0,
        kl_estimator="k3",
        surrogate="clipped",
        ratio="token",
        advantage="group_normalized",
        aggregation="sequence",
        overlong_cache=0,
        grad_reg_coeff=0.0,
        kl_target=None,
    )
    base = asdict(AlgorithmConfig())
    assert {name: base[name] for name in shared} == shared


# Each refusal: settings, and words of a message that says what is wrong and what to type.
REFUSALS = [
    (dict(clip_low=1.0), ["clip_low=1.0", "0.2"]),
    (dict(clip_low=-0.1), ["clip_low=-0.1", "0.2"]),
    (dict(clip_high=-0.1), ["clip_high=-0.1", "0.2"]),
    (dict(kl_coef=-0.1), ["kl_coef=-0.1", "away from the reference", "use 0"]),
    (dict(entropy_coef=-1.0), ["entropy_coef=-1.0", "0 or more"]),
    (dict(entropy_coef=float("inf")), ["entropy_coef=inf", "finite"]),
    (dict(kl_coef=float("inf")), ["kl_coef=inf", "finite"]),
    (dict(grad_reg_coeff=-1.0), ["grad_reg_coeff=-1.0", "0 or more"]),
    (dict(value_coef=-1.0), ["value_coef=-1.0", "0 or more"]),
    (dict(value_rate=-1.0), ["value_rate=-1.0", "0 or more"]),
    (dict(gamma=1.1), ["gamma=1.1", "[0, 1]"]),
    (dict(gamma=-0.1), ["gamma=-0.1", "[0, 1]"]),
    (dict(gae_lambda=1.1), ["gae_lambda=1.1", "[0, 1]"]),
    (dict(gae_lambda=-0.1), ["gae_lambda=-0.1", "[0, 1]"]),
    (
        dict(kl_target=0.0, kl_coef=0.1, kl_schedule="adaptive"),
        ["kl_target=0.0", "above 0"],
    ),
    (dict(kl_horizon=0.0), ["kl_horizon=0.0", "above 0"]),
    (dict(value_clip=0.0), ["value_clip=0.0", "above 0"]),
    (dict(advantage_eps=0.0), ["advantage_eps=0.0", "above 0"]),
    (dict(advantage_ddof=2), ["advantage_ddof=2", "0 or 1"]),
    (dict(overlong_cache=-1), ["overlong_cache", "0 or more"]),
    (dict(overlong_penalty=-1.0), ["overlong_penalty", "0 or more"]),
    (dict(dual_clip=1.0), ["dual_clip=1.0", "above 1"]),
    (dict(dual_clip=3.0, surrogate="cispo"), ["surrogate=cispo", "leave dual_clip out"]),
    (dict(importance_cap=0.5), ["importance_cap=0.5", "at least 1", "2"]),
    (
        dict(dynamic_sampling=True, max_sampling_rounds=1),
        ["max_sampling_rounds=1", "at least 2", "mask_dead_groups"],
    ),
    (dict(kl_in="none", kl_coef=0.1), ["kl_in=none", "kl_in=loss", "kl_coef=0"]),
    (dict(kl_in="monitor", kl_coef=0.1), ["kl_in=monitor", "kl_in=loss", "kl_coef=0"]),
    (
        dict(kl_target=0.01, kl_schedule="adaptive"),
        ["without a reference", "set kl_in=loss and kl_coef"],
    ),
    (
        dict(kl_in="monitor", kl_schedule="linear"),
        ["kl_schedule=linear", "without a reference", "set kl_in=loss and kl_coef"],
    ),
    (dict(kl_coef=0.1, kl_schedule="adaptive"), ["kl_schedule=adaptive", "set kl_target", "0.01"]),
    (dict(kl_coef=0.1, kl_target=0.01), ["kl_schedule=constant", "kl_schedule=adaptive"]),
]


@pytest.mark.parametrize(("settings", "words"), REFUSALS, ids=[str(s) for s, _ in REFUSALS])
def test_settings_that_cannot_work_are_refused_with_the_way_out(settings, words):
    with pytest.raises(ConfigError) as refusal:
        AlgorithmConfig(**settings)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


NUMBERS = [field.name for field in fields(AlgorithmConfig) if "float" in str(field.type)]


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=nan"):
        AlgorithmConfig(**{name: float("nan")})


FITTING = dict(group_size=4, updates_per_rollout=1, rollout_lag=0, max_tokens=16)
SIZE_REFUSALS = [
    (dict(advantage=name), dict(group_size=1), [f"advantage={name}", "group_size=8", "gae"])
    for name in ("group_normalized", "group_centered", "leave_one_out")
] + [
    (
        dict(advantage="gae", dynamic_sampling=True),
        dict(group_size=1),
        ["dynamic_sampling", "group_size=8", "switch them off"],
    ),
    (
        dict(advantage="reward_to_go", mask_dead_groups=True),
        dict(group_size=1),
        ["mask_dead_groups", "group_size=8", "switch them off"],
    ),
    (dict(grad_reg_coeff=0.05), dict(), ["grad_reg_coeff=0.05", "train.epochs=2"]),
    (dict(overlong_cache=16), dict(), ["overlong_cache=16", "max_tokens=16", "a fifth"]),
]


@pytest.mark.parametrize(("settings", "sizes", "words"), SIZE_REFUSALS)
def test_sizes_that_cannot_work_are_refused_with_the_way_out(settings, sizes, words):
    config = AlgorithmConfig(**settings)
    with pytest.raises(ConfigError) as refusal:
        config.check_sizes(**FITTING | sizes)
    message = str(refusal.value)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (dict(), dict(group_size=2)),
        (dict(advantage="gae"), dict(group_size=1)),
        (dict(advantage="reward_to_go"), dict(group_size=1)),
        (dict(grad_reg_coeff=0.05), dict(updates_per_rollout=2)),
        (dict(grad_reg_coeff=0.05), dict(rollout_lag=1)),
        (dict(overlong_cache=15), dict()),
    ],
)
def test_sizes_at_the_edge_are_accepted(settings, sizes):
    AlgorithmConfig(**settings).check_sizes(**FITTING | sizes)


@pytest.mark.parametrize(
    ("settings", "trains", "needs"),
    [
        (dict(), False, False),
        (dict(kl_coef=0.1), True, True),
        (dict(kl_in="reward", kl_coef=0.1), True, True),
        (dict(kl_in="monitor"), False, True),
        (dict(kl_in="none"), False, False),
    ],
)
def test_a_reference_is_kept_where_a_kl_is_trained_or_watched(settings, trains, needs):
    config = AlgorithmConfig(**settings)
    assert (config.trains_kl, config.needs_reference) == (trains, needs)
