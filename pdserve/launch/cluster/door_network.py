"""Connects an admin client with the nodes behind a server's admin socket (`admin_door`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ConfigError, DialFailed, DialRefused, DialTimeout
from pdserve.launch.cluster.admin_door import LONGEST, PREFIX, DoorAnswer, DoorQuery, framed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.ids import Seconds
    from pdserve.net.base import NetListener

__all__ = ["DoorNetwork"]


class DoorNetwork:
    """Connections through one admin socket; implements `net.base.ByteNetwork`. It only dials.

    The path itself is an address, too: that of any node of the server.
    """

    def __init__(self, path: Path, on_answer: Callable[[DoorAnswer], None]) -> None:
        """`on_answer` hears the cluster's name and key before the handshake begins."""
        self.path = path
        """The socket; it may be replaced by that of a server that follows."""
        self._on_answer = on_answer

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        return b""

    async def listen(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> NetListener:
        raise ConfigError("nothing can listen at an admin socket of another process")

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout):
                await self._enter(connection, "" if address == str(self.path) else address)
                loop = asyncio.get_running_loop()
                await loop.create_unix_connection(factory, sock=connection)
        except TimeoutError:
            connection.close()
            raise DialTimeout(f"{self.path} did not answer within {timeout:g} s") from None
        except OSError as error:
            connection.close()
            raise _unreachable(self.path, error) from None
        except BaseException:
            connection.close()
            raise

    async def _enter(self, connection: socket.socket, to: str) -> None:
        """Asks for a node. Errors: `DialFailed`, `OSError`."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, str(self.path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # It may be closed already, after an answer that says why.
            await loop.sock_sendall(connection, framed(DoorQuery(to)))
        (size,) = PREFIX.unpack(await _exactly(connection, PREFIX.size))
        if size > LONGEST:
            raise DialFailed(f"what listens at {self.path} is no pdserve")
        try:
            answer = msgspec.json.decode(await _exactly(connection, size), type=DoorAnswer)
            bytes.fromhex(answer.key)
        except (msgspec.DecodeError, ValueError):
            raise DialFailed(f"what listens at {self.path} is no pdserve") from None
        if answer.error:
            raise DialFailed(f"{self.path}: {answer.error}")
        self._on_answer(answer)


async def _exactly(connection: socket.socket, size: int) -> bytes:
    """Reads just so many bytes, since those after them belong to the link."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise DialFailed("the server ended the connection")
        data += more
    return data


def _unreachable(path: Path, error: OSError) -> DialFailed:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return DialRefused(f"no server listens at {path}")
    return DialFailed(f"{path}: {error.strerror or error}")
