"""Provides nodes for tests of the network: a scripted handler, sinks that record."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import DeadlineExceeded
from pdserve.ids import NodeId
from pdserve.net.endpoint import Endpoint
from pdserve.wire.codec import Method
from pdserve.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, Seconds
    from pdserve.net.base import (
        ByteNetwork,
        IncomingCall,
        IncomingStream,
        ItemStream,
        Link,
        LinkDownReason,
    )
    from pdserve.net.settings import NetSettings
    from pdserve.wire.parser import Buffer

__all__ = [
    "ECHO",
    "HANG",
    "KEY",
    "REFUSE",
    "Echo",
    "RecordingHandler",
    "RecordingStreamSink",
    "node",
    "send_item",
]

KEY = b"the tests' own cluster key, 32 bytes or more"


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """Request and reply of the test methods."""

    payload: bytes = b""


ECHO = Method(1, "echo", Echo, Echo)
"""Answered at once with the same record."""
HANG = Method(2, "hang", Echo, Echo)
"""Never answered."""
REFUSE = Method(3, "refuse", Echo, Echo)
"""Answered with the error in `RecordingHandler.refusal`."""


class RecordingStreamSink:
    """Records everything on a stream, and lets a test wait for it."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.ends: list[BaseException | None] = []
        self.unblocked = 0
        self._changed = asyncio.Event()

    def on_data(self, body: Buffer) -> None:
        self.items.append(bytes(body))
        self._changed.set()

    def on_end(self, error: BaseException | None) -> None:
        self.ends.append(error)
        self._changed.set()

    def on_unblocked(self) -> None:
        self.unblocked += 1

    async def until(
        self, met: Callable[[RecordingStreamSink], bool], timeout: Seconds = 10.0
    ) -> None:
        """Wait until `met(self)`."""
        async with asyncio.timeout(timeout):
            while not met(self):
                self._changed.clear()
                await self._changed.wait()

    async def end(self, timeout: Seconds = 10.0) -> BaseException | None:
        """Wait for the end; returns the error, or None."""
        await self.until(lambda sink: bool(sink.ends), timeout)
        return self.ends[0]


async def send_item(
    stream: ItemStream, body: Buffer, *, timeout: Seconds, last: bool = False
) -> None:
    """Send one item as soon as there is credit. Errors: `DeadlineExceeded`, and what `try_send`
    raises."""
    until = asyncio.get_running_loop().time() + timeout
    while not stream.try_send(body, last=last):
        if asyncio.get_running_loop().time() >= until:
            raise DeadlineExceeded("the peer granted no credit in time")
        await asyncio.sleep(0.001)


class RecordingHandler:
    """Answers the test methods, accepts every stream, and records everything."""

    def __init__(self) -> None:
        self.ups: list[Link] = []
        self.downs: list[tuple[Link, LinkDownReason]] = []
        self.tells: list[tuple[int, bytes]] = []
        self.calls: list[IncomingCall] = []
        """Calls that were not answered at once."""
        self.cancelled = 0
        self.refusal: PdserveError | Exception = ValueError("no reason was set")
        self.streams: list[tuple[IncomingStream, RecordingStreamSink]] = []
        self.window = 64 * 1024
        self.on_stream_hook: Callable[[IncomingStream, int, Buffer], None] | None = None
        self._changed = asyncio.Event()

    def on_link_up(self, link: Link) -> None:
        self.ups.append(link)
        self._changed.set()

    def on_link_down(self, link: Link, down: LinkDownReason) -> None:
        self.downs.append((link, down))
        self._changed.set()

    def on_tell(self, link: Link, method: int, body: Buffer) -> None:
        self.tells.append((method, bytes(body)))
        self._changed.set()

    def on_request(self, call: IncomingCall) -> None:
        self._changed.set()
        if call.method == ECHO.id:
            call.reply(call.read(ECHO))
        elif call.method == REFUSE.id:
            raise self.refusal
        else:
            call.on_cancel = self._on_cancel
            self.calls.append(call)

    def _on_cancel(self) -> None:
        self.cancelled += 1
        self._changed.set()

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        self._changed.set()
        if self.on_stream_hook is not None:
            self.on_stream_hook(stream, method, body)
            return
        sink = RecordingStreamSink()
        stream.accept(sink, window=self.window)
        self.streams.append((stream, sink))

    async def until(self, met: Callable[[RecordingHandler], bool], timeout: Seconds = 10.0) -> None:
        """Wait until `met(self)`."""
        async with asyncio.timeout(timeout):
            while not met(self):
                self._changed.clear()
                await self._changed.wait()


def node(
    name: str,
    network: ByteNetwork,
    handler: RecordingHandler,
    *,
    epoch: Epoch = 1,
    cluster: str = "test",
    keys: tuple[bytes, ...] = (KEY,),
    settings: NetSettings | None = None,
) -> Endpoint:
    """An endpoint with a repeatable source of nonces."""
    counter = iter(range(1 << 30))

    def entropy(count: int) -> bytes:
        return f"{name}/{epoch}/{next(counter)}/".encode().ljust(count, b".")[:count]

    identity = Identity(cluster, NodeId(name), epoch, name)
    return Endpoint(
        identity, handler, network, keys=lambda: keys, entropy=entropy, settings=settings
    )
