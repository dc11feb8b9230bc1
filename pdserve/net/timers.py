"""Manages many deadlines with one event-loop timer: a wheel of coarse ticks.

Setting and cancelling a deadline cost one dictionary operation each. An entry never expires early
and at most one tick late. One timer is armed for the earliest filled tick; a tick whose entries
were all cancelled costs at most one empty wake-up. Owned by one endpoint; everything runs on its
event loop.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["TICK", "Expiring", "Timer", "TimerWheel", "Timers"]

TICK: Final[Seconds] = 0.01
"""Length of a tick. Deadlines in a cluster are tens of milliseconds and up; finer ticks only cost
wake-ups.
"""
_ROUNDING: Final[Seconds] = 1e-9
_TICKS_PER_SECOND: Final = round(1 / TICK)


class Expiring(Protocol):
    """Something with a deadline. `tick` belongs to the wheel: initialise it to 0."""

    tick: int

    def expire(self) -> None:
        """Handles the passed deadline. Called once, even if cancelled within this very tick; must
        not raise.
        """
        ...


_EMPTIED: Final[dict[Expiring, None]] = {}
"""Stands for a tick whose entries were all cancelled; it is never written to."""
_FEW: Final = 64
"""Number of emptied ticks below which they are not cleaned up."""


class TimerWheel:
    """The bookkeeping, without a clock."""

    __slots__ = ("_emptied", "_filled", "_slots")

    def __init__(self) -> None:
        # Dicts as ordered sets: entries of one tick expire in the order of `add`, in every run.
        self._slots: dict[int, dict[Expiring, None]] = {}
        self._filled: list[int] = []  # heap of `_slots` keys
        self._emptied = 0  # slots that are `_EMPTIED`

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, entry: Expiring, when: Seconds) -> bool:
        """Expires `entry` at the first tick not before `when`; True if that is a new tick."""
        tick = int(when * _TICKS_PER_SECOND) + 1
        entry.tick = tick
        slot = self._slots.get(tick)
        if slot:
            slot[entry] = None
            return False
        self._slots[tick] = {entry: None}
        if slot is not None:
            self._emptied -= 1
            return False
        heappush(self._filled, tick)
        return True

    def remove(self, entry: Expiring) -> None:
        """Cancels a deadline; an expired one is ignored."""
        slot = self._slots.get(entry.tick)
        if slot:
            slot.pop(entry, None)
            # Far ticks are many, and an emptied dict keeps its memory: `_EMPTIED` replaces it.
            if not slot:
                self._slots[entry.tick] = _EMPTIED
                self._emptied += 1
                if self._emptied > _FEW and self._emptied > len(self._slots) // 2:
                    self._drop_emptied()

    def _drop_emptied(self) -> None:
        """Removes emptied ticks; deadlines are minutes ahead, and the ticks would use memory until
        then.
        """
        self._slots = {tick: slot for tick, slot in self._slots.items() if slot}
        # A sorted list is a heap.
        self._filled = sorted(self._slots)
        self._emptied = 0

    def next(self) -> Seconds | None:
        """The time at which `due` may return something; None: never."""
        return self._filled[0] * TICK if self._filled else None

    def due(self, now: Seconds) -> list[Expiring]:
        """Removes and yields what has expired by `now`, earliest tick first."""
        expired: list[Expiring] = []
        # The product may lie a rounding error above the time that `next` named.
        while self._filled and self._filled[0] * TICK <= now + _ROUNDING:
            slot = self._slots.pop(heappop(self._filled))
            if not slot:
                self._emptied -= 1
            expired += slot
        return expired


class TimerLoop(Protocol):
    """The part of an event loop that a wheel needs."""

    def time(self) -> Seconds: ...

    def call_at(self, when: Seconds, callback: Callable[[], None]) -> TimerHandle: ...


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Timers:
    """A timer wheel driven by an event loop's clock, real or virtual."""

    def __init__(self, loop: TimerLoop) -> None:
        self._loop = loop
        self._wheel = TimerWheel()
        self._handle: TimerHandle | None = None
        self._armed: Seconds = 0.0
        self._closed = False

    def __len__(self) -> int:
        return len(self._wheel)

    def add(self, entry: Expiring, when: Seconds) -> None:
        """Calls `entry.expire()` at loop time `when` or up to one tick later."""
        if self._wheel.add(entry, when):
            self._arm()

    def remove(self, entry: Expiring) -> None:
        """Cancels a deadline; an expired one is ignored."""
        self._wheel.remove(entry)

    def now(self) -> Seconds:
        """The loop's clock."""
        return self._loop.time()

    def call_at(self, when: Seconds, callback: Callable[[], None]) -> Timer:
        """Calls `callback` at loop time `when` or up to one tick later; keep the result to cancel
        it.
        """
        timer = Timer(callback, self._wheel)
        self.add(timer, when)
        return timer

    def call_later(self, delay: Seconds, callback: Callable[[], None]) -> Timer:
        """Calls `callback` after `delay` seconds; keep the result to cancel it."""
        return self.call_at(self._loop.time() + delay, callback)

    def close(self) -> None:
        """Cancels all deadlines."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        due = self._wheel.next()
        if due is None or self._closed or (self._handle is not None and self._armed <= due):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._armed = due
        self._handle = self._loop.call_at(due, self._run)

    def _run(self) -> None:
        self._handle = None
        due = iter(self._wheel.due(self._loop.time()))
        try:
            for entry in due:
                entry.expire()
        finally:
            # The loop reports an exception of one entry; the entries after it expire a tick later.
            rest = [*due]
            for entry in rest:
                self._wheel.add(entry, self._loop.time())
            self._arm()


class Timer:
    """A callback with a deadline."""

    __slots__ = ("_callback", "_wheel", "tick")

    def __init__(self, callback: Callable[[], None], wheel: TimerWheel) -> None:
        self.tick = 0
        self._callback: Callable[[], None] | None = callback
        self._wheel = wheel

    def cancel(self) -> None:
        """Cancels the callback, even if it is due in this very tick."""
        self._callback = None
        self._wheel.remove(self)

    def expire(self) -> None:
        if self._callback is not None:
            callback, self._callback = self._callback, None
            callback()
