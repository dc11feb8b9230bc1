"""The first bytes of a bulk connection, on the loop: TLS if there is any, and who knows the secret.

Plain sockets and TLS ones are greeted alike. When it is over the connection goes to a thread.
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
    """As bulk connections are."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def tls_handshake(connection: ssl.SSLSocket) -> None:
    """Agree on keys. Raises `OSError`."""
    await _done(connection, connection.do_handshake, write=False)


async def send_all(connection: socket.socket, data: bytes) -> None:
    """All of it. Raises `OSError`."""
    while data:
        data = data[await _done(connection, partial(connection.send, data), write=True) :]


async def receive_exactly(connection: socket.socket, size: Bytes) -> bytes:
    """So many bytes. Raises `PlanError` when the connection ends before."""
    found = b""
    while len(found) < size:
        step = partial(connection.recv, size - len(found))
        piece = await _done(connection, step, write=False)
        if not piece:
            raise PlanError("the connection ended before it had shown its secret")
        found += piece
    return found


def proof(token: bytes) -> bytes:
    """Shows that one knows the secret too, without showing it back."""
    return hashlib.blake2b(token, digest_size=TOKEN_BYTES, person=b"pdserve-tcp").digest()


async def _done(connection: socket.socket, step: Callable[[], R], *, write: bool) -> R:
    """Try until the connection lets it be done; `write`: what a plain one waits for."""
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
    """Cancellation: nothing is left behind."""
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
