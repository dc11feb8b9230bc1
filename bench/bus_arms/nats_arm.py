"""nats-py through a nats-server of its own, on uvloop: the broker that many buses are built on.

The request for the count uses the subject of the items, because messages of two subjects have no
order.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from bench.bus_arms.base import BURST, Arm, Tally

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Nats(Arm):
    name = "nats-py"
    about = "nats-py over nats-server, on uvloop"

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("nats") is None:
            return "nats-py is not installed"
        return None if shutil.which("nats-server") else "nats-server is not on the path"

    async def serve(self, port: int) -> None:
        self.broker = await asyncio.create_subprocess_exec(
            *("nats-server", "-a", "127.0.0.1", "-p", str(port)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = await self._connected(port)
        self.tally = Tally()
        await self.client.subscribe("echo", cb=self._on_echo)
        await self.client.subscribe(
            "item", cb=self._on_item, pending_msgs_limit=1 << 30, pending_bytes_limit=1 << 40
        )  # with a bound it would drop messages
        await self.client.flush()

    async def stop(self) -> None:
        await self.client.close()
        self.broker.terminate()
        await self.broker.wait()

    async def _connected(self, port: int) -> Any:
        nats = importlib.import_module("nats")
        for _ in range(50):
            try:
                return await nats.connect(
                    f"nats://127.0.0.1:{port}", pending_size=64 << 20, max_reconnect_attempts=0
                )
            except Exception:
                await asyncio.sleep(0.1)
        raise RuntimeError("nats-server does not answer")

    async def _on_echo(self, message: Any) -> None:
        await message.respond(message.data)

    async def _on_item(self, message: Any) -> None:
        if message.data:
            self.tally.add(int.from_bytes(message.data[:4], "big"))
        else:
            await message.respond(str(self.tally.take()).encode())

    async def connect(self, port: int) -> None:
        self.client = await self._connected(port)

    async def close(self) -> None:
        await self.client.close()

    def call(self, payload: bytes) -> Awaitable[Any]:
        return self.client.request("echo", payload, timeout=30)  # type: ignore[no-any-return]

    def payload_of(self, answer: Any) -> bytes:
        return bytes(answer.data)

    async def publish(self, count: int, payload: bytes) -> int:
        for number in range(count):
            await self.client.publish("item", number.to_bytes(4, "big") + payload)
            if number % BURST == 0:
                await asyncio.sleep(0)
        await self.client.flush(timeout=60)
        return int((await self.client.request("item", b"", timeout=60)).data)
