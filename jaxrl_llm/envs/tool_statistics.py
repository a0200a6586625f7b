"""What became of a model's tool calls: counts in total and of each tool."""

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

Status = Literal["ok", "failed", "malformed", "unknown"]


class ToolResult(NamedTuple):
    """The answer to a call."""

    text: str  # at most `Tool.max_output` bytes of UTF-8; begins with "error: " unless ok
    status: Status
    seconds: float  # from the call to the answer


@dataclass
class ToolCounts:
    """What became of the calls of one tool, or of all."""

    calls: int = 0
    succeeded: int = 0
    failed: int = 0
    malformed: int = 0
    unknown: int = 0
    redundant: int = 0  # same tool and same arguments as an earlier call of the episode
    seconds: float = 0.0  # sum
    seconds_max: float = 0.0

    @property
    def seconds_mean(self) -> float:
        return self.seconds / max(self.calls, 1)

    def add(self, result: ToolResult, is_redundant: bool) -> None:
        outcome = "succeeded" if result.status == "ok" else result.status
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.calls += 1
        self.redundant += is_redundant
        self.seconds += result.seconds
        self.seconds_max = max(self.seconds_max, result.seconds)

    def as_dict(self) -> dict[str, float]:
        """`calls`, `calls_succeeded`, ..., `calls_seconds_mean`."""
        first, *names = [field.name for field in fields(self)] + ["seconds_mean"]
        return {first: self.calls, **{f"{first}_{name}": getattr(self, name) for name in names}}


class ToolStatistics:
    """Counts of all calls, and of each tool's; many threads may write.

    Calls of names that are no tools are in the total alone: a model invents any number of them.

    Attributes:
        total: counts of all calls.
        tools: name → counts.
    """

    def __init__(self, names: Iterable[str]):
        self._names, self._lock = names, threading.Lock()
        self.reset()

    def record(self, name: str, result: ToolResult, *, is_redundant: bool = False) -> None:
        with self._lock:
            self.total.add(result, is_redundant)
            if result.status != "unknown":
                self.tools[name].add(result, is_redundant)

    def reset(self) -> None:
        with self._lock:
            self.total, self.tools = ToolCounts(), defaultdict[str, ToolCounts](ToolCounts)

    def as_dict(self) -> dict[str, float]:
        """Flat, for logging: `calls`, `calls_failed`, ..., and `calls/NAME`, `calls_failed/NAME`.

        Every registered tool is there. Keys with `seconds` are the clock's, and belong to
        `timing` where a log keeps it apart.
        """
        with self._lock:
            flat = self.total.as_dict()
            for name in self._names:
                flat |= {f"{key}/{name}": n for key, n in self.tools[name].as_dict().items()}
            return flat
