"""Hundreds of clients that hardly read or hardly write: what they hold is bounded, and they go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve.frontend import service as service_module
from tests.frontend.support import HELLO, Client, frontend, http, read_answer, tokens, until
from tests.support.fake_backend import Script
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
MANY = 2000 if is_long() else 200
DRIP = 20.0 if is_long() else 5.0
"""Seconds for a head or a body: enough for all clients to connect and to begin."""
PATIENCE = 300.0 if is_long() else 50.0
"""Seconds for all to be cut."""
SCRIPT = Script(tokens=tokens("hello world "), burst=20)
ROOM: dict[str, Any] = {"max_connections": 3 * MANY, "max_in_flight": 2 * MANY}
EACH = 128 << 10
"""What a stalled client may cost, its share of the interpreter's own waste included."""

pytestmark = pytest.mark.timeout(900 if is_long() else 60)


@pytest.fixture(autouse=True)
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SWEEP", 0.05)


def cut(client: Client, reason: str) -> float:
    return client.service.metrics.connections_cut.labels(reason).value


@contextlib.asynccontextmanager
async def connected(client: Client, count: int) -> AsyncIterator[list[socket.socket]]:
    """So many sockets with the smallest buffers on both sides."""
    listener = client.service._listener
    assert listener is not None
    listener.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # accepted ones inherit
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", client.service.port))
        await until(lambda: len(client.service._server._open) >= count)
        for connection in client.service._server._open:
            assert connection.socket is not None
            connection.socket.set_write_buffer_limits(high=1024)
        yield sockets


async def ask_all(sockets: list[socket.socket], **fields: object) -> None:
    body = json.dumps(HELLO | {"stream": True, "max_tokens": 4000} | fields).encode()
    for sock in sockets:
        await asyncio.get_running_loop().sock_sendall(sock, http("POST", CHAT, body))


async def test_clients_that_read_nothing_are_cut_at_their_bound() -> None:
    async with frontend(SCRIPT, write_buffer=512, **ROOM) as client:
        await client.chunks(max_tokens=100)  # what a process allocates once
        before = psutil.Process().memory_info().rss
        async with connected(client, MANY + 1) as sockets:
            await ask_all(sockets[:-1])
            await until(lambda: cut(client, "write buffer full") == MANY, PATIENCE)
            await until(lambda: client.backend.idle)  # the engine computes nothing for them
            grown = psutil.Process().memory_info().rss - before
            assert grown < MANY * EACH + (32 << 20), f"{grown >> 20} MiB"
        chunks = await client.chunks(max_tokens=500)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_clients_that_read_a_byte_now_and_then_are_cut_as_well() -> None:
    config: dict[str, Any] = {"write_buffer": 64 << 20, "write_stall_timeout": 0.5}
    async with frontend(SCRIPT, **ROOM, **config) as client:
        async with connected(client, MANY) as sockets:
            await ask_all(sockets, max_tokens=1500)
            reading = asyncio.create_task(sip(sockets))
            await until(lambda: cut(client, "does not read") == MANY, PATIENCE)
            reading.cancel()
            await until(lambda: client.backend.idle)
            await until(lambda: client.service.active_requests == 0)
        await client.chat(max_tokens=5)


async def sip(sockets: list[socket.socket]) -> None:
    """A byte of each, again and again."""
    while True:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.recv(1)
        await asyncio.sleep(0.05)


async def test_heads_and_bodies_that_drip_hold_no_place_and_go() -> None:
    config: dict[str, Any] = {"header_timeout": DRIP, "body_timeout": DRIP, "max_in_flight": 2}
    head = http("POST", CHAT, headers="Content-Length: 500\r\n")
    async with frontend(max_connections=3 * MANY, **config) as client:
        loop = asyncio.get_running_loop()
        async with connected(client, MANY) as sockets:
            for number, sock in enumerate(sockets):
                await loop.sock_sendall(sock, head[:20] if number % 2 else head + b"{")
            await until(lambda: client.service.active_requests == MANY // 2)
            await client.chat(max_tokens=5)  # there is room for who writes
            dripping = asyncio.create_task(drip(sockets))
            await until(lambda: cut(client, "slow headers") == MANY // 2, PATIENCE)
            await until(lambda: client.service.active_requests == 0, PATIENCE)
            dripping.cancel()
            reader, writer = await asyncio.open_connection(sock=sockets[0])
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
            writer.close()


async def drip(sockets: list[socket.socket]) -> None:
    """A blank to each, again and again: neither a head nor a body ever ends."""
    while True:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.send(b" ")
        await asyncio.sleep(0.2)
