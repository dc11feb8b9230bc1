"""Encodes traces as OTLP/HTTP JSON (`ExportTraceServiceRequest`), and reads the collector's answer.

Pure. OTLP's JSON differs from protobuf's own: ids are hex, enums are numbers. Integers of 64 bits
are strings. Spans are encoded one by one, so that the exporter can do a few at a time.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve import __version__
from pdserve.tracing.compact import well_formed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.messages.trace import AttributeValue, Span, SpanEvent, Trace

__all__ = ["RequestBodyWriter", "RequestFrame", "encode_span", "read_partial_success"]

_KINDS: Final = {"internal": 1, "server": 2}
"""Values of `Span.SpanKind`."""
_ERROR: Final = {"code": 2}
"""`Status` with `STATUS_CODE_ERROR`."""
_SAMPLED: Final = 0x01
_PARENT_KNOWN: Final = 0x100
"""In `Span.flags`: whether the parent is remote is known."""
_PARENT_REMOTE: Final = 0x200
_GZIP_LEVEL: Final = 1
"""The quickest: spans repeat themselves so much that others save little."""
_GZIP_WINDOW: Final = 31
"""zlib's number for gzip's format."""
_INT64: Final = range(-(2**63), 2**63)

_encode = msgspec.json.Encoder().encode


class RequestFrame:
    """What all requests of one process have around their spans: resource and scope."""

    def __init__(self, resource: Mapping[str, AttributeValue]) -> None:
        """Args: `resource` describes the process."""
        scope = {"name": "pdserve", "version": __version__}
        head = _encode({"resource": {"attributes": _attributes(resource)}})[:-1]
        self._head = b'{"resourceSpans":[' + head + b',"scopeSpans":[{"scope":' + _encode(scope)
        self._head += b',"spans":['

    def body(self, *, gzip: bool) -> RequestBodyWriter:
        """Begin a request's body."""
        return RequestBodyWriter(self._head, gzip=gzip)


class RequestBodyWriter:
    """Writes the body of one request, span by span."""

    def __init__(self, head: bytes, *, gzip: bool) -> None:
        self._parts: list[bytes] = []
        self._packer = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW) if gzip else None
        self.spans = 0
        """Spans that it has."""
        self._write(head)

    def add(self, span: bytes) -> None:
        """Add a span as `encode_span` returns it."""
        self._write(b"," + span if self.spans else span)
        self.spans += 1

    def finish(self) -> bytes:
        """The whole body."""
        self._write(b"]}]}]}")
        if self._packer is not None:
            self._parts.append(self._packer.flush())
        return b"".join(self._parts)

    def _write(self, part: bytes) -> None:
        self._parts.append(part if self._packer is None else self._packer.compress(part))


def encode_span(trace: Trace, span: Span) -> bytes:
    """One span of a trace, as a JSON object."""
    root = span is trace.spans[0]
    attributes = _attributes(span.attributes)
    if root:
        attributes += _attributes(
            {"pdserve.request_id": trace.request_id, "pdserve.kept": trace.kept}
        )
    flags = _SAMPLED | _PARENT_KNOWN | (_PARENT_REMOTE if root and span.parent_id else 0)
    coded: dict[str, Any] = {
        "traceId": trace.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "flags": flags,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": _moment(trace.began, span.start),
        "endTimeUnixNano": _moment(trace.began, max(span.start, span.end)),
        "attributes": attributes,
    }
    if span.parent_id:
        coded["parentSpanId"] = span.parent_id.hex()
    if trace.tracestate:
        coded["traceState"] = trace.tracestate
    if span.events:
        coded["events"] = [_event(trace.began, event) for event in span.events]
    if span.error:
        coded["status"] = _ERROR | {"message": span.error}
    try:
        return _encode(coded)
    except UnicodeEncodeError:
        # Half of a surrogate pair, which no UTF-8 can carry.
        return _encode(well_formed(coded))


def _moment(began: int, offset: Seconds) -> str:
    return str(began + round(offset * 1e9))


def _event(began: int, event: SpanEvent) -> dict[str, Any]:
    return {
        "timeUnixNano": _moment(began, event.at),
        "name": event.name,
        "attributes": _attributes(event.attributes),
    }


def _attributes(values: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _any_value(value)} for name, value in values.items()]


def _any_value(value: AttributeValue) -> dict[str, Any]:
    """An `AnyValue`. `bool` comes first: it is a kind of `int`."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue" if value in _INT64 else "stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _not_finite(value)}
    return {"arrayValue": {"values": [{"stringValue": one} for one in value]}}


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class _PartialSuccess(msgspec.Struct, rename="camel"):
    rejected_spans: int | str = 0
    error_message: str = ""


class _Response(msgspec.Struct, rename="camel"):
    partial_success: _PartialSuccess | None = None


_decode = msgspec.json.Decoder(_Response).decode


def read_partial_success(body: bytes) -> tuple[int, str]:
    """How many spans the collector did not take, and why, from the body of a 200.

    A body of another form means that it took all: not all collectors send one.
    """
    try:
        part = _decode(body).partial_success
        return (0, "") if part is None else (max(0, int(part.rejected_spans)), part.error_message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0, ""
