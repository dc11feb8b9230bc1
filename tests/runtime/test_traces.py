"""Nodes that ask frontends for traces, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Overloaded
from pdserve.ids import NodeId
from pdserve.messages.trace import TraceQuery, TraceReply
from pdserve.runtime import traces
from pdserve.runtime.rpc_methods import TRACES
from pdserve.runtime.traces import TraceService
from pdserve.tracing.answers import TraceAnswers
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.watches import TraceWatches
from pdserve.wire.handshake import Identity
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster
from tests.support.actors import silent
from tests.support.net_support import RecordingHandler, node
from tests.support.traces import make_trace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.link import PeerLink

EVERYWHERE = TraceQuery(everywhere=True)


class Scene:
    """A router, and frontends with a trace each; a visitor's link to one of them."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.rings: dict[str, TraceRing] = {}
        self.watches: dict[str, TraceWatches] = {}
        self.link: PeerLink

    async def add(self, name: str, role: str) -> None:
        made = await self.nodes.add(name, role=role)
        if role != "frontend":
            TraceService(made)
            return
        self.rings[name], self.watches[name] = TraceRing(), TraceWatches()
        self.rings[name].add(make_trace(f"req-{name}"))
        TraceService(
            made, TraceAnswers(self.rings[name], self.watches[name], name, self.nodes.loop.time)
        )

    async def ask(self, query: TraceQuery = EVERYWHERE, timeout: float = 3.0) -> TraceReply:
        return await self.link.request(TRACES, query, timeout=timeout)


@asynccontextmanager
async def scene(*frontends: str, asked: str = "router") -> AsyncIterator[Scene]:
    async with cluster() as nodes:
        made = Scene(nodes)
        await made.add("router", "router")
        for name in frontends:
            await made.add(name, "frontend")
        await nodes.until(nodes.converged)
        visitor = node("visitor", nodes.world.network("visitor"), RecordingHandler())
        visitor.identity = Identity("test", NodeId("visitor"), 1, "")
        try:
            made.link = await visitor.dial(f"{asked}:7000")
            yield made
        finally:
            await visitor.close()


@virtually
async def test_any_node_tells_of_all_frontends() -> None:
    for asked in ("router", "f1"):
        async with scene("f1", "f2", asked=asked) as s:
            reply = await s.ask()
            assert {one.node for one in reply.summaries} == {"f1", "f2"}
            assert reply.frontends == ("f1", "f2")
            assert reply.silent == {}


@virtually
async def test_the_trace_of_a_request_is_found_wherever_it_is() -> None:
    async with scene("f1", "f2", "f3") as s:
        for name in ("f1", "f2", "f3"):
            reply = await s.ask(TraceQuery(everywhere=True, id=f"req-{name}"))
            assert reply.trace == make_trace(f"req-{name}")
            assert reply.summaries[0].node == name


@virtually
async def test_a_node_without_traces_has_none_of_its_own() -> None:
    async with scene("f1") as s:
        assert await s.ask(TraceQuery()) == TraceReply()


@virtually
async def test_a_watch_begins_everywhere() -> None:
    async with scene("f1", "f2") as s:
        await s.ask(TraceQuery(everywhere=True, watch="tiny", watch_seconds=60.0))
        now = s.nodes.loop.time()
        assert all(watches.watching("tiny", now) for watches in s.watches.values())


@virtually
async def test_who_does_not_answer_in_time_is_named_and_does_not_keep_the_others() -> None:
    async with scene("f1", "f2") as s:
        s.nodes.nodes["f2"].host(silent(TRACES))
        start = s.nodes.loop.time()
        reply = await s.ask()
        assert s.nodes.loop.time() - start < 1.5
        assert reply.frontends == ("f1",)
        assert "1 s" in reply.silent["f2"]
        assert not [n for n in s.nodes.nodes["router"].tasks.names() if "traces" in n]


