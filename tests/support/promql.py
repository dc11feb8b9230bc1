"""Reads which metrics and labels a PromQL expression uses, and compares them with the registry.

It splits an expression into words and follows brackets; it does not know operators or types, which
`promtool` and Prometheus check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.observe.metrics import Definition

_WORD = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")|(?P<number>\d[\w.]*)|(?P<name>\$?[A-Za-z_:][\w:]*)'
    r"|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){}\[\],:$])|(?P<space>\s+)"
)
_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}
TARGET_LABELS = {"cluster", "instance", "job"}
"""What a scrape adds to each series."""
FOREIGN = {"up": (), "process_start_time_seconds": (), "process_resident_memory_bytes": ()} | {
    "process_cpu_seconds_total": ()
}
"""Series of Prometheus itself and of its client's library."""

_VALUES = {"mode": ("aggregated", "prefill", "decode")}
"""Values of labels that a metric's help does not list."""
_LISTED_ELSEWHERE = ("pdserve_degraded",)
"""Metrics whose values of labels are in docs/operations.md."""


@dataclass(slots=True)
class Selector:
    """A metric with its matchers: label to the text it is compared with."""

    metric: str
    at: int
    matchers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The labels of a `by` or `on` list, and where the words begin and end that they are of."""

    labels: tuple[str, ...]
    begin: int
    end: int


def words(expr: str) -> list[tuple[str, str]]:
    """Kind and text of each word. Raises `ValueError` for what is no word."""
    found = []
    at = 0
    while at < len(expr):
        match = _WORD.match(expr, at)
        if match is None:
            raise ValueError(f"unreadable at {expr[at : at + 20]!r}")
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
        at = match.end()
    return found


class Reading:
    """What an expression uses."""

    def __init__(self, expr: str) -> None:
        self.selectors: list[Selector] = []
        self.groupings: list[Grouping] = []
        self._words = words(expr)
        at = 0
        while at < len(self._words):
            at = self._read(at)

    def _text(self, at: int) -> str:
        return self._words[at][1] if at < len(self._words) else ""

    def _read(self, at: int) -> int:
        """Reads what begins at a word, and returns where the next begins."""
        kind, text = self._words[at]
        if text == "[":
            return self._closing(at) + 1
        if kind != "name" or text in _WORDS or text.startswith("$"):
            return at + 1
        if text in _LISTS:
            return self._list(at)
        if self._text(at + 1) == "(" or self._text(at + 1) in _LISTS:
            return at + 1
        return self._selector(at)

    def _list(self, at: int) -> int:
        end = self._closing(at + 1)
        labels = tuple(word for kind, word in self._words[at + 2 : end] if kind == "name")
        by = self._text(at) in ("by", "without")
        of = (end + 1, self._closing(end + 1)) if by else (0, len(self._words))
        self.groupings.append(Grouping(labels, *of))
        return end + 1

    def _selector(self, at: int) -> int:
        selector = Selector(self._text(at), at)
        self.selectors.append(selector)
        if self._text(at + 1) != "{":
            return at + 1
        end = self._closing(at + 1)
        inside = [word for _, word in self._words[at + 2 : end]]
        for start in range(0, len(inside), 4):
            label, _, value = inside[start : start + 3]
            selector.matchers[label] = value.strip('"')
        return end + 1

    def _closing(self, at: int) -> int:
        pairs = {"(": ")", "{": "}", "[": "]"}
        open_, depth = self._text(at), 0
        if open_ not in pairs:
            raise ValueError(f"expected a bracket at {open_!r}")
        for end in range(at, len(self._words)):
            depth += {open_: 1, pairs[open_]: -1}.get(self._text(end), 0)
            if depth == 0:
                return end
        raise ValueError(f"{open_!r} is not closed")


class Registry:
    """The names and labels that exist: of the metrics' definitions, and of recorded expressions."""

    def __init__(self, definitions: tuple[Definition, ...], recorded: Mapping[str, str]) -> None:
        """Args: `recorded` has expressions by name."""
        self._labels: dict[str, set[str]] = {name: set(labels) for name, labels in FOREIGN.items()}
        self._help: dict[str, str] = {}
        for one in definitions:
            names = [one.name]
            if one.kind == "histogram":
                names = [f"{one.name}_{end}" for end in ("bucket", "sum", "count")]
            for name in names:
                self._labels[name] = {*one.labels, *(["le"] if name.endswith("_bucket") else [])}
                self._help[name] = one.help
        for name, expr in recorded.items():
            groups = [set(one.labels) for one in Reading(expr).groupings]
            self._labels[name] = set.union(set(), *groups)

    def problems(self, expr: str) -> Iterator[str]:
        """Names and labels of the expression that do not exist."""
        reading = Reading(expr)
        for one in reading.selectors:
            if one.metric not in self._labels:
                yield f"there is no {one.metric}"
                continue
            for label, value in one.matchers.items():
                yield from self._matcher(one.metric, label, value)
        for group in reading.groupings:
            inside = [one for one in reading.selectors if group.begin <= one.at < group.end]
            if not all(one.metric in self._labels for one in inside):
                continue
            known = TARGET_LABELS.union(*(self._labels[one.metric] for one in inside))
            for label in group.labels:
                if label not in known:
                    yield f"nothing has the label {label} in {', '.join(o.metric for o in inside)}"

    def _matcher(self, metric: str, label: str, value: str) -> Iterator[str]:
        if label not in self._labels[metric] | TARGET_LABELS:
            yield f"{metric} has no label {label}"
        elif (
            re.fullmatch(r"[a-z_]+", value)
            and value not in _VALUES.get(label, ())
            and metric not in _LISTED_ELSEWHERE
            and value not in self._help.get(metric, value)
        ):
            yield f"the help of {metric} does not name the value {value} of {label}"
