"""Posts encoded spans to a collector over HTTP, under a deadline.

It knows no OTLP and never tries again. The exporter owns it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.name_lookup import look_up
from pdserve.tracing.export.delivery import CollectorAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.connector import AddrInfoType

    from pdserve.ids import Bytes, Seconds
    from pdserve.tracing.export.otel_env import OtelSettings

__all__ = ["Collector", "HttpCollector"]

_MOST_ANSWER: Final[Bytes] = 64 << 10
"""Bytes of an answer that are read: a partial success is shorter."""
_HEADERS: Final = {
    "Content-Type": "application/json",
    "User-Agent": f"pdserve/{__version__}",
    "Accept-Encoding": "identity",
}
_NO_LINGER: Final = struct.pack("ii", 1, 0)
"""For SO_LINGER: what is not sent is discarded when the socket is closed."""


class Collector(Protocol):
    """Takes request bodies."""

    async def post(self, body: bytes, *, gzip: bool, timeout: Seconds) -> CollectorAnswer:
        """Send one body. It does not raise, except when cancelled."""
        ...

    async def close(self) -> None: ...


class HttpCollector:
    """A collector at a URL. Use it on one event loop."""

    def __init__(self, url: str, settings: OtelSettings) -> None:
        """Errors: `ConfigError` if certificates cannot be used."""
        self._url = url
        self._headers: Mapping[str, str] = {**settings.headers, **_HEADERS}
        self._tls = _tls_of(settings) if url.startswith("https:") else True
        self._session: aiohttp.ClientSession | None = None
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def post(self, body: bytes, *, gzip: bool, timeout: Seconds) -> CollectorAnswer:
        headers = {**self._headers, "Content-Encoding": "gzip"} if gzip else self._headers
        try:
            async with self._opened().post(
                self._url,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as reply:
                return CollectorAnswer(
                    reply.status,
                    reply.headers.get("Retry-After", ""),
                    await _beginning(reply.content),
                )
        except TimeoutError:
            self._cut()
            return CollectorAnswer(failure=f"it does not answer within {timeout:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._cut()
            return CollectorAnswer(failure=_in_words(error))
        except BaseException:
            self._cut()
            raise

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=1,
                    ssl=self._tls,
                    resolver=_Resolver(),
                    socket_factory=self._socket,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    def _socket(self, address: AddrInfoType) -> socket.socket:
        made = socket.socket(*address[:3])
        self._sockets.add(made)
        return made

    def _cut(self) -> None:
        """End the connection at once. A connection that is merely closed waits, with all that it
        has yet to send, until the collector reads; one that is stopped never does."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                each.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()


class _Resolver(AbstractResolver):
    """Looks up the collector's name: aiohttp's own lookups can delay the end of the process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await look_up(host, port, family=family, flags=socket.AI_ADDRCONFIG)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=each,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for each, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Nothing is open here."""


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    read = b""
    while len(read) < _MOST_ANSWER and (part := await content.read(_MOST_ANSWER - len(read))):
        read += part
    return read


def _in_words(error: Exception) -> str:
    """One line without the URL, which may hold a password."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", error.certificate_error)
        remedy = "name who signed it in OTEL_EXPORTER_OTLP_CERTIFICATE"
        return f"its certificate is not trusted ({why}): {remedy}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {_reason(error.os_error)}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closes the connection without an answer"
    if isinstance(error, aiohttp.InvalidURL):
        return "its URL cannot be used"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"what answers does not speak HTTP: {' '.join(error.message.split())}"[:200]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _reason(error: OSError) -> str:
    """The system's words, without those of the library around them."""
    # asyncio puts the address into the words; errors of TLS and of names have numbers of their own.
    if isinstance(error, ssl.SSLError | socket.gaierror) or not error.errno:
        return str(error.strerror or error)
    return os.strerror(error.errno).lower()


def _tls_of(settings: OtelSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.certificate)
        if settings.client_certificate is not None:
            context.load_cert_chain(settings.client_certificate, settings.client_key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the certificates of OTEL_EXPORTER_OTLP_CERTIFICATE, …_CLIENT_CERTIFICATE and "
            f"…_CLIENT_KEY cannot be used: {error}"
        ) from None
    return context
