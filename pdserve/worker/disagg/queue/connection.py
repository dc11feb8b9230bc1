"""Keeps one stream to one life of a router open, and reconnects when it breaks.

Until `close` there is always a stream, a task that opens one, or a retry timer. Messages that
cannot be sent at once wait here, up to a bound; beyond it the stream is closed and reopened, and
both ends start from an empty state. Owned by `client` or `claims`, which define the messages.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

from pdserve.errors import Cancelled, DialFailed, Draining, Overloaded, PdserveError
from pdserve.messages.handoff import PREFILL_QUEUE, FromQueue
from pdserve.net.redial import Redial
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Any

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.handoff import ToQueue
    from pdserve.net.base import ItemStream
    from pdserve.net.timers import Timer
    from pdserve.runtime.node import Node
    from pdserve.wire.parser import Buffer

__all__ = ["QueueConnection", "QueueConnectionListener"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 1 << 20
"""Flow-control credit in bytes for the router's messages, which are small."""
_MOST_WAITING: Final = 8192
"""Maximum number of messages that wait for a router that does not read."""
_LINK_TIMEOUT: Final[Seconds] = 3.0

_decode: Callable[[Buffer], FromQueue] = decoder(cast("Any", FromQueue))


class QueueConnectionListener(Protocol):
    """The user of a connection. May call `post` and `close` from each of these methods."""

    def on_open(self, connection: QueueConnection) -> None:
        """A stream is open; the router remembers nothing of an earlier one."""
        ...

    def on_lost(self, connection: QueueConnection) -> None:
        """The stream has broken; the connection will reopen it. Called once for each `on_open`,
        unless closed."""
        ...

    def on_message(self, connection: QueueConnection, message: FromQueue) -> None: ...

    def on_room(self, connection: QueueConnection) -> None:
        """`sendable` is true again."""
        ...


class QueueConnection:
    """A connection to one life of a router; it connects at once. Implements
    `net.base.StreamSink`."""

    def __init__(
        self, node: Node, router: NodeId, epoch: Epoch, user: QueueConnectionListener
    ) -> None:
        self.router = router
        self.epoch = epoch
        self.streams = 0
        """Number of streams that the router has accepted."""
        self.open = False
        """True while there is a stream that the router has accepted."""
        self._node = node
        self._user = user
        self._redial = Redial(node.random)
        self._stream: ItemStream | None = None
        self._waiting: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._over = False
        self._connect()

    def __repr__(self) -> str:
        return f"<prefill queue of {self.router}, life {self.epoch}>"

    @property
    def sendable(self) -> bool:
        """True if the next message would leave at once."""
        return self._stream is not None and not self._waiting and self._stream.sendable

    # ------------------------------------------------------------------ coming and going

    def _connect(self) -> None:
        self._timer = None
        try:
            self._task = self._node.tasks.spawn(self._open(), f"prefill queue of {self.router}")
        except Draining:
            _log.debug("the node is closing: %r is not opened", self)

    async def _open(self) -> None:
        try:
            router = self._node.ref(self.router, self.epoch)
            link = await router.link(timeout=_LINK_TIMEOUT)
            self._stream = link.open_stream(PREFILL_QUEUE, b"", self, window=_WINDOW)
        except PdserveError as error:
            _log.debug("%r cannot be opened: %s", self, error)
            self._later(error)
            return
        self.on_unblocked()

    def _later(self, error: BaseException | None) -> None:
        """Schedules the next try to connect."""
        if self._over:
            return
        if isinstance(error, DialFailed):
            delay = self._redial.failed(error)
        else:
            delay = self._redial.lost(self._node.now())
        self._timer = self._node.timers.call_later(delay, self._connect)

    def _broken(self, error: BaseException | None) -> None:
        """Handles the end of a stream."""
        if self._stream is None or self._over:
            return
        _log.debug("%r has broken: %s", self, error)
        self._stream = None
        self._waiting.clear()
        self._later(error)
        if self.open:
            self.open = False
            self._user.on_lost(self)

    def close(self) -> None:
        """Ends the connection without a call to its user. Idempotent."""
        self._over = True
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.abort(Cancelled("the worker has left the queue"))
            self._stream = None
        self._waiting.clear()

    # ------------------------------------------------------------------ to the router

    def post(self, message: ToQueue) -> None:
        """Sends a message, in order, as soon as the router reads; drops it unless `open`. If too
        many wait, the stream is closed and reopened."""
        stream = self._stream
        if stream is None or not self.open:
            return
        self._waiting.append(encode(message))
        self._flush(stream)
        if len(self._waiting) > _MOST_WAITING:
            error = Overloaded(f"router {self.router} does not read", retry_after=1.0)
            stream.abort(error)
            self._broken(error)

    def _flush(self, stream: ItemStream) -> None:
        waiting = self._waiting
        try:
            while waiting and stream.try_send(waiting[0]):
                waiting.popleft()
        except PdserveError as error:  # the stream has ended: `on_end` is on its way
            _log.debug("%r: %s", self, error)

    # ------------------------------------------------------------------ net.base.Sink

    def on_data(self, body: Buffer) -> None:
        """Passes a message to the user. A message that cannot be decoded ends the stream: both ends
        start again from an empty state."""
        stream = self._stream
        if stream is None:
            return
        try:
            self._user.on_message(self, _decode(body))
        except PdserveError as error:
            _log.warning("%r: %s", self, error)
            stream.abort(error)
            self._broken(error)
        except Exception:
            _log.exception("%r", self)
            stream.abort(Cancelled("the worker failed to process a message"))
            self._broken(None)

    def on_end(self, error: BaseException | None) -> None:
        stream = self._stream
        self._broken(error)
        if stream is not None:
            stream.end()

    def on_unblocked(self) -> None:
        """Opens the connection with the first flow-control credit, by which the router accepts the
        stream; then sends what waits."""
        stream = self._stream
        if stream is None:
            return
        self._flush(stream)
        if not self.sendable:
            return
        if self.open:
            self._user.on_room(self)
        else:
            self.open = True
            self.streams += 1
            self._redial.connected(self._node.now())
            self._user.on_open(self)
