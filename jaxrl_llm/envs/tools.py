"""Tools that a language model calls by text: what they are, how a call is read and answered.

A call stands in the model's turn as `<call>NAME ARGUMENTS</call>`, and the environment writes
`<result>TEXT</result>` after it. ARGUMENTS are separated by spaces, in the order of the schema's
properties, and the last one takes the rest of the text; or they are one JSON object, which larger
models write.

Whatever a model writes and whatever a tool does, the answer is a bounded text and a status.
"""

import functools
import inspect
import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match

from jaxrl_llm.envs.tool_statistics import Status, ToolResult, ToolStatistics
from jaxrl_llm.types import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MAX_RUNNING = 32  # calls of one tool at a time, those included that will never end
_MIN_OUTPUT = 16


class ToolError(Exception):
    """A call that has no result. Its message is the answer, after "error: "."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function that a model may call, and what the model needs to know to call it.

    Attributes:
        name: letters, digits, - and _; at most 64.
        description: what it does, for the model.
        parameters: JSON Schema of type object. Properties that it does not list are refused,
            unless it says `additionalProperties`.
        function: takes the properties as keyword arguments and returns text. Raise `ToolError` to
            answer with an error.
        on_device: the function is traced by JAX and runs inside the compiled rollout.
        timeout: seconds that a call may take on the host, once fewer than 32 others are running
            (it waits as long for that).
        max_output: longest answer, bytes of UTF-8; what is longer is cut.

    Raises:
        ConfigError: one of them cannot work.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    on_device: bool = False
    timeout: float = 10.0
    max_output: int = 1000

    def __post_init__(self):
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"tool name {self.name!r}: expected a letter, then letters, digits, - or _, at "
                "most 64 in all, such as search"
            )
        if not callable(self.function):
            raise ConfigError(
                f"tool {self.name}: function is {self.function!r}; expected something callable"
            )
        if not self.timeout > 0 or self.max_output < _MIN_OUTPUT:
            raise ConfigError(
                f"tool {self.name}: timeout={self.timeout}, max_output={self.max_output}; expected "
                f"more than 0 seconds and at least {_MIN_OUTPUT} bytes"
            )
        object.__setattr__(self, "parameters", _checked_schema(self.name, self.parameters))
        if not self.on_device:
            _check_signature(self)

    @functools.cached_property
    def validator(self) -> Draft202012Validator:
        return Draft202012Validator({"additionalProperties": False} | dict(self.parameters))

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        return self.parameters.get("properties", {})


def _checked_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, which later edits of the original do not reach."""
    try:
        schema = json.loads(json.dumps(parameters))
        Draft202012Validator.check_schema(schema)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise ValueError('its type is not "object"')
        if not all(isinstance(each, dict) for each in schema.get("properties", {}).values()):
            raise ValueError("a property is described by true or false")
    except (TypeError, ValueError, SchemaError) as error:
        problem = getattr(error, "message", error)
        raise ConfigError(
            f"tool {name}: parameters are not a JSON Schema of an object: {problem}; expected "
            '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}'
        ) from error
    return schema


def _check_signature(tool: Tool) -> None:
    try:
        inspect.signature(tool.function).bind(**dict.fromkeys(tool.properties))
    except ValueError:  # some built-in functions do not tell their signature
        return
    except TypeError as error:
        raise ConfigError(
            f"tool {tool.name}: its function cannot be called with the properties "
            f"{', '.join(tool.properties) or '(none)'}: {error}; name its arguments like them"
        ) from error


