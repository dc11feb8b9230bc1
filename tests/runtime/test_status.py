"""Nodes that ask each other how they are, in virtual time; and a visitor that leaves no trace."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded
from pdserve.ids import NodeId
from pdserve.messages.status import NodeReport, StatusQuery
from pdserve.runtime import status
from pdserve.runtime.rpc_methods import REPORT, STATUS
from pdserve.runtime.status import StatusService
from pdserve.wire.handshake import Identity
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster
from tests.support.actors import answering, silent
from tests.support.net_support import RecordingHandler, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.link import PeerLink


@asynccontextmanager
async def visited(*names: str) -> AsyncIterator[tuple[Cluster, PeerLink]]:
    """Nodes that serve status, converged, and a visitor's link to the first."""
    async with cluster() as nodes:
        for name in names:
            made = await nodes.add(name, role="router")
            report = functools.partial(NodeReport, degraded={f"of_{name}": "why"})
            StatusService(made, report, lambda: 1_700_000_000.0)
        await nodes.until(nodes.converged)
        visitor = node("visitor", nodes.world.network("visitor"), RecordingHandler())
        visitor.identity = Identity("test", NodeId("visitor"), 1, "")
        try:
            yield nodes, await visitor.dial(f"{names[0]}:7000")
        finally:
            await visitor.close()


@virtually
async def test_any_node_tells_of_all() -> None:
    async with visited("a", "b", "c") as (_, link):
        view = await link.request(STATUS, StatusQuery(), timeout=3.0)
        assert [member.node for member in view.members] == ["a", "b", "c"]
        reports = [member.report for member in view.members]
        assert [report and list(report.degraded) for report in reports] == [
            ["of_a"],
            ["of_b"],
            ["of_c"],
        ]


@virtually
async def test_a_visitor_is_no_member_and_leaves_no_trace() -> None:
    async with visited("a", "b") as (nodes, link):
        a = nodes.nodes["a"]
        for _ in range(3):
            await link.request(STATUS, StatusQuery(), timeout=3.0)
            await asyncio.sleep(20.0)
        machine = a._living().gossip.machine
        assert [member.node for member in a.registry] == ["b"]
        assert "visitor" not in machine.context.links
        assert "visitor" not in machine._met
        link.close()
        await nodes.until(lambda: a.link_nowait(NodeId("visitor")) is None)
        assert [member.node for member in a.registry] == ["b"]


@virtually
async def test_who_does_not_answer_in_time_is_named_and_does_not_keep_the_others() -> None:
    async with visited("a", "b", "c") as (nodes, link):
        nodes.nodes["b"].host(silent(REPORT))
        start = nodes.loop.time()
        view = await link.request(STATUS, StatusQuery(), timeout=3.0)
        assert nodes.loop.time() - start < 1.5
        quiet = {member.node: member.silence for member in view.members if member.silence}
        assert list(quiet) == ["b"]
        assert "1 s" in quiet[NodeId("b")]
        assert not [name for name in nodes.nodes["a"].tasks.names() if "report" in name]


@virtually
async def test_the_askers_deadline_shortens_the_wait() -> None:
    async with visited("a", "b") as (nodes, link):
        nodes.nodes["b"].host(silent(REPORT))
        view = await link.request(STATUS, StatusQuery(), timeout=0.6)
        assert view.members[1].silence


@virtually
async def test_a_member_that_fails_is_named_with_its_words() -> None:
    async with visited("a", "b") as (nodes, link):

        def fail(question: StatusQuery, call: object) -> NodeReport:
            raise Overloaded("too busy")

        nodes.nodes["b"].host(answering(REPORT, fail))
        view = await link.request(STATUS, StatusQuery(), timeout=3.0)
        assert "too busy" in view.members[1].silence


@virtually
async def test_an_asker_that_gives_up_ends_the_asking() -> None:
    async with visited("a", "b") as (nodes, link):
        nodes.nodes["b"].host(silent(REPORT))
        asking = asyncio.create_task(link.request(STATUS, StatusQuery(), timeout=3.0))
        await asyncio.sleep(0.1)
        assert [name for name in nodes.nodes["a"].tasks.names() if "report" in name]
        asking.cancel()
        await asyncio.sleep(0.1)
        assert not [name for name in nodes.nodes["a"].tasks.names() if "report" in name]


@virtually
async def test_askers_are_bounded() -> None:
    async with visited("a", "b") as (nodes, link):
        nodes.nodes["b"].host(silent(REPORT))
        many = status._CALLERS + 3
        outcomes = await asyncio.gather(
            *(link.request(STATUS, StatusQuery(), timeout=3.0) for _ in range(many)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == 3
        assert (await link.request(STATUS, StatusQuery(), timeout=3.0)).members
