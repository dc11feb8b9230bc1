"""Appointments of a machine that owns no timers: at most one per key, the earliest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds

__all__ = ["Agenda", "Key"]

Key = tuple[str, str | int]
"""What kind of appointment, and whose."""


class Agenda:
    """A heap in which cancelled entries stay until they surface, or outnumber the others."""

    def __init__(self) -> None:
        self._due: dict[Key, tuple[Seconds, int]] = {}
        self._heap: list[tuple[Seconds, int, Key]] = []
        self._serial = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, due: Seconds) -> None:
        """Make the appointment, or move it."""
        self._serial += 1
        self._due[key] = (due, self._serial)
        heapq.heappush(self._heap, (due, self._serial, key))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [(at, serial, k) for k, (at, serial) in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Nothing happens without one."""
        self._due.pop(key, None)

    def clear(self) -> None:
        self._due.clear()
        self._heap.clear()

    @property
    def first(self) -> Seconds | None:
        """When the next one is due."""
        while self._heap:
            due, serial, key = self._heap[0]
            if self._due.get(key) == (due, serial):
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: Seconds) -> Iterator[Key]:
        """Those that are due, each removed as it is given out. What is set for `now` or earlier
        meanwhile comes too."""
        while (first := self.first) is not None and first <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            yield key