def parse_arguments(tool: Tool, text: str) -> dict[str, Any]:
    """The keyword arguments that a call's text stands for, converted and validated by the schema.

    Surrounding whitespace is dropped. Text that begins with { is JSON; any other is positional,
    where numbers, booleans, arrays and objects are written as in JSON and strings as they are.

    >>> tool = Tool(
    ...     name="power",
    ...     description="base to the exponent",
    ...     parameters={
    ...         "type": "object",
    ...         "properties": {"base": {"type": "number"}, "exponent": {"type": "integer"}},
    ...         "required": ["base", "exponent"],
    ...     },
    ...     function=lambda base, exponent: str(base**exponent),
    ... )
    >>> parse_arguments(tool, "1.5 2")
    {'base': 1.5, 'exponent': 2}
    >>> parse_arguments(tool, '{"exponent": 2, "base": 1.5}')
    {'exponent': 2, 'base': 1.5}

    Raises:
        ToolError: the text does not fit the schema; the message says where.
    """
    text = text.strip()
    try:
        arguments = _json(text) if text.startswith("{") else _positional(tool, text)
        error = best_match(tool.validator.iter_errors(arguments))
    except (ValueError, RecursionError, OverflowError) as problem:
        raise ToolError(f"the arguments cannot be read: {problem}") from problem
    if error is not None:
        where = "".join(f"{step}: " for step in error.path)
        raise ToolError(f"{where}{error.message}")
    return {name: _converted(tool, name, value) for name, value in arguments.items()}


def _positional(tool: Tool, text: str) -> dict[str, Any]:
    properties = tool.properties
    if text and not properties:
        raise ToolError(f"{tool.name} takes no arguments")
    words = text.split(maxsplit=max(len(properties) - 1, 0))
    return {
        name: word if "string" in schema.get("type", "string") else _json_or_text(word)
        for (name, schema), word in zip(properties.items(), words, strict=False)
    }


def _json_or_text(word: str) -> Any:
    try:
        return _json(word)
    except ValueError:
        return word  # of the wrong type: validation says so better


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _converted(tool: Tool, name: str, value: Any) -> Any:
    """Integers are integers: to JSON Schema, 3.0 is one too."""
    return int(value) if tool.properties.get(name, {}).get("type") == "integer" else value


class ToolManager:
    """The tools that a model may call, and the counts of its calls.

    Calls come from any number of threads. Register the tools before.

    >>> manager = ToolManager()
    >>> schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    >>> _ = manager.register("shout", "Says a word loudly.", schema, lambda word: word.upper())
    >>> manager.call("shout", "hello").text
    'HELLO'
    >>> manager.call("whisper", "hello").text
    'error: unknown tool whisper; there is: shout'
    >>> manager.statistics.total.unknown
    1

    Attributes:
        statistics: counts of all calls since the last `statistics.reset()`.
    """

    def __init__(self):
        self._tools: dict[str, Tool] = {}
        self._slots: dict[str, threading.Semaphore] = {}
        self.statistics = ToolStatistics(self._tools)

    def register(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        function: Function,
        *,
        on_device: bool = False,
        timeout: float = 10.0,
        max_output: int = 1000,
    ) -> Function:
        """Add a tool; the arguments are those of `Tool`.

        Returns:
            The function, so that `functools.partial` of the first three arguments decorates:
            `@partial(manager.register, "search", "Searches.", schema)`.

        Raises:
            ConfigError: an argument cannot work, or the name is taken.
        """
        tool = Tool(
            name=name,
            description=description,
            parameters=parameters,
            function=function,
            on_device=on_device,
            timeout=timeout,
            max_output=max_output,
        )
        if name in self:
            raise ConfigError(f"tool {name} is registered already; expected another name")
        self._slots[name] = threading.Semaphore(_MAX_RUNNING)
        self._tools[name] = tool
        return function

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool:
        if name not in self:
            raise ConfigError(f"no tool {name!r}; registered: {self._listed()}")
        return self._tools[name]

    def host_tools(self) -> list[Tool]:
        return [tool for tool in self._tools.values() if not tool.on_device]

    def device_tools(self) -> list[Tool]:
        return [tool for tool in self._tools.values() if tool.on_device]

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the usual form of function calling, for a chat template or a prompt."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": json.loads(json.dumps(tool.parameters)),
                },
            }
            for tool in self._tools.values()
        ]

    def episode(self) -> "Episode":
        """Begin an episode, whose calls are counted on their own too."""
        return Episode(self)

    def call(self, name: str, text: str) -> ToolResult:
        """Answer a call outside of any episode: `Episode.call`, where nothing is redundant."""
        return self.episode().call(name, text)

    def _answer(self, name: str, text: str) -> tuple[ToolResult, tuple[str, str]]:
        """The answer to a call, and what identifies the call."""
        start = time.perf_counter()
        tool = self._tools.get(name)
        key, max_output = text.strip(), 1000
        if tool is None:
            status, answer = "unknown", f"error: unknown tool {name}; there is: {self._listed()}"
        elif tool.on_device:
            raise ConfigError(
                f"tool {name} runs on the device, inside the compiled rollout; expected one of "
                f"{', '.join(tool.name for tool in self.host_tools()) or '(none)'}"
            )
        else:
            max_output = tool.max_output
            try:
                arguments = parse_arguments(tool, text)
            except ToolError as error:
                status, answer = "malformed", f"error: {error}"
            else:
                key = json.dumps(arguments, sort_keys=True)
                status, answer = _run(tool, arguments, self._slots[name])
        result = ToolResult(_cut(answer, max_output), status, time.perf_counter() - start)
        return result, (name, key)

    def _listed(self) -> str:
        return ", ".join(self.names) or "(none)"


