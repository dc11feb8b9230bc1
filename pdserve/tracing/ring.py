"""Remembers the last traces of this process in memory, and answers queries about them.

Each trace is held as its encoding, so its size is known and nobody can change it. The ring forgets
the oldest ones beyond a count or a number of bytes. It does not know why a trace was kept.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.ids import Bytes
from pdserve.messages.trace import TraceReply, TraceSummary
from pdserve.tracing.compact import decode_trace, encode_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.trace import Trace, TraceQuery

__all__ = ["MOST_SUMMARIES", "MOST_TRACES", "TraceRing", "is_id_of", "summarize"]

MOST_SUMMARIES: Final = 200
"""Most summaries in one reply."""
MOST_TRACES: Final = 200
"""Most traces that a frontend remembers."""
_BYTES: Final[Bytes] = 2 << 20
_TEXT: Final = 256
"""Most characters of a text in a summary."""
_FIRST_TOKEN: Final = "first_token"
_STATUS: Final = "http.response.status_code"


class _Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One remembered trace."""

    summary: TraceSummary
    encoded: bytes
    size: Bytes


class TraceRing:
    """A `TraceSink` that remembers. Used on one thread."""

    def __init__(self, traces: int = MOST_TRACES, limit: Bytes = _BYTES) -> None:
        """Args: `traces` is the most traces that it holds, `limit` the most bytes."""
        self._most = traces
        self._limit = limit
        self._entries: deque[_Entry] = deque()
        self.added = 0
        """Traces that were ever added."""
        self.refused = 0
        """Of these, traces that are larger than the whole ring."""
        self.size: Bytes = 0
        """Memory of all traces that it holds."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, trace: Trace) -> None:
        """Remember a trace, and forget the oldest ones that have no room beside it."""
        self.added += 1
        encoded = encode_trace(trace)
        summary = summarize(trace, self.added)
        size = sys.getsizeof(encoded) + _size_of(summary)
        if size > self._limit:
            self.refused += 1
            return
        self._entries.append(_Entry(summary, encoded, size))
        self.size += size
        while self.size > self._limit or len(self._entries) > self._most:
            self.size -= self._entries.popleft().size

    def answer(self, query: TraceQuery, node: str) -> TraceReply:
        """The traces that fit a query; `node` is the name of this frontend."""
        limit = max(0, min(query.limit, MOST_SUMMARIES))
        if query.id:
            found = list(self._find(query.id))
        else:
            found = [entry for entry in reversed(self._entries) if _fits(entry.summary, query)]
        if query.after:
            after = query.after.get(node, 0)
            found = [entry for entry in reversed(found) if entry.summary.number > after]
        return TraceReply(
            summaries=tuple(_named(entry.summary, node) for entry in found[:limit]),
            trace=decode_trace(found[0].encoded) if query.id and found else None,
            frontends=(node,),
            numbers={node: self.added},
        )

    def _find(self, wanted: str) -> Iterator[_Entry]:
        """Entries with this id, the newest first; if there are none, those whose id begins so."""
        by_hex = wanted.lower()
        newest = tuple(reversed(self._entries))
        exact = [entry for entry in newest if is_id_of(entry.summary, wanted)]
        if exact:
            return iter(exact)
        return (
            entry
            for entry in newest
            if entry.summary.request_id.startswith(wanted)
            or entry.summary.trace_id.hex().startswith(by_hex)
        )


def is_id_of(summary: TraceSummary, wanted: str) -> bool:
    """Whether a text is the whole request id or trace id."""
    return summary.request_id == wanted or summary.trace_id.hex() == wanted.lower()


def summarize(trace: Trace, number: int) -> TraceSummary:
    """One line about a trace, which is the frontend's `number`th."""
    root = trace.spans[0]
    first = next((event.at for event in root.events if event.name == _FIRST_TOKEN), None)
    status = root.attributes.get(_STATUS)
    return TraceSummary(
        number=number,
        trace_id=trace.trace_id,
        request_id=trace.request_id[:_TEXT],
        began=trace.began,
        duration=max(0.0, root.end - root.start),
        ttft=None if first is None else max(0.0, first - root.start),
        model=trace.model[:_TEXT],
        kept=trace.kept,
        status=status if isinstance(status, int) else 0,
        error=root.error[:_TEXT],
    )


def _named(summary: TraceSummary, node: str) -> TraceSummary:
    return msgspec.structs.replace(summary, node=node)


def _fits(summary: TraceSummary, query: TraceQuery) -> bool:
    """Whether a list with the query's filters has it."""
    if query.model and summary.model != query.model:
        return False
    if query.errors and not _failed(summary):
        return False
    if query.slow and not any(reason.startswith("slo") for reason in summary.kept):
        return False
    return _long_enough(summary.duration, query.longer_than)


def _failed(summary: TraceSummary) -> bool:
    return bool(summary.error) or summary.status >= 400


def _long_enough(duration: Seconds, least: Seconds) -> bool:
    return least <= 0 or duration > least


def _size_of(summary: TraceSummary) -> Bytes:
    """Memory of a summary and of the entry around it."""
    texts = (summary.request_id, summary.model, summary.error, *summary.kept)
    records = sys.getsizeof(summary) + 2 * _RECORD + sys.getsizeof(summary.kept)
    return records + sys.getsizeof(summary.trace_id) + sum(map(sys.getsizeof, texts))


_RECORD: Final[Bytes] = 64
"""About the size of a small object: the entry, and the summary's numbers."""
