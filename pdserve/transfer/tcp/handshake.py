"""Authenticates bulk connections on the event loop: TLS if configured, then proof of a secret.

Plain sockets and TLS sockets are handled alike. A thread takes the connection afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from pdserve.transfer.copy_plan import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes

__all__ = [
    "TOKEN_BYTES",
    "proof",
    "receive_exactly",
    "send_all",
    "set_socket_options",
    "tls_handshake",
]

TOKEN_BYTES: Final[Bytes] = 32

R = TypeVar("R")


def set_socket_options(connection: socket.socket) -> None:
    """Set the options of bulk connections."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def tls_handshake(connection: ssl.SSLSocket) -> None:
    """Do the TLS handshake. Errors: `OSError`."""
    await _done(connection, connection.do_handshake, write=False)


async def send_all(connection: socket.socket, data: bytes) -> None:
    """Send all bytes. Errors: `OSError`."""
    while data:
        data = data[await _done(connection, partial(connection.send, data), write=True) :]


async def receive_exactly(connection: socket.socket, size: Bytes) -> bytes:
    """Receive exactly so many bytes. Errors: `PlanError` if the connection ends before,
    `OSError`."""
    found = b""
    while len(found) < size:
        step = partial(connection.recv, size - len(found))
        piece = await _done(connection, step, write=False)
        if not piece:
            raise PlanError("the peer ended the connection before it proved the path's secret")
        found += piece
    return found


def proof(token: bytes) -> bytes:
    """A proof of knowing the secret, without sending it back."""
    return hashlib.blake2b(token, digest_size=TOKEN_BYTES, person=b"pdserve-tcp").digest()


async def _done(connection: socket.socket, step: Callable[[], R], *, write: bool) -> R:
    """Retry until the connection allows it; `write`: wait until a plain socket is writable, else
    readable."""
    while True:
        try:
            return step()
        except ssl.SSLWantWriteError:
            await _ready(connection, write=True)
        except ssl.SSLWantReadError:
            await _ready(connection, write=False)
        except (BlockingIOError, InterruptedError):
            await _ready(connection, write=write)


async def _ready(connection: socket.socket, *, write: bool) -> None:
    """Wait for the socket. Cancellation: removes the event loop's callback."""
    loop, number = asyncio.get_running_loop(), connection.fileno()
    ready = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    )
    add(number, _set, ready)
    try:
        await ready
    finally:
        remove(number)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
