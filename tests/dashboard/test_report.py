"""The page is complete, harmless, and opens without a network."""

import base64
import doctest
import html
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from jaxrl_llm import report
from jaxrl_llm.dashboard import EvalDashboard

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


# ---- the page


HOSTILE = "<script>document.title='taken'</script><img src=http://evil.example/x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page_of_all(tmp_path_factory, write_run):
    """A page of two seeds with tool calls, one growing run and one broken one."""
    tmp_path = tmp_path_factory.mktemp("dashboard")
    completion = "<call>find(1)</call><result>2</result>so <answer>2</answer>" + HOSTILE
    sample = {"prompt": f"ask & {HOSTILE}", "completion": completion, "reward": 0.5}
    for seed in (0, 1):
        metrics = {
            "reward/mean": [0.1, 0.4 + seed / 8],
            "kl/rollout": [0.0, 0.1],
            "policy/entropy": [1.0, 0.9],
            "rollout/length_mean": [20.0, 30.0],
            "rollout/calls": [2.0, 4.0],
            "rollout/calls_succeeded": [1.0, 3.0],
            "rollout/calls/search": [2.0, 4.0],
            "eval/success": [None, 0.625],
            "eval/success_low": [None, 0.5],
            "eval/success_high": [None, 0.75],
        }
        write_run(
            tmp_path / "runs" / "g" / str(seed),
            metrics,
            seed=seed,
            kl_target=0.05,
            samples=[{"step": step} | sample for step in (0, 1, 2)],
            summary={
                "commit": "abcdef0123456789",
                "is_dirty": True,
                "command": ["python", "a b"],
                "versions": {"jax": "0.10.2"},
                "device": "TPU v9",
            },
            timing=[{"step": step, "time/train_seconds": 62.5} for step in (1, 2)],
        )
    growing = tmp_path / "runs" / f"{'long-' * 20}<b>"
    write_run(growing, {"reward/mean": [0.5]}, config=None)
    with (growing / "metrics.jsonl").open("a") as file:
        file.write('{"step"')
    write_run(tmp_path / "runs" / "empty")
    return EvalDashboard(tmp_path / "runs").report(tmp_path / "pages" / "report.html")


class Elements(HTMLParser):
    """Every start tag with its attributes; tags that are not closed in order are an error."""

    void = {"meta", "img", "link", "br", "hr", "input"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_refers_to_nothing_outside_itself(page_of_all):
    elements = Elements(page_of_all.read_text()).found
    references = [a[name] for _, a in elements for name in ("src", "href") if name in a]
    assert references and all(ref.startswith(("data:image/", "#")) for ref in references)
    tags = {tag for tag, _ in elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    style = page_of_all.read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style


def test_every_plot_is_an_image_with_its_words(page_of_all):
    images = [a for tag, a in Elements(page_of_all.read_text()).found if tag == "img"]
    assert len(images) == 8
    for image in images:
        data = base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,"))
        assert ElementTree.fromstring(data).tag.endswith("svg")
        assert len(image["alt"]) > 20
    assert "g from 0.1 to 0.4" in images[0]["alt"]


def test_transcripts_are_escaped_and_their_calls_marked(page_of_all):
    text = page_of_all.read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert text.count('<mark class="call">&lt;call&gt;find(1)&lt;/call&gt;</mark>') == 4
    assert text.count('<mark class="answer">&lt;answer&gt;2&lt;/answer&gt;</mark>') == 4
    assert text.count('<mark class="result">&lt;result&gt;2&lt;/result&gt;</mark>') == 4


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("<user>hi\nyou</user>", '<mark class="user">&lt;user&gt;hi\nyou&lt;/user&gt;</mark>'),
        ("<call>cut of", '<mark class="call">&lt;call&gt;cut of</mark>'),
        ("<call>a</call><call>b", None),
        ("<CALL>a</CALL> &lt;call&gt;", "&lt;CALL&gt;a&lt;/CALL&gt; &amp;lt;call&amp;gt;"),
        ('</mark><call><b>"</call>', None),
    ],
)
def test_highlighting_adds_marks_and_changes_no_character(text, marked):
    highlighted = report.highlighted(text)
    if marked is not None:
        assert highlighted == marked
    seen = []
    parser = HTMLParser(convert_charrefs=True)
    parser.handle_data = seen.append
    parser.feed(highlighted)
    parser.close()
    assert "".join(seen) == text
    assert {tag for tag, _ in Elements(highlighted).found} <= {"mark"}


