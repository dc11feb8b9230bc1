"""A request that is over and a connection that is closed leave nothing to the garbage collector."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import EngineDied, Overloaded
from tests.frontend.support import HELLO, Client, frontend, http, raw_connection, tokens, until
from tests.support.fake_backend import Script
from tests.support.garbage import uncollected

CHAT = "/v1/chat/completions"
SAYS = Script(tokens=tokens("hello world "))
ENDLESS = Script(tokens=tokens("la "), interval=0.001)
FEW = HELLO | {"max_tokens": 5}
BODIES = {
    "plain": (CHAT, FEW),
    "two choices": (CHAT, FEW | {"n": 2}),
    "stop string": (CHAT, FEW | {"stop": "wor"}),
    "logprobs": (CHAT, FEW | {"logprobs": True}),
    "two prompts": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3}),
    "messages": ("/v1/messages", FEW | {"model": "tiny"}),
    "ollama": ("/api/chat", HELLO | {"model": "tiny", "options": {"num_predict": 5}}),
}


async def ask(client: Client, path: str, body: Any, stream: bool = False) -> bytes:
    """The whole answer on a connection of its own, which the server closes."""
    data = json.dumps(body | {"stream": stream}).encode()
    async with raw_connection(client) as (reader, writer):
        writer.write(http("POST", path, data, headers="Connection: close\r\n"))
        return await reader.read()


async def settled(client: Client) -> None:
    """Waits until the service knows neither request nor connection; the backend forgets them."""
    await until(lambda: client.service.active_requests == 0)
    await until(lambda: client.service._server.open_connections == 0)
    client.backend.streams.clear()


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "untraced"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answered_request_leaves_no_cycle(stream: bool, traced: bool) -> None:
    async with frontend(SAYS, trace_rate=100.0 if traced else 0.0) as client:
        await ask(client, CHAT, HELLO, stream)
        await settled(client)
        for name, (path, body) in BODIES.items():
            with uncollected() as found:
                answer = await ask(client, path, body, stream)
                assert answer.startswith(b"HTTP/1.1 200"), answer
                await settled(client)
            assert not found, name


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_leaves_no_cycle(stream: bool) -> None:
    async with frontend(ENDLESS) as client:
        await ask(client, CHAT, HELLO | {"max_tokens": 2}, stream)
        with uncollected() as found:
            async with raw_connection(client) as (_, writer):
                body = json.dumps(HELLO | {"max_tokens": 4000, "stream": stream}).encode()
                writer.write(http("POST", CHAT, body))
                await until(lambda: client.backend.streams)
                writer.transport.abort()
            await settled(client)
        assert not found


@pytest.mark.parametrize("error", [Overloaded("full", retry_after=1.0), None], ids=["full", "died"])
async def test_a_request_that_fails_leaves_no_cycle(error: Overloaded | None) -> None:
    script = Script(fail=EngineDied("gone"), tokens=tokens("la "), fail_after=2)
    async with frontend(Script(refuse=error) if error else script) as client:
        await ask(client, CHAT, HELLO)
        for stream in (True, False):
            with uncollected() as found:
                await ask(client, CHAT, HELLO, stream)
                await settled(client)
            assert not found


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /live HT", http("GET", "/live"), b"nonsense\r\n\r\n"],
    ids=["nothing", "a part", "a probe", "nonsense"],
)
async def test_a_connection_without_work_leaves_no_cycle(sent: bytes, answered: bool) -> None:
    async with frontend() as client:
        # The first connection of a process fills caches.
        for _ in range(2):
            with uncollected() as found:
                async with raw_connection(client) as (reader, writer):
                    writer.write(sent)
                    await writer.drain()
                    if answered and sent.endswith(b"\r\n\r\n"):
                        await reader.readline()
                    writer.transport.abort()
                await settled(client)
        assert not found
