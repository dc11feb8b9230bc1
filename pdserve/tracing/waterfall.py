"""Draws a trace as a waterfall of text: a row per span, with a bar where it lies in the request.

Pure. Every line fits the width, whatever a client or a model has put into a name: characters that
control a terminal are replaced.
"""

from __future__ import annotations

import datetime
import unicodedata
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.messages.trace import SpanEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.trace import AttributeValue, Span, Trace

__all__ = ["MAX_WIDTH", "MIN_WIDTH", "plain_text", "seconds_text", "waterfall"]

MIN_WIDTH: Final = 60
MAX_WIDTH: Final = 100

_NAME: Final = 22
_TIME: Final = 7
_ROWS: Final = 200
"""Most rows; a request that was moved without end has more spans than anybody reads."""
_DEPTH: Final = 6
_PREFIX: Final = "pdserve."
_TIMES: Final = ("predicted_ttft", "itl_", "gap", "held")
"""Beginnings of names of attributes in seconds."""
_LEFT_OUT: Final = ("life", "accepted_after", "content.prompt", "content.output")
"""Attributes that say little to people, or have no room here."""
_FIRST: Final = (
    *("result", "action"),
    *("held", "worker", "policy", "cached_tokens", "computed_tokens", "from", "to", "node"),
    *("cached_tokens.host", "cached_tokens.disk", "cached_tokens.peer", "cached_from"),
    *("prefill_cached_tokens", "prefill_cached_tokens.host", "prefill_cached_tokens.disk"),
    *("prefill_cached_tokens.peer", "prefill_cached_from"),
    *("backend", "tokens", "itl_mean", "itl_p50", "overlap_tokens", "predicted_ttft", "reason"),
)
"""Attributes that come before the others: there is not always room for all."""
_ZERO_IS_NOTHING: Final = ("preemptions", "held", "received_tokens")
_SHORT: Final = {
    "cached_from": "from",
    "cached_tokens": "cached",
    "cached_tokens.disk": "disk",
    "cached_tokens.host": "host",
    "cached_tokens.peer": "peer",
    "computed_tokens": "computed",
    "itl_mean": "itl",
    "overlap_tokens": "overlap",
    "predicted_ttft": "predicted",
    "prefill_cached_from": "prefill-from",
    "prefill_cached_tokens": "prefill-cached",
    "prefill_cached_tokens.disk": "prefill-disk",
    "prefill_cached_tokens.host": "prefill-host",
    "prefill_cached_tokens.peer": "prefill-peer",
    "prompt_tokens": "tokens",
    "received_tokens": "received",
}
_AT_ROOT: Final = {
    "gen_ai.usage.input_tokens": "in",
    "gen_ai.usage.output_tokens": "out",
    "gen_ai.response.finish_reasons": "finish",
}


class _Marks(msgspec.Struct, frozen=True):
    """The characters of a drawing."""

    bar: str
    brief: str
    moment: str
    more: str


_UNICODE: Final = _Marks("█", "▏", "◆", "…")
_ASCII: Final = _Marks("#", "|", "*", "~")


def waterfall(trace: Trace, width: int = 80, *, ascii_only: bool = False) -> list[str]:
    """The lines of the drawing, each `width` characters at most (`MIN_WIDTH` to `MAX_WIDTH`)."""
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    lines = _Drawing(trace, width, _ASCII if ascii_only else _UNICODE).lines()
    if ascii_only:
        return [line.encode("ascii", "replace").decode() for line in lines]
    return lines


def seconds_text(seconds: Seconds) -> str:
    """A duration in at most 7 characters: `0.42ms`, `51ms`, `1.23s`, `12.3s`, `310s`."""
    if seconds < 0.0000005:
        return "0"
    for below, factor, form, unit in _FORMS:
        if seconds < below:
            return f"{seconds * factor:{form}}{unit}"
    return f"{seconds / 60:.0f}m" if seconds < 360_000 else f"{seconds / 3600:.0f}h"


_FORMS: Final = (
    *((0.001, 1000, ".2f", "ms"), (0.01, 1000, ".1f", "ms"), (0.9995, 1000, ".0f", "ms")),
    *((9.995, 1, ".2f", "s"), (99.95, 1, ".1f", "s"), (5999.5, 1, ".0f", "s")),
)
"""Up to this many seconds: the factor, the format and the unit."""


def plain_text(text: str) -> str:
    """One line, one column per character: what would move the cursor otherwise is replaced."""
    return "".join(one if _is_plain(one) else "?" for one in text)


def _is_plain(one: str) -> bool:
    return one.isprintable() and not (
        unicodedata.combining(one) or unicodedata.east_asian_width(one) in "WF"
    )


