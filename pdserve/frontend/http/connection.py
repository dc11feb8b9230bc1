"""One client connection: aiohttp parses HTTP, and this file limits what a connection may hold.

It adds to aiohttp's protocol, beyond `edge`'s limits on what arrives: places, deadlines for first
bytes and headers, flow control for synchronous writers, closing of clients that do not read, and
errors in OpenAI's format. It does not know requests. Owned by `ConnectionServer`; the service
sweeps it once a second.

A connection *works* while it answers a request with a valid key (or where no key is needed) for
more than the state of the process. The number of working connections is limited. Other connections
can be closed to make room for new ones, so that a probe always finds a place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestPayloadError

from pdserve.edge.bounded_parser import FramingBudget, TooMuchFraming
from pdserve.edge.handler import BoundedHandler, make_request
from pdserve.edge.idle_connections import IdleConnections, host_of
from pdserve.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.frontend.http.fd_limit import usable_connections
from pdserve.frontend.http.http_response import error_response, request_id_line
from pdserve.ids import Bytes, Seconds, new_request_id

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from pdserve.frontend.config import FrontendConfig
    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend.connection")

LINGER: Seconds = 2.0
"""Seconds for which an unread body is discarded after an early answer, so that the client can read
it."""
STEADY: Bytes = 64 * 1024
"""Bytes that a slow client must take within the stall timeout. Slow links get their time, but no
client can keep an answer in memory for ever by taking a byte now and then."""


_MOST_SPARE: Final = 64
"""Places that working connections cannot take, so that probes find one."""


class FlowControlled(Protocol):
    """The stream that is written on a connection, as the connection sees it."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def detach(self) -> None: ...


