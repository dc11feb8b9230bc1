"""Defines a trace of one request: a tree of spans, as the frontend builds it when the request ends.

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
