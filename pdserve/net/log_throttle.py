"""Limits log lines that unauthenticated peers can cause: one per kind and interval, with a count of
the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["LogThrottle"]


class LogThrottle:
    """Decides which of many similar messages is logged. The caller chooses the kinds; they are
    few.
    """

    def __init__(self, interval: Seconds = 10.0) -> None:
        self._interval = interval
        self._next: dict[str, Seconds] = {}
        self._suppressed: dict[str, int] = {}

    def admit(self, kind: str, now: Seconds) -> int | None:
        """Returns None if the message is suppressed, else the number of suppressed messages of this
        kind since the last one.
        """
        if now < self._next.get(kind, 0.0):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        self._next[kind] = now + self._interval
        return self._suppressed.pop(kind, 0)
