"""Tools by text: what is refused, how arguments are read, that every call has an answer."""

import functools
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.envs import tools
from jaxrl_llm.envs.tools import Tool, ToolError, ToolManager, parse_arguments
from jaxrl_llm.types import ConfigError


def schema(**types):
    """All properties required."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


def make_tool(function=lambda **arguments: "", parameters=None, **settings):
    return Tool(
        name="tool",
        description="",
        parameters=parameters or schema(),
        function=function,
        **settings,
    )


def manager_of(function, parameters=None, **settings):
    manager = ToolManager()
    manager.register("tool", "", parameters or schema(), function, **settings)
    return manager


@pytest.fixture
def manager():
    manager = ToolManager()
    numbers = schema(a="integer", b="integer")
    manager.register("add", "a + b", numbers, lambda a, b: str(a + b))
    manager.register("divide", "a / b", numbers, lambda a, b: str(a // b))
    manager.register("leave", "", schema(), sys.exit)
    return manager


def read(text, **types):
    return parse_arguments(make_tool(parameters=schema(**types)), text)


# Registration


@pytest.mark.parametrize("name", ["", "a b", "1st", "é", "<call>", "a" * 65, "a\n", None])
def test_names_that_a_call_could_not_hold_are_refused(name):
    with pytest.raises(ConfigError, match="expected a letter"):
        ToolManager().register(name, "", schema(), str)


@pytest.mark.parametrize(
    "parameters, problem",
    [
        ({"type": "array"}, 'not "object"'),
        ({}, 'not "object"'),
        (True, 'not "object"'),
        (["query"], "is not of type"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "text"),
        ({"type": "object", "properties": ["a"]}, "is not of type 'object'"),
        ({"type": "object", "properties": {"a": True}}, "described by true or false"),
        ({"type": "object", "required": "a"}, "is not of type 'array'"),
        ({"type": "object", "default": {1}}, "not JSON serializable"),
    ],
)
def test_what_is_no_schema_of_an_object_is_refused(parameters, problem):
    with pytest.raises(ConfigError, match=f"(?s){problem}.*expected"):
        ToolManager().register("tool", "", parameters, lambda **arguments: "")


def test_functions_that_cannot_be_called_with_the_properties_are_refused():
    with pytest.raises(ConfigError, match="'nothing'; expected something callable"):
        manager_of("nothing")
    for function in (lambda: "", lambda text: "", lambda query, limit: ""):
        with pytest.raises(ConfigError, match="cannot be called with the properties query"):
            manager_of(function, schema(query="string"))
    for function in (lambda query: "", lambda query, limit=3: "", lambda **any: ""):
        manager_of(function, schema(query="string"))


@pytest.mark.parametrize(
    "settings", [{"timeout": 0.0}, {"timeout": float("nan")}, {"max_output": 15}]
)
def test_limits_under_which_no_call_could_succeed_are_refused(settings):
    with pytest.raises(ConfigError, match="expected more than 0 seconds and at least 16 bytes"):
        manager_of(str, **settings)


def test_a_name_is_registered_once(manager):
    with pytest.raises(ConfigError, match="add is registered already"):
        manager.register("add", "", schema(), lambda: "")
    assert manager.call("add", "1 2").text == "3"


def test_a_manager_begins_empty_and_lists_what_is_registered(manager):
    assert ToolManager().names == ()
    assert manager.names == ("add", "divide", "leave")
    assert "add" in manager and "multiply" not in manager
    assert manager.get("add").description == "a + b"
    with pytest.raises(ConfigError, match="no tool 'multiply'; registered: add, divide, leave"):
        manager.get("multiply")


def test_register_decorates():
    manager = ToolManager()

    @functools.partial(manager.register, "twice", "", schema(word="string"), max_output=20)
    def twice(word):
        return word * 2

    assert twice("a") == manager.call("twice", "a").text == "aa"
    assert manager.get("twice").max_output == 20


def test_schemas_have_the_form_of_function_calling_and_are_copies():
    parameters = schema(query="string")
    manager = ToolManager()
    manager.register("search", "Searches.", parameters, lambda query: query)
    expected = {"name": "search", "description": "Searches.", "parameters": schema(query="string")}
    for _ in range(2):
        [listed] = manager.schemas()
        assert listed == {"type": "function", "function": expected}
        parameters["properties"].clear()
        listed["function"]["parameters"]["properties"].clear()


def test_tools_of_the_device_are_listed_and_not_called(manager):
    manager.register("sum", "", schema(a="integer"), lambda writer: None, on_device=True)
    assert [tool.name for tool in manager.device_tools()] == ["sum"]
    assert [tool.name for tool in manager.host_tools()] == ["add", "divide", "leave"]
    with pytest.raises(ConfigError, match="sum runs on the device.* add, divide, leave"):
        manager.call("sum", "1")


# Arguments


def test_positional_arguments_are_converted_by_the_schema():
    types = {"n": "integer", "x": "number", "is_on": "boolean", "word": "string"}
    assert read("-3 2.5 true 7", **types) == {"n": -3, "x": 2.5, "is_on": True, "word": "7"}
    assert read("[1, 2]", values="array") == {"values": [1, 2]}


def test_the_last_argument_takes_the_rest_of_the_text():
    assert read(" 3   big  red\ndogs ", n="integer", query="string") == {
        "n": 3,
        "query": "big  red\ndogs",
    }
    assert read('say "hi" {now}', query="string") == {"query": 'say "hi" {now}'}


def test_text_that_begins_with_a_brace_is_json_in_any_order():
    text = ' {"word": "a b", "n": 3} '
    assert read(text, n="integer", word="string") == {"n": 3, "word": "a b"}


def test_integers_are_integers_however_they_are_written():
    for text in ("3", "3.0", '{"n": 3.0}'):
        value = read(text, n="integer")["n"]
        assert value == 3 and type(value) is int


def test_arguments_that_are_not_required_may_be_left_out():
    parameters = schema(query="string", limit="integer") | {"required": ["query"]}
    tool = make_tool(lambda query, limit=5: "", parameters)
    assert parse_arguments(tool, "cats") == {"query": "cats"}
    assert parse_arguments(tool, '{"query": "cats", "limit": 2}') == {"query": "cats", "limit": 2}


def test_other_properties_are_refused_unless_the_schema_wants_them():
    with pytest.raises(ToolError, match="'z' was unexpected"):
        read('{"a": 1, "z": 2}', a="integer")
    tool = make_tool(parameters=schema(a="integer") | {"additionalProperties": True})
    assert parse_arguments(tool, '{"a": 1, "z": 2}') == {"a": 1, "z": 2}


@pytest.mark.parametrize(
    "text, types, problem",
    [
        ("", {"a": "integer"}, "'a' is a required property"),
        ("1", {"a": "integer", "b": "integer"}, "'b' is a required property"),
        ("one", {"a": "integer"}, "a: 'one' is not of type 'integer'"),
        ("1.5", {"a": "integer"}, "a: 1.5 is not of type 'integer'"),
        ("1 2", {"a": "integer"}, "a: '1 2' is not of type 'integer'"),
        ("1_000", {"a": "integer"}, "a: '1_000' is not of type 'integer'"),
        ("True", {"a": "boolean"}, "a: 'True' is not of type 'boolean'"),
        ("1", {"a": "boolean"}, "a: 1 is not of type 'boolean'"),
        ("true", {"a": "number"}, "a: True is not of type 'number'"),
        ("NaN", {"a": "number"}, "a: 'NaN' is not of type 'number'"),
        ('{"a": NaN}', {"a": "number"}, "cannot be read: NaN is not a number"),
        ('{"a": "1"}', {"a": "integer"}, "a: '1' is not of type 'integer'"),
        ('{"a": 1', {"a": "integer"}, "cannot be read"),
        ('{"a": 1} 2', {"a": "integer"}, "cannot be read"),
        ("9" * 10_000, {"a": "integer"}, "is not of type 'integer'"),
        ("1", {}, "takes no arguments"),
        ('{"a":' * 100_000, {"a": "integer"}, "cannot be read: maximum recursion"),
    ],
)
def test_arguments_that_do_not_fit_are_malformed(text, types, problem):
    manager = manager_of(lambda **arguments: "called", schema(**types), max_output=100_000)
    result = manager.call("tool", text)
    assert result.status == "malformed"
    assert result.text.startswith("error: ") and problem in result.text


def test_numbers_too_large_for_a_rule_of_the_schema_are_malformed():
    parameters = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}}}
    manager = manager_of(lambda x: str(x), parameters)
    assert manager.call("tool", "1.5").status == "ok"
    assert manager.call("tool", "9" * 400).status == "malformed"


# Answers


class BadMessageError(Exception):
    def __str__(self):
        raise RuntimeError


def raising(error):
    def function(**arguments):
        raise error

    return function


@pytest.mark.parametrize(
    "function, text",
    [
        (raising(ValueError("no such city")), "error: ValueError: no such city"),
        (raising(ToolError("no such city")), "error: no such city"),
        (raising(ValueError("\ud800")), "error: ValueError: ?"),
        (raising(SystemExit(0)), "error: SystemExit: 0"),
        (raising(KeyboardInterrupt()), "error: KeyboardInterrupt"),
        (raising(GeneratorExit()), "error: GeneratorExit"),
        (raising(BadMessageError()), "str() failed>"),
        (lambda: 12, "error: tool returned int, not text"),
        (lambda: None, "error: tool returned NoneType, not text"),
        (lambda: b"\xff\xfe", "error: tool returned bytes, not text"),
        (lambda: "\ud800", "error: UnicodeEncodeError: 'utf-8' codec can't encode"),
    ],
)
def test_whatever_a_tool_does_the_call_has_an_answer(function, text):
    result = manager_of(function).call("tool", "")
    assert result.status == "failed" and text in result.text and result.text.startswith("error: ")


@pytest.mark.parametrize("status", ["ok", "failed", "malformed", "unknown"])
@pytest.mark.parametrize("character", ["x", "é", "漢", "🙂"])
def test_answers_are_cut_between_characters(status, character):
    long = 5000 * character
    manager = ToolManager()
    manager.register("echo", "", schema(n="integer"), lambda n: long, max_output=50)
    manager.register("fail", "", schema(), raising(ToolError(long)), max_output=50)
    name, text = {
        "ok": ("echo", "1"),
        "failed": ("fail", ""),
        "malformed": ("echo", long),
        "unknown": (long, "1"),
    }[status]
    result = manager.call(name, text)
    assert result.status == status
    limit = 1000 if status == "unknown" else 50
    size, width = len(result.text.encode()), len(character.encode())
    assert limit - width < size <= limit
    assert result.text.endswith("…") and "�" not in result.text and character in result.text


def test_an_answer_that_just_fits_is_not_cut():
    manager = manager_of(lambda: "é" * 10, max_output=20)
    assert manager.call("tool", "").text == "é" * 10
    manager = manager_of(lambda: "é" * 10 + "x", max_output=20)
    assert manager.call("tool", "").text == "é" * 8 + "…"


def test_no_text_makes_a_call_raise(manager):
    rng = random.Random(0)
    alphabet = '{}[]":, \n\t\0-+.eE0123456789abtrufalsn\\\ud800é<>/'
    for _ in range(3000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        if rng.random() < 0.5:
            text = '{"a": ' + text
        result = manager.call("add", text)
        assert result.text.startswith("error: ") or result.text.lstrip("-").isdigit()
        assert (result.status == "ok") == (not result.text.startswith("error: "))


# Tools that hang


@pytest.fixture
def hanging(monkeypatch):
    """A manager of two places whose tool hangs until `.release` is set."""
    monkeypatch.setattr(tools, "_MAX_RUNNING", 2)
    release = threading.Event()
    manager = manager_of(lambda: "done" if release.wait(60) else "never", timeout=0.2)
    manager.release = release
    yield manager
    release.set()


def test_a_hanging_tool_is_answered_when_its_time_is_up(hanging):
    start = time.monotonic()
    result = hanging.call("tool", "")
    assert 0.2 <= time.monotonic() - start < 5
    assert result.status == "failed" and result.text == "error: no answer within 0.2 s"
    assert 0.2 <= result.seconds < 5


def test_hanging_calls_do_not_pile_up_and_the_tool_recovers(hanging):
    before = set(threading.enumerate())
    answers = [hanging.call("tool", "").text for _ in range(4)]
    assert answers[:2] == ["error: no answer within 0.2 s"] * 2
    assert answers[2:] == ["error: tool is busy with 2 other calls"] * 2
    assert len(set(threading.enumerate()) - before) == 2
    hanging.release.set()
    assert any(hanging.call("tool", "").text == "done" for _ in range(50))


def test_a_hanging_tool_does_not_keep_the_interpreter_alive():
    program = """
