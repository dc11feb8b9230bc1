"""Bytes over TCP, with TLS if the node has certificates.

Under TLS the encryption's own handshake comes before ours and is the stranger's first chance to
cost us something: it has the same deadline and the same bound (`Pending`) as ours."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError, DialFailed, DialRefused, DialTimeout, HandshakeRefused
from pdserve.net.address import join, split
from pdserve.net.admission import Pending
from pdserve.net.complaints import Complaints

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.base import Listener
    from pdserve.net.settings import NetSettings
    from pdserve.net.tls import Tls

__all__ = ["TcpNetwork"]

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_ACCEPT_PAUSE: Final = 1.0
"""After an error that retrying at once would only repeat, such as too many open files."""


class TcpNetwork:
    """See `base.ByteNetwork`."""

    def __init__(self, settings: NetSettings, tls: Tls | None = None) -> None:
        self._settings = settings
        self._tls = tls

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        return b"" if self._tls is None else self._tls.binding(transport)

    async def listen(self, address: str, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        host, port = split(address)
        loop = asyncio.get_running_loop()
        try:
            if self._tls is not None:
                sockets = await _bind(loop, host, port)
                return _TlsListener(loop, sockets, self._tls, self._settings, factory)
            server = await loop.create_server(factory, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, error) from None
        return _TcpListener(server)

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        host, port = split(address)
        loop = asyncio.get_running_loop()
        details: dict[str, Any] = {}
        if self._tls is not None:
            details = {
                "ssl": self._tls.client,
                "server_hostname": "",  # not compared, see `tls`
                "ssl_handshake_timeout": timeout,
            }
        try:
            async with asyncio.timeout(timeout):
                await loop.create_connection(factory, host, port, **details)
        except TimeoutError:
            raise DialTimeout(f"{address} did not answer within {timeout:g} s") from None
        except ConnectionRefusedError:
            raise DialRefused(f"nobody listens at {address}") from None
        except ssl.SSLError as error:
            raise HandshakeRefused(f"{address}: TLS: {_tls_words(error)}") from None
        except OSError as error:
            raise DialFailed(f"{address}: {error.strerror or error}") from None


class _TcpListener:
    """See `base.Listener`."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.address = _name(server.sockets[0])

    async def close(self) -> None:
        self._server.close()  # not `wait_closed`: accepted connections go on


class _TlsListener:
    """Accepts by hand, so that unfinished TLS handshakes are counted and bounded."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: list[socket.socket],
        tls: Tls,
        settings: NetSettings,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._loop = loop
        self._sockets = sockets
        self._tls = tls
        self._settings = settings
        self._factory = factory
        self._pending: Pending[asyncio.Task[None]] = Pending(settings.pending_handshakes)
        self._complaints = Complaints()
        self._resuming: asyncio.TimerHandle | None = None
        self.address = _name(sockets[0])
        self._watch()

    def _watch(self) -> None:
        self._resuming = None
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _unwatch(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        """Take what waits, up to a backlog's worth before others get their turn."""
        for _ in range(_BACKLOG):
            try:
                accepted, peername = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("cannot accept on %s for now: %s", self.address, error)
                self._unwatch()
                self._resuming = self._loop.call_later(_ACCEPT_PAUSE, self._watch)
                return
            accepted.setblocking(False)
            host = str(peername[0])
            task = self._loop.create_task(self._encrypt(accepted, host), name=f"tls accept {host}")
            victim = self._pending.add(task, host)
            task.add_done_callback(partial(self._accepted, host))
            if victim is not None:
                victim.cancel()

    def _accepted(self, host: str, task: asyncio.Task[None]) -> None:
        self._pending.remove(task, host)

    async def _encrypt(self, accepted: socket.socket, host: str) -> None:
        """The TLS handshake; who fails it is told to the operator, but not too often."""
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                accepted,
                ssl=self._tls.server,
                ssl_handshake_timeout=self._settings.handshake_timeout,
            )
        except OSError as error:
            suppressed = self._complaints.admit("tls", self._loop.time())
            if suppressed is not None:
                more = f" ({suppressed} more like it were not logged)" if suppressed else ""
                words = _tls_words(error)
                _log.warning("refused a connection from %s: TLS: %s%s", host, words, more)

    async def close(self) -> None:
        self._unwatch()
        if self._resuming is not None:
            self._resuming.cancel()
        for listening in self._sockets:
            listening.close()
        unfinished = self._pending.drain()
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)


async def _bind(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`. Raises `OSError`."""
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, name in found:
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind(name)
            listening.listen(_BACKLOG)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def _name(listening: socket.socket) -> str:
    name = listening.getsockname()
    return join(name[0], name[1])


def _tls_words(error: OSError) -> str:
    """What a person can act on; to OpenSSL a peer without TLS has a strange version."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "the peer does not use it: give all nodes --tls-cert, or none"
    return str(error)


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    number = error.errno or 0  # those of name resolution are negative
    cause = os.strerror(number) if number > 0 else error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {address}: {cause}; choose another --listen", param="listen"
    )
