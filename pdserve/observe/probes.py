"""A listener of its own for whoever watches: `/live`, `/health` and `/metrics`, no API keys.

Every role can open one (`--metrics-port`), so that probes and scrapes neither compete with requests
for connections nor need a place on the public address. It knows nothing of requests. Owned by the
process's start-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from pdserve import __version__
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Pages

_SHUTDOWN = 1.0
"""Seconds for a scrape in progress to end."""
_PATIENCE = 15.0
"""Seconds without a whole request before a connection is closed; a scraper just opens another."""
_MAX_CONNECTIONS = 256
"""One more is dropped at once: each takes a file from those that requests need."""


class ProbeServer:
    """`start`, then `stop`, on one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        degradations: Degradations,
        unready_reason: Callable[[], str | None],
    ) -> None:
        """`unready_reason` is None when the role can do its work."""
        self._host = host
        self._port = port
        self._pages = pages
        self._degradations = degradations
        self._unready_reason = unready_reason
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is listened on. Only after `start`."""
        assert self._listener is not None, "not started"
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen. Errors: `ConfigError` when the address cannot be had."""
        from aiohttp import web

        self._server = web.Server(self._handle, access_log=None, keepalive_timeout=_PATIENCE)
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._accept, self._host, self._port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error}; choose another "
                "--metrics-port",
                param="metrics_port",
            ) from None

    async def stop(self) -> None:
        """Close the listener and its connections. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            self._server.pre_shutdown()
            await self._server.shutdown(_SHUTDOWN)

    def _accept(self) -> asyncio.BaseProtocol:
        crowded = len(self._server.connections) >= _MAX_CONNECTIONS
        return _Refusal() if crowded else self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        if request.method not in ("GET", "HEAD"):
            return web.json_response({"error": "only GET"}, status=405, headers={"Allow": "GET"})
        if request.path == "/live":
            return web.json_response({"status": "ok"})
        if request.path == "/health":
            return self._health()
        if request.path == "/metrics":
            page, content_type = await self._pages.page(request.headers.get("Accept", ""))
            return web.Response(body=page, headers={"Content-Type": content_type})
        return web.json_response({"error": "only /live, /health and /metrics"}, status=404)

    def _health(self) -> web.Response:
        from aiohttp import web

        reason = self._unready_reason()
        body = {
            "status": _status(reason),
            "reason": reason,
            "degraded": dict(self._degradations.reasons()),
            "version": __version__,
        }
        status = 200 if reason is None else 503
        return web.json_response(body, status=status)


def _status(reason: str | None) -> str:
    if reason is None:
        return "ok"
    return "draining" if reason.startswith(("draining", "drained")) else "unavailable"


class _Refusal(asyncio.Protocol):
    """Drops its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()