class ClientConnection(BoundedHandler):
    """One accepted socket."""

    __slots__ = (
        "_moved_at",
        "_unread",
        "closing_since",
        "host",
        "partial_since",
        "paused_since",
        "server",
        "since",
        "socket",
        "waiters",
        "was_cut",
        "wire",
        "works",
    )

    def __init__(self, server: ConnectionServer, loop: asyncio.AbstractEventLoop, **kw: Any):
        super().__init__(server, server.room, loop=loop, **kw)
        self.server = server
        self.socket: asyncio.Transport | None = None
        """The transport until it is really gone; aiohttp forgets its own when closing begins."""
        self.was_cut = False
        self.host = ""
        """The client's address."""
        self.since: Seconds = 0.0
        """Time when it was accepted."""
        self.works = False
        """True while it answers a request that needs more than the state of the process."""
        self.partial_since: Seconds | None = None
        """Time when the first byte of an unfinished request head came."""
        self.paused_since: Seconds | None = None
        """Time since which the client has read too slowly; None while it keeps up."""
        self.closing_since: Seconds | None = None
        self._unread: Bytes = 0
        """Unsent bytes when the client last made progress."""
        self._moved_at: Seconds = 0.0
        self.wire: FlowControlled | None = None
        """The stream that is being written, if any."""
        self.waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = socket = cast("asyncio.Transport", transport)
        self.host = host_of(socket.get_extra_info("peername"))
        self.since = self._loop.time()
        super().connection_made(transport)
        self.server.register(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._detach()
        self.socket = None
        self.server.unregister(self)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the client is gone"))
        self.waiters.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.closing_since is not None:
            return
        super().data_received(data)
        if self._messages or self.busy or not (self.body_is_here and self.intake.partial):
            self.partial_since = None
        elif self.partial_since is None:
            self.partial_since = self._loop.time()

    @property
    def heard(self) -> bool:
        """True once a request has come, or none will."""
        return self.body is not None or self.closing_since is not None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_since = self._loop.time()
        if self.wire is not None:
            self.wire.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused_since = None
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
        if self.wire is not None:
            self.wire.resume()

    def force_close(self) -> None:
        self._detach()
        super().force_close()

    def _detach(self) -> None:
        if self.wire is not None:
            self.wire.detach()

    async def finish_response(self, *args: Any) -> Any:
        """Finishes as aiohttp does, then frees the place."""
        try:
            return await super().finish_response(*args)
        finally:
            self.server.rest(self)

    # ------------------------------------------------------------------ for requests

    def begin_work(self) -> None:
        """Counts the connection as working.

        Errors: `Overloaded` when too many connections work.
        """
        self.server.work(self)

    async def wait_writable(self) -> None:
        """Returns when the client keeps up.

        Errors: `ConnectionResetError` when it has disconnected; the sweep closes it after the stall
        timeout.
        """
        if self.paused_since is not None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self.waiters.append(waiter)
            await waiter

    def cut(self, reason: str) -> None:
        """Closes the connection at once and drops what it holds. Idempotent."""
        if self.socket is None or self.was_cut:
            return
        # The socket stays set until the loop's next turn.
        self.was_cut = True
        level = logging.DEBUG if reason in _ORDINARY else logging.WARNING
        logger.log(level, "connection cut: %s (peer %s)", reason, self.peername)
        self.server.metrics.connections_cut.labels(reason).inc()
        self._detach()
        self.socket.abort()

    def sweep(self, now: Seconds, config: FrontendConfig) -> None:
        """Enforces the deadlines that no request checks."""
        if self.socket is None:
            return
        if self.closing_since is None and self.socket.is_closing():
            self.closing_since = now
        if self._stalled_for(now) > config.write_stall_timeout:
            self.cut("does not read")
        elif self.partial_since is not None:
            if now - self.partial_since > config.header_timeout:
                self.cut("slow headers")
        elif not self.heard and now - self.since > config.header_timeout:
            self.cut("silent")

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Does not log a body that its client broke: the answer has reported it."""
        if not isinstance(kw.get("exc_info"), RequestPayloadError):
            super().log_exception(*args, **kw)

    def _stalled_for(self, now: Seconds) -> Seconds:
        """Seconds since a client that is behind last made progress."""
        behind_since = self.closing_since or self.paused_since
        if behind_since is None or self.socket is None:
            return 0.0
        unread = self.socket.get_write_buffer_size()
        if self._moved_at < behind_since:
            self._unread, self._moved_at = unread, behind_since
        elif unread <= self._unread - STEADY:
            self._unread, self._moved_at = unread, now
        return now - self._moved_at

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers an error of aiohttp's parser. Errors of handlers do not come here."""
        reply = error_response(
            _refusal(exc, message or "malformed request", self.max_line_size),
            request_id_line(new_request_id()),
        )
        reply.force_close()
        return reply


def _refusal(exc: BaseException | None, message: str, max_line: Bytes) -> PdserveError:
    """The parser's error as a message for the client."""
    if isinstance(exc, TooMuchFraming) and exc.crowded:
        return Overloaded(exc.message, retry_after=1)
    if isinstance(exc, LineTooLong):
        what = f"a line of the request's head is longer than {max_line} bytes"
    elif message.startswith("Pause on PRI"):
        what = "HTTP/2 is not spoken here; use HTTP/1.1"
    else:
        what = message.splitlines()[0].rstrip(":")
    return InvalidRequest(f"not valid HTTP: {what}")


_ORDINARY: Final = frozenset(("silent", "evicted"))
"""Reasons that browsers and port scanners cause all day; they are logged at debug level."""


class ConnectionServer(web.Server):
    """Makes connections and counts them. Owned by the service."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        config: FrontendConfig,
        metrics: Metrics,
    ) -> None:
        super().__init__(handler, request_factory=make_request, handler_cancellation=True)
        self._config = config
        self._limit = limit = usable_connections(config.max_connections)
        self._most_working = limit - min(_MOST_SPARE, max(limit // 8, limit > 1))
        self._working = 0
        self._open: set[ClientConnection] = set()
        self._idle: IdleConnections[ClientConnection] = IdleConnections()
        self.room = FramingBudget()
        """The framing bytes that all connections hold of unfinished requests."""
        self.accepted = 0
        """Number of connections accepted so far."""
        self.on_accepted: Callable[[], None] = lambda: None
        """Called for each of them."""
        self.metrics = metrics

    def __call__(self) -> ClientConnection:
        config = self._config
        return ClientConnection(
            self,
            self._loop,
            keepalive_timeout=config.keepalive_timeout,
            max_line_size=config.max_header_line,
            max_field_size=config.max_header_line,
            max_headers=config.max_headers,
            lingering_time=LINGER,
            access_log=None,
            logger=logger,
        )

    def register(self, connection: ClientConnection) -> None:
        """Registers a connection. At the limit, another one that does not work is closed."""
        self._open.add(connection)
        self._idle.add(connection, connection.host)
        self.accepted += 1
        self.on_accepted()
        if len(self._open) <= self._limit:
            return
        victim = self._idle.evict(connection) or connection
        victim.cut("evicted")
        # The socket stays open until the loop's next turn, but the connection counts no longer.
        self.unregister(victim)

    def unregister(self, connection: ClientConnection) -> None:
        """Removes a connection. Idempotent."""
        self.rest(connection)
        self._idle.remove(connection, connection.host)
        self._open.discard(connection)

    def work(self, connection: ClientConnection) -> None:
        """Counts a connection as working. Errors: `Overloaded` when too many connections work."""
        if connection.works:
            return
        if self._working >= self._most_working:
            raise Overloaded("too many connections", retry_after=self._config.retry_after)
        connection.works = True
        self._working += 1
        self._idle.remove(connection, connection.host)

    def rest(self, connection: ClientConnection) -> None:
        """Ends the work of a connection: its request is answered, or it is gone."""
        if connection.works:
            connection.works = False
            self._working -= 1
            if connection in self._open:
                self._idle.add(connection, connection.host)

    @property
    def open_connections(self) -> int:
        return len(self._open)

    @property
    def unheard(self) -> int:
        """Open connections whose first request has not come."""
        return sum(not connection.heard for connection in self._open)

    def sweep(self, now: Seconds) -> None:
        """Enforce every connection's deadlines."""
        for connection in tuple(self._open):
            connection.sweep(now, self._config)

    def abort_all(self) -> None:
        """Closes every connection at once, at the end of a shutdown."""
        for connection in tuple(self._open):
            if connection.socket is not None:
                connection.socket.abort()
