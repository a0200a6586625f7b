"""Runs are found, grouped by their config, and named when they cannot be read."""

import doctest
import sys

import pytest
from tensorboardX import SummaryWriter

from jaxrl_llm import runs
from jaxrl_llm.dashboard import EvalDashboard
from jaxrl_llm.types import ConfigError


def curve(axis, label):
    """Values of the line with this label."""
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return list(line.get_ydata())


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ---- groups


def test_runs_of_one_config_are_one_group_whatever_their_seed_and_name(tmp_path, write_run):
    rows = {"reward/mean": [0.0]}
    for seed in (0, 1, 2):
        write_run(tmp_path / "grpo" / f"s{seed}", rows, seed=seed, kl_coef=0.1)
    write_run(tmp_path / "grpo" / "other", rows, seed=0, kl_coef=0.2)
    groups = EvalDashboard(tmp_path).groups
    assert [[run.name for run in group.runs] for group in groups] == [
        ["grpo/other"],
        ["grpo/s0", "grpo/s1", "grpo/s2"],
    ]
    assert [group.legend for group in groups] == ["grpo/other", "grpo (3 seeds)"]


def test_groups_of_one_folder_are_named_by_the_settings_in_which_they_differ(tmp_path, write_run):
    for name, seed, coef in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2), ("d", 1, 0.2)):
        columns = {"reward/mean": [0.0]}
        write_run(tmp_path / "grpo" / name, columns, seed=seed, kl_coef=coef, gamma=1.0)
    labels = [group.label for group in EvalDashboard(tmp_path).groups]
    assert labels == ["grpo, kl_coef=0.1", "grpo, kl_coef=0.2"]


def test_a_repeated_seed_is_not_counted_as_a_seed(tmp_path, write_run):
    for name in ("a", "b"):
        write_run(tmp_path / "x" / name, {"reward/mean": [0.0]}, seed=0)
    assert EvalDashboard(tmp_path).groups[0].legend == "x (2 runs, repeated seeds)"


def test_runs_without_a_config_are_groups_of_their_own(tmp_path, write_run):
    for name in ("a", "b"):
        write_run(tmp_path / name, {"reward/mean": [0.0]}, config=None)
    assert len(EvalDashboard(tmp_path).groups) == 2


def test_the_path_of_one_run_is_a_dashboard_of_one_run(tmp_path, write_run):
    folder = write_run(tmp_path / "grpo" / "mine", {"reward/mean": [0.0]})
    board = EvalDashboard(log_root=str(folder))
    assert [run.name for run in board.runs] == ["mine"]


def test_more_groups_than_colours_differ_by_the_line_style(tmp_path, write_run):
    for i in range(9):
        write_run(tmp_path / f"r{i}", {"reward/mean": [0.0, 1.0]}, kl_coef=float(i))
    axis = EvalDashboard(tmp_path).plot_rewards().axes[0]
    drawn = [line for line in axis.lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 9


def test_a_group_keeps_its_colour_where_others_are_not_drawn(tmp_path, write_run):
    for i, metric in enumerate(("reward/mean", "policy/entropy")):
        rows = [{"step": 1, "reward/mean": 0.1, metric: 0.5}, {"step": 2, metric: 0.4}]
        write_run(tmp_path / f"r{i}", rows, kl_coef=float(i))
    board = EvalDashboard(tmp_path)
    of_second = [
        [line.get_color() for line in figure.axes[0].lines if line.get_label() == "r1"]
        for figure in (board.plot_rewards(), board.plot_entropy())
    ]
    assert of_second[0] == of_second[1] != []


# ---- runs that cannot be drawn


def test_a_run_that_is_still_written_is_drawn_without_its_unfinished_line(
    tmp_path, write_run, capsys
):
    folder = write_run(tmp_path / "a", {"reward/mean": [0.5, 0.75]})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    board = EvalDashboard(tmp_path)
    assert curve(board.plot_rewards().axes[0], "a") == [0.5, 0.75]
    assert "unfinished last line" in board.skipped[folder]
    assert capsys.readouterr().out.count("unfinished") == 1


def test_a_last_row_without_a_newline_is_a_row(tmp_path, write_run):
    folder = write_run(tmp_path / "a", [])
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}')
    board = EvalDashboard(tmp_path)
    assert len(board.runs[0].rows) == 1 and board.skipped == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"step": 1}\nnot JSON\n{"step": 2}\n', "line 2 of metrics.jsonl"),
        ('{"reward/mean": 1.0}\n', "line 1 of metrics.jsonl"),
        ('{"step": NaN}\n', "line 1 of metrics.jsonl"),
        ('{"step": "1"}\n', "line 1 of metrics.jsonl"),
        ("[1, 2]\n", "line 1 of metrics.jsonl"),
        ("\x00\n", "line 1 of metrics.jsonl"),
        ("", "no whole row"),
        ('{"st', "no whole row"),
    ],
)
def test_a_broken_run_is_named_once_and_the_others_are_drawn(
    tmp_path, write_run, capsys, content, reason
):
    write_run(tmp_path / "whole", {"reward/mean": [0.5, 0.75]})
    folder = write_run(tmp_path / "broken", [], gamma=0.9)
    (folder / "metrics.jsonl").write_text(content)
    board = EvalDashboard(tmp_path)
    assert legend(board.plot_rewards()) == legend(board.plot_rewards()) == ["whole"]
    assert list(board.skipped) == [folder] and reason in board.skipped[folder]
    (line,) = capsys.readouterr().out.splitlines()
    assert str(folder) in line and reason in line


