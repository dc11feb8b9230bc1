"""Serves `/live`, `/health` and `/metrics` on a port of their own, without API keys.

Every role can open one (`--metrics-port`), so that probes and scrapes do not compete with requests
for connections and need no public address. Input is bounded as on the API's port (`edge`). At the
bound of connections, the host with the most loses its oldest one, so that new connections are
always accepted. Owned by the process's start-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError
from pdserve.observe.scrapes import CachedPages, ScrapeForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from pdserve.edge.hosts import HostRule
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.scrapes import ScrapeHandler

_SHUTDOWN = 1.0
"""Seconds for a scrape in progress to end."""
_PATIENCE = 15.0
"""Seconds without a complete request after which a connection is closed; a scraper opens another.
"""
_MAX_CONNECTIONS = 256
"""Most connections; each takes a file descriptor from requests."""


class ProbeServer:
    """The probe listener: `start`, then `stop`, on one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: ScrapeHandler,
        degradations: Degradations,
        unready_reason: Callable[[], str | None],
    ) -> None:
        """Args: `unready_reason` returns None when the role can work."""
        self._host = host
        self._port = port
        self._made = pages
        self._degradations = degradations
        self._unready_reason = unready_reason
        self._listener: asyncio.Server | None = None
        self._hosts: HostRule | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; valid after `start`."""
        assert self._listener is not None, "not started"
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Starts to listen. Raises `ConfigError` if the address is not available."""
        # aiohttp takes a while to import, and only a process that listens needs it.
        from pdserve.edge.hosts import HostRule, is_loopback
        from pdserve.edge.server import BoundedServer

        # By DNS rebinding a page of another site could read a loopback port; the rule refuses it.
        if is_loopback(self._host):
            self._hosts = HostRule((self._host,))
        self._server = BoundedServer(self._handle, _MAX_CONNECTIONS, _PATIENCE)
        loop = asyncio.get_running_loop()
        self._pages = CachedPages(self._made, loop.time)
        try:
            self._listener = await loop.create_server(self._server, self._host, self._port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error}; choose another "
                "--metrics-port",
                param="metrics_port",
            ) from None

    async def stop(self) -> None:
        """Closes the listener and its connections. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            self._server.pre_shutdown()
            await self._server.shutdown(_SHUTDOWN)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        if self._hosts is not None and (why := self._hosts.refusal(request.headers.get("Host"))):
            return web.json_response({"error": why.partition(";")[0]}, status=403)
        if request.method not in ("GET", "HEAD"):
            return web.json_response({"error": "only GET"}, status=405, headers={"Allow": "GET"})
        if request.path == "/live":
            return web.json_response({"status": "ok"})
        if request.path == "/health":
            return self._health()
        if request.path == "/metrics":
            return await self._metrics(request)
        return web.json_response({"error": "only /live, /health and /metrics"}, status=404)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        from aiohttp import web

        try:
            form = ScrapeForm.asked(
                request.headers.get("Accept", ""),
                request.headers.get("Accept-Encoding", ""),
                request.query.get("names"),
                self._made.names,
            )
        except PdserveError as error:
            return web.json_response({"error": error.message}, status=400)
        page = await self._pages.page(form)
        headers = {"Content-Type": page.content_type}
        if page.encoding:
            headers["Content-Encoding"] = page.encoding
        return web.Response(body=page.body, headers=headers)

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
