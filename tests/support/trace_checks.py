"""What holds for every trace, whatever happened to its request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.trace import Span, Trace

__all__ = ["children", "defects", "named"]

_PARTS = ("pdserve.queue", "pdserve.prefill", "pdserve.decode")


def defects(trace: Trace) -> Iterator[str]:
    """A sentence for each rule that a trace breaks."""
    spans = trace.spans
    if len(trace.trace_id) != 16 or not any(trace.trace_id):
        yield f"the trace's id is {trace.trace_id!r}"
    by_id = {span.span_id: span for span in spans}
    if len(by_id) != len(spans):
        yield "two spans have one id"
    seen: set[bytes] = set()
    for span in spans:
        yield from _alone(span)
        if span is not spans[0]:
            yield from _within(span, by_id.get(span.parent_id), seen)
        seen.add(span.span_id)
    if spans[0].parent_id in by_id:
        yield "the root is the child of its own child"
    if spans[0].kind != "server" or any(span.kind == "server" for span in spans[1:]):
        yield "the root is not the only span of a server"
    yield from _attempts(trace)


def _alone(span: Span) -> Iterator[str]:
    if len(span.span_id) != 8 or not any(span.span_id):
        yield f"{span.name} has the id {span.span_id!r}"
    if not 0.0 <= span.start <= span.end:
        yield f"{span.name} lasts from {span.start} to {span.end}"
    times = [event.at for event in span.events]
    if times != sorted(times) or any(not span.start <= at <= span.end for at in times):
        yield f"{span.name} from {span.start} to {span.end} has events at {times}"


def _within(span: Span, parent: Span | None, seen: set[bytes]) -> Iterator[str]:
    if parent is None:
        yield f"{span.name} has no parent in the trace"
    elif parent.span_id not in seen:
        yield f"{span.name} comes before its parent"
    elif not (parent.start <= span.start and span.end <= parent.end):
        yield (
            f"{span.name} from {span.start} to {span.end} is outside {parent.name} from "
            f"{parent.start} to {parent.end}"
        )


def _attempts(trace: Trace) -> Iterator[str]:
    """They are numbered without gaps, have all ended, and have room for their parts."""
    numbers: dict[bytes, list[object]] = {}
    for span in named(trace, "pdserve.attempt"):
        numbers.setdefault(span.parent_id, []).append(span.attributes["pdserve.number"])
        if span.attributes["pdserve.end"] == "open":
            yield f"attempt {span.attributes} has not ended"
        parts = [part for part in children(trace, span) if part.name in _PARTS]
        took = sum(part.end - part.start for part in parts)
        if took > span.end - span.start + 1e-9:
            yield f"an attempt of {span.end - span.start} s has parts of {took} s"
        for before, after in itertools.pairwise(parts):
            if after.start < before.end:
                yield f"{after.name} begins at {after.start}, before {before.name} has ended"
    for found in numbers.values():
        if found != list(range(1, len(found) + 1)):
            yield f"attempts are numbered {found}"


def named(trace: Trace, name: str) -> list[Span]:
    """Spans of this name, in order."""
    return [span for span in trace.spans if span.name == name]


def children(trace: Trace, parent: Span) -> list[Span]:
    """Spans directly below this one, in order."""
    return [span for span in trace.spans if span.parent_id == parent.span_id]
