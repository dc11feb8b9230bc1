"""A timer queue for a machine without an event loop: at most one timer per key, earliest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds

__all__ = ["Key", "TimerQueue"]

Key = tuple[str, str | int]
"""The timer's kind and its subject."""


class TimerQueue:
    """A heap; cancelled entries stay until they surface or outnumber the others."""

    def __init__(self) -> None:
        self._due: dict[Key, tuple[Seconds, int]] = {}
        self._heap: list[tuple[Seconds, int, Key]] = []
        self._serial = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, due: Seconds) -> None:
        """Sets or moves a timer."""
        self._serial += 1
        self._due[key] = (due, self._serial)
        heapq.heappush(self._heap, (due, self._serial, key))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [(at, serial, k) for k, (at, serial) in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Cancels a timer; a missing one is ignored."""
        self._due.pop(key, None)

    def clear(self) -> None:
        self._due.clear()
        self._heap.clear()

    @property
    def first(self) -> Seconds | None:
        """The time of the next timer."""
        while self._heap:
            due, serial, key = self._heap[0]
            if self._due.get(key) == (due, serial):
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: Seconds) -> Iterator[Key]:
        """Yields due timers, each removed as it is yielded. Includes those set meanwhile for `now`
        or earlier.
        """
        while (first := self.first) is not None and first <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            yield key
