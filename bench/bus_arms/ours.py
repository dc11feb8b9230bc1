"""pdserve's links: typed bodies, deadlines, credit and authentication, with every limit on."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from bench.bus_arms.base import BURST, Arm, Tally
from pdserve.ids import NodeId
from pdserve.net.endpoint import Endpoint
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.wire.codec import Method, decoder, encode
from pdserve.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from pdserve.net.base import IncomingCall, IncomingStream, Link, LinkDownReason
    from pdserve.wire.parser import Buffer

_KEY = (b"a key for measurements, 32 bytes long",)
_TIMEOUT = 30.0


class Payload(msgspec.Struct, frozen=True, array_like=True):
    payload: bytes


class Item(msgspec.Struct, frozen=True, array_like=True):
    number: int
    payload: bytes


class Count(msgspec.Struct, frozen=True, array_like=True):
    count: int


ECHO = Method(1, "echo", Payload, Payload)
_ITEMS = 1
_decode_item = decoder(Item)
_decode_count = decoder(Count)


class _Reader:
    """Counts items and reports at the end."""

    def __init__(self, stream: IncomingStream) -> None:
        self.stream = stream
        self.tally = Tally()

    def on_data(self, body: Buffer) -> None:
        self.tally.add(_decode_item(body).number)

    def on_end(self, error: BaseException | None) -> None:
        if error is None:
            self.stream.try_send(encode(Count(self.tally.take())), last=True)

    def on_unblocked(self) -> None: ...


class _Writer:
    """Waits for credit, and for the reader's report."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.count = -1

    def on_data(self, body: Buffer) -> None:
        self.count = _decode_count(body).count
        self.changed.set()

    def on_end(self, error: BaseException | None) -> None: ...

    def on_unblocked(self) -> None:
        self.changed.set()

    async def wait(self) -> None:
        """Waits until anything changes."""
        self.changed.clear()
        await self.changed.wait()


class _Handler:
    def on_link_up(self, link: Link) -> None: ...

    def on_link_down(self, link: Link, down: LinkDownReason) -> None: ...

    def on_tell(self, link: Link, method: int, body: Buffer) -> None: ...

    def on_request(self, call: IncomingCall) -> None:
        call.reply(call.read(ECHO))

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        stream.accept(_Reader(stream), window=8 << 20)


class Ours(Arm):
    name = "pdserve"
    about = "pdserve's links: typed, deadlines, credit, authenticated"

    def _endpoint(self, node: str) -> Endpoint:
        settings = NetSettings()
        return Endpoint(
            Identity("bench", NodeId(node), 1),
            _Handler(),
            TcpNetwork(settings),
            keys=lambda: _KEY,
            entropy=os.urandom,
            settings=settings,
        )

    async def serve(self, port: int) -> None:
        self.endpoint = self._endpoint("server")
        await self.endpoint.listen(f"127.0.0.1:{port}")

    async def connect(self, port: int) -> None:
        self.endpoint = self._endpoint("client")
        self.link = await self.endpoint.dial(f"127.0.0.1:{port}")

    async def close(self) -> None:
        await self.endpoint.close()

    def call(self, payload: bytes) -> Awaitable[Payload]:
        return self.link.request(ECHO, Payload(payload), timeout=_TIMEOUT)

    def payload_of(self, answer: Payload) -> bytes:
        return answer.payload

    async def publish(self, count: int, payload: bytes) -> int:
        writer = _Writer()
        stream = self.link.open_stream(_ITEMS, b"", writer, window=4096)
        for number in range(count):
            body = encode(Item(number, payload))
            while not stream.try_send(body):
                async with asyncio.timeout(_TIMEOUT):
                    await writer.wait()
            if number % BURST == 0:
                await asyncio.sleep(0)
        stream.end()
        while writer.count < 0:
            await writer.wait()
        return writer.count
