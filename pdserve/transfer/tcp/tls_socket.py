"""Runs bulk connections under TLS: the same frames, one direction on each connection.

Two threads must not use one TLS session at a time, so a path has two connections, one for what each
end sends. On this node, each session belongs to one thread, which sends or receives. Nothing goes
the other way: the listening side issues no session tickets, and TLS 1.3 has no renegotiation.
"""

from __future__ import annotations

import hashlib
import select
import ssl
from typing import TYPE_CHECKING, Final

from pdserve.transfer.tcp.framing import BulkSocket

if TYPE_CHECKING:
    import socket

    from pdserve.ids import Bytes, Seconds
    from pdserve.net.transport.tls import Tls

__all__ = ["TlsSocket", "peer_fingerprint", "wrap_tls"]

_RECORD: Final[Bytes] = 16 << 10
"""Bytes of a TLS record. Shorter runs are gathered, since each record costs as much as copying
thousands of bytes."""


MAX_SESSION_BYTES: Final[Bytes] = 256 << 30
"""Most bytes of one session: TLS 1.3 allows AES-GCM 2^24.5 records of 16 KiB under one key, and
keys are not renewed here. Then the path ends, and the next one has a new session."""


class TlsSocket(BulkSocket):
    """A connected TLS socket after its handshake; it is used to read or to write, never both."""

    def __init__(self, connection: ssl.SSLSocket, progress: Seconds) -> None:
        super().__init__(connection, progress)
        self._tls = connection

    def _write(self, views: list[memoryview]) -> Bytes:
        """Send; after a lack of room the same views must be given again, as TLS demands."""
        if self.sent >= MAX_SESSION_BYTES:
            raise OSError("the TLS session has reached its byte limit")
        try:
            return self._tls.send(_gathered(views))
        except ssl.SSLWantWriteError:
            return 0

    def _read(self, views: list[memoryview]) -> Bytes | None:
        try:
            return self._tls.recv_into(views[0])
        except ssl.SSLWantReadError:
            return None

    def _is_ready(self, events: int, patience: Seconds | None) -> bool:
        """True also if TLS has decrypted bytes that the socket no longer shows."""
        if events == select.POLLIN and self._tls.pending():
            return True
        return super()._is_ready(events, patience)


def _gathered(views: list[memoryview]) -> memoryview | bytes:
    if len(views) == 1 or len(views[0]) >= _RECORD:
        return views[0][:_RECORD]
    count = size = 0
    while count < len(views) and size < _RECORD:
        size += len(views[count])
        count += 1
    return b"".join(views[:count])[:_RECORD]


def wrap_tls(connection: socket.socket, tls: Tls, *, listening: bool) -> ssl.SSLSocket:
    """Put a connection under TLS, before its handshake. Errors: `OSError`."""
    context = tls.server if listening else tls.client
    if listening:
        context.num_tickets = 0
    return context.wrap_socket(connection, server_side=listening, do_handshake_on_connect=False)


def peer_fingerprint(connection: ssl.SSLSocket) -> bytes:
    """SHA-256 of the other side's certificate; empty: it has shown none."""
    certificate = connection.getpeercert(binary_form=True)
    return hashlib.sha256(certificate).digest() if certificate else b""
