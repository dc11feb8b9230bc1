"""Tenants and priorities over real HTTP, when twice as much is asked as two workers can do.

Nothing here is timed: what is compared is who is begun before whom.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.chaos.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = """
[[key]]
key = "sk-heavy-0001"
tenant = "heavy"

[[key]]
key = "sk-light-0001"
tenant = "light"
max_priority = 5

[[key]]
key = "sk-tight-0001"
tenant = "tight"
[key.limits]
max_concurrent_requests = 2
"""
PROMPT = 512
MANY = 120
"""What the heavy tenant asks at once: many times what the workers can begin meanwhile."""
FEW = 8


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a frontend with two slow workers, whose router has learnt how slow they are."""
    home: Path = tmp_path_factory.mktemp("overload")
    keys = home / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    sim = ("--engine", "sim", "--engine-option", "slowdown=4", "--engine-option", "max_len=4096")
    with Cluster(home) as cluster:
        cluster.router()
        for _ in range(2):
            cluster.start("worker", "", "--join", cluster.address, *sim)
        frontend = cluster.frontend("--api-keys-file", str(keys))
        cluster.wait_ready()
        found = f"{frontend.url}/v1/completions"
        asyncio.run(World(found).crowd("heavy", 60))
        yield found


class World:
    """Asks, and writes down whose first tokens came in which order."""

    number = 0

    def __init__(self, url: str) -> None:
        self.url = url
        self.begun: list[str] = []
        self.statuses: list[int] = []
        self.first = asyncio.Event()
        """Somebody has been begun."""

    async def crowd(self, tenant: str, count: int, **fields: Any) -> None:
        """So many at once, until all have ended."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await asyncio.gather(*[self._ask(http, tenant, fields) for _ in range(count)])

    async def _ask(self, http: aiohttp.ClientSession, tenant: str, fields: Any) -> None:
        World.number += 1
        pair = [50 + World.number % 1000, 50 + World.number // 1000]
        body = {"prompt": pair * (PROMPT // 2), "max_tokens": 2, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer sk-{tenant}-0001"}
        async with http.post(self.url, json=body | fields, headers=headers) as answer:
            self.statuses.append(answer.status)
            if answer.status != 200:
                return
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.begun.append(tenant)
                    self.first.set()
                    break
            rest = await answer.read()
            assert b"data: [DONE]" in rest, rest

    async def behind(self, **fields: Any) -> int:
        """The light tenant asks when all of the heavy one's wait; returns how many of those were
        begun before the last of the light one's."""
        heavy = asyncio.create_task(self.crowd("heavy", MANY))
        await self.first.wait()
        since = len(self.begun)
        await self.crowd("light", FEW, **fields)
        during = self.begun[since:]
        await heavy
        last = len(during) - during[::-1].index("light")
        return during[:last].count("heavy")


@pytest.mark.timeout(180)
def test_a_tenant_that_asks_for_all_cannot_starve_another(url):
    world = World(url)
    overtaken_by = asyncio.run(world.behind())
    assert world.statuses == [200] * (MANY + FEW)
    assert overtaken_by < MANY / 2


@pytest.mark.timeout(180)
def test_a_higher_priority_goes_first(url):
    world = World(url)
    overtaken_by = asyncio.run(world.behind(priority=5))
    assert world.statuses == [200] * (MANY + FEW)
    assert overtaken_by < MANY / 3
    refused = World(url)
    asyncio.run(refused.crowd("light", 1, priority=6))
    asyncio.run(refused.crowd("heavy", 1, priority=1))
    assert refused.statuses == [403, 403]


@pytest.mark.timeout(180)
def test_a_keys_own_limit_holds_and_is_nobody_elses(url):
    world = World(url)
    asyncio.run(world.crowd("tight", 20))
    assert set(world.statuses) == {200, 429}
    other = World(url)
    asyncio.run(other.crowd("heavy", 20))
    assert other.statuses == [200] * 20
