"""Answers trace queries at a frontend: from its ring, and by beginning watches.

Pure: the time comes from a function. `runtime.traces` brings the queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.trace import TraceQuery, TraceReply
    from pdserve.tracing.ring import TraceRing
    from pdserve.tracing.watches import TraceWatches

__all__ = ["TraceAnswers"]

_LONGEST_NAME: Final = 512


class TraceAnswers:
    """Call it with a query."""

    def __init__(
        self, ring: TraceRing, watches: TraceWatches, node: str, now: Callable[[], Seconds]
    ) -> None:
        """Args: `node` is this frontend; `now` is the clock of the watches."""
        self._ring = ring
        self._watches = watches
        self._node = node
        self._now = now

    def __call__(self, query: TraceQuery) -> TraceReply:
        """Errors: `Overloaded` for one watch too many, `InvalidRequest`."""
        if query.watch:
            if len(query.watch) > _LONGEST_NAME or not query.watch_seconds > 0:
                raise InvalidRequest("a watch needs a model's name and a time")
            self._watches.begin(query.watch, query.watch_seconds, self._now())
        return self._ring.answer(query, self._node)
