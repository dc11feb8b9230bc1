"""The limit for bulk: two blocking sockets, one buffer each, nothing in between."""

from __future__ import annotations

import asyncio
import socket
import threading

from bench.bus_arms.base import Arm

_CHUNK = 1 << 20


class SocketCopy(Arm):
    name = "socket"
    about = "two blocking sockets, `sendall` and `recv_into` of 1 MiB"

    async def serve(self, port: int) -> None:
        listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        memory = memoryview(bytearray(_CHUNK))
        while True:
            accepted, _ = listening.accept()
            with accepted:
                while accepted.recv_into(memory):
                    pass
                accepted.sendall(b"!")

    async def connect(self, port: int) -> None:
        self.port = port

    async def bulk(self, total: int) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._send, total)

    def _send(self, total: int) -> None:
        memory = memoryview(bytearray(_CHUNK))
        with socket.create_connection(("127.0.0.1", self.port)) as connected:
            for _ in range(total // _CHUNK):
                connected.sendall(memory)
            connected.shutdown(socket.SHUT_WR)
            connected.recv(1)
