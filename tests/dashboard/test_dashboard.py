"""What the plots show is what the rows of the runs say."""

import math

import numpy as np
import pytest

from jaxrl_llm import charts
from jaxrl_llm.dashboard import EvalDashboard
from jaxrl_llm.runs import Series, first_stay, max_drawdown, trailing
from jaxrl_llm.types import ConfigError


def curve(axis, label):
    """Values of the line with this label."""
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return list(line.get_ydata())


def unlabelled(axis):
    return [list(line.get_ydata()) for line in axis.lines if line.get_label().startswith("_")]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bar_texts(axis):
    return [text.get_text() for text in axis.texts]


# ---- curves


def test_a_single_run_is_its_raw_rows_under_their_running_mean(tmp_path, write_run):
    rewards = [0.0, 3.0, 0.0, 6.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0]
    write_run(tmp_path / "a", {"reward/mean": rewards})
    axis = EvalDashboard(tmp_path, smooth=3).plot_rewards().axes[0]
    assert unlabelled(axis) == [rewards]
    expected = [np.mean(rewards[max(0, i - 1) : i + 2]) for i in range(15)]
    np.testing.assert_allclose(curve(axis, "a"), expected)


@pytest.mark.parametrize(
    ("plot", "metric"),
    [
        ("plot_rewards", "reward/mean"),
        ("plot_length", "rollout/length_mean"),
        ("plot_entropy", "policy/entropy"),
        ("plot_kl_divergence", "kl/rollout"),
    ],
)
def test_each_curve_is_of_its_metric(tmp_path, write_run, plot, metric):
    tags = ("reward/mean", "rollout/length_mean", "policy/entropy", "kl/rollout", "policy/kl_k3")
    rows = [{"step": s} | {tag: s + 10.0 * i for i, tag in enumerate(tags)} for s in (1, 2)]
    write_run(tmp_path / "a", rows)
    axis = getattr(EvalDashboard(tmp_path), plot)().axes[0]
    assert curve(axis, "a") == [row[metric] for row in rows]


def test_several_seeds_are_their_mean_in_a_band_from_the_lowest_to_the_highest(tmp_path, write_run):
    curves = [0.0, 2.0, 4.0], [1.0, 1.0, 1.0], [5.0, 3.0, 1.0, 9.0]
    for seed, rewards in enumerate(curves):
        write_run(tmp_path / "g" / str(seed), {"reward/mean": rewards}, seed=seed)
    axis = EvalDashboard(tmp_path, smooth=1).plot_rewards().axes[0]
    assert curve(axis, "g (3 seeds)") == [2.0, 2.0, 2.0]  # where all three have a row
    assert unlabelled(axis) == [list(c) for c in curves]
    corners = {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices.tolist()}
    lowest_and_highest = {(1, 0), (1, 5), (2, 1), (2, 3), (3, 1), (3, 4)}
    assert corners == {(float(x), float(y)) for x, y in lowest_and_highest}


def test_values_that_are_not_finite_are_gaps(tmp_path, write_run):
    write_run(tmp_path / "a", {"reward/mean": [1.0, "NaN", "Infinity", 2.0]})
    axis = EvalDashboard(tmp_path).plot_rewards().axes[0]
    np.testing.assert_array_equal(unlabelled(axis)[0], [1.0, np.nan, np.nan, 2.0])


def test_evaluations_are_drawn_with_the_intervals_of_the_run(tmp_path, write_run):
    evaluations = [(0, 0.2, 0.1, 0.4), (10, 0.5, 0.3, 0.6)]
    rows = [
        {"step": s, "eval/greedy": v, "eval/greedy_low": low, "eval/greedy_high": high}
        for s, v, low, high in evaluations
    ]
    write_run(tmp_path / "a", rows)
    (axis,) = EvalDashboard(tmp_path).plot_accuracy().axes
    points, _, (bars,) = axis.containers[0].lines
    expected = [[(s, low), (s, high)] for s, _, low, high in evaluations]
    np.testing.assert_allclose(bars.get_segments(), expected)
    assert points.get_ydata().tolist() == [0.2, 0.5]