@virtually
async def test_the_askers_deadline_shortens_the_wait() -> None:
    async with scene("f1", "f2") as s:
        s.nodes.nodes["f2"].host(silent(TRACES))
        assert (await s.ask(timeout=0.6)).silent


@virtually
async def test_a_frontend_of_the_release_before_is_named() -> None:
    async with scene("f1", "f2") as s:
        del s.nodes.nodes["f2"].actors.answers[TRACES.id]
        assert "has no traces" in (await s.ask()).silent["f2"]


@virtually
async def test_an_error_at_the_asked_frontend_itself_is_named() -> None:
    async with scene("f1", asked="f1") as s:
        for number in range(20):
            query = TraceQuery(everywhere=True, watch=f"m{number}", watch_seconds=60.0)
            reply = await s.ask(query)
        assert "watched already" in reply.silent["f1"]


@virtually
async def test_an_asker_that_gives_up_ends_the_asking() -> None:
    async with scene("f1") as s:
        s.nodes.nodes["f1"].host(silent(TRACES))
        asking = asyncio.create_task(s.ask())
        await asyncio.sleep(0.1)
        assert [n for n in s.nodes.nodes["router"].tasks.names() if "traces" in n]
        asking.cancel()
        await asyncio.sleep(0.1)
        assert not [n for n in s.nodes.nodes["router"].tasks.names() if "traces" in n]


@virtually
async def test_askers_are_bounded() -> None:
    async with scene("f1") as s:
        s.nodes.nodes["f1"].host(silent(TRACES))
        waiting = [asyncio.create_task(s.ask()) for _ in range(traces._CALLERS)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded, match="too many trace queries at once"):
            await s.ask()
        await asyncio.gather(*waiting)
        assert (await s.ask()).silent, "places are free again"


@virtually
async def test_own_traces_are_told_however_many_wait_for_others() -> None:
    async with scene("f1", "f2", asked="f1") as s:
        s.nodes.nodes["f2"].host(silent(TRACES))
        waiting = [asyncio.create_task(s.ask()) for _ in range(traces._CALLERS)]
        await asyncio.sleep(0.1)
        replies = await asyncio.gather(*(s.ask(TraceQuery()) for _ in range(3 * traces._CALLERS)))
        assert all(reply.summaries for reply in replies)
        await asyncio.gather(*waiting)


@virtually
async def test_many_frontends_fit_one_message() -> None:
    async with scene("f1", "f2", "f3", "f4", "f5", "f6") as s:
        for ring in s.rings.values():
            for number in range(200):
                ring.add(make_trace(f"r{number}"))
        query = TraceQuery(everywhere=True, limit=10**6, after={"none": 0})
        reply = await s.ask(query)
        assert len(reply.summaries) <= traces._SUMMARIES
        assert len(reply.summaries) >= 6 * 100


def _answer(ring: TraceRing, name: str, query: TraceQuery) -> TraceReply:
    return ring.answer(query, name)


@virtually
async def test_changes_are_asked_of_planners_and_workers_and_ids_of_all() -> None:
    async with scene("f1") as s:
        rings = {}
        for name, role in (("p1", "planner"), ("w1", "worker")):
            made = await s.nodes.add(name, role=role)
            rings[name] = ring = TraceRing()
            ring.add(make_trace(f"change-{name}"))
            TraceService(made, partial(_answer, ring, name), of="changes")
        await s.nodes.until(s.nodes.converged)
        ids = {one.request_id for one in (await s.ask()).summaries}
        assert ids == {"req-f1"}
        reply = await s.ask(TraceQuery(everywhere=True, changes=True))
        assert {one.request_id for one in reply.summaries} == {"change-p1", "change-w1"}
        assert reply.frontends == ("p1", "w1")
        for wanted in ("req-f1", "change-p1", "change-w1"):
            found = (await s.ask(TraceQuery(everywhere=True, id=wanted))).trace
            assert found is not None
            assert found.request_id == wanted