def test_first_and_last_evaluation_are_side_by_side(page_of_all):
    text = page_of_all.read_text()
    pair = text.split('<div class="pair">')[1]
    assert "iteration 0, reward 0.5" in pair and "iteration 2, reward 0.5" in pair
    assert "iteration 1," not in text


def test_the_table_has_the_figures_of_each_run(page_of_all):
    text = page_of_all.read_text()
    row = text.split('<th scope="row">g/1</th>')[1].split("</tr>")[0]
    cells = [html.unescape(cell.split("</td>")[0]) for cell in row.split("<td>")[1:]]
    assert cells[0].endswith("</span>g")
    assert cells[1:] == [
        "1",
        "2",
        "0.525",
        "0.625 [0.500, 0.750]",
        "2 min 05 s",
        "abcdef0123 + changes",
        "<code>python 'a b'</code>",
    ]


def test_the_page_names_what_was_left_out_and_where_the_runs_come_from(page_of_all):
    text = html.unescape(page_of_all.read_text())
    left_out = text.split('<section id="left-out">')[1]
    assert "empty: metrics.jsonl has no whole row" in left_out
    assert "left out the unfinished last line" in left_out
    provenance = text.split('<section id="provenance">')[1]
    assert "jax 0.10.2" in provenance and "TPU v9" in provenance
    assert "abcdef0123456789" in provenance


def test_a_page_of_runs_without_tool_calls_says_so_once(tmp_path, write_run, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, {"reward/mean": [0.5, 0.7]})
    text = EvalDashboard(tmp_path).report(tmp_path / "report.html").read_text()
    assert text.count("no run has rollout/calls") == 1
    assert capsys.readouterr().out == ""


# ---- a browser


def browse(*arguments):
    """Run headless Chromium; returns what it printed and what the page logged."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_opens_without_an_error_and_fits_a_screen_of_400_pixels(page_of_all):
    page = html.escape(page_of_all.read_text())
    wrapper = page_of_all.with_name("wrapper.html")
    script = """
    onload = () => {
      const inner = document.querySelector("iframe").contentDocument;
      const root = inner.documentElement;
      inner.querySelectorAll("details").forEach(details => { details.open = true; });
      document.body.innerText = JSON.stringify({
        overflow: root.scrollWidth - root.clientWidth,
        images: [...inner.images].map(image => image.naturalWidth > 0),
        title: inner.title,
      });
    }"""
    frame = f'<iframe width="400" height="900" style="border:0" srcdoc="{page}"></iframe>'
    wrapper.write_text(f"<!DOCTYPE html><meta charset=utf-8>{frame}<script>{script}</script>")
    printed, _ = browse("--dump-dom", wrapper.as_uri())
    seen = json.loads(printed.split("<body>")[1].split("</body>")[0])
    assert seen == {"overflow": 0, "images": [True] * 8, "title": "Training runs in runs/"}
    _, logged = browse("--dump-dom", page_of_all.as_uri())
    assert logged == []


# ---- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.dashboard", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_the_command_writes_the_page(tmp_path, write_run):
    write_run(tmp_path / "a", {"reward/mean": [0.5, 0.7]})
    done = command(tmp_path, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("page.html: 1 runs in 1 groups")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_command_refuses_a_folder_without_runs_in_one_line(tmp_path):
    done = command(tmp_path, "--out", tmp_path / "page.html")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and str(tmp_path) in line
    assert not (tmp_path / "page.html").exists()


def test_examples_in_the_docstrings_hold():
    result = doctest.testmod(report)
    assert result.attempted and not result.failed
