"""Defines where a finished trace goes, and passes it on to several places.

The frontend calls `TraceSink.add` when a request that is kept has ended. It does not know whether
traces are remembered, exported or both.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.trace import Trace

__all__ = ["NO_SINK", "TraceSink", "TraceSinks"]

_log = logging.getLogger(__name__)


class TraceSink(Protocol):
    """Takes the traces that are kept."""

    def add(self, trace: Trace) -> None:
        """Take one trace. It is quick, waits for nothing, and does not raise."""
        ...


class TraceSinks:
    """Passes each trace to all of its sinks. A sink that fails does not keep it from the others."""

    def __init__(self, *sinks: TraceSink, on_lost: Callable[[], None] = lambda: None) -> None:
        """`on_lost` is called for each trace that a sink could not take."""
        self._sinks = sinks
        self._on_lost = on_lost
        self._said: set[TraceSink] = set()

    def add(self, trace: Trace) -> None:
        for sink in self._sinks:
            try:
                sink.add(trace)
            except Exception:
                # A defect in what watches requests must not end one.
                self._on_lost()
                if sink not in self._said:
                    self._said.add(sink)
                    _log.exception(
                        "a trace was lost in %s; further ones are only counted", type(sink).__name__
                    )


NO_SINK: Final[TraceSink] = TraceSinks()
"""Takes traces and drops them."""
