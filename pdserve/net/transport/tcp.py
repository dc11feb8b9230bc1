"""Carries bytes over TCP, with TLS if the node has certificates.

The TLS handshake comes before the cluster's own, so it is the first work that an unknown peer can
cause on this node. It has the same deadline and the same bound (`PendingHandshakes`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError, DialFailed, DialRefused, DialTimeout, HandshakeRefused
from pdserve.net.address import join, split
from pdserve.net.log_throttle import LogThrottle
from pdserve.net.transport.bounded_acceptor import BoundedAcceptor
from pdserve.net.transport.sockets import bind_all, connect_any, resolve
from pdserve.net.transport.tls import Tls

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.base import NetListener
    from pdserve.net.settings import NetSettings
    from pdserve.net.transport.tls import TlsSource

__all__ = ["TcpNetwork"]

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024


class TcpNetwork:
    """Connects addresses by TCP, with TLS if configured; implements `net.base.ByteNetwork`."""

    def __init__(self, settings: NetSettings, tls: TlsSource | None = None) -> None:
        self._settings = settings
        self._tls = tls

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        return b"" if self._tls is None else Tls.binding(transport)

    async def listen(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> NetListener:
        host, port = split(address)
        loop = asyncio.get_running_loop()
        try:
            sockets = bind_all(await resolve(host, port, passive=True), _BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, error) from None
        if self._tls is not None:
            return _TlsListener(sockets, self._tls, self._settings, factory)
        name = sockets[0].getsockname()
        servers = [
            await loop.create_server(factory, sock=listening, backlog=_BACKLOG)
            for listening in sockets
        ]
        return _TcpListener(servers, join(name[0], name[1]))

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        host, port = split(address)
        loop = asyncio.get_running_loop()
        details: dict[str, Any] = {}
        if self._tls is not None:
            details = {
                "ssl": self._tls.current().client,
                "server_hostname": "",  # not compared, see `tls`
                "ssl_handshake_timeout": timeout,
            }
        try:
            async with asyncio.timeout(timeout):
                connection = await connect_any(host, port)
                await loop.create_connection(factory, sock=connection, **details)
        except TimeoutError:
            raise DialTimeout(f"{address} did not answer within {timeout:g} s") from None
        except ConnectionRefusedError:
            raise DialRefused(f"nothing listens at {address}") from None
        except ssl.SSLError as error:
            raise HandshakeRefused(f"{address}: TLS: {_tls_words(error)}") from None
        except OSError as error:
            raise DialFailed(f"{address}: {error.strerror or error}") from None


class _TcpListener:
    """An open TCP listening address."""

    def __init__(self, servers: list[asyncio.Server], address: str) -> None:
        self._servers = servers
        self.address = address

    async def close(self) -> None:
        for server in self._servers:
            # Without `wait_closed`, because accepted connections go on.
            server.close()


class _TlsListener:
    """Counts and bounds unfinished TLS handshakes."""

    def __init__(
        self,
        sockets: list[socket.socket],
        tls: TlsSource,
        settings: NetSettings,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._timeout = settings.handshake_timeout
        self._factory = factory
        self._complaints = LogThrottle()
        self._accepting = BoundedAcceptor(sockets, settings.pending_handshakes, self._encrypt)
        self.address = self._accepting.address

    async def _encrypt(self, accepted: socket.socket, host: str) -> None:
        """Does the TLS handshake; logs a failure, with a limit on the number of log lines."""
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                accepted,
                ssl=self._tls.current().server,
                ssl_handshake_timeout=self._timeout,
            )
        except OSError as error:
            suppressed = self._complaints.admit("tls", self._loop.time())
            if suppressed is not None:
                more = f" ({suppressed} more like it were not logged)" if suppressed else ""
                words = _tls_words(error)
                _log.warning("refused a connection from %s: TLS: %s%s", host, words, more)

    async def close(self) -> None:
        await self._accepting.close()


def _tls_words(error: OSError) -> str:
    """The error in words that an operator can act on; OpenSSL reports a peer without TLS as a wrong
    version."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "the peer does not use it: give all nodes --tls-cert, or none"
    return str(error)


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    # Errors of name resolution have negative numbers.
    number = error.errno or 0
    cause = os.strerror(number) if number > 0 else error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {address}: {cause}; choose another --listen", param="listen"
    )
