"""A lock that tenants take in turn, so that one tenant's queue for it does not delay another's.

`text/fair_queue.py` says whose turn it is. Used on the event loop's thread.
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

__all__ = ["FairLock"]


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def was_granted(self) -> bool:
        """True if the waiter holds the lock; a refused waiter never does."""
        return (
            self.granted.done()
            and not self.granted.cancelled()
            and self.granted.exception() is None
        )


class FairLock:
    """The lock. Waiters of different tenants get it in turns."""

    def __init__(
        self, most: int, refusal: Callable[[], PdserveError], time: Callable[[], Seconds]
    ) -> None:
        """At most `most` waiters; beyond it, the newest waiter of the tenant with the most gets
        `refusal`."""
        self._most = most
        self._refusal = refusal
        self._time = time
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._taken = False

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Holds the lock. Errors: `refusal`, while waiting."""
        waiter = _Waiter(tenant)
        self._enter(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.was_granted():
                # The lock was granted in the same turn as the cancellation.
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
        if self._taken and len(self._queue) >= self._most:
            victim = self._queue.make_room(waiter.tenant)
            if victim is None:
                raise self._refusal()
            if not victim.granted.done():
                victim.granted.set_exception(self._refusal())
        self._queue.push(waiter.tenant, waiter)
        self._grant()

    def _leave(self, tenant: str, took: Seconds) -> None:
        self._queue.end(tenant, took)
        self._taken = False
        self._grant()

    def _grant(self) -> None:
        """Gives a free lock to the next waiter. A cancelled waiter stays in the queue until its
        task has run."""
        while not self._taken and (waiter := self._queue.next(lambda *_: True)) is not None:
            if waiter.granted.done():
                self._queue.remove(waiter.tenant, waiter)
                continue
            self._queue.begin(waiter.tenant, waiter)
            self._taken = True
            waiter.granted.set_result(None)
