"""A small HTTP server for unknown clients, with limits on connections and on each of them.

It never refuses a new connection: at the limit, the host with the most connections loses its oldest
one. It does not know what clients ask for. Owned by the listener.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from pdserve.edge.bounded_parser import FramingBudget
from pdserve.edge.handler import BoundedHandler, make_request
from pdserve.edge.idle_connections import IdleConnections, host_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from pdserve.ids import Seconds

__all__ = ["BoundedServer"]


class BoundedServer(web.Server):
    """Creates connections. Used as an event loop's protocol factory."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        most: int,
        patience: Seconds,
    ) -> None:
        """`patience`: seconds after which a connection without a whole request ends."""
        super().__init__(handler, request_factory=make_request)
        self._most = most
        self._patience = patience
        self._open: IdleConnections[_Connection] = IdleConnections()
        self.room = FramingBudget()
        self.evicted = 0
        """Number of connections closed to make room."""

    def __call__(self) -> BoundedHandler:
        return _Connection(self, self._loop, self._patience)

    def register(self, connection: _Connection) -> None:
        """Registers a connection; another one may be closed for it."""
        self._open.add(connection, connection.host)
        if len(self._open) > self._most:
            victim = self._open.evict(connection) or connection
            self.evicted += 1
            victim.abort()

    def unregister(self, connection: _Connection) -> None:
        """Removes a connection. Idempotent."""
        self._open.remove(connection, connection.host)


class _Connection(BoundedHandler):
    __slots__ = ("_server", "_socket", "host")

    def __init__(
        self, server: BoundedServer, loop: asyncio.AbstractEventLoop, patience: Seconds
    ) -> None:
        super().__init__(
            server, server.room, loop=loop, keepalive_timeout=patience, access_log=None
        )
        self._server = server
        self._socket: asyncio.Transport | None = None
        self.host = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self.host = host_of(transport.get_extra_info("peername"))
        super().connection_made(transport)
        self._server.register(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.unregister(self)
        self._socket = None
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Does not log errors of clients: the answer has reported them."""

    def abort(self) -> None:
        """Closes it at once."""
        if self._socket is not None:
            self._socket.abort()