def test_a_run_without_the_metric_is_named_once_and_the_others_are_drawn(
    tmp_path, write_run, capsys
):
    write_run(tmp_path / "rl", {"reward/mean": [0.5, 0.75]})
    folder = write_run(tmp_path / "sft", {"loss": [0.5, 0.75]}, config={"sft": {}})
    board = EvalDashboard(tmp_path)
    assert legend(board.plot_rewards()) == legend(board.plot_rewards()) == ["rl"]
    board.plot_stability()
    assert board.skipped == {folder: "no reward/mean"}
    assert capsys.readouterr().out.splitlines() == [f"left out: {folder}: no reward/mean"]
    board.plot_entropy()
    assert board.skipped[folder] == "no reward/mean; no policy/entropy"


@pytest.mark.parametrize(
    "plot",
    [name for name in vars(EvalDashboard) if name.startswith("plot_")],
)
def test_a_plot_of_what_no_run_has_says_so(tmp_path, write_run, plot):
    write_run(tmp_path / "a", {"loss": [0.5]})
    figure = getattr(EvalDashboard(tmp_path), plot)()
    assert figure.axes == []
    assert any("no run has" in text.get_text() for text in figure.texts)


def test_a_config_that_is_not_json_is_named_and_the_run_is_drawn(tmp_path, write_run):
    folder = write_run(tmp_path / "a", {"reward/mean": [0.5]})
    (folder / "config.json").write_text('{"algo')
    board = EvalDashboard(tmp_path)
    assert curve(board.plot_rewards().axes[0], "a") == [0.5]
    assert "config.json is no JSON object" in board.skipped[folder]


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_where_there_is_no_run_the_error_says_where_it_looked(tmp_path, place):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError) as refusal:
        EvalDashboard(tmp_path / place)
    assert str((tmp_path / place).absolute()) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_where_no_run_can_be_read_the_error_says_why(tmp_path, write_run):
    write_run(tmp_path / "a", [])
    with pytest.raises(ConfigError, match="a: metrics.jsonl has no whole row"):
        EvalDashboard(tmp_path)


# ---- TensorBoard


def write_events(folder):
    with SummaryWriter(str(folder)) as writer:
        for step in (1, 2, 3):
            writer.add_scalar("reward/mean", step / 4, step)
    return folder


def test_runs_that_are_event_files_only_are_drawn(tmp_path):
    write_events(tmp_path / "foreign")
    board = EvalDashboard(tmp_path)
    assert curve(board.plot_rewards().axes[0], "foreign") == [0.25, 0.5, 0.75]


def test_scalars_that_tensorflow_wrote_as_tensors_are_drawn(tmp_path):
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    writer = writers.EventFileWriter(str(tmp_path / "tf"))
    for step in (1, 2):
        writer.add_event(Event(step=step, summary=scalar_pb("reward/mean", step / 4)))
    writer.close()
    assert curve(EvalDashboard(tmp_path).plot_rewards().axes[0], "tf") == [0.25, 0.5]


def test_rows_are_preferred_to_event_files(tmp_path, write_run):
    write_events(write_run(tmp_path / "a", {"reward/mean": [0.9, 0.8]}))
    assert curve(EvalDashboard(tmp_path).plot_rewards().axes[0], "a") == [0.9, 0.8]


def test_without_tensorboard_an_event_file_is_named_with_what_to_install(
    tmp_path, write_run, monkeypatch
):
    write_run(tmp_path / "a", {"reward/mean": [0.9]})
    folder = write_events(tmp_path / "foreign")
    name = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'tensorboard" in EvalDashboard(tmp_path).skipped[folder]


@pytest.mark.parametrize("content", [b"", b"no events at all, only text that is long enough"])
def test_event_files_without_events_are_named(tmp_path, write_run, content):
    write_run(tmp_path / "a", {"reward/mean": [0.9]})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.out.tfevents.1.host").write_bytes(content)
    assert "hold no scalar" in EvalDashboard(tmp_path).skipped[tmp_path / "b"]


def test_examples_in_the_docstrings_hold():
    result = doctest.testmod(runs)
    assert result.attempted and not result.failed