def test_evaluations_of_several_seeds_are_their_mean_and_tool_calls_are_none_of_them(
    tmp_path, write_run
):
    for seed, last in enumerate((0.4, 0.8)):
        rows = [
            {"step": 0, "eval/success": 0.2, "eval/success_low": 0.1, "eval/success_high": 0.3},
            {"step": 9, "eval/success": last, "eval/calls": 3.0, "eval/calls_failed": 1.0},
        ]
        write_run(tmp_path / "g" / str(seed), rows, seed=seed)
    figure = EvalDashboard(tmp_path).plot_accuracy()
    assert [axis.get_title(loc="left").strip() for axis in figure.axes] == ["success"]
    np.testing.assert_allclose(curve(figure.axes[0], "g (2 seeds)"), [0.2, 0.6])


@pytest.mark.parametrize("name", ["_hidden", "cost$x_$", "$", "long-" * 30])
def test_every_name_is_in_the_legend_and_can_be_drawn(tmp_path, write_run, name):
    write_run(tmp_path / name, {"reward/mean": [0.1, 0.2]})
    board = EvalDashboard(tmp_path)
    (told,) = legend(board.plot_rewards(tmp_path / "rewards.png"))
    assert told.strip().replace("\\", "").startswith(name[:5])
    board.plot_stability(tmp_path / "stability.png")


# ---- KL


def test_the_target_of_a_steered_run_is_a_line_at_its_height(tmp_path, write_run):
    rows = {"kl/rollout": [0.0, 0.1], "kl/coef": [0.5, 0.6]}
    write_run(tmp_path / "steered", rows, kl_target=0.05)
    write_run(tmp_path / "free", rows, kl_target=None)
    figure = EvalDashboard(tmp_path).plot_kl_divergence()
    kl, coefficient = figure.axes
    assert curve(kl, "KL target 0.05") == [0.05, 0.05]
    assert curve(coefficient, "steered") == [0.5, 0.6]
    assert legend(figure) == ["free", "steered", "KL target 0.05"]


def test_without_a_target_there_is_no_target_line(tmp_path, write_run):
    write_run(tmp_path / "a", {"kl/rollout": [0.0, 0.1]})
    figure = EvalDashboard(tmp_path).plot_kl_divergence()
    assert legend(figure) == ["a"]


def test_targets_that_differ_have_the_colours_of_their_groups(tmp_path, write_run):
    for name, target in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / name, {"kl/rollout": [0.0, 0.1]}, kl_target=target)
    axis = EvalDashboard(tmp_path).plot_kl_divergence().axes[0]
    color = {line.get_label(): line.get_color() for line in axis.lines}
    assert color["KL target 0.1"] == color["a"] != color["b"] == color["KL target 0.2"]


def test_the_kl_of_the_updates_stands_in_where_none_was_measured_before_them(tmp_path, write_run):
    write_run(tmp_path / "a", {"policy/kl_k3": [0.3, 0.4]})
    board = EvalDashboard(tmp_path)
    assert curve(board.plot_kl_divergence().axes[0], "a") == [0.3, 0.4]
    assert board.skipped == {}


# ---- tool calls


TOOL_CALLS = {
    "rollout/calls": [2.0, 4.0, 0.0],
    "rollout/calls_succeeded": [1.0, 3.0, 0.0],
    "rollout/calls_failed": [1.0, 0.5, 0.25],
    "rollout/calls/search": [2.0, 1.0, 0.5],
    "rollout/calls/book": [0.0, 1.0, 0.75],
    "eval/calls_failed": [None, None, 0.3],
    "eval/calls_failed_low": [None, None, 0.2],
    "eval/calls_failed_high": [None, None, 0.5],
}


