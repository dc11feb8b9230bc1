"""Plain sockets without any protocol: the limit of whatever asks another process.

`unix` and `tcp` are one message each way between blocking sockets. `stream` sends the blocks over
TCP with one loop of `sendmsg` here and of `recvmsg_into` there, and waits for one byte.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.getcwd())

from bench.transfer_arms.base import BLOCK, Arm, Pool, Talk, run

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_ONCE = 16
"""Blocks of one system call: 1 MiB."""
_MESSAGE = 64
"""Bytes of a message, each way."""


class Bare(Arm):
    name = "bare"
    about = "plain sockets: a message each way, or blocks and one byte"
    modes = ("unix", "tcp", "stream")

    # ------------------------------------------------------------------ the driver

    def connect(self, partner: Talk | None) -> None:
        assert partner is not None
        self.partner = partner
        self.pool = Pool(1)
        name = f"\0pdserve-bench-{os.getpid()}"
        self.sockets = {"unix": socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)}
        port = partner.ask({"what": "listen", "name": name})["port"]
        self.sockets["unix"].connect(name)
        for mode in ("tcp", "stream"):
            self.sockets[mode] = socket.create_connection(("127.0.0.1", port))
            self.sockets[mode].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            partner.ask({"what": "accept", "mode": mode})

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        if mode == "stream":
            return self._stream(here, there)
        self.partner.ask({"what": "point", "block": there[-1]})
        connection, message = self.sockets[mode], bytes(self.pool.head(here[-1]))
        started = time.perf_counter()
        connection.send(message)
        connection.recv(_MESSAGE)
        return time.perf_counter() - started

    def _stream(self, here: Sequence[int], there: Sequence[int]) -> float:
        self.partner.ask({"what": "expect", "blocks": list(there)})
        connection, views = self.sockets["stream"], self._views(here)
        started = time.perf_counter()
        for at in range(0, len(views), AT_ONCE):
            batch = views[at : at + AT_ONCE]
            while batch:
                batch = after(batch, connection.sendmsg(batch))
        connection.recv(1)
        return time.perf_counter() - started

    def _views(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self.pool.view[block * BLOCK : (block + 1) * BLOCK] for block in blocks]

    def mark(self, here: int, value: bytes) -> None:
        self.pool.head(here)[:] = value

    # ------------------------------------------------------------------ the partner

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["what"]:
            case "listen":
                self.pool = Pool(2)
                self.point = 0
                self.views: list[memoryview] = []
                self.ready = threading.Semaphore(0)
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listening.bind(request["name"])
                listening.listen()
                self._start(lambda: self._echo(listening.accept()[0]))
                self.listening = socket.create_server(("127.0.0.1", 0))
                return {"port": self.listening.getsockname()[1]}
            case "accept":
                connection = self.listening.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                work = self._take if request["mode"] == "stream" else self._echo
                self._start(lambda: work(connection))
            case "point":
                self.point = request["block"]
            case "expect":
                self.views = self._views(request["blocks"])
                self.ready.release()
            case _:
                return {"bytes": bytes(self.pool.head(request["block"])).hex()}
        return {}

    def _start(self, work: Any) -> None:
        def quiet() -> None:
            with contextlib.suppress(ConnectionError):  # the driver has ended
                work()

        threading.Thread(target=quiet, daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        while message := connection.recv(_MESSAGE):
            connection.send(message)
            self.pool.head(self.point)[:] = message

    def _take(self, connection: socket.socket) -> None:
        while True:
            self.ready.acquire()
            for at in range(0, len(self.views), AT_ONCE):
                batch = self.views[at : at + AT_ONCE]
                while batch:
                    count = connection.recvmsg_into(batch)[0]
                    if not count:
                        return
                    batch = after(batch, count)
            connection.send(b".")


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """The bytes after the first `count`."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []


if __name__ == "__main__":
    run(Bare())
