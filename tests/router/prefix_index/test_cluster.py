"""Over nodes and a network that fails: every router ends with exactly what every pool holds.

Workers are whole, with inline engines; of a router there is only its index.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Overloaded
from pdserve.ids import NodeLife
from pdserve.messages.kv_events import KV
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.router.config import RouterConfig
from pdserve.router.prefix_index.index import PrefixIndex
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.topics.config import LogConfig, TopicsConfig
from pdserve.runtime.topics.service import Topics
from pdserve.testing.fake_rdma import FakeFabric
from pdserve.token_ids import token_ids
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.worlds.oracle.checks import pool_chains
from tests.worlds.roles import NodeSettings, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from tests.runtime.cluster import Cluster

SMALL = TopicsConfig(log=LogConfig(ring_events=8), log_window=512)
"""Who misses more than a few events has to take a snapshot."""


class Reader:
    """A router's index, and the topic that feeds it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.index = PrefixIndex(RouterConfig())
        self.topics = Topics(node, node.timers, SMALL)
        node.on_member(self._on_member)
        self.subscription = self.topics.subscribe_log(KV, self.index.target)

    def _on_member(self, event: MemberEvent) -> None:
        life = NodeLife(event.member.node, event.member.epoch)
        if isinstance(event, MemberGone):
            self.index.worker_gone(life)
        elif event.member.role == "worker":
            self.index.worker_up(life)

    def has(self, worker: Worker) -> bool:
        node, chains = worker.node.id, list(pool_chains(worker))
        held = {chain[i : i + 8] for chain in chains for i in range(0, len(chain), 8)}
        self.index.check()
        return self.index.known_blocks(node) == len(held) and all(
            self.index.told(node, chain) == len(chain) // 8 for chain in chains
        )


class Nobody:
    """Takes tokens and forgets them."""

    def on_delta(self, delta: object) -> None: ...

    def on_error(self, error: object) -> None: ...