def test_tool_usage_shows_calls_successes_outcomes_and_tools(tmp_path, write_run):
    write_run(tmp_path / "a", TOOL_CALLS)
    calls, success, outcomes, tools = EvalDashboard(tmp_path).plot_tool_usage().axes
    assert curve(calls, "a") == [2.0, 4.0, 0.0]
    np.testing.assert_array_equal(curve(success, "a"), [0.5, 0.75, np.nan])  # of 0 calls: unknown
    names = [text.get_text() for text in outcomes.get_xticklabels()]
    heights = dict(zip(names, [bar.get_height() for bar in outcomes.patches], strict=True))
    assert heights["succeeded"] == 0.0 and heights["failed"] == 0.3  # held out, where measured
    assert [text.get_text() for text in tools.get_xticklabels()] == ["book", "search"]
    assert [bar.get_height() for bar in tools.patches] == [0.75, 0.5]
    segments = [c for c in outcomes.collections if len(c.get_paths()) == 6][0].get_segments()
    np.testing.assert_allclose(segments[1][:, 1], [0.2, 0.5])


def test_columns_of_several_seeds_are_their_mean_with_lowest_and_highest(tmp_path, write_run):
    for seed, n in enumerate((1.0, 2.0, 6.0)):
        rows = {"rollout/calls": [n], "rollout/calls/search": [n]}
        write_run(tmp_path / "g" / str(seed), rows, seed=seed)
    tools = EvalDashboard(tmp_path).plot_tool_usage().axes[3]
    assert [bar.get_height() for bar in tools.patches] == [3.0]
    (segment,) = tools.collections[0].get_segments()
    assert segment[:, 1].tolist() == [1.0, 6.0]


# ---- sample efficiency


@pytest.mark.parametrize(
    ("values", "index"),
    [
        ([0.0, 1.0, 0.0, 0.5, 1.0], 3),  # the first touch did not last
        ([0.5, 0.6], 0),
        ([1.0, 1.0, 0.4], None),
        ([1.0, math.nan, 1.0], 2),
        ([], None),
    ],
)
def test_the_threshold_is_reached_where_no_later_value_is_below_it(values, index):
    assert first_stay(np.array(values), 0.5) == index


def test_the_running_mean_of_the_threshold_looks_back_only():
    values = np.array([0.0, 3.0, 6.0, 9.0] + [0.0] * 16)
    means = trailing(Series(np.arange(20.0), values), 3).values
    np.testing.assert_allclose(means[:6], [0.0, 1.5, 3.0, 6.0, 5.0, 3.0])


def test_episodes_count_prompts_times_group_size_times_rounds(tmp_path, write_run):
    rewards = [0.0, 0.2, 0.9, 1.0]
    write_run(tmp_path / "plain", {"reward/mean": rewards})
    rows = {"reward/mean": rewards, "rollout/rounds": [1.0, 3.0, 2.0, 1.0]}
    write_run(tmp_path / "resampled", rows, gamma=0.9)
    write_run(tmp_path / "short", {"reward/mean": rewards[:2]}, gamma=0.8)
    board = EvalDashboard(tmp_path)
    (axis,) = board.plot_sample_efficiency(threshold=0.8).axes
    # 8 completions a round; the third iteration is the first that stays above.
    assert bar_texts(axis) == ["24", "48", "not reached"]
    assert [bar.get_width() for bar in axis.patches] == [24.0, 48.0, 16.0]
    assert [bar.get_facecolor()[3] == 0.0 for bar in axis.patches] == [False, False, True]
    assert "0.8" in axis.get_xlabel()


def test_rows_that_were_not_logged_count_as_episodes(tmp_path, write_run):
    rows = [{"step": 10, "reward/mean": 0.0}, {"step": 20, "reward/mean": 1.0}]
    write_run(tmp_path / "a", rows)
    (axis,) = EvalDashboard(tmp_path).plot_sample_efficiency(threshold=0.5).axes
    assert bar_texts(axis) == ["160"]


