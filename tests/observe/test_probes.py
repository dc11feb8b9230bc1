import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest

from pdserve.errors import ConfigError
from pdserve.observe import probes
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.observe.probes import ProbeServer


class Role:
    """Something to be watched."""

    def __init__(self):
        self.metrics = Metrics()
        self.degradations = Degradations(self.metrics)
        self.reason: str | None = None
        self.get: Any = None
        self.post: Any = None

    def server(self, port=0):
        return ProbeServer("127.0.0.1", port, self.metrics, self.degradations, lambda: self.reason)


@pytest.fixture
async def role():
    role = Role()
    server = role.server()
    await server.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        role.get = session.get
        role.post = session.post
        yield role
    await server.stop()
    await server.stop()


async def test_health_says_why_not(role):
    role.degradations.add("no_memfd", "slower")
    async with role.get("/health") as response:
        assert response.status == 200
        assert (await response.json())["degraded"] == {"no_memfd": "slower"}
    role.reason = "still loading"
    async with role.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["reason"] == "still loading"
    async with role.get("/live") as response:
        assert response.status == 200


async def test_metrics_come_in_the_format_that_was_asked_for(role):
    async with role.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        assert "pdserve_http_connections 0.0" in await response.text()
    async with role.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")


async def test_anything_else_is_refused(role):
    async with role.get("/v1/models") as response:
        assert response.status == 404
    async with role.post("/health") as response:
        assert response.status == 405


async def test_a_taken_port_is_named(role):
    taken = role.server()
    await taken.start()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken.port}.*metrics-port"):
        await role.server(taken.port).start()
    await taken.stop()


async def test_whoever_sends_no_request_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(probes, "_PATIENCE", 0.1)
    server = Role().server()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /live HTTP/1.1\r\n")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await server.stop()


async def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(probes, "_MAX_CONNECTIONS", 2)
    server = Role().server()
    await server.start()
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await opened[-1][0].read() == b""
        reader, writer = opened[0]
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    for _, writer in opened:
        writer.close()
    await server.stop()
