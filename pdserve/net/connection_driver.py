"""Moves bytes between a transport and a sans-I/O `Connection`.

Writing. The owner queues frames on the connection and calls `wake`. One flush per turn of the loop
passes the queued bytes, at most about `high_water`, to the transport in one call. While the
transport is full, nothing is passed on, so the queued bytes have not left this process.

Reading. A large body is received directly into its memory. Everything else goes into one
buffer that all connections of a node share: each read is copied out before the next one begins.

It knows no requests, streams or peers: it passes events to the rules of its owner.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdserve.net.settings import NetSettings
    from pdserve.net.timers import Timers
    from pdserve.wire import events as ev
    from pdserve.wire.parser import Buffer
    from pdserve.wire.protocol import Connection

__all__ = ["IGNORE", "ConnectionDriver", "ConnectionOwner"]


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
        self._in_place = False

        self._paused = False
        self._closing = False
        self._lost = False

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
            return False
        return True

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
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
        return self._scratch

    def buffer_updated(self, count: int) -> None:
        self.heard = True
        if self._in_place:
            self._in_place = False
            self.dispatch(self.connection.received(count))
            return
        self.dispatch(self.connection.receive_data(bytes(self._scratch[:count])))

    def eof_received(self) -> None:
        """Sends what is queued, because the transport closes itself after this."""
        self.dispatch(self.connection.receive_eof())
        self.flush()
        self.closed = True

    def dispatch(self, events: list[ev.Event]) -> None:
        """Passes `events` to the rules; what they queue goes out at the end of this turn."""
        rest = self.rest = iter(events)
        for event in rest:
            self.rules[type(event)](event)
        if not self.due and self.connection.queued != self.connection.taken:
            self.wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the methods of this class.
        self.transport = cast("asyncio.Transport", transport)
        self.connection = self.owner.connected(self)
        high, low = self._settings.high_water, self._settings.low_water
        self.transport.set_write_buffer_limits(high=high, low=low)
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
        self.owner.lost(self, exc)