def test_the_default_threshold_is_halfway_from_the_first_to_the_best_mean(tmp_path, write_run):
    write_run(tmp_path / "a", {"reward/mean": [0.1, 0.9, 0.5]})
    write_run(tmp_path / "b", {"reward/mean": [0.3, 0.4, "NaN"]}, gamma=0.9)
    board = EvalDashboard(tmp_path)
    assert charts.default_threshold(board.runs, 1) == pytest.approx((0.2 + 0.9) / 2)
    (axis,) = board.plot_sample_efficiency().axes
    assert "0.55" in axis.get_xlabel()


def test_a_run_whose_config_does_not_tell_the_episodes_is_named(tmp_path, write_run):
    write_run(tmp_path / "known", {"reward/mean": [0.0, 1.0]})
    unknown = write_run(tmp_path / "unknown", {"reward/mean": [0.0, 1.0]}, config=None)
    board = EvalDashboard(tmp_path)
    (axis,) = board.plot_sample_efficiency().axes
    assert len(axis.patches) == 1
    assert "train.prompts" in board.skipped[unknown]


# ---- stability


@pytest.mark.parametrize(
    ("values", "fall"),
    [
        ([0.0, 3.0, 1.0, 5.0, 4.0], 2.0),
        ([5.0, 4.0, 6.0, 1.0], 5.0),
        ([0.0, 1.0, 2.0], 0.0),
        ([2.0, math.nan, 0.5], 1.5),
        ([math.nan], 0.0),
    ],
)
def test_the_drawdown_is_the_largest_fall_from_an_earlier_peak(values, fall):
    assert max_drawdown(np.array(values)) == fall


def test_stability_shows_the_spread_over_seeds_at_the_last_common_step_and_drawdowns(
    tmp_path, write_run
):
    for seed, rewards in enumerate(([0.9, 0.2, 0.5], [0.1, 0.6, 0.7, 99.0])):
        write_run(tmp_path / "g" / str(seed), {"reward/mean": rewards}, seed=seed)
    write_run(tmp_path / "h", {"reward/mean": [1.0, 0.5]}, gamma=0.9)
    spread, drawdown = EvalDashboard(tmp_path).plot_stability().axes
    # Two values 0.5 and 0.7: their standard deviation is their distance through √2.
    assert [bar.get_width() for bar in spread.patches] == pytest.approx([0.2 / math.sqrt(2), 0.0])
    assert bar_texts(spread) == ["0.141", "one run"]
    assert [bar.get_width() for bar in drawdown.patches] == pytest.approx([0.7, 0.0, 0.5])


# ---- files


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plot_is_written_where_it_is_asked_for(tmp_path, write_run, ending):
    write_run(tmp_path / "runs" / "a", {"reward/mean": [0.5, 0.7]})
    path = tmp_path / "new" / f"rewards.{ending}"
    EvalDashboard(tmp_path / "runs").plot_rewards(path)
    assert path.stat().st_size > 1000


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, write_run):
    write_run(tmp_path / "a", {"reward/mean": [0.5, 0.7]})
    board = EvalDashboard(tmp_path)
    for write, path in (
        (board.plot_rewards, tmp_path / "plot.docx"),
        (board.plot_rewards, tmp_path / "a" / "metrics.jsonl" / "plot.png"),
        (board.report, tmp_path),
    ):
        with pytest.raises(ConfigError, match="cannot write") as refusal:
            write(path)
        assert "\n" not in str(refusal.value)


def test_a_running_mean_of_no_rows_is_refused(tmp_path, write_run):
    write_run(tmp_path / "a", {"reward/mean": [0.5]})
    with pytest.raises(ConfigError, match="smooth=0"):
        EvalDashboard(tmp_path, smooth=0)