class Episode:
    """The calls of one episode. Begin it with `ToolManager.episode`.

    Attributes:
        statistics: counts of the episode; the manager's count its calls too.
    """

    def __init__(self, manager: ToolManager):
        self._manager, self._seen, self._lock = manager, set[tuple[str, str]](), threading.Lock()
        self.statistics = ToolStatistics(manager.names)

    def call(self, name: str, text: str) -> ToolResult:
        """Answer a call, and count it.

        It is redundant if an earlier one of the episode named the same tool with the same
        arguments, in whichever of the two ways they were written.

        Raises:
            ConfigError: the tool runs on the device. Nothing else is raised.
        """
        result, key = self._manager._answer(name, text)
        with self._lock:
            is_redundant = key in self._seen
            self._seen.add(key)
        for statistics in (self.statistics, self._manager.statistics):
            statistics.record(name, result, is_redundant=is_redundant)
        return result


def _run(tool: Tool, arguments: dict[str, Any], slots: threading.Semaphore) -> tuple[Status, str]:
    """Call the function, and stop waiting when its time is up.

    It runs in a daemon thread: a process could not share the function's state (an index, a
    connection) without pickling it, and forking a process in which JAX has threads can deadlock.
    A thread cannot be killed, so one that hangs goes on in the background until the interpreter
    ends, which it does not delay, and holds one of the tool's slots. A function that has to be
    stopped, or that keeps the interpreter's lock, belongs in a subprocess: `host_tools.run_python`.
    """
    outcome: list[tuple[Status, str]] = []

    def work() -> None:
        try:
            outcome.append(("ok", _checked_text(tool, tool.function(**arguments))))
        except ToolError as error:
            outcome.append(("failed", f"error: {error}"))
        except BaseException as error:  # SystemExit, too, is an answer
            said = "".join(traceback.format_exception_only(error)).strip()
            outcome.append(("failed", f"error: {said}"))
        finally:
            slots.release()

    if not slots.acquire(timeout=tool.timeout):
        return "failed", f"error: {tool.name} is busy with {_MAX_RUNNING} other calls"
    thread = threading.Thread(target=work, name=f"tool {tool.name}", daemon=True)
    thread.start()
    thread.join(tool.timeout)
    return outcome[0] if outcome else ("failed", f"error: no answer within {tool.timeout:g} s")


def _checked_text(tool: Tool, text: Any) -> str:
    if not isinstance(text, str):
        raise ToolError(f"{tool.name} returned {type(text).__name__}, not text")
    text.encode()  # raises where it is not Unicode
    return text


def _cut(text: str, max_bytes: int) -> str:
    """At most `max_bytes` of UTF-8, cut between characters and marked with an ellipsis."""
    encoded = text.encode(errors="replace")
    if len(encoded) > max_bytes:
        encoded = encoded[: max_bytes - len("…".encode())]
        return encoded.decode(errors="ignore") + "…"
    return encoded.decode()