import threading
from jaxrl_llm.envs.tools import ToolManager
manager = ToolManager()
manager.register("hang", "", {"type": "object"}, lambda: threading.Event().wait(), timeout=0.1)
print(manager.call("hang", "").text)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("error: no answer within 0.1 s\n", 0), done.stderr


# Statistics

# name, text, what becomes of it, and which calls are the same
CALLS = [
    ("add", "1 2", "succeeded", "1+2"),
    ("add", " 1   2\n", "succeeded", "1+2"),
    ("add", '{"a": 1, "b": 2}', "succeeded", "1+2"),
    ("add", '{"b": 2.0, "a": 1}', "succeeded", "1+2"),
    ("add", "2 1", "succeeded", "2+1"),
    ("add", "1", "malformed", "add 1"),
    ("add", "1 ", "malformed", "add 1"),
    ("add", "one two", "malformed", "add one two"),
    ("divide", "1 2", "succeeded", "1/2"),
    ("divide", "1 0", "failed", "1/0"),
    ("divide", "1", "malformed", "divide 1"),
    ("leave", "", "failed", "leave"),
    ("multiply", "1 2", "unknown", "1*2"),
    ("multiply", "", "unknown", "multiply"),
    ("", "", "unknown", "nothing"),
]
COUNTS = ("calls", "succeeded", "failed", "malformed", "unknown", "redundant")


