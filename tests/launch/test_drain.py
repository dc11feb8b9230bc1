"""A process's drain, with parts that are played by hand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.ids import NodeId
from pdserve.launch.drain import Drain, describe
from pdserve.messages.status import DrainOrder, DrainState
from pdserve.runtime.rpc_methods import DRAIN
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.runtime.cluster import Cluster


class FakePart:
    def __init__(self, name: str, log: list[tuple[str, float]], takes: float) -> None:
        self.name, self.log, self.takes, self.left = name, log, takes, 3
        self.fails = False

    async def drain(self, timeout: float) -> None:
        self.log.append((self.name, timeout))
        if self.fails:
            raise OSError("no disk")
        await asyncio.sleep(min(timeout, self.takes))
        self.left = 0


class World:
    """A process of two parts at node `w`, and whoever asks at `f`."""

    def __init__(self, nodes: Cluster, refusal: str) -> None:
        self.nodes = nodes
        self.log: list[tuple[str, float]] = []
        self.worker = FakePart("worker", self.log, 4.0)
        parts: Any = [FakePart("router", self.log, 1.0), self.worker]
        self.ended: list[float] = []
        self.drain = Drain(parts, 10.0, lambda: self.ended.append(nodes.loop.time()), refusal)
        self.drain.serve(nodes.nodes["w"])

    async def order(self, *, stay: bool = False) -> DrainState:
        link = await self.nodes.nodes["f"].link(NodeId("w"), timeout=1.0)
        return await link.request(DRAIN, DrainOrder(stay), timeout=1.0)


@asynccontextmanager
async def world(refusal: str = "") -> AsyncIterator[World]:
    async with cluster() as nodes:
        await nodes.add("f", role="frontend")
        await nodes.add("w")
        made = World(nodes, refusal)
        yield made
        await made.drain.close()


@virtually
async def test_parts_drain_in_turn_within_one_time_the_last_to_join_first() -> None:
    async with world() as w:
        assert (w.drain.begun, w.drain.state(), w.drain.reason()) == (False, None, None)
        await w.drain.finish(10.0)
        assert w.log == [("worker", 10.0), ("router", pytest.approx(6.0))]
        assert w.drain.state() == DrainState(drained=True)
        await w.drain.finish(10.0)
        assert len(w.log) == 2


@virtually
async def test_a_part_that_fails_at_it_does_not_keep_the_others_from_it() -> None:
    async with world() as w:
        w.worker.fails = True
        await w.drain.finish(10.0)
        assert [name for name, _ in w.log] == ["worker", "router"]
        assert w.drain.state() == DrainState(drained=True, left=3)


@virtually
async def test_an_order_ends_the_process_when_its_answer_is_on_its_way() -> None:
    async with world() as w:
        told = await w.order()
        assert (told.drained, told.left, told.stays, told.already) == (False, 3, False, False)
        assert told.remaining == pytest.approx(10.0, abs=0.1)
        assert w.drain.reason() == "draining: 3 requests left, for 10 s at most"
        await asyncio.sleep(0.2)
        assert len(w.ended) == 1
        await w.drain.finish(10.0)  # what its owner does then: the drain that has begun
        assert [name for name, _ in w.log] == ["worker", "router"]


@virtually
async def test_who_is_to_stay_does_until_it_is_told_otherwise() -> None:
    async with world() as w:
        assert (await w.order(stay=True)).stays
        await asyncio.sleep(6.0)
        told = await w.order(stay=True)
        assert told == DrainState(drained=True, stays=True, already=True)
        assert w.ended == []
        told = await w.order()
        assert (told.drained, told.already, told.stays) == (True, True, False)
        await asyncio.sleep(0.2)
        assert len(w.ended) == 1
        assert len(w.log) == 2


@virtually
async def test_a_process_that_another_would_start_again_is_not_drained() -> None:
    async with world("drain the first") as w:
        with pytest.raises(ConfigError, match="drain the first"):
            await w.order()
        assert (w.log, w.ended, w.drain.begun) == ([], [], False)


def test_its_state_in_words() -> None:
    assert describe(DrainState(left=1, remaining=12.3)) == (
        "draining: 1 request left, for 12 s at most"
    )
    assert describe(DrainState(drained=True, stays=True)) == "drained"
    assert "leaving" in describe(DrainState(drained=True))
