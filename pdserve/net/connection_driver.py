"""Moves bytes between a transport and a sans-I/O `Connection`.

Writing. The owner queues frames on the connection and calls `wake`. One flush per turn of the loop
passes the queued bytes, at most about `high_water`, to the transport in one call. While the
transport is full, nothing is passed on, so the queued bytes have not left this process.

Pinned memory. A raw payload is written without a copy. `pin` stores a callback for the moment when
the transport has drained past the payload. While there are pins, the transport reports when its
buffer is empty, not when it is nearly empty.

Reading. A large body is received directly into its destination. Everything else goes into one
buffer that all connections of a node share: each read is copied out before the next one begins.

It knows no requests, streams or peers: it passes events to the rules of its owner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdserve.ids import Bytes
    from pdserve.net.settings import NetSettings
    from pdserve.net.timers import Timers
    from pdserve.wire import events as ev
    from pdserve.wire.parser import Buffer
    from pdserve.wire.protocol import Connection

__all__ = ["IGNORE", "ConnectionDriver", "ConnectionOwner"]

_AFTER_PLACED: Final[Bytes] = 4096
"""Size of the read after a payload that was received in place. Another such payload probably
follows, and the part of it that is read together with its header must be copied."""


class _IgnoreAll(dict[type, "Callable[[Any], None]"]):
    """Rules that ignore everything."""

    def __missing__(self, event: type) -> Callable[[Any], None]:
        return _ignore


def _ignore(event: object) -> None:
    """Ignores an event that follows the end in the same read."""


IGNORE: Final = _IgnoreAll()


class ConnectionOwner(Protocol):
    """What owns a driver and handles its events."""

    def connected(self, shell: ConnectionDriver) -> Connection:
        """Handles a connected transport; returns the connection to run over it."""
        ...

    def lost(self, shell: ConnectionDriver, error: BaseException | None) -> None:
        """Handles the end of the transport. Called once, after the last event."""
        ...


class ConnectionDriver(asyncio.BufferedProtocol):
    """Moves bytes between one transport and one `Connection`, and its events to the owner. `rules`
    maps event types to what the owner does; the owner may replace it."""

    transport: asyncio.Transport
    connection: Connection

    def __init__(
        self,
        owner: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        timers: Timers,
        settings: NetSettings,
        scratch: memoryview,
    ) -> None:
        self.owner = owner
        self.rules: Mapping[type, Callable[[Any], None]] = {}
        self.due = False
        """True if a flush is scheduled."""
        self.closed = False
        """True if nothing more is passed to the transport."""
        self.heard = False
        """True if bytes arrived since the owner last cleared this."""
        self.rest: Iterator[ev.Event] = iter(())
        """Events of the last read that have not been passed on. What the owner takes from here is
        not passed on any more."""

        self._loop = loop
        self._timers = timers
        self._settings = settings
        self._scratch = scratch
        self._small = scratch[:_AFTER_PLACED]
        self._reading: memoryview = scratch
        self._in_place = False

        self._paused = False
        self._closing = False
        self._lost = False
        self._pins: deque[tuple[Bytes, Callable[[], None]]] = deque()
        self._eager = False

    # ------------------------------------------------------------------ writing

    def wake(self) -> None:
        """Schedules a flush for the end of this turn of the loop. Hot paths test `due` first."""
        if not self.due:
            self.due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Passes queued bytes to the transport, unless it is full."""
        self.due = False
        # uvloop raises on a write to a transport that has ended, even before `connection_lost`.
        if not self.takes():
            return
        connection = self.connection
        buffers = connection.data_to_send(self._settings.high_water)
        if not self._write(buffers):
            return
        if self._pins:
            self._unpin()
        if connection.queued != connection.taken:
            if not self._paused:
                # The rest goes out in the next turn: other connections are served in between.
                self.wake()
        elif self._closing:
            self.closed = True
            self.transport.close()

    def _write(self, buffers: Sequence[Buffer]) -> bool:
        """Writes `buffers` to the transport; False once the transport is gone.

        uvloop closes a transport whose dial is cancelled while `create_connection` returns it. Then
        `is_closing` stays False and `connection_lost` is not called: only a write fails.
        """
        try:
            if len(buffers) == 1:
                self.transport.write(buffers[0])
            elif buffers:
                self.transport.writelines(buffers)
        except RuntimeError:
            self.closed = True
            self._unpin_all()
            return False
        return True

    def pin(self, on_sent: Callable[[], None]) -> None:
        """Calls `on_sent` when the transport has drained past all that is queued now."""
        self._pins.append((self.connection.queued, on_sent))

    def _unpin_all(self) -> None:
        while self._pins:
            self._pins.popleft()[1]()

    def _unpin(self) -> None:
        """Releases the memory that the transport no longer reads."""
        left = self.transport.get_write_buffer_size()
        # Under TLS the buffer holds encrypted bytes; their count differs from the plain one.
        encrypted = self.transport.get_extra_info("ssl_object") is not None
        past = self.connection.taken - left if not (encrypted and left) else 0
        while self._pins and self._pins[0][0] <= past:
            self._pins.popleft()[1]()
        self._report_empty(bool(self._pins))

    def _report_empty(self, eager: bool) -> None:
        """Has `resume_writing` called when the transport's buffer is empty, not when it is low."""
        if eager == self._eager:
            return
        self._eager = eager
        if eager:
            self.transport.set_write_buffer_limits(high=1, low=0)
        else:
            self._set_limits()

    def _set_limits(self) -> None:
        self.transport.set_write_buffer_limits(
            high=self._settings.high_water, low=self._settings.low_water
        )

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        # Unpin before the flush: new bytes in the buffer would hide that the old ones have left.
        if self._pins:
            self._unpin()
        self.flush()

    @property
    def full(self) -> bool:
        """True if the transport takes no more at present."""
        return self._paused

    def takes(self) -> bool:
        """True if `flush` would pass on queued bytes. False also for a transport that has ended
        and has not called `connection_lost` yet."""
        return not (self._paused or self.closed or self.transport.is_closing())

    # ------------------------------------------------------------------ reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.connection.in_place:
            wanted = self.connection.receive_buffer()
            if wanted is not None:
                self._in_place = True
                return wanted
        # The call before may have offered memory in place, without a read after it.
        self._in_place = False
        return self._reading

    def buffer_updated(self, count: int) -> None:
        self.heard = True
        if self._in_place:
            self._in_place = False
            self._reading = self._small
            self.dispatch(self.connection.received(count))
            return
        data = bytes(self._reading[:count])
        if count == _AFTER_PLACED:
            self._reading = self._scratch
        self.dispatch(self.connection.receive_data(data))

    def eof_received(self) -> None:
        """Sends what is queued, because the transport closes itself after this."""
        self.dispatch(self.connection.receive_eof())
        self.flush()
        self.closed = True

    def dispatch(self, events: list[ev.Event]) -> None:
        """Passes `events` to the rules; what they queue goes out at the end of this turn."""
        # After `PayloadBegins`, a call inside this one has events of its own: it is the last event.
        rest = self.rest = iter(events)
        for event in rest:
            self.rules[type(event)](event)
        if not self.due and self.connection.queued != self.connection.taken:
            self.wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the methods of this class.
        self.transport = cast("asyncio.Transport", transport)
        self.connection = self.owner.connected(self)
        self._set_limits()
        self.wake()

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Sends what is queued, then closes; aborts after `close_timeout` at the latest."""
        if self._closing or self.closed:
            return
        self._closing = True
        self._timers.call_later(self._settings.close_timeout, self.abort)
        self.wake()

    def end(self) -> None:
        """Passes on what the transport takes now, then closes; the rest never leaves this
        process."""
        self.flush()
        if not self.closed:
            self.closed = True
            self.transport.close()
            self._timers.call_later(self._settings.close_timeout, self.abort)

    def abort(self) -> None:
        """Closes now; what is queued is lost."""
        self.closed = True
        if not self._lost:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.closed = self._lost = True
        self._in_place = False
        self._unpin_all()
        self.owner.lost(self, exc)