def counts_of(counts):
    return {name: getattr(counts, name) for name in COUNTS if getattr(counts, name)}


def test_statistics_are_those_of_a_simulator_on_ten_thousand_episodes(manager):
    rng = random.Random(0)
    total, per_tool, seconds = Counter(), defaultdict(Counter), []
    for _ in range(10_000):
        episode, seen, expected = manager.episode(), set(), Counter()
        for name, text, outcome, identity in rng.choices(CALLS, k=rng.randrange(5)):
            seconds.append(episode.call(name, text).seconds)
            counted = Counter(["calls", outcome])
            if identity in seen:
                counted["redundant"] += 1
            seen.add(identity)
            expected += counted
            if outcome != "unknown":
                per_tool[name] += counted
        assert counts_of(episode.statistics.total) == expected
        total += expected
    statistics = manager.statistics
    assert counts_of(statistics.total) == total and total["redundant"] > 1000
    assert {name: counts_of(tool) for name, tool in statistics.tools.items()} == per_tool
    assert statistics.total.seconds == pytest.approx(sum(seconds))
    assert statistics.total.seconds_mean == pytest.approx(sum(seconds) / len(seconds))
    assert statistics.total.seconds_max == max(seconds)


def test_the_dictionary_of_statistics_is_flat_and_names_every_registered_tool(manager):
    episode = manager.episode()
    for text in ("1 2", "1 2", "x"):
        episode.call("add", text)
    episode.call("multiply", "")
    flat = manager.statistics.as_dict()
    counts = {key: value for key, value in flat.items() if "seconds" not in key}
    names = ("succeeded", "failed", "malformed", "unknown", "redundant")
    rows = {"": (4, 2, 0, 1, 1, 1), "/add": (3, 2, 0, 1, 0, 1), "/divide": (0,) * 6}
    rows["/leave"] = (0,) * 6
    assert counts == {
        f"{key}{suffix}": value
        for suffix, row in rows.items()
        for key, value in zip(["calls", *(f"calls_{n}" for n in names)], row, strict=True)
    }
    assert flat["calls_seconds"] == pytest.approx(4 * flat["calls_seconds_mean"])
    assert 0 < flat["calls_seconds_max/add"] <= flat["calls_seconds_max"]
    assert episode.statistics.as_dict() == flat


