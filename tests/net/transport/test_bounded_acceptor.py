"""Strangers on listening sockets: so many, and a pause when nothing more can be opened."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import warnings

from pdserve.net.transport.bounded_acceptor import BoundedAcceptor
from pdserve.net.transport.sockets import bind_all, resolve_now


class Scene:
    """Connections that are asked nothing, and stay until they are cancelled."""

    def __init__(self, bound: int) -> None:
        self.welcomed: asyncio.Queue[str] = asyncio.Queue()
        self.ended = 0
        self.accepting = BoundedAcceptor(
            bind_all(resolve_now("127.0.0.1", 0), 8), bound, self.welcome
        )

    async def welcome(self, connection: socket.socket, host: str) -> None:
        self.welcomed.put_nowait(host)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1
            connection.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        stream = await asyncio.open_connection("127.0.0.1", self.accepting.port)
        async with asyncio.timeout(10):
            await self.welcomed.get()
        return stream


async def test_beyond_the_bound_the_oldest_goes() -> None:
    scene = Scene(bound=2)
    streams = [await scene.connect() for _ in range(3)]
    assert await streams[0][0].read() == b"", "it was sent away"
    assert (scene.accepting.pending, scene.accepting.evicted, scene.ended) == (2, 1, 1)
    await scene.accepting.close()
    assert scene.ended == 3
    for _, writer in streams:
        writer.close()


async def test_in_a_burst_those_without_a_turn_are_closed_too() -> None:
    scene = Scene(bound=2)
    arriving = [socket.create_connection(("127.0.0.1", scene.accepting.port)) for _ in range(6)]
    with warnings.catch_warnings(record=True) as left_to_chance:
        warnings.simplefilter("always", ResourceWarning)
        async with asyncio.timeout(10):
            for _ in range(2):
                await scene.welcomed.get()
        assert scene.accepting.evicted == 4
        await scene.accepting.close()
        gc.collect()
    for each in arriving:
        assert each.recv(1) == b""
        each.close()
    assert not [one for one in left_to_chance if issubclass(one.category, ResourceWarning)]


class FullUp(socket.socket):
    """In a process that may open no more files."""

    def accept(self) -> None:  # type: ignore[override]
        raise OSError(errno.EMFILE, "Too many open files")


async def test_without_files_it_pauses_instead_of_spinning(monkeypatch) -> None:
    monkeypatch.setattr("pdserve.net.transport.bounded_acceptor._PAUSE", 0.05)
    scene = Scene(bound=8)
    with FullUp() as full:
        scene.accepting._accept(full)
        assert scene.accepting.paused
        _, writer = await scene.connect()  # after the pause
        assert not scene.accepting.paused
        scene.accepting._accept(full)
    await scene.accepting.close()
    writer.close()


async def test_a_bug_of_the_owner_closes_the_connection(caplog) -> None:
    async def welcome(connection: socket.socket, host: str) -> None:
        raise ValueError("a bug")

    accepting = BoundedAcceptor(bind_all(resolve_now("127.0.0.1", 0), 8), 8, welcome)
    reader, writer = await asyncio.open_connection("127.0.0.1", accepting.port)
    assert await reader.read() == b""
    assert "could not be set up" in caplog.text
    writer.close()
    await accepting.close()
