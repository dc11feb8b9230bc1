"""What an actor may do with itself: timers, watches, tasks. All of it ends with the actor.

Timers and deaths become messages in the system lane, so they come one at a time like all others.
Owned by one `actor.Cell`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdserve.runtime.envelope import Envelope
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pdserve.ids import Seconds
    from pdserve.runtime.actor import Cell
    from pdserve.runtime.ref import ActorRef, Terminated, Watch

__all__ = ["Context"]

M = TypeVar("M")


class Context(Generic[M]):
    """See above."""

    def __init__(self, cell: Cell[M, Any]) -> None:
        self.ref: ActorRef[M, Any] = cell.ref
        """The actor's own, for others to answer to."""
        self.tasks = Tasks(cell.name, lambda _, error: cell.fail(error))
        """The actor's own. One that fails ends the actor; what it finds out, it tells `ref`."""
        self._cell = cell
        self._timers: dict[Hashable, _Timer[M]] = {}
        self._watches: dict[Watch, None] = {}

    def now(self) -> Seconds:
        """The loop's clock."""
        return asyncio.get_running_loop().time()

    def stop(self) -> None:
        """End after the present message; what waits is failed."""
        self._cell.close()

    def set_timer(
        self, key: Hashable, delay: Seconds, message: M, *, every: Seconds | None = None
    ) -> None:
        """Get `message` in `delay` seconds, then `every` so often. Replaces a timer of the same
        key, whose message does not come any more even if it waits already."""
        self.cancel_timer(key)
        self._timers[key] = _Timer(self._cell, message, self.now() + delay, every)

    def cancel_timer(self, key: Hashable) -> None:
        """Its message does not come any more. Nothing happens without such a timer."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def watch(self, ref: ActorRef[Any, Any], message: Callable[[Terminated], M]) -> Watch:
        """Get `message(terminated)` once when the actor of `ref` has ended."""

        def heard(terminated: Terminated) -> None:
            self._watches.pop(watch, None)
            self._cell.post_system(Envelope(message(terminated)))

        watch = ref.watch(heard)
        self._watches[watch] = None
        return watch

    def close(self) -> None:
        """For the cell: no more timers and watches."""
        for key in tuple(self._timers):
            self.cancel_timer(key)
        for watch in tuple(self._watches):
            watch.cancel()
        self._watches.clear()


class _Timer(Generic[M]):
    """One message, at most one of it in the mailbox at a time."""

    def __init__(self, cell: Cell[M, Any], message: M, due: Seconds, every: Seconds | None) -> None:
        if every is not None and every <= 0:
            raise ValueError(f"a timer cannot fire every {every} s")
        self._cell = cell
        self._envelope = Envelope(message)
        self._due = due
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        """Ticks that the actor or the loop was too late for are left out."""
        if self._envelope not in self._cell.mailbox:
            self._cell.post_system(self._envelope)
        if self._every is not None:
            late = max(0.0, self._loop.time() - self._due)
            self._due += self._every * (1 + late // self._every)
            self._handle = self._loop.call_at(self._due, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()
        self._cell.mailbox.withdraw_system(self._envelope)