class _Drawing:
    def __init__(self, trace: Trace, width: int, marks: _Marks) -> None:
        self._trace = trace
        self._marks = marks
        self._width = width
        root = trace.spans[0]
        self._of_request = root.kind == "server"
        """False: of a change, which has its attributes in the head."""
        self._zero = root.start
        self._total = max(root.end - root.start, 1e-9)
        room = width - _NAME - 2 * _TIME - 4
        self._bar = room * 3 // 8
        self._notes = room - self._bar
        self._children: dict[bytes, list[Span]] = {}
        for span in trace.spans[1:]:
            self._children.setdefault(span.parent_id, []).append(span)

    def lines(self) -> list[str]:
        rows = list(self._rows())
        hidden = len(rows) - _ROWS
        if hidden > 0:
            rows[_ROWS:] = [f"{self._marks.more} {hidden} more rows"]
        return [*self._head(), *rows]

    def _head(self) -> Iterator[str]:
        trace, root = self._trace, self._trace.spans[0]
        status = root.attributes.get("http.response.status_code", "")
        began = datetime.datetime.fromtimestamp(trace.began / 1e9).astimezone()
        took = seconds_text(root.end - root.start)
        words = (root.name, f"{status}", trace.model, f"took {took}")
        yield self._cut("  ".join(word for word in words if word))
        yield self._cut(f"{'request' if self._of_request else 'change '} {trace.request_id}")
        when = began.isoformat(" ", "milliseconds")
        yield self._cut(f"trace   {trace.trace_id.hex()}  {when}")
        if trace.kept:
            yield self._cut(f"kept    {', '.join(trace.kept)}")
        if not self._of_request:
            yield self._cut(f"about   {_attributes(root.attributes)}")
        yield ""
        yield self._row("phase", self._scale(), "start", "took", "")

    def _scale(self) -> str:
        end = seconds_text(self._total)
        return "0" + end.rjust(self._bar - 1)

    # ------------------------------------------------------------------ rows

    def _rows(self) -> Iterator[str]:
        """All spans, children below their parents, by time. Spans whose parent is missing stand
        below the root."""
        root = self._trace.spans[0]
        known = {span.span_id for span in self._trace.spans}
        orphans = [
            s for parent, them in self._children.items() if parent not in known for s in them
        ]
        waiting: list[tuple[Span | SpanEvent, int]] = [(root, 0)]
        seen: set[bytes] = set()
        while waiting:
            item, depth = waiting.pop()
            if isinstance(item, SpanEvent):
                yield self._event_row(item, depth)
            elif item.span_id not in seen:
                seen.add(item.span_id)
                yield from self._span_rows(item, depth)
                below = self._children.get(item.span_id, []) + (orphans if item is root else [])
                inner: list[Span | SpanEvent] = [*below, *item.events]
                inner.sort(key=_begins)  # what begins together stays in its order
                waiting.extend((one, depth + 1) for one in reversed(inner))

    def _span_rows(self, span: Span, depth: int) -> Iterator[str]:
        root = span is self._trace.spans[0]
        name = "request" if root and self._of_request else span.name.removeprefix(_PREFIX)
        notes = _at_root(span.attributes) if root else _attributes(span.attributes)
        start, took = span.start - self._zero, max(0.0, span.end - span.start)
        yield self._row(
            _indented(name, depth),
            self._bar_of(start, start + took),
            seconds_text(start),
            seconds_text(took),
            notes,
        )
        if span.error:
            yield self._cut(f"{_indented('', depth + 1)}failed: {span.error}")

    def _event_row(self, event: SpanEvent, depth: int) -> str:
        at = event.at - self._zero
        bar = " " * self._column(at) + self._marks.moment
        name = _indented(event.name, depth)
        return self._row(name, bar, seconds_text(at), "", _attributes(event.attributes))

    def _row(self, name: str, bar: str, start: str, took: str, notes: str) -> str:
        cells = (
            self._cut(name, _NAME).ljust(_NAME),
            bar.ljust(self._bar),
            start.rjust(_TIME),
            took.rjust(_TIME),
            self._cut(notes, self._notes),
        )
        return " ".join(cells).rstrip()

    def _bar_of(self, start: Seconds, end: Seconds) -> str:
        first, last = self._column(start), round(min(end / self._total, 1.0) * self._bar)
        mark = self._marks.bar if end > start else self._marks.brief
        return " " * first + mark * max(1, last - first)

    def _column(self, at: Seconds) -> int:
        share = min(max(at / self._total, 0.0), 1.0)
        return min(round(share * self._bar), self._bar - 1)

    def _cut(self, text: str, width: int = 0) -> str:
        text, width = plain_text(text), width or self._width
        return text if len(text) <= width else text[: width - 1] + self._marks.more


def _begins(item: Span | SpanEvent) -> Seconds:
    return item.at if isinstance(item, SpanEvent) else item.start


def _indented(name: str, depth: int) -> str:
    return "  " * min(depth, _DEPTH) + name


def _at_root(attributes: dict[str, AttributeValue]) -> str:
    named = {short: attributes[name] for name, short in _AT_ROOT.items() if name in attributes}
    return _attributes(named)


def _attributes(attributes: dict[str, AttributeValue]) -> str:
    """Attributes in a few words: `worker=w1 tokens=30 held`."""
    named = {name.removeprefix(_PREFIX): value for name, value in attributes.items()}
    first = {name: named[name] for name in _FIRST if name in named}
    return " ".join(filter(None, (_attribute(*one) for one in (first | named).items())))


def _attribute(name: str, value: AttributeValue) -> str:
    """One attribute; empty if it says nothing."""
    if name in _LEFT_OUT or value == "" or value is False:
        return ""
    if name in _ZERO_IS_NOTHING and not value:
        return ""
    short = _SHORT.get(name, name)
    if value is True:
        return short
    if isinstance(value, float):
        text = seconds_text(value) if name.startswith(_TIMES) else f"{value:.4g}"
        return f"{short}={text}"
    return f"{short}={','.join(value) if isinstance(value, tuple) else value}"
