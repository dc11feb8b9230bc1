"""grpc.aio with plain bytes for messages: what most services are built on."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from bench.bus_arms.base import Arm, Tally

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable


class Grpc(Arm):
    name = "grpc.aio"
    about = "grpc.aio, messages of plain bytes, one-way as a client stream"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("grpc") else "grpcio is not installed"

    async def serve(self, port: int) -> None:
        grpc: Any = importlib.import_module("grpc")

        async def echo(request: bytes, _: Any) -> bytes:
            return request

        async def items(requests: AsyncIterator[bytes], _: Any) -> bytes:
            tally = Tally()
            async for request in requests:
                tally.add(int.from_bytes(request[:4], "big"))
            return str(tally.take()).encode()

        self.server = grpc.aio.server()
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(echo),
            "Items": grpc.stream_unary_rpc_method_handler(items),
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Bus", methods),)
        )
        self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()

    async def connect(self, port: int) -> None:
        grpc: Any = importlib.import_module("grpc")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.echo = self.channel.unary_unary("/bench.Bus/Echo")
        self.items = self.channel.stream_unary("/bench.Bus/Items")

    async def close(self) -> None:
        await self.channel.close()

    def call(self, payload: bytes) -> Awaitable[Any]:
        return self.echo(payload, timeout=30)  # type: ignore[no-any-return]

    async def publish(self, count: int, payload: bytes) -> int:
        async def stream() -> AsyncIterator[bytes]:
            for number in range(count):
                yield number.to_bytes(4, "big") + payload

        return int(await self.items(stream()))
