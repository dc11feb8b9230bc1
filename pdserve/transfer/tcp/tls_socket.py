"""Bulk connections under TLS: the same frames, in one direction each.

One TLS session must not be used by two threads at once, so a path has two connections, one for what
each end sends. What this node has of a session belongs to the thread that sends or to the one that
receives. Nothing goes the other way: the listening side issues no session tickets, and TLS 1.3
has no renegotiation.
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
"""Of TLS. Shorter runs are gathered: each record costs as much as copying thousands of bytes."""


MAX_SESSION_BYTES: Final[Bytes] = 256 << 30
"""That one session may carry: TLS 1.3 allows AES-GCM 2^24.5 records of 16 KiB under one key, and
nothing here renews keys. The path ends then, and the next one has a session of its own."""


class TlsSocket(BulkSocket):
    """A connected TLS socket whose handshake is over; it is read or written, never both."""

    def __init__(self, connection: ssl.SSLSocket, progress: Seconds) -> None:
        super().__init__(connection, progress)
        self._tls = connection

    def _write(self, views: list[memoryview]) -> Bytes:
        """The same views again when there was no room, as TLS demands."""
        if self.sent >= MAX_SESSION_BYTES:
            raise OSError("the session has carried as much as its keys are good for")
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
        """What TLS has taken off the connection already, the system knows nothing of."""
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
    """A connection under TLS, before its handshake. Raises `OSError`."""
    context = tls.server if listening else tls.client
    if listening:
        context.num_tickets = 0
    return context.wrap_socket(connection, server_side=listening, do_handshake_on_connect=False)


def peer_fingerprint(connection: ssl.SSLSocket) -> bytes:
    """SHA-256 of the certificate that the other side has shown; empty: none."""
    certificate = connection.getpeercert(binary_form=True)
    return hashlib.sha256(certificate).digest() if certificate else b""
