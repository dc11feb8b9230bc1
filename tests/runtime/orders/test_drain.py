"""A process's drain, with parts that are played by hand."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError, Overloaded
from pdserve.ids import NodeId
from pdserve.messages.status import DrainOrder, DrainState, UndoDrain
from pdserve.runtime.orders.drain import Drain, describe
from pdserve.runtime.rpc_methods import DRAIN, UNDO_DRAIN
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.runtime.cluster import Cluster


class FakePart:
    def __init__(self, name: str, log: list[tuple[str, float]], takes: float) -> None:
        self.name, self.log, self.takes, self.left = name, log, takes, 3
        self.fails = False
        self.undone = 0
        self.cannot: Exception | None = None
        self.undo_takes = 0.0
        self.need: deque[str] = deque([""])
        """What it answers when it is asked whether it is needed; the last answer stays."""

    async def drain(self, timeout: float) -> None:
        self.log.append((self.name, timeout))
        if self.fails:
            raise OSError("no disk")
        await asyncio.sleep(min(timeout, self.takes))
        self.left = 0

    async def undo_drain(self) -> None:
        await asyncio.sleep(self.undo_takes)
        if self.cannot is not None:
            raise self.cannot
        self.undone += 1

    def needed(self) -> str:
        return self.need.popleft() if len(self.need) > 1 else self.need[0]


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

    async def order(self, *, stay: bool = False, **fields: Any) -> DrainState:
        link = await self.nodes.nodes["f"].link(NodeId("w"), timeout=1.0)
        return await link.request(DRAIN, DrainOrder(stay, **fields), timeout=1.0)

    async def undo(self, **fields: Any) -> DrainState:
        link = await self.nodes.nodes["f"].link(NodeId("w"), timeout=1.0)
        return await link.request(UNDO_DRAIN, UndoDrain(**fields), timeout=20.0)


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
async def test_an_order_ends_the_process_when_it_is_drained() -> None:
    async with world() as w:
        told = await w.order()
        assert (told.drained, told.left, told.stays, told.already) == (False, 3, False, False)
        assert told.remaining == pytest.approx(10.0, abs=0.1)
        assert w.drain.reason() == "draining: 3 requests left, for 10 s at most"
        await asyncio.sleep(4.9)
        assert w.ended == []
        await asyncio.sleep(0.3)
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


# ---------------------------------------------------------------- taking it back


@virtually
async def test_a_drain_in_progress_is_undone_and_begins_anew_when_ordered_again() -> None:
    async with world() as w:
        await w.order()
        await asyncio.sleep(2.0)
        told = await w.undo()
        assert (told.serves, told.refused, told.already) == (True, "", False)
        assert (w.drain.begun, w.drain.state(), w.worker.undone) == (False, None, 1)
        await asyncio.sleep(20.0)
        assert w.ended == []
        told = await w.order(stay=True)
        assert not told.already
        assert told.remaining == pytest.approx(10.0, abs=0.1)
        assert [name for name, _ in w.log] == ["worker", "worker"]


@virtually
async def test_a_process_that_stays_serves_again_after_its_drain() -> None:
    async with world() as w:
        await w.order(stay=True)
        await asyncio.sleep(6.0)
        assert (await w.undo()).serves
        assert w.drain.reason() is None
        await w.order()  # it may end later all the same
        await asyncio.sleep(6.0)
        assert len(w.ended) == 1


@virtually
async def test_a_process_that_ends_does_not_serve_again() -> None:
    async with world() as w:
        await w.order()
        await asyncio.sleep(6.0)
        told = await w.undo()
        assert told.refused == "it has begun to end, which cannot be taken back"
        assert (told.serves, w.worker.undone, len(w.ended)) == (False, 0, 1)


@virtually
async def test_a_signal_is_final_even_while_a_drain_is_taken_back() -> None:
    async with world() as w:
        w.worker.undo_takes = 1.0
        await w.order(stay=True)
        undo = asyncio.ensure_future(w.undo())
        await asyncio.sleep(0.5)
        await w.drain.finish(10.0)
        assert (await undo).serves is False
        assert w.drain.state() == DrainState(drained=True)
        assert (await w.undo()).refused


@virtually
async def test_one_that_does_not_drain_says_so_and_two_callers_undo_it_once() -> None:
    async with world() as w:
        told = await w.undo()
        assert (told.serves, told.already) == (True, True)
        w.worker.undo_takes = 1.0
        await w.order(stay=True)
        both = [asyncio.ensure_future(w.undo()) for _ in range(2)]
        await asyncio.sleep(0.5)
        with pytest.raises(Overloaded, match="being taken back"):
            await w.order()
        assert all([(await one).serves for one in both])
        assert w.worker.undone == 1


@virtually
async def test_a_process_that_cannot_serve_again_is_drained_as_before() -> None:
    async with world() as w:
        await w.order(stay=True)
        await asyncio.sleep(6.0)
        w.worker.cannot = ConfigError("the port is taken")
        with pytest.raises(ConfigError, match="the port is taken"):
            await w.undo()
        await asyncio.sleep(6.0)
        assert w.drain.state() == DrainState(drained=True, stays=True)
        w.worker.cannot = None
        assert (await w.undo()).serves


# ---------------------------------------------------------------- planners' orders


@virtually
async def test_a_late_order_of_a_planner_is_refused_and_an_operators_is_not() -> None:
    async with world() as w:
        assert not (await w.order(stay=True, term=7, number=3)).refused
        assert (await w.undo(term=7, number=4)).serves
        assert (await w.order(stay=True, term=7, number=3)).refused.startswith("stale: ")
        late = await w.order(stay=True, term=6, number=9)
        assert late.refused.startswith("stale: ")
        assert late.newest == 7
        assert not w.drain.begun
        assert not (await w.order(stay=True)).refused
        assert (await w.undo(term=6, number=9)).refused.startswith("stale: ")
        assert w.drain.begun
        assert (await w.undo()).serves


@virtually
async def test_a_planner_does_not_drain_the_last_one_unless_it_says_so() -> None:
    async with world() as w:
        w.worker.need[0] = "no other ready worker takes requests"
        told = await w.order(stay=True, term=7, number=1)
        assert (told.refused, told.serves) == ("no other ready worker takes requests", True)
        assert not w.drain.begun
        assert not (await w.order(stay=True, term=7, number=2, last=True)).refused
        await asyncio.sleep(6.0)
        assert w.drain.state() == DrainState(drained=True, stays=True, term=7)
        await w.order(stay=True)  # an operator wants it, too
        assert w.drain.state() == DrainState(drained=True, stays=True)


@virtually
async def test_of_two_that_drain_at_once_each_serves_on_when_it_hears_of_the_other() -> None:
    async with world() as w:
        w.worker.need.extend(["", "no other ready worker takes requests"])
        w.worker.need.popleft()
        w.worker.takes = 0.0  # it could end long before it hears
        assert not (await w.order(term=7, number=1)).refused
        await asyncio.sleep(2.5)
        assert (w.drain.begun, w.ended) == (True, [])
        await asyncio.sleep(2.0)
        assert (w.drain.begun, w.ended, w.worker.undone) == (False, [], 1)