def test_calls_outside_of_an_episode_are_never_redundant(manager):
    for _ in range(3):
        manager.call("add", "1 2")
    assert counts_of(manager.statistics.total) == {"calls": 3, "succeeded": 3}


def test_reset_forgets_the_calls_of_the_manager_and_not_those_of_episodes(manager):
    episode = manager.episode()
    episode.call("add", "1 2")
    manager.statistics.reset()
    assert set(manager.statistics.as_dict().values()) == {0}
    episode.call("add", "1 2")
    assert manager.statistics.total.calls == 1
    assert counts_of(episode.statistics.tools["add"]) == {
        "calls": 2,
        "succeeded": 2,
        "redundant": 1,
    }


def test_no_call_is_lost_among_threads(manager):
    episode = manager.episode()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: episode.call("add", f"{i % 500} 1"), range(2000)))
            list(pool.map(lambda i: episode.call("multiply", ""), range(1000)))
    finally:
        sys.setswitchinterval(interval)
    expected = {"calls": 3000, "succeeded": 2000, "unknown": 1000, "redundant": 1500 + 999}
    for statistics in (episode.statistics, manager.statistics):
        assert counts_of(statistics.total) == expected
        assert counts_of(statistics.tools["add"]) == {
            "calls": 2000,
            "succeeded": 2000,
            "redundant": 1500,
        }


def test_of_equal_calls_at_once_all_but_one_are_redundant(manager):
    class SlowSet(set):
        def __contains__(self, key):
            found = super().__contains__(key)
            time.sleep(0.02)
            return found

    episode = manager.episode()
    episode._seen = SlowSet()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: episode.call("add", "1 2"), range(4)))
    assert episode.statistics.total.redundant == 3
