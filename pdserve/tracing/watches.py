"""Remembers which models are watched: for a while, all their requests are traced and kept.

`pdserve trace --watch` begins a watch at every frontend. A watch ends by itself, after its time or
after a number of traces, so that an operator who goes away leaves nothing behind. Pure: times are
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["LONGEST_WATCH", "TraceWatches"]

LONGEST_WATCH: Final[Seconds] = 600.0
_MODELS: Final = 16
"""Most models that are watched at a time."""
_TRACES: Final = 2000
"""Most traces that one watch keeps."""


@dataclass(slots=True)
class _Watch:
    until: Seconds
    left: int
    """Traces that it still keeps."""


class TraceWatches:
    """The watches of one frontend."""

    def __init__(self, models: int = _MODELS, traces: int = _TRACES) -> None:
        self._most = models
        self._traces = traces
        self._watches: dict[str, _Watch] = {}

    def __len__(self) -> int:
        return len(self._watches)

    def begin(self, model: str, seconds: Seconds, now: Seconds) -> None:
        """Watch a model from `now` on; a watch of it that runs begins anew.

        Errors: `Overloaded` if too many other models are watched.
        """
        self._forget(now)
        if model not in self._watches and len(self._watches) >= self._most:
            raise Overloaded(f"{self._most} models are watched already", retry_after=10.0)
        self._watches[model] = _Watch(now + min(seconds, LONGEST_WATCH), self._traces)

    def watching(self, model: str, now: Seconds) -> bool:
        """Whether a request of this model is to be traced in full: asked when it begins."""
        if not self._watches:
            return False
        watch = self._watches.get(model)
        return watch is not None and watch.left > 0 and now < watch.until

    def take(self, model: str, now: Seconds) -> bool:
        """Whether a request of this model that has ended is to be kept; it then counts."""
        if not self.watching(model, now):
            return False
        self._watches[model].left -= 1
        return True

    def _forget(self, now: Seconds) -> None:
        self._watches = {m: watch for m, watch in self._watches.items() if now < watch.until}
