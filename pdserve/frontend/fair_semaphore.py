"""A semaphore whose places tenants take in turn, so that one tenant does not delay the others.

`text/fair_queue.py` says whose turn it is, and how many places a tenant may hold. With one place it
is a lock. Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.text.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds

__all__ = ["FairSemaphore"]


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def was_granted(self) -> bool:
        """True if the waiter holds a place; a refused waiter never does."""
        return (
            self.granted.done()
            and not self.granted.cancelled()
            and self.granted.exception() is None
        )


class FairSemaphore:
    """The places. Waiters of different tenants get them in turns."""

    def __init__(
        self,
        places: int,
        most: int,
        refusal: Callable[[], PdserveError],
        time: Callable[[], Seconds],
    ) -> None:
        """At most `most` waiters; beyond it, the newest waiter of the tenant with the most gets
        `refusal`."""
        self._places = places
        self._most = most
        self._refusal = refusal
        self._time = time
        self._queue: FairQueue[_Waiter] = FairQueue()

    @property
    def running(self) -> int:
        """Number of places that are held."""
        return self._queue.running

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._queue)

    def running_of(self, tenant: str) -> int:
        """Number of places that a tenant holds."""
        return self._queue.running_of(tenant)

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Holds a place. Errors: `refusal`, while waiting."""
        waiter = _Waiter(tenant)
        self._enter(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.was_granted():
                # The place was granted in the same turn as the cancellation.
                self._leave(tenant, 0.0)
            else:
                self._queue.remove(tenant, waiter)
            raise
        began = self._time()
        try:
            yield
        finally:
            self._leave(tenant, self._time() - began)

    def _enter(self, waiter: _Waiter) -> None:
        running = self._queue.running_of(waiter.tenant)
        waits = not self._queue.has_place(running, self._places)
        if waits and len(self._queue) >= self._most:
            victim = self._queue.make_room(waiter.tenant)
            if victim is None:
                raise self._refusal()
            if not victim.granted.done():
                victim.granted.set_exception(self._refusal())
        self._queue.push(waiter.tenant, waiter)
        self._grant()

    def _leave(self, tenant: str, took: Seconds) -> None:
        self._queue.end(tenant, took)
        self._grant()

    def _grant(self) -> None:
        """Gives free places to the next waiters. A cancelled waiter stays in the queue until its
        task has run."""
        while (waiter := self._queue.next_in(self._places)) is not None:
            if waiter.granted.done():
                self._queue.remove(waiter.tenant, waiter)
                continue
            self._queue.begin(waiter.tenant, waiter)
            waiter.granted.set_result(None)
