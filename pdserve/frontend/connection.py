"""One client connection: aiohttp parses HTTP, this bounds what a connection may hold or delay.

Adds to aiohttp's protocol: a bound on connections, a deadline for headers, flow control that a
synchronous writer can ask for, cutting clients that do not read, errors in OpenAI's shape. It
does not know requests. Owned by `ConnectionServer`, swept by the service once a second.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong
from aiohttp.web_protocol import RequestPayloadError

from pdserve.errors import InvalidRequest, Overloaded
from pdserve.frontend.bodies import unknown_encoding
from pdserve.frontend.descriptors import usable_connections
from pdserve.frontend.replies import error_reply, raw_reply, request_id_line
from pdserve.ids import Bytes, Seconds, new_request_id

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader

    from pdserve.frontend.config import FrontendConfig
    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend.connection")

LINGER: Seconds = 2.0
"""How long an unread body is discarded after an early answer, so that the client can read it."""
STEADY: Bytes = 64 * 1024
"""What a client that is behind must take within the stall timeout: slow links may have their time,
but nobody holds an answer in our memory for ever by taking a byte now and then."""


class Writer(Protocol):
    """What a connection tells the stream that is being written on it."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def detach(self) -> None: ...


class Connection(web.RequestHandler):
    """One accepted socket."""

    __slots__ = (
        "_body",
        "_moved_at",
        "_unread",
        "busy",
        "closing_since",
        "partial_since",
        "paused_since",
        "server",
        "socket",
        "waiters",
        "was_cut",
        "wire",
    )

    def __init__(self, server: ConnectionServer, loop: asyncio.AbstractEventLoop, **kw: Any):
        super().__init__(server, loop=loop, **kw)
        self.server = server
        self.socket: asyncio.Transport | None = None
        """The transport until it is really gone; aiohttp forgets its own when closing begins."""
        self.was_cut = False
        self.busy = False
        """A request is being answered."""
        self.partial_since: Seconds | None = None
        """When the first byte of an unfinished request head came."""
        self.paused_since: Seconds | None = None
        """Since when the client has not read fast enough; None while it does."""
        self.closing_since: Seconds | None = None
        self._unread: Bytes = 0
        """In the transport, when the client was last seen to move on."""
        self._moved_at: Seconds = 0.0
        self._body: StreamReader | None = None
        """Of the newest request; the rest of it may come after an early answer."""
        self.wire: Writer | None = None
        """The stream that is being written, if one is."""
        self.waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = socket = cast("asyncio.Transport", transport)
        if not self.server.register(self):
            socket.write(_TOO_MANY)
            socket.close()
            self.closing_since = self._loop.time()
            return
        super().connection_made(transport)

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
        if data and not self.busy and self.partial_since is None and self._body_is_here():
            self.partial_since = self._loop.time()
        if self.closing_since is None:
            super().data_received(data)

    def _body_is_here(self) -> bool:
        return self._body is None or self._body.is_eof()

    @property
    def heard(self) -> bool:
        """A request has come, or none will."""
        return self._body is not None or self.closing_since is not None

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

    # ------------------------------------------------------------------ for requests

    async def wait_writable(self) -> None:
        """Return when the client keeps up.

        Errors: `ConnectionResetError` when it is gone; the sweep cuts it after the stall timeout.
        """
        if self.paused_since is not None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self.waiters.append(waiter)
            await waiter

    def cut(self, reason: str) -> None:
        """Drop the connection and what it still holds, at once. Idempotent."""
        if self.socket is None or self.was_cut:
            return
        self.was_cut = True  # its socket stays until the loop's next turn
        logger.warning("connection cut: %s (peer %s)", reason, self.peername)
        self.server.metrics.connections_cut.labels(reason).inc()
        self._detach()
        self.socket.abort()

    def sweep(self, now: Seconds, config: FrontendConfig) -> None:
        """Enforce the deadlines that no request watches."""
        if self.socket is None:
            return
        if self.closing_since is None and self.socket.is_closing():
            self.closing_since = now
        if self._stalled_for(now) > config.write_stall_timeout:
            self.cut("does not read")
        elif self.partial_since is not None and now - self.partial_since > config.header_timeout:
            self.cut("slow headers")

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that its client broke is no fault of ours; the answer has told it."""
        if not isinstance(kw.get("exc_info"), RequestPayloadError):
            super().log_exception(*args, **kw)

    def _stalled_for(self, now: Seconds) -> Seconds:
        """How long the client has not taken what it is behind with."""
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
        """What aiohttp's parser refused. Faults of handlers never come here: they answer."""
        reply = error_reply(
            _refusal(exc, message or "malformed request", self.max_line_size),
            request_id_line(new_request_id()),
        )
        reply.force_close()
        return reply


def _refusal(exc: BaseException | None, message: str, max_line: Bytes) -> InvalidRequest:
    """The parser's complaint in words for whoever sent it."""
    if isinstance(exc, ContentEncodingError):
        return unknown_encoding()
    if isinstance(exc, LineTooLong):
        what = f"a line of the request's head is longer than {max_line} bytes"
    elif message.startswith("Pause on PRI"):
        what = "HTTP/2 is not spoken here; use HTTP/1.1"
    else:
        what = message.splitlines()[0].rstrip(":")
    return InvalidRequest(f"not valid HTTP: {what}")


_TOO_MANY = raw_reply(
    error_reply(Overloaded("too many connections", retry_after=1), b""), keep_alive=False
)


class ConnectionServer(web.Server):
    """Makes connections and counts them. Owned by the service."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        config: FrontendConfig,
        metrics: Metrics,
    ) -> None:
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._config = config
        self._limit = usable_connections(config.max_connections)
        self._open: set[Connection] = set()
        self.accepted = 0
        """Connections so far."""
        self.metrics = metrics

    def __call__(self) -> Connection:
        config = self._config
        return Connection(
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

    def register(self, connection: Connection) -> bool:
        """Count a connection in; False when there are too many."""
        self._open.add(connection)
        self.accepted += 1
        return len(self._open) <= self._limit

    def unregister(self, connection: Connection) -> None:
        self._open.discard(connection)

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
        """Drop every connection at once: the end of a shutdown."""
        for connection in tuple(self._open):
            if connection.socket is not None:
                connection.socket.abort()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        assert isinstance(protocol, Connection)
        protocol.busy = True
        protocol._body = payload
        protocol.partial_since = None
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop)
