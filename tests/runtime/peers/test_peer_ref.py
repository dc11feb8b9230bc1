from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import DeadlineExceeded, LinkLost, NoMethod, Overloaded
from pdserve.ids import NodeId
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.wire.codec import Notice
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.support.actors import answering, silent
from tests.support.net_support import ECHO, HANG, Echo

if TYPE_CHECKING:
    from pdserve.net.base import IncomingCall

NOTE = Notice(0x7001, "note", Echo)
B = NodeId("b")


@virtually
async def test_a_reference_to_a_life_does_not_reach_the_next_one() -> None:
    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        b.host(answering(ECHO, lambda message, call: message))
        assert await a.ref(B, b.epoch).ask(ECHO, Echo(b"x"), timeout=3.0) == Echo(b"x")
        earlier = a.ref(B, b.epoch - 1)
        with pytest.raises(LinkLost) as lost:
            await earlier.ask(ECHO, Echo(), timeout=3.0)
        assert not lost.value.sent
        with pytest.raises(LinkLost):
            earlier.tell(NOTE, Echo())


@virtually
async def test_nothing_is_told_without_a_link_or_to_no_member() -> None:
    async with cluster() as nodes:
        a = await nodes.add("a")
        with pytest.raises(LinkLost) as lost:
            a.ref(B).tell(NOTE, Echo())
        assert not lost.value.sent
        with pytest.raises(LinkLost):
            await a.ref(B).ask(ECHO, Echo(), timeout=3.0)


@virtually
async def test_the_time_for_the_dial_counts() -> None:
    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        lefts: list[float] = []

        def note(message: Echo, call: IncomingCall) -> Echo:
            lefts.append(call.deadline - nodes.loop.time())
            return message

        b.host(answering(ECHO, note))
        (await a.link(B, timeout=1.0)).abort("so that it is dialled")
        nodes.world.set_conditions("a", "b", delay_min=0.25, delay_max=0.25)
        await a.ref(B).ask(ECHO, Echo(), timeout=5.0)
        assert lefts[0] < 4.75, "the handshake took more than one way"


@virtually
async def test_all_are_asked_under_one_deadline() -> None:
    async with cluster() as nodes:
        for name in "abcde":
            await nodes.add(name)
        await nodes.until(nodes.converged)

        def refuse(message: Echo, call: IncomingCall) -> Echo:
            raise Overloaded("busy")

        nodes.nodes["b"].host(answering(ECHO, lambda message, call: message))
        nodes.nodes["c"].host(answering(ECHO, refuse))
        nodes.nodes["d"].host(silent(ECHO))
        start = nodes.loop.time()
        asked = [NodeId(name) for name in "bcdez"]
        found = await ask_all(nodes.nodes["a"], asked, ECHO, Echo(b"x"), timeout=1.0)
        assert nodes.loop.time() - start == pytest.approx(1.0, abs=0.1)
        kinds = [type(found[node]) for node in asked]
        assert kinds == [Echo, Overloaded, DeadlineExceeded, NoMethod, LinkLost]
        assert await ask_all(nodes.nodes["a"], [], ECHO, Echo(), timeout=1.0) == {}


@virtually
async def test_who_gives_up_on_all_ends_the_requests() -> None:
    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        b.host(silent(HANG))
        asking = asyncio.create_task(ask_all(a, [B], HANG, Echo(), timeout=60.0))
        await asyncio.sleep(0.1)
        assert a.tasks.names() == ["hang of b"]
        asking.cancel()
        await asyncio.sleep(0.1)
        assert not a.tasks.names()
