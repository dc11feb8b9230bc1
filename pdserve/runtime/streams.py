"""A stream of answers: the actor's end, the reader's end, and credit between them.

The reader grants credit by taking items, so at most a window of them waits for it. Each end hears
of the other's end exactly once. Neither knows whether a network lies between. An `Outlet` is owned
by its actor's `Cell`, an `Inlet` by whoever entered `ActorRef.stream`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pdserve.errors import Cancelled, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes, Seconds

__all__ = ["LOCAL_COST", "Inlet", "Outlet", "pipe"]

R = TypeVar("R")

LOCAL_COST: Final[Bytes] = 256
"""Credit that an item passed by reference takes: it has no size, but must have a bound."""


class _Signal:
    """Wakes those who wait for something to change."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order, so that runs repeat

    def give(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, until: Seconds | None) -> bool:
        """False: it has become `until` on the loop's clock."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = None
        left = None if until is None else max(0.0, until - loop.time())
        try:
            done, _ = await asyncio.wait({waiter}, timeout=left)
        finally:
            del self._waiting[waiter]
        return bool(done)


class Inlet(Generic[R]):
    """The reader's end: an asynchronous iterator of items."""

    def __init__(self, timeout: Seconds | None) -> None:
        """`timeout`: the longest wait for an item; None where the end is certain to come."""
        self.taken: Callable[[Bytes], None] = lambda size: None
        """Returns credit; whoever connects the ends sets it."""
        self.ended = False
        """Nothing more will come in."""
        self._timeout = timeout
        self._error: BaseException | None = None
        self._items: deque[tuple[R, Bytes]] = deque()
        self._changed = _Signal()

    @property
    def complete(self) -> bool:
        """It has ended, and not by an error."""
        return self.ended and self._error is None

    def push(self, item: R, size: Bytes) -> None:
        """One item has come."""
        self._items.append((item, size))
        self._changed.give()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes; what has come can still be read."""
        if not self.ended:
            self.ended, self._error = True, error
            self._changed.give()

    def discard(self) -> None:
        """The reader has left: return the credit of what it did not take."""
        while self._items:
            self.taken(self._items.popleft()[1])

    def __len__(self) -> int:
        """How many items have come and were not taken."""
        return len(self._items)

    def __aiter__(self) -> Inlet[R]:
        return self

    async def __anext__(self) -> R:
        """Raises what the stream ended with; `DeadlineExceeded` if an item is late, after which
        reading may go on. Cancellation: no item is lost."""
        timeout = self._timeout
        until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while not self._items:
            if self.ended:
                raise StopAsyncIteration if self._error is None else self._error
            if not await self._changed.wait(until):
                raise DeadlineExceeded(f"no item of the stream came within {timeout:g} s")
        item, size = self._items.popleft()
        self.taken(size)
        return item


class Outlet(Generic[R]):
    """The actor's end. Send within `Actor.opened`, or keep it and send from later messages."""

    def __init__(
        self, push: Callable[[R], bool], finish: Callable[[BaseException | None], None]
    ) -> None:
        """`push` sends if there is credit, `finish` ends the stream; from whoever connects."""
        self.closed = False
        """The reader has left, or this end has ended the stream."""
        self.on_closed: Callable[[], None] | None = None
        """The actor's: called once, as soon as `closed`."""
        self.on_forget: Callable[[], None] | None = None
        """The cell's."""
        self._push = push
        self._finish = finish
        self._changed = _Signal()

    def try_send(self, item: R) -> bool:
        """Send if there is credit; False: nothing was sent. Raises `Cancelled` once closed,
        `PayloadTooLarge`."""
        if self.closed:
            raise Cancelled("nobody reads this stream any more")
        return self._push(item)

    async def send(self, item: R, *, timeout: Seconds) -> None:
        """Send as soon as there is credit.

        Raises `DeadlineExceeded` and what `try_send` raises; then, and when cancelled, nothing was
        sent.
        """
        until = asyncio.get_running_loop().time() + timeout
        while not self.try_send(item):
            if not await self._changed.wait(until):
                raise DeadlineExceeded(f"the reader took nothing for {timeout:g} s")

    def end(self) -> None:
        """The stream is complete. Idempotent."""
        self.fail(None)

    def fail(self, error: BaseException | None) -> None:
        """End it by an error, which the reader gets after the items. Idempotent."""
        if not self.closed:
            self.left()
            self._finish(error)

    def left(self) -> None:
        """For whoever connects: the reader has gone."""
        if not self.closed:
            self.closed = True
            self._changed.give()
            for callback in (self.on_forget, self.on_closed):
                if callback is not None:
                    callback()

    def unblocked(self) -> None:
        """For whoever connects: there may be credit."""
        self._changed.give()


def pipe(timeout: Seconds, window: Bytes) -> tuple[Inlet[R], Outlet[R]]:
    """Both ends within one process: items pass by reference."""
    inlet: Inlet[R] = Inlet(timeout)
    credit = window

    def push(item: R) -> bool:
        nonlocal credit
        if credit <= 0:
            return False
        credit -= LOCAL_COST
        inlet.push(item, LOCAL_COST)
        return True

    def taken(size: Bytes) -> None:
        nonlocal credit
        credit += size
        outlet.unblocked()

    outlet: Outlet[R] = Outlet(push, inlet.end)
    inlet.taken = taken
    return inlet, outlet
