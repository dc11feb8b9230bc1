"""Defines a trace: a tree of spans. A frontend builds one when a request ends; planners and workers
build those of their changes.

Times in a trace are seconds on the frontend's monotonic clock since the request arrived; only
`Trace.began` is wall time, read once. The frontend keeps traces in memory, exports them as OTLP,
and answers `pdserve trace` with them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.ids import Seconds

AttributeValue = bool | int | float | str | tuple[str, ...]

SpanKind = Literal["server", "internal"]


class SpanEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened at one moment of a span."""

    name: str
    at: Seconds
    attributes: dict[str, AttributeValue] = {}


class Span(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One phase of a request. Its times lie within those of its parent."""

    span_id: bytes
    """8 bytes, not all zero; unique within the trace."""
    parent_id: bytes = b""
    """Id of the span around it; the root has the caller's span as its parent, or none (empty)."""
    name: str
    start: Seconds
    end: Seconds
    kind: SpanKind = "internal"
    attributes: dict[str, AttributeValue] = {}
    events: tuple[SpanEvent, ...] = ()
    """Ordered by time."""
    error: str = ""
    """Why the phase failed; empty: it did not."""


class Trace(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All spans of one request."""

    trace_id: bytes
    """16 bytes, not all zero."""
    tracestate: str = ""
    """As the client sent it, to be passed on; at most 512 bytes."""
    began: int
    """Unix time of the request's arrival, in nanoseconds: second 0 of the spans' times."""
    request_id: str
    model: str = ""
    """The model's name as it is served; empty if the request did not get that far."""
    kept: tuple[str, ...] = ()
    """Why it was kept: `parent`, `head`, `watch`, or a tail rule such as `error` or `slo_ttft`."""
    spans: tuple[Span, ...]
    """The root first; a parent before its children."""


class TraceSummary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One line of a list of traces."""

    number: int
    """Counts the traces of one frontend process in the order in which they ended, from 1."""
    trace_id: bytes
    request_id: str
    began: int
    """As `Trace.began`."""
    duration: Seconds
    ttft: Seconds | None = None
    """Time to the first token; None: there was none."""
    model: str = ""
    kept: tuple[str, ...] = ()
    status: int = 0
    """HTTP status of the answer; 0: unknown."""
    error: str = ""
    """Why the request failed; empty: it did not."""
    node: str = ""
    """The frontend that has the trace."""


class TraceQuery(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks for traces: of one request, or for a list of the last ones.

    A node that is asked with `everywhere` asks all frontends of the cluster, each without it.
    """

    everywhere: bool = False
    id: str = ""
    """A request id, a trace id in hex, or the beginning of one of them; empty: list the last."""
    limit: int = 20
    """Most summaries in the reply."""
    model: str = ""
    """Only of this model; empty: of all."""
    errors: bool = False
    """Only of requests that failed."""
    slow: bool = False
    """Only of requests that missed an SLO."""
    longer_than: Seconds = 0.0
    """Only of requests that took longer."""
    after: dict[str, int] = {}
    """By node: only traces with a greater `TraceSummary.number`; a node that is not named here
    answers with all. The order is then the oldest first."""
    watch: str = ""
    """Begin to trace, and keep, all requests of this model; empty: do not."""
    watch_seconds: Seconds = 0.0
    """For how long."""
    changes: bool = False
    """Only changes of planners, and mode switches of workers; False: only requests. With an `id`,
    both are looked at."""


class TraceReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Traces that fit a query."""

    summaries: tuple[TraceSummary, ...] = ()
    """The newest first, unless the query says otherwise."""
    trace: Trace | None = None
    """The trace of the first summary, if an id was asked for."""
    silent: dict[str, str] = {}
    """Frontends that did not answer, and why."""
    frontends: tuple[str, ...] = ()
    """Frontends that answered."""
    numbers: dict[str, int] = {}
    """By frontend: the number of its newest trace, for `TraceQuery.after`."""
