"""Compare runs: plots, and one HTML page with all of them.

    python -m jaxrl_llm.dashboard runs --out report.html

Every folder below `runs` that holds `metrics.jsonl` or TensorBoard event files is a run. Runs whose
configs differ by the seed only are one group.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from jaxrl_llm import charts
from jaxrl_llm.chart_parts import Chart
from jaxrl_llm.report import render
from jaxrl_llm.runs import find_runs, group_runs
from jaxrl_llm.types import ConfigError


class EvalDashboard:
    """The runs below a folder, as they are now, and the plots that compare them.

    Every plot method returns a figure (no display is needed; notebooks show it after
    `%matplotlib inline`) and writes it to `path`, whose ending chooses the format. Runs that lack
    what it shows are left out of it and named, once, on a line of their own.

        board = EvalDashboard("runs")
        board.plot_rewards("rewards.png")
        board.report("report.html")

    Attributes:
        runs: what could be read, in the order of their paths.
        groups: the same, runs that differ by the seed only together.
        skipped: what was left out, folder → reason.

    Raises:
        ConfigError: no run was found, or none can be read; `smooth` is below 1.
    """

    def __init__(self, log_root: str | Path = "runs", *, smooth: int = 10):
        """Read the runs.

        Args:
            log_root: a folder of runs, or one run.
            smooth: rows in the running means; a fifth of a run at most.
        """
        if smooth < 1:
            raise ConfigError(f"smooth={smooth}: expected at least 1 row, such as 10")
        self.log_root, self.smooth = Path(log_root), smooth
        self.skipped: dict[Path, str] = {}
        self.runs, unread = find_runs(log_root)
        self.groups = group_runs(self.runs, self.log_root.absolute().name)
        self._note(unread)

    def plot_rewards(self, path: str | Path | None = None) -> Figure:
        """Mean reward in training."""
        return self._deliver(charts.rewards(self.groups, self.smooth), path)

    def plot_accuracy(self, path: str | Path | None = None) -> Figure:
        """Held-out figures, with their intervals."""
        return self._deliver(charts.accuracy(self.groups), path)

    def plot_kl_divergence(self, path: str | Path | None = None) -> Figure:
        """KL to the reference, in nats per token, with its target; and its coefficient."""
        return self._deliver(charts.kl_divergence(self.groups, self.smooth), path)

    def plot_tool_usage(self, path: str | Path | None = None) -> Figure:
        """Tool calls per episode, the fraction that succeeds, their outcomes, the tools called."""
        return self._deliver(charts.tool_usage(self.groups, self.smooth), path)

    def plot_sample_efficiency(
        self, path: str | Path | None = None, *, threshold: float | None = None
    ) -> Figure:
        """Episodes until the running mean of the reward stays at or above a threshold, per run.

        Episodes are completions sampled: iterations × train.prompts × train.group_size × rounds of
        dynamic sampling. The running mean is over the last `smooth` rows.

        Args:
            path: where the figure is written.
            threshold: a reward; halfway between the first and the best running mean when None.
        """
        return self._deliver(charts.sample_efficiency(self.groups, self.smooth, threshold), path)

    def plot_stability(self, path: str | Path | None = None) -> Figure:
        """Standard deviation of the final reward over seeds, and each run's largest drawdown."""
        return self._deliver(charts.stability(self.groups, self.smooth), path)

    def plot_length(self, path: str | Path | None = None) -> Figure:
        """Mean length of the completions, in tokens."""
        return self._deliver(charts.lengths(self.groups, self.smooth), path)

    def plot_entropy(self, path: str | Path | None = None) -> Figure:
        """Entropy of the policy, in nats per token."""
        return self._deliver(charts.entropy(self.groups, self.smooth), path)

    def report(self, path: str | Path = "report.html", *, threshold: float | None = None) -> Path:
        """Write one HTML page with the table of runs, all plots, transcripts and provenance.

        Args:
            path: the page; folders are made.
            threshold: as for `plot_sample_efficiency`.

        Returns:
            The path written.
        """
        drawn = self._charts(threshold)
        # What no run has is named once, not for every run.
        self._note(*(chart.missing for chart in drawn if chart.figure.axes))
        title = f"Training runs in {self.log_root.absolute().name}/"
        page = render(title, self.groups, drawn, self.skipped, smooth=self.smooth)
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(_unwritable(path, error, "report.html")) from error
        return path

    def _charts(self, threshold: float | None) -> list[Chart]:
        of = self.groups, self.smooth
        return [
            charts.rewards(*of),
            charts.accuracy(self.groups),
            charts.sample_efficiency(*of, threshold),
            charts.stability(*of),
            charts.kl_divergence(*of),
            charts.entropy(*of),
            charts.lengths(*of),
            charts.tool_usage(*of),
        ]

    def _deliver(self, chart: Chart, path: str | Path | None) -> Figure:
        self._note(chart.missing)
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                chart.figure.savefig(path, dpi=150)
            except (OSError, ValueError) as error:
                raise ConfigError(_unwritable(path, error, "plot.png or plot.svg")) from error
        return chart.figure

    def _note(self, *left_out: Mapping[Path, str]) -> None:
        """Remember what was left out, and print what is new of it, one line a run."""
        new: dict[Path, list[str]] = {}
        for path, reason in (item for notes in left_out for item in notes.items()):
            if reason not in self.skipped.get(path, "").split("; ") + new.get(path, []):
                new.setdefault(path, []).append(reason)
        for path, reasons in new.items():
            earlier = [self.skipped[path]] if path in self.skipped else []
            self.skipped[path] = "; ".join(earlier + reasons)
            print(f"left out: {path}: {'; '.join(reasons)}")


def _unwritable(path: str | Path, error: Exception, example: str) -> str:
    told = error.strerror if isinstance(error, OSError) else error
    return f"cannot write {path} ({told}); expected a file that can be written, such as {example}"


def main(
    runs: Path, /, out: Path = Path("report.html"), smooth: int = 10, threshold: float | None = None
) -> None:
    """Compare runs on one HTML page that opens without a network.

    Args:
        runs: Folder of runs, or one run.
        out: The page to write.
        smooth: Rows in the running means; a fifth of a run at most.
        threshold: Reward of the sample-efficiency plot (none: halfway between the first and the
            best running mean).
    """
    board = EvalDashboard(runs, smooth=smooth)
    written = board.report(out, threshold=threshold)
    print(f"{written}: {len(board.runs)} runs in {len(board.groups)} groups")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
