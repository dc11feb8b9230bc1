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


async def test_vllms_names_and_compressed_pages_are_for_who_asks(role):
    role.metrics.of_model("m").e2e_request_latency.observe(1.0)
    async with role.get("/metrics?names=vllm") as response:
        assert response.headers["Content-Encoding"] == "gzip"
        page = await response.text()
        assert "vllm:e2e_request_latency_seconds_count" in page
        assert "pdserve_e2e_request_latency_seconds_count" not in page
    async with role.get("/metrics", headers={"Accept-Encoding": "identity"}) as response:
        assert "Content-Encoding" not in response.headers
    role.metrics.names = "both"
    async with role.get("/metrics") as response:
        page = await response.text()
        assert "vllm:e2e_request_latency_seconds_count" in page
        assert "pdserve_e2e_request_latency_seconds_count" in page
    async with role.get("/metrics?names=other") as response:
        assert response.status == 400
        assert "pdserve, vllm, both" in (await response.json())["error"]


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


async def test_at_the_bound_the_busiest_hosts_oldest_connection_ends(monkeypatch):
    monkeypatch.setattr(probes, "_MAX_CONNECTIONS", 3)
    server = Role().server()
    await server.start()

    async def dial(address):
        return await asyncio.open_connection("127.0.0.1", server.port, local_addr=(address, 0))

    quiet = await dial("127.0.0.2")
    busy = [await dial("127.0.0.3") for _ in range(9)]
    newcomer = await dial("127.0.0.4")
    async with asyncio.timeout(10):
        for reader, _ in busy[:-1]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for reader, writer in (quiet, newcomer):
            writer.write(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    for _, writer in (quiet, newcomer, *busy):
        writer.close()
    await server.stop()


async def test_a_head_without_end_is_refused():
    server = Role().server()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 100_000)
            assert b" 400 " in await reader.readline()
            await reader.read()
    assert server._server.room.held == 0
    writer.close()
    await server.stop()


async def test_on_loopback_no_other_name_is_answered(role):
    async with role.get("/metrics", headers={"Host": "evil.example"}) as response:
        assert response.status == 403
    async with role.get("/live", headers={"Host": "localhost:1"}) as response:
        assert response.status == 200
