"""The limit: a bare uvloop `Protocol` with length-prefixed msgpack, and nothing else.

It has no deadlines, types, credit, authentication or limits: only the event loop, the socket, the
codec and a future per call. It also merges the writes of one turn of the loop.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, cast

import msgpack

from bench.bus_arms.base import BURST, Arm, Tally

if TYPE_CHECKING:
    from collections.abc import Awaitable

_LENGTH = struct.Struct(">I")


class _Bare(asyncio.Protocol):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tail = b""
        self.out: list[bytes] = []
        self.due = False
        self.full: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(1 << 20, 1 << 18)

    def data_received(self, data: bytes) -> None:
        if self.tail:
            data = self.tail + data
        position, end = 0, len(data)
        while end - position >= 4:
            (length,) = _LENGTH.unpack_from(data, position)
            stop = position + 4 + length
            if stop > end:
                break
            self.received(msgpack.unpackb(data[position + 4 : stop]))
            position = stop
        self.tail = data[position:]

    def received(self, message: list[Any]) -> None:
        raise NotImplementedError

    def send(self, message: list[Any]) -> None:
        body = msgpack.packb(message)
        self.out.append(_LENGTH.pack(len(body)))
        self.out.append(body)
        if not self.due:
            self.due = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        self.due = False
        out, self.out = self.out, []
        self.transport.write(b"".join(out))

    def pause_writing(self) -> None:
        self.full = self.loop.create_future()

    def resume_writing(self) -> None:
        if self.full is not None:
            self.full.set_result(None)
            self.full = None


class _Server(_Bare):
    """Message: [call, payload]; call 0 is one way, with a number in front of the payload."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def received(self, message: list[Any]) -> None:
        call, payload, number = message
        if call:
            self.send([call, payload if number == 0 else self.tally.take(), 0])
        else:
            self.tally.add(number)


class _Client(_Bare):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.last = 0

    def received(self, message: list[Any]) -> None:
        self.calls.pop(message[0]).set_result(message[1])

    async def ask(self, payload: bytes, number: int = 0) -> Any:
        future = self.loop.create_future()
        self.last += 1
        self.calls[self.last] = future
        self.send([self.last, payload, number])
        return await future


class Bare(Arm):
    name = "bare"
    about = "uvloop Protocol, length-prefixed msgpack: the limit"

    async def serve(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(_Server, "127.0.0.1", port)

    async def connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, self.client = await loop.create_connection(_Client, "127.0.0.1", port)

    def call(self, payload: bytes) -> Awaitable[Any]:
        return self.client.ask(payload)

    async def close(self) -> None:
        self.client.transport.abort()

    async def publish(self, count: int, payload: bytes) -> int:
        client = self.client
        for number in range(count):
            client.send([0, payload, number])
            if number % BURST == 0:
                await asyncio.sleep(0)
                if client.full is not None:
                    await client.full
        return int(await client.ask(b"", 1))
