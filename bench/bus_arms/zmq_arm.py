"""pyzmq's asyncio sockets: the usual choice without a broker.

Calls go from DEALER to ROUTER, one-way items from PUSH to PULL; messages have one part.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any

from bench.bus_arms.base import BURST, Arm, Tally

_WHERE = b"where"
"""The request for the address of the PULL socket."""


class Zmq(Arm):
    name = "pyzmq"
    about = "pyzmq's asyncio sockets on uvloop: DEALER to ROUTER, one-way PUSH to PULL"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("zmq") else "pyzmq is not installed"

    def __init__(self) -> None:
        self.zmq: Any = importlib.import_module("zmq")
        self.context: Any = importlib.import_module("zmq.asyncio").Context()
        self.tasks: list[asyncio.Future[None]] = []

    def _socket(self, kind: int) -> Any:
        socket = self.context.socket(kind)
        socket.set_hwm(0)  # a bound would drop messages or stall the ROUTER
        return socket

    # ------------------------------------------------------------------ the server

    async def serve(self, port: int) -> None:
        self.socket = self._socket(self.zmq.ROUTER)
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.items = self._socket(self.zmq.PULL)
        self.items.bind("tcp://127.0.0.1:*")
        self.counts: asyncio.Queue[int] = asyncio.Queue()
        self.tasks += map(asyncio.ensure_future, (self._answer(), self._count()))

    async def _answer(self) -> None:
        while True:
            peer, head, body = await self.socket.recv_multipart()
            if body == _WHERE:
                body = self.items.getsockopt(self.zmq.LAST_ENDPOINT)
            elif not body:
                body = str(await self.counts.get()).encode()
            await self.socket.send_multipart((peer, head, body))

    async def _count(self) -> None:
        """Counts items until an empty one."""
        tally = Tally()
        while True:
            item = await self.items.recv()
            if item:
                tally.add(int.from_bytes(item[:4], "big"))
            else:
                self.counts.put_nowait(tally.take())

    # ------------------------------------------------------------------ the client

    async def connect(self, port: int) -> None:
        self.socket = self._socket(self.zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.calls: dict[bytes, asyncio.Future[bytes]] = {}
        self.last = 0
        self.tasks.append(asyncio.ensure_future(self._receive()))
        self.items = self._socket(self.zmq.PUSH)
        self.items.connect((await self.call(_WHERE)).rstrip(b"\0").decode())

    async def _receive(self) -> None:
        while True:
            head, body = await self.socket.recv_multipart()
            self.calls.pop(head).set_result(body)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.context.destroy(linger=0)

    async def call(self, payload: bytes) -> bytes:
        self.last += 1
        head = self.last.to_bytes(8, "big")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.calls[head] = future
        await self.socket.send_multipart((head, payload))
        return await future

    async def publish(self, count: int, payload: bytes) -> int:
        for number in range(count):
            await self.items.send(number.to_bytes(4, "big") + payload)
            if number % BURST == 0:
                await asyncio.sleep(0)
        await self.items.send(b"")
        return int(await self.call(b""))
