"""The node's end of the socket: one write per tick, garbage ends it, congestion shows."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from pdserve.engine.core_connection import CoreConnection
from pdserve.errors import ProtocolError
from pdserve.messages.engine import Abort, Command, EngineSpec, LoadProgress, StartCore
from pdserve.testing.sinks import until
from pdserve.wire.length_prefixed import FrameDecoder, encode_frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.engine import Event


class Pair:
    """A connection and the raw socket that plays the core."""

    connection: CoreConnection
    core: socket.socket

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def open(self) -> None:
        ours, self.core = socket.socketpair()
        self.core.setblocking(False)
        loop = asyncio.get_running_loop()
        self.connection = CoreConnection(loop, self.events.append)
        await loop.create_unix_connection(lambda: self.connection, sock=ours)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.open()
    yield pair
    pair.connection.close()
    await pair.connection.lost
    pair.core.close()


async def test_everything_posted_in_a_tick_leaves_in_one_write(pair: Pair):
    writes: list[bytes] = []
    transport = cast("asyncio.Transport", pair.connection._transport)
    commands: list[Command] = [Abort(handle=n) for n in range(100)]

    class Spy:
        def write(self, data: bytes) -> None:
            writes.append(data)

        def is_closing(self) -> bool:
            return False

        def abort(self) -> None:
            transport.abort()

    pair.connection._transport = Spy()  # type: ignore[assignment]
    for command in commands:
        pair.connection.post(command)
    assert writes == []
    await asyncio.sleep(0)
    (data,) = writes
    assert [msgspec.msgpack.decode(b, type=Command) for b in FrameDecoder().feed(data)] == commands
    pair.connection.post(commands[0])
    await asyncio.sleep(0)
    assert len(writes) == 2


async def test_events_are_handed_on_in_order(pair: Pair):
    events = [LoadProgress(stage=str(n)) for n in range(50)]
    data = encode_frames(map(msgspec.msgpack.encode, events))
    pair.core.sendall(data[:77])
    await until(lambda: bool(pair.events))
    pair.core.sendall(data[77:])
    await until(lambda: len(pair.events) == 50)
    assert pair.events == events


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", encode_frames([b"\xc1"]), b"\0\0\0\0"])
async def test_garbage_ends_the_connection_with_the_reason(pair: Pair, garbage: bytes):
    pair.core.sendall(garbage)
    async with asyncio.timeout(5):
        error = await asyncio.shield(pair.connection.lost)
    assert isinstance(error, ProtocolError)
    assert "unreadable" in error.message


async def test_a_core_that_hangs_up_is_a_loss_without_reason(pair: Pair):
    pair.core.close()
    async with asyncio.timeout(5):
        assert await asyncio.shield(pair.connection.lost) is None
    pair.connection.post(Abort(handle=1))  # nobody is there: nothing happens
    await asyncio.sleep(0)


async def test_a_core_that_does_not_read_makes_it_congested(pair: Pair):
    assert not pair.connection.congested

    command = StartCore(spec=EngineSpec(engine="x" * 3_000_000, model=""))
    for _ in range(4):
        pair.connection.post(command)
    await until(lambda: pair.connection.congested)
    while pair.connection.congested:
        try:
            pair.core.recv(1 << 20)
        except BlockingIOError:
            await asyncio.sleep(0)
