"""The limit for bulk: two blocking sockets without a protocol."""

from __future__ import annotations

import asyncio
import socket
import threading
from itertools import cycle, islice

from bench.bus_arms.base import BULK_CHUNK, BULK_CHUNKS, Arm


class SocketCopy(Arm):
    name = "socket"
    about = (
        "two blocking sockets, `sendall` and `recv_into` of 1 MiB, eight of them in turn as above"
    )

    async def serve(self, port: int) -> None:
        listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        memory = cycle(_memory())
        while True:
            accepted, _ = listening.accept()
            with accepted:
                while _fill(accepted, next(memory)):
                    pass
                accepted.sendall(b"!")

    async def connect(self, port: int) -> None:
        self.port = port

    async def bulk(self, total: int) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._send, total)

    def _send(self, total: int) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as connected:
            for memory in islice(cycle(_memory()), total // BULK_CHUNK):
                connected.sendall(memory)
            connected.shutdown(socket.SHUT_WR)
            connected.recv(1)


def _memory() -> list[memoryview]:
    return [memoryview(bytearray(BULK_CHUNK)) for _ in range(BULK_CHUNKS)]


def _fill(connected: socket.socket, memory: memoryview) -> bool:
    """Fills the whole buffer from the socket; False at the end of the stream."""
    while memory:
        received = connected.recv_into(memory)
        if not received:
            return False
        memory = memory[received:]
    return True
