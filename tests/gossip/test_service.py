from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Draining, HandshakeRefused, ProtocolError
from pdserve.gossip import events as ev
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.messages import TELL, PartReply, Ping
from pdserve.gossip.service import PARTS
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard, part_hash
from pdserve.runtime.registry import MemberChanged
from pdserve.wire.codec import encode
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.support.actors import answering, silent
from tests.support.net_support import ECHO, HANG, Echo, RecordingStreamSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.gossip.service import GossipService
    from pdserve.net.base import IncomingStream, Link
    from pdserve.net.transport.memory import MemoryWorld
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.wire.parser import Buffer


def gossip_of(node: Node) -> GossipService:
    assert node._life is not None
    return node._life.gossip


def alias(world: MemoryWorld, name: str, address: str) -> None:
    """Let `name` be one more way to `address`, as a host name is to a number."""
    connect = world.connect

    async def by_any_name(
        source: str, target: str, factory: Callable[[], asyncio.Protocol]
    ) -> None:
        await connect(source, address if target == name else target, factory)

    world.connect = by_any_name  # type: ignore[method-assign, assignment]


def hear_links(node: Node, listener: Callable[[Link], None]) -> None:
    """Call `listener` with every link of `node` that comes up, after the node has heard of it."""
    own = node.on_link_up

    def up(link: Link) -> None:
        own(link)
        listener(link)

    node.on_link_up = up  # type: ignore[method-assign]


@virtually
async def test_a_seed_that_has_another_name_is_not_dialled_again_and_again() -> None:
    """Each such dial would replace the link, and end what takes long on it."""
    async with cluster() as nodes:
        await nodes.add("a")
        alias(nodes.world, "seed:1", "a:7000")
        ups: list[Link] = []

        node = nodes.nodes["b"] = nodes.make("b", join=("seed:1",))
        hear_links(node, ups.append)
        await node.start()
        await nodes.until(nodes.converged)
        await asyncio.sleep(120.0)
        assert len(ups) == 1


@virtually
async def test_a_node_whose_seeds_are_all_itself_is_the_first() -> None:
    """One list of seeds may be given to every node, the first one included."""
    async with cluster() as nodes:
        alias(nodes.world, "seed:1", "a:7000")
        node = nodes.nodes["a"] = nodes.make("a", join=("seed:1", "a:7000"))
        before = nodes.loop.time()
        await node.start()
        assert nodes.loop.time() - before < 0.1
        other = nodes.nodes["b"] = nodes.make("b", join=("seed:1", "a:7000"))
        await other.start()
        await nodes.until(nodes.converged)
        assert len(node.registry) == len(other.registry) == 1
        await asyncio.sleep(60.0)
        assert node.endpoint.refused == {"OwnAddress": 1}


@virtually
async def test_a_node_beside_other_seeds_forgets_that_one_is_itself() -> None:
    async with cluster() as nodes:
        await nodes.add("b")
        alias(nodes.world, "seed:1", "a:7000")
        node = nodes.nodes["a"] = nodes.make("a", join=("seed:1", "b:7000"))
        await node.start()
        await nodes.until(nodes.converged)
        assert len(node.registry) == 1


@virtually
async def test_a_link_that_ended_before_its_dial_was_heard_of_is_no_link() -> None:
    async with cluster() as nodes:
        await nodes.add("a")
        alias(nodes.world, "seed:1", "a:7000")
        node = nodes.nodes["b"] = nodes.make("b", join=("seed:1",))

        def cut(link: Link) -> None:
            if not cuts:
                cuts.append(link)
                nodes.loop.call_soon(link.abort)

        cuts: list[Link] = []
        hear_links(node, cut)
        await node.start()
        await nodes.until(nodes.converged)
        links = gossip_of(node).machine.context.links
        assert set(links) == set(node.endpoint.links)


@virtually
async def test_a_link_that_membership_needs_no_longer_is_kept_while_it_is_used() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        nodes.nodes["b"].host(silent(HANG))
        nodes.nodes["b"].host(answering(ECHO, lambda question, call: question))
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        asking = asyncio.ensure_future(link.request(HANG, Echo(), timeout=15.0))
        await asyncio.sleep(0.1)
        service = gossip_of(nodes.nodes["a"])
        service._close_idle(NodeId("b"))
        assert not link.retiring
        await asyncio.sleep(10.5)
        assert not link.retiring
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.sleep(10.5)
        assert link.down is not None
        for one, other in (("a", "b"), ("b", "a")):
            member = nodes.nodes[one].registry.get(NodeId(other))
            assert member is not None
            assert member.reachable  # nobody has lost it
        again = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        assert await again.request(ECHO, Echo(b"x"), timeout=1.0) == Echo(b"x")
        assert not service._unneeded


@virtually
async def test_large_parts_take_the_bulk_connection() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        reader = nodes.nodes["b"]

        def told(size: int) -> bool:
            member = reader.registry.get(NodeId("a"))
            return member is not None and member.card is not None and member.card.pid == size

        for size, bulk in ((1_000, False), (600_000, True)):
            data = b"x" * size
            nodes.nodes["a"].publish_card(NodeCard(pid=size), {part_hash(data): data})
            await nodes.until(partial(told, size))
            assert await reader.part(NodeId("a"), part_hash(data), timeout=5.0) == data
            link = await reader.link(NodeId("a"), timeout=1.0)
            assert link.stats().bulk == bulk


