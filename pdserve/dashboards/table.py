"""Records of which boards and rules are made. Pure data; `grafana.py` and `rules.py` render it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Alert", "Board", "Panel", "Query", "Recording", "Row", "selected"]

Severity = Literal["page", "ticket"]
PanelKind = Literal["timeseries", "stat"]

_SELECTORS: Final = {
    "CLUSTER": 'cluster=~"$cluster"',
    "MODEL": 'cluster=~"$cluster", model=~"$model"',
    "PROCESS": 'job=~"pdserve.*", cluster=~"$cluster", instance=~"$worker"',
    "WORKER": 'cluster=~"$cluster", model=~"$model", instance=~"$worker"',
}
"""What a board's variables select. PROCESS is for metrics of a worker's process that have no model;
other programs, and a second job for vLLM's names, have some of them, too.
"""
_SELECTOR: Final = re.compile(rf"(?<=\{{)({'|'.join(_SELECTORS)})\b")


def selected(template: str) -> str:
    """An expression whose `{MODEL}`, `{WORKER, label="…"}` and so on are matchers, and whose
    `[RATE]` is Grafana's interval for rates."""
    text = _SELECTOR.sub(lambda match: _SELECTORS[match[1]], template)
    return " ".join(text.replace("[RATE]", "[$__rate_interval]").split())


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel, as a template of `selected`."""

    expr: str
    legend: str
    rare: bool = False
    """The series begin with a rare event, so the expression is empty on a sound cluster."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart, or one number."""

    title: str
    description: str
    unit: str
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    kind: PanelKind = "timeseries"
    stacked: bool = False
    width: int = 8
    """Columns of Grafana's 24."""
    most: float | None = None
    """End of the axis, where values have a natural one."""
    red: float | None = None
    """From this value on the background is red."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One page of Grafana."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded expression."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert rule. Its runbook is the section of `docs/observability.md` with its name."""

    name: str
    expr: str
    hold: str = "0s"
    """How long the condition must hold: `for` of the rule."""
    severity: Severity
    summary: str
    description: str
    operands: tuple[str, ...]
    """Parts of `expr` that have values while the condition is false. A condition is an empty vector
    then, which says nothing about its names; its operands do."""
