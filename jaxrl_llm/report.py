"""Runs compared on one HTML page, which carries all it shows and asks no network for anything."""

import base64
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from jaxrl_llm.chart_parts import Chart, color
from jaxrl_llm.runs import Group, Interval, Run, eval_names, final_reward, last_interval

_TAGS = "call", "result", "answer", "user"
# In escaped text, so what a transcript says can never become markup. An unclosed tag ends with it.
_TAGGED = re.compile(rf"&lt;({'|'.join(_TAGS)})&gt;.*?(?:&lt;/\1&gt;|\Z)", re.DOTALL)
_PROVENANCE = "commit", "device", "devices", "cpus", "python", "platform", "versions", "start"

# The policy forbids scripts and every request.
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$lead</p>
<nav>$links</nav>
</header>
<main>
$sections
</main>
</body>
</html>
""")

_STYLE = """
:root {
  color-scheme: light dark;
  --text: #1c2127; --dim: #5c6670; --page: #f6f7f9; --card: #ffffff; --line: #d9dee4;
  --link: #1f5fa8; --call: #dbe9fb; --result: #e4e6ea; --answer: #d7f0dc; --user: #fbecc8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e3e7eb; --dim: #9aa5b1; --page: #14181d; --card: #1d2329; --line: #343c45;
    --link: #8ab8f0; --call: #1d3a5f; --result: #353c45; --answer: #1d4a2b; --user: #54431a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 0.9rem; margin: 0 0 0.3rem; color: var(--dim); }
header p, .dim { color: var(--dim); margin: 0.2rem 0; }
nav a { margin-right: 1rem; }
a { color: var(--link); }
.wide {
  overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: var(--card);
}
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; text-align: left; vertical-align: top; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.swatch {
  display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.4em;
  border: 1px solid var(--line);
}
figure { margin: 0 0 1rem; }
figure .wide { background: #ffffff; }
figure img { display: block; width: 100%; min-width: 34rem; height: auto; margin: 0 auto; }
details {
  border: 1px solid var(--line); border-radius: 6px; background: var(--card);
  margin-bottom: 0.6rem; padding: 0.5rem 0.8rem;
}
summary { cursor: pointer; }
.pair {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 0.8rem; margin-top: 0.8rem;
}
.pair > div { border: 1px solid var(--line); border-radius: 6px; padding: 0.6rem; min-width: 0; }
pre {
  margin: 0.2rem 0; font-size: 0.82rem; white-space: pre-wrap; max-height: 28rem; overflow-y: auto;
}
pre.prompt { color: var(--dim); }
mark { color: var(--text); border-radius: 3px; padding: 0 0.15em; }
.call { background: var(--call); } .result { background: var(--result); }
.answer { background: var(--answer); } .user { background: var(--user); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; font-size: 0.88rem; }
dt { color: var(--dim); } dd { margin: 0; min-width: 0; }
"""


def render(
    title: str,
    groups: Sequence[Group],
    charts: Sequence[Chart],
    skipped: Mapping[Path, str],
    *,
    smooth: int,
) -> str:
    """The whole page.

    Args:
        title: heading.
        groups: the runs.
        charts: what to show of them, in this order; those without axes are only named.
        skipped: what was left out, path → reason.
        smooth: rows that a final reward is the mean of.
    """
    runs = [(group, run) for group in groups for run in group.runs]
    sections = {
        "Runs": _table(runs, smooth),
        "Plots": "\n".join(_figure(chart) for chart in charts if chart.figure.axes),
        "Transcripts": _transcripts([run for _, run in runs]),
        "Provenance": "\n".join(_provenance(run) for _, run in runs),
        "Left out": _left_out(charts, skipped),
    }
    sections = {name: body for name, body in sections.items() if body}
    lead = f"{len(runs)} runs in {len(groups)} groups; runs of a group differ by the seed only. "
    return _PAGE.substitute(
        title=escape(title),
        style=_STYLE,
        lead=f"{lead}Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        links=" ".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections),
        sections="\n".join(
            f'<section id="{_anchor(name)}">\n<h2>{name}</h2>\n{body}\n</section>'
            for name, body in sections.items()
        ),
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


# ---- runs


def _table(runs: Sequence[tuple[Group, Run]], smooth: int) -> str:
    names = eval_names(run for _, run in runs)
    heads = ["run", "group", "seed", "iterations", f"reward, mean of last {smooth}"]
    heads += [*(f"eval/{name}" for name in names), "time", "commit", "command"]
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "\n".join(_table_row(group, run, names, smooth) for group, run in runs)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    note = "Brackets are the intervals that the runs logged with their last evaluation (95 %)."
    return f'{_scrolled(table, "table of runs")}\n<p class="dim">{note}</p>'


def _table_row(group: Group, run: Run, names: Iterable[str], smooth: int) -> str:
    chip = f'<span class="swatch" style="background:{color(group)}"></span>'
    cells = [chip + escape(group.label), escape(_or_dash(run.seed)), escape(_progress(run))]
    cells.append(_figures(final_reward(run, smooth)))
    cells += [_estimate(last_interval(run, f"eval/{name}")) for name in names]
    cells += [_duration(run.seconds), escape(_commit(run)), f"<code>{escape(_command(run))}</code>"]
    data = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(run.name)}</th>{data}</tr>'


def _scrolled(content: str, label: str) -> str:
    """What is wider than the screen scrolls by itself, with the keyboard too."""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">{content}</div>'
    )


def _progress(run: Run) -> str:
    done, total = max(row["step"] for row in run.rows), run.setting("train.iterations")
    return f"{done:,}" if total is None or done == total else f"{done:,} of {total}"


def _figures(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _estimate(estimate: Interval) -> str:
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return _figures(estimate.value)
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _duration(seconds: float) -> str:
    """Seconds as `1 h 02 min`, `3 min 20 s` or `12 s`."""
    if math.isnan(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _commit(run: Run) -> str:
    commit = run.summary.get("commit")
    if not commit:
        return "–"
    return f"{str(commit)[:10]}{' + changes' if run.summary.get('is_dirty') else ''}"


def _command(run: Run) -> str:
    command = run.summary.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else _or_dash(command)


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


# ---- plots


def _figure(chart: Chart) -> str:
    image = f'<img src="{data_uri(chart.figure)}" alt="{escape(chart.alt)}">'
    return f"<figure>{_scrolled(image, chart.title)}</figure>"


def data_uri(figure: Figure) -> str:
    """A figure as the address of an SVG image that contains it."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ---- transcripts


def _transcripts(runs: Sequence[Run]) -> str:
    told = [_run_transcripts(run) for run in runs if run.samples]
    if not told:
        return ""
    marks = ", ".join(f'<mark class="{tag}">{tag}</mark>' for tag in _TAGS)
    return f'<p class="dim">Samples of the first and last evaluation. {marks}.</p>' + "".join(told)


def _run_transcripts(run: Run) -> str:
    steps = sorted({row["step"] for row in run.samples})
    ends = [[row for row in run.samples if row["step"] == step] for step in {steps[0], steps[-1]}]
    ends.sort(key=lambda rows: rows[0]["step"])
    pairs = "\n".join(
        f'<div class="pair">{"".join(_sample(row) for row in pair if row is not None)}</div>'
        for pair in itertools.zip_longest(*ends)
    )
    return f"<details><summary>{escape(run.name)}</summary>\n{pairs}\n</details>"


def _sample(row: Mapping[str, Any]) -> str:
    hidden = "step", "prompt", "completion"
    facts = [f"iteration {row['step']}"]
    facts += [f"{name} {_fact(value)}" for name, value in row.items() if name not in hidden]
    prompt, completion = (str(row.get(name, "")) for name in ("prompt", "completion"))
    return (
        f"<div><h3>{escape(', '.join(facts))}</h3>"
        f'<pre class="prompt">{highlighted(prompt)}</pre><pre>{highlighted(completion)}</pre></div>'
    )


def _fact(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def highlighted(text: str) -> str:
    """A transcript as HTML: escaped, with calls, results, answers and users' words marked.

    >>> highlighted("a < b <answer>3</answer>")
    'a &lt; b <mark class="answer">&lt;answer&gt;3&lt;/answer&gt;</mark>'
    """
    return _TAGGED.sub(r'<mark class="\1">\g<0></mark>', escape(text))


# ---- provenance, and what is not shown


def _provenance(run: Run) -> str:
    if not run.summary:
        return ""
    facts = {name: run.summary[name] for name in _PROVENANCE if name in run.summary}
    facts["working tree"] = "with changes" if run.summary.get("is_dirty") else "as committed"
    facts["command"] = _command(run)
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_listed(value))}</dd>" for name, value in facts.items()
    )
    return f"<details><summary>{escape(run.name)}</summary><dl>{listed}</dl></details>"


def _listed(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _left_out(charts: Sequence[Chart], skipped: Mapping[Path, str]) -> str:
    lines = [chart.alt for chart in charts if not chart.figure.axes]
    lines += [f"{path}: {reason}" for path, reason in skipped.items()]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