@virtually
async def test_a_part_begun_on_a_link_that_was_replaced_takes_the_other() -> None:
    async with cluster() as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        there, heard = gossip_of(b), []
        opened = there.opened

        def note(stream: IncomingStream, body: Buffer) -> None:
            heard.append(bytes(body))
            opened(stream, body)

        there.opened = note  # type: ignore[method-assign]
        link = await a.link(NodeId("b"), timeout=1.0)

        class Replaced:
            """A link that went while its bulk connection was being made."""

            peer = link.peer

            async def open_bulk_stream(self, *_: object, **__: object) -> None:
                raise HandshakeRefused("it names a session that is not its own")

        reply = encode(PartReply(bytes(16), 0, bytes(100_000)))
        await gossip_of(a)._send_bulk(Replaced(), reply)  # type: ignore[arg-type]
        await nodes.until(lambda: heard == [reply])


@virtually
async def test_what_is_no_message_counts_against_the_peer() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        sink = RecordingStreamSink()
        link.open_stream(PARTS, encode(Ping(1)), sink, window=0)
        assert isinstance(await sink.end(), ProtocolError)
        for _ in range(3):
            link.tell(TELL, b"\xc1")
        await asyncio.sleep(0.1)
        assert link.down is not None
        await nodes.until(lambda: bool(nodes.nodes["a"].endpoint.links))


@virtually
async def test_a_part_that_nobody_wanted_is_let_pass() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        sink = RecordingStreamSink()
        link.open_stream(PARTS, encode(PartReply(b"h" * 16, 0, b"x")), sink, window=0, last=True)
        assert await sink.end() is None
        assert link.stats().streams == 0


@virtually
async def test_a_closed_service_hears_and_says_nothing() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        events: list[MemberEvent] = []
        nodes.nodes["a"].on_member(events.append)
        service = gossip_of(nodes.nodes["a"])
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        await service.close()
        await service.close()
        service.link_up(link)
        service.link_down(link.peer.node, link.peer.epoch)
        service.leave()
        assert not service._waiting
        assert service._timer is None or service._timer.cancelled()
        assert not service._tasks
        assert not any(isinstance(event, MemberChanged) for event in events)


@virtually
async def test_a_listener_that_fails_loses_nothing_of_what_membership_says() -> None:
    """An effect is for one owner; those that follow it are for others."""
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        service = gossip_of(nodes.nodes["a"])
        told = service._on_effect
        failures = [3]

        def failing(effect: object) -> None:
            told(effect)  # type: ignore[arg-type]
            if failures[0]:
                failures[0] -= 1
                raise ValueError("a fault")

        service._on_effect = failing
        for name in ("c", "d", "e"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        assert failures == [0]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_no_task_outlives_it(when: str) -> None:
    async def body() -> None:
        async with cluster() as nodes:
            node = nodes.nodes["a"] = nodes.make("a", join=("nowhere:1", "elsewhere:1"))
            nodes.world.partition("a", "nowhere")
            starting = asyncio.ensure_future(node.start())
            await asyncio.sleep(0 if when == "at once" else 1.0)
            await node.close()
            with pytest.raises(Draining):
                await starting
            assert len(asyncio.all_tasks()) == 1

    virtually(body)()


@virtually
async def test_a_dial_that_fails_in_an_unknown_way_is_tried_again() -> None:
    """A name that IDNA refuses was "being dialled" for ever."""
    async with cluster() as nodes:
        await nodes.add("a")
        connect = nodes.world.connect
        failures: list[str] = []

        async def fails_first(source: str, target: str, factory: object) -> None:
            if source == "b" and not failures:
                failures.append(target)
                raise UnicodeError("label empty or too long")
            await connect(source, target, factory)  # type: ignore[arg-type]

        nodes.world.connect = fails_first  # type: ignore[method-assign, assignment]
        await nodes.add("b")
        await nodes.until(nodes.converged)
        assert failures


@virtually
async def test_a_fault_of_the_machine_costs_neither_events_nor_the_timer() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        gossip = gossip_of(nodes.nodes["a"])
        step = gossip.machine.step
        seen: list[type[ev.Event]] = []

        def faulty(now: float, event: ev.Event) -> list[ev.Effect]:
            seen.append(type(event))
            if len(seen) == 1:
                gossip._step(ev.Tick())  # what an effect causes at once waits its turn
                raise ZeroDivisionError("a bug")
            return step(now, event)

        gossip.machine.step = faulty  # type: ignore[method-assign]
        await asyncio.sleep(30.0)
        assert seen[1] is ev.Tick
        assert len(seen) > 10, "membership goes on"
        await nodes.until(nodes.converged)


@virtually
async def test_messages_that_are_faults_do_not_hold_up_the_timer() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        gossip = gossip_of(nodes.nodes["a"])
        step, ticks = gossip.machine.step, 0

        def faulty(now: float, event: ev.Event) -> list[ev.Effect]:
            nonlocal ticks
            if isinstance(event, ev.LinkDown):
                raise ZeroDivisionError("a bug")
            ticks += isinstance(event, ev.Tick)
            return step(now, event)

        gossip.machine.step = faulty  # type: ignore[method-assign]
        for _ in range(60):
            gossip._step(ev.LinkDown(NodeId("b"), 1))
            await asyncio.sleep(0.5)
        assert ticks > 10


@virtually
async def test_seeds_that_were_away_for_long_are_found_soon_after_their_return() -> None:
    """Requests wait for routers meanwhile; the pace does not slow down to the longest pause."""
    for away in (45.0, 46.0, 47.0):
        async with cluster() as nodes:
            await nodes.add("a")
            await nodes.add("b")
            await nodes.until(nodes.converged)
            await nodes.crash("a")
            await asyncio.sleep(away)
            again = nodes.nodes["a"] = nodes.make("a", join=())
            await again.start()
            most = GossipConfig().redial_refused + 0.5
            assert await nodes.until(nodes.converged) <= most
