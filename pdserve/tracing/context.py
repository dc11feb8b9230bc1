"""Reads and writes W3C trace context: the headers `traceparent` and `tracestate`.

Strict: a header that breaks the format is ignored, and the request gets a trace of its own.
`baggage` is not read. Pure.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

__all__ = ["MAX_TRACESTATE", "TraceContext", "format_traceparent", "parse_traceparent"]

MAX_TRACESTATE: Final = 512
"""Most bytes of `tracestate` that are passed on: what the standard asks for at least."""

_PARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    re.ASCII,
)
_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]", re.ASCII
)
_MOST_MEMBERS: Final = 32
_SAMPLED: Final = 1


class TraceContext(msgspec.Struct, frozen=True):
    """The caller's span, of which the request's root is a child."""

    trace_id: bytes
    span_id: bytes
    sampled: bool
    """The caller records its part of this trace."""
    tracestate: str = ""


def parse_traceparent(parent: str | None, state: str | None = None) -> TraceContext | None:
    """The caller's context; None if `parent` is missing or not valid. A `state` that is too long or
    not valid is dropped alone."""
    if parent is None:
        return None
    match = _PARENT.fullmatch(parent.strip(" \t"))
    if match is None:
        return None
    version, more = match["version"], match["more"]
    # Version 00 ends after the flags; a later one may go on after a dash; ff is never valid.
    if version == "ff" or (version == "00" and more is not None):
        return None
    trace_id, span_id = bytes.fromhex(match["trace"]), bytes.fromhex(match["span"])
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(match["flags"], 16) & _SAMPLED), _state(state))


def format_traceparent(trace_id: bytes, span_id: bytes, *, sampled: bool) -> str:
    """The header for a request that this process makes within a trace."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-{_SAMPLED if sampled else 0:02x}"


def _state(state: str | None) -> str:
    if not state or len(state) > MAX_TRACESTATE:
        return ""
    members = [member for one in state.split(",") if (member := one.strip(" \t"))]
    if len(members) > _MOST_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return state