class World:
    def __init__(self, nodes: Cluster, seed: int) -> None:
        self.nodes = nodes
        self.random = random.Random(seed)
        self.fabric = FakeFabric(random.Random(seed))
        self.workers: dict[str, Worker] = {}
        self.readers: dict[str, Reader] = {}

    async def worker(self, name: str, **settings: Any) -> Worker:
        node = self.nodes.make(name)
        self.nodes.nodes[name] = node
        made = self.workers[name] = Worker(node, replace(NodeSettings(), **settings), self.fabric)
        made.topics.config = SMALL
        await made.start()
        return made

    async def reader(self, name: str) -> Reader:
        node = self.nodes.make(name, role="router")
        self.nodes.nodes[name] = node
        made = self.readers[name] = Reader(node)
        await node.start()
        return made

    def ask(self, worker: Worker) -> None:
        """A prompt that shares a part with others; its worker may be down or full."""
        prompt = [self.random.randrange(60, 63)] * 8 * self.random.randrange(1, 8)
        prompt += [self.random.randrange(3, 60) for _ in range(self.random.randrange(1, 90))]
        sampling = SamplingParams(max_tokens=self.random.randrange(1, 20))
        request = GenerateRequest(
            request_id="r", model="model", prompt=token_ids(prompt), sampling=sampling
        )
        if worker.service.unready_reason() is None:
            with suppress(Overloaded):
                worker.engine.submit(request, Nobody())

    async def busy(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            for worker in self.workers.values():
                self.ask(worker)
            await asyncio.sleep(0.05)

    async def level(self) -> None:
        """Every reader has what every worker has, and it is something."""

        def met() -> bool:
            return all(r.has(w) for r in self.readers.values() for w in self.workers.values())

        await self.nodes.until(lambda: all(w.engine.stats().running == 0 for w in self.alive))
        await self.nodes.until(met)

    @property
    def alive(self) -> list[Worker]:
        return list(self.workers.values())

    async def crash(self, name: str) -> None:
        worker = self.workers.pop(name)
        await self.nodes.crash(name)
        await worker.stop(leave=False)


@asynccontextmanager
async def world(seed: int = 0) -> AsyncIterator[World]:
    async with cluster(seed) as nodes:
        made = World(nodes, seed)
        yield made
        for reader in made.readers.values():
            reader.topics.close()
            assert reader.index.counters["worker_blocks"] == 0, "a closed topic leaves nothing"
            reader.index.check()
        for worker in made.workers.values():
            await worker.stop(leave=False)


@virtually
async def test_a_router_that_starts_late_has_everything() -> None:
    async with world() as w:
        a = await w.worker("a")
        await w.busy(2.0)
        r = await w.reader("r")
        await w.level()
        assert r.index.known_blocks(a.node.id) > 20
        counters = r.subscription.stats()
        assert (counters["snapshots"], counters["divergences"]) == (1, 0)


@virtually
async def test_events_keep_it_level() -> None:
    async with world() as w:
        await w.worker("a")
        r = await w.reader("r")
        await w.busy(4.0)
        await w.level()
        counters = r.subscription.stats()
        assert counters["events"] > 20
        assert (counters["gaps"], counters["divergences"]) == (0, 0)
        assert r.index.counters["blocks_removed"] > 0, "the pool was full"


@virtually
async def test_an_engine_that_died_has_nothing() -> None:
    async with world() as w:
        a = await w.worker("a")
        r = await w.reader("r")
        await w.busy(1.0)
        assert a.break_engine()
        await w.nodes.until(lambda: r.index.known_blocks(a.node.id) == 0, timeout=1.0)
        await asyncio.sleep(3.0)
        await w.busy(1.0)
        await w.level()
        assert r.index.known_blocks(a.node.id) > 0


@virtually
async def test_a_worker_that_comes_back_begins_empty() -> None:
    async with world() as w:
        await w.reader("r")
        await w.worker("a")
        await w.busy(1.0)
        await w.crash("a")
        w.nodes.world.resume("a")
        w.nodes.world.heal()
        await w.worker("a")
        await w.busy(0.5)
        await w.level()


@virtually
async def test_an_event_that_is_lost_in_silence_is_found() -> None:
    async with world() as w:
        a = await w.worker("a")
        r = await w.reader("r")
        await w.busy(1.0)
        await w.level()
        following: Any = r.topics.following(KV, a.node.id)
        target = following.reader.target
        apply = target.apply
        lost: list[bytes] = []
        target.apply = lost.append
        await w.busy(0.2)
        target.apply = apply
        assert lost
        await w.level()
        assert r.subscription.stats()["divergences"] > 0


@virtually
async def test_who_was_cut_off_for_long_takes_a_snapshot() -> None:
    async with world() as w:
        await w.worker("a")
        r = await w.reader("r")
        await w.busy(0.5)
        w.nodes.world.pause("r")
        await w.busy(1.5)
        w.nodes.world.resume("r")
        await w.level()
        counters = r.subscription.stats()
        assert counters["lagged"] > 0
        assert counters["snapshots"] > 1


async def anything(w: World) -> None:
    """One thing that may happen."""
    net, names = w.nodes.world, list(w.nodes.nodes)
    what = w.random.choice(("reset", "pause", "engine", "clear", "slow", "nothing"))
    first, second = w.random.sample(names, 2)
    if what == "reset":
        net.reset(first, second)
    elif what == "pause":
        net.pause(first)
        await w.busy(0.6)
        net.resume(first)
    elif what == "engine":
        w.random.choice(list(w.workers.values())).break_engine()
    elif what == "clear":
        net.reset_after(first, second, w.random.randrange(5_000))
    elif what == "slow":
        net.set_conditions(first, second, delay_min=0.05, delay_max=0.1)
        await w.busy(0.5)
        net.set_conditions(first, second, delay_min=0.0, delay_max=0.0)
    await w.busy(0.3)


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_all_are_level_in_the_end(seed: int, part: int) -> None:
    @virtually
    async def run() -> None:
        async with world(seed % 10**9 + part) as w:
            await w.worker("a")
            await w.reader("r")
            await w.worker("b", pace=0.05)
            for number in range(12):
                await anything(w)
                if number == 5:
                    await w.reader("late")
                if number == 7:
                    await w.crash("b")
                    w.nodes.world.resume("b")
                    await w.worker("b")
            await w.level()

    run()
