"""Log lines that a stranger can provoke: one per kind and interval, with a count of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["Complaints"]


class Complaints:
    """Decides which of many like messages is written. Kinds are few and chosen by the caller."""

    def __init__(self, interval: Seconds = 10.0) -> None:
        self._interval = interval
        self._next: dict[str, Seconds] = {}
        self._suppressed: dict[str, int] = {}

    def admit(self, kind: str, now: Seconds) -> int | None:
        """None: stay silent. Else how many of the kind were not written since the last one."""
        if now < self._next.get(kind, 0.0):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        self._next[kind] = now + self._interval
        return self._suppressed.pop(kind, 0)
