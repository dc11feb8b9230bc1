"""pyzmq's asyncio sockets, DEALER to ROUTER: the usual choice without a broker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any

from bench.bus_arms.base import BURST, Arm, Tally

_ITEM, _COUNT = b"i", b"c"


class Zmq(Arm):
    name = "pyzmq"
    about = "pyzmq's asyncio sockets, DEALER to ROUTER"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("zmq") else "pyzmq is not installed"

    def _socket(self, kind: str) -> Any:
        zmq = importlib.import_module("zmq")
        self.context = importlib.import_module("zmq.asyncio").Context()
        socket = self.context.socket(getattr(zmq, kind))
        socket.set_hwm(0)  # a bound would drop messages or stall the ROUTER
        return socket

    async def serve(self, port: int) -> None:
        self.socket = self._socket("ROUTER")
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        tally = Tally()
        while True:
            peer, head, body = await self.socket.recv_multipart()
            if head == _ITEM:
                tally.add(int.from_bytes(body[:4], "big"))
                continue
            if head[:1] == _COUNT:
                body = str(tally.take()).encode()
            await self.socket.send_multipart((peer, head, body))

    async def connect(self, port: int) -> None:
        self.socket = self._socket("DEALER")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.calls: dict[bytes, asyncio.Future[bytes]] = {}
        self.last = 0
        self.task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        while True:
            head, body = await self.socket.recv_multipart()
            self.calls.pop(head).set_result(body)

    async def close(self) -> None:
        self.task.cancel()
        self.socket.close(0)
        self.context.term()

    async def _ask(self, prefix: bytes, payload: bytes) -> bytes:
        self.last += 1
        head = prefix + self.last.to_bytes(8, "big")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.calls[head] = future
        await self.socket.send_multipart((head, payload))
        return await future

    async def call(self, payload: bytes) -> bytes:
        return await self._ask(b"", payload)

    async def publish(self, count: int, payload: bytes) -> int:
        for number in range(count):
            await self.socket.send_multipart((_ITEM, number.to_bytes(4, "big") + payload))
            if number % BURST == 0:
                await asyncio.sleep(0)
        return int(await self._ask(_COUNT, b""))
