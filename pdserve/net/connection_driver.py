"""Moves bytes between a transport and a sans-I/O `Connection`.

Writing. Verbs append to the connection and call `wake`; one flush per turn of the loop then hands
everything, or as much as the transport is to hold, to the transport in one call. While it is full,
nothing is handed over, so what waits is known not to have left this process.

Pinned memory. A raw payload is written from where it lies. `pin` remembers who wants to know when
the transport has drained past it; while there are pins, the transport is asked to report when it is
empty instead of nearly empty.

Reading. A large body is received where it belongs; everything else into one buffer that all
connections of a node share, because a read is used up before the next one begins.

It knows no requests, streams or peers: it hands events to the rules of its owner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Bytes
    from pdserve.net.settings import NetSettings
    from pdserve.net.timers import Timers
    from pdserve.wire import events as ev
    from pdserve.wire.parser import Buffer
    from pdserve.wire.protocol import Connection

__all__ = ["IGNORE", "ConnectionDriver", "ConnectionOwner"]

_AFTER_PLACED: Final[Bytes] = 4096
"""Most bytes to read behind a payload that was received in place: probably the next one follows,
and what of it comes along with its header has to be copied."""


class _IgnoreAll(dict[type, "Callable[[Any], None]"]):
    """Rules that ignore everything."""

    def __missing__(self, event: type) -> Callable[[Any], None]:
        return _ignore


def _ignore(event: object) -> None:
    """What came after the end, in the same read."""


IGNORE: Final = _IgnoreAll()


class ConnectionOwner(Protocol):
    """Who a shell works for."""

    def connected(self, shell: ConnectionDriver) -> Connection:
        """The transport is there; returns the connection to run over it."""
        ...

    def lost(self, shell: ConnectionDriver, error: BaseException | None) -> None:
        """The transport is gone. Comes once, after the last event."""
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
        """A flush is scheduled."""
        self.closed = False
        """Nothing more is handed to the transport."""
        self.heard = False
        """Bytes came since the owner last looked."""

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
        self._drained: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ writing

    def wake(self) -> None:
        """Flush at the end of this turn of the loop. Callers on hot paths test `due` first."""
        if not self.due:
            self.due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand what is queued to the transport, unless it is full."""
        self.due = False
        if not self.takes():
            return  # uvloop refuses what comes between the end of a transport and the word of it
        connection = self.connection
        buffers = connection.data_to_send(self._settings.high_water)
        if not self._write(buffers):
            return
        if self._pins:
            self._unpin()
        if connection.queued != connection.taken:
            if not self._paused:
                self.wake()  # the rest in its turn: other connections get theirs in between
        elif self._closing:
            self.closed = True
            self.transport.close()

    def _write(self, buffers: Sequence[Buffer]) -> bool:
        """Hand these over; False once the transport is gone.

        uvloop closes a transport whose dial is cancelled while `create_connection` returns it. It
        neither says that it is closing nor calls `connection_lost` then: only a write tells.
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
        """Call `on_sent` when the transport has drained past all that is queued now."""
        self._pins.append((self.connection.queued, on_sent))

    def _unpin_all(self) -> None:
        while self._pins:
            self._pins.popleft()[1]()

    def _unpin(self) -> None:
        """Release what the transport no longer reads."""
        left = self.transport.get_write_buffer_size()
        # Under TLS the buffer holds encrypted bytes, whose count says nothing about ours.
        encrypted = self.transport.get_extra_info("ssl_object") is not None
        past = self.connection.taken - left if not (encrypted and left) else 0
        while self._pins and self._pins[0][0] <= past:
            self._pins.popleft()[1]()
        self._report_empty(bool(self._pins))

    def _report_empty(self, eager: bool) -> None:
        """Have `resume_writing` called when the transport's buffer is empty, not when it is low."""
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
        if self._pins:
            self._unpin()  # before more is written, which would hide that this was drained
        self.flush()
        if not self._paused:
            self._wake_drained()

    @property
    def full(self) -> bool:
        """The transport takes no more at present."""
        return self._paused

    def takes(self) -> bool:
        """`flush` hands on what is queued. False also between the end of a transport and the word
        of it."""
        return not (self._paused or self.closed or self.transport.is_closing())

    def wait_drained(self) -> asyncio.Future[None]:
        """Done when the transport takes more, or is gone. Shared: do not cancel it."""
        if self._drained is None:
            self._drained = self._loop.create_future()
        return self._drained

    def _wake_drained(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # ------------------------------------------------------------------ reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.connection.in_place:
            wanted = self.connection.receive_buffer()
            if wanted is not None:
                self._in_place = True
                return wanted
        self._in_place = False  # it may have been offered before, and nothing came
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
        """The transport closes itself after this; the last words go out first."""
        self.dispatch(self.connection.receive_eof())
        self.flush()
        self.closed = True

    def dispatch(self, events: list[ev.Event]) -> None:
        """Hand `events` to the rules; what they queue goes out at the end of this turn."""
        for event in events:
            self.rules[type(event)](event)
        if not self.due and self.connection.queued != self.connection.taken:
            self.wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one by structure
        self.connection = self.owner.connected(self)
        self._set_limits()
        self.wake()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Send what is queued, then close; give up on a peer that does not read after a while."""
        if self._closing or self.closed:
            return
        self._closing = True
        self._timers.call_later(self._settings.close_timeout, self.abort)
        self.wake()

    def end(self) -> None:
        """Close with what the transport takes now: nothing of the rest leaves this process."""
        self.flush()
        if not self.closed:
            self.closed = True
            self.transport.close()
            self._timers.call_later(self._settings.close_timeout, self.abort)

    def abort(self) -> None:
        """Close now; what is queued is lost."""
        self.closed = True
        if not self._lost:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.closed = self._lost = True
        self._in_place = False
        self._unpin_all()
        self._wake_drained()
        self.owner.lost(self, exc)
