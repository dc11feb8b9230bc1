from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    ConfigError,
    Draining,
    LinkLost,
    NoMethod,
    ProtocolError,
    WrongCluster,
    WrongClusterKey,
)
from pdserve.gossip.messages import TELL
from pdserve.ids import NodeId
from pdserve.messages.card import ModelCard
from pdserve.messages.node import NodeCard, model_card, summarize_card
from pdserve.runtime.registry import MemberAppeared, MemberChanged, MemberGone
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.support.actors import answering, silent
from tests.support.net_support import ECHO, HANG, KEY, Echo, RecordingStreamSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.net.base import NetListener
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent

MODEL = ModelCard(
    name="tiny",
    max_model_len=64,
    vocab_size=100,
    block_size=32,
    tokenizer_json=b"x" * 700_000,
    chat_template="{{ messages }}",
)


@virtually
async def test_nodes_find_each_other_through_one_seed() -> None:
    async with cluster() as nodes:
        for name in ("a", "b", "c", "d"):
            await nodes.add(name, role="router" if name == "a" else "worker")
        assert await nodes.until(nodes.converged) < 3.0
        members = nodes.nodes["d"].registry
        assert [member.node for member in members.by_role("worker")] == ["b", "c"]
        assert members.get(NodeId("a")) is not None


@virtually
async def test_a_card_and_its_parts_reach_whoever_wants_them() -> None:
    async with cluster() as nodes:
        for name in ("a", "b", "c"):
            await nodes.add(name)
        small, parts = summarize_card(MODEL)
        nodes.nodes["a"].publish_card(NodeCard(models=(small,), topics=("load",)), parts)
        reader = nodes.nodes["c"]

        def known() -> bool:
            member = reader.registry.get(NodeId("a"))
            return member is not None and member.card is not None

        assert await nodes.until(known) < 3.0
        publishes = {m.node: m.card.topics for m in reader.registry if m.card is not None}
        assert publishes[NodeId("a")] == ("load",)
        fetched = await asyncio.gather(
            *(reader.part(NodeId("a"), name, timeout=5.0) for name in (*small.parts, *small.parts))
        )
        whole = dict(zip((*small.parts, *small.parts), fetched, strict=True))
        assert model_card(small, whole) == MODEL


@virtually
async def test_a_part_that_nobody_has_is_an_error() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        with pytest.raises(LinkLost):
            await nodes.nodes["a"].part(NodeId("b"), b"0" * 16, timeout=60.0)


@virtually
async def test_a_crash_is_told_once_and_ends_what_waits() -> None:
    async with cluster() as nodes:
        for name in ("a", "b", "c"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        nodes.nodes["b"].host(silent(HANG))
        events: list[MemberEvent] = []
        nodes.nodes["a"].on_member(events.append)
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        asking = asyncio.ensure_future(link.request(HANG, Echo(), timeout=60.0))
        await asyncio.sleep(0.1)
        await nodes.crash("b")
        with pytest.raises(LinkLost) as lost:
            await asking
        assert lost.value.sent
        assert await nodes.until(nodes.converged) < 1.5
        await asyncio.sleep(20.0)
        gone = [event for event in events if isinstance(event, MemberGone)]
        assert [(event.member.node, event.reason) for event in gone] == [("b", "died")]
        assert sum(isinstance(event, MemberAppeared) for event in events) == 2


@virtually
async def test_who_leaves_is_gone_at_once() -> None:
    async with cluster() as nodes:
        for name in ("a", "b", "c"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        events: list[MemberEvent] = []
        nodes.nodes["a"].on_member(events.append)
        leaver = nodes.nodes.pop("b")
        leaving = asyncio.ensure_future(leaver.leave())
        assert await nodes.until(nodes.converged) < 0.5
        await leaving
        await leaver.close()
        assert [e.reason for e in events if isinstance(e, MemberGone)] == ["left"]


@virtually
async def test_a_node_held_for_dead_comes_back_as_another_life() -> None:
    async with cluster() as nodes:
        for name in ("a", "b", "c", "d"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        first = nodes.nodes["d"].epoch
        nodes.nodes["d"].publish_card(NodeCard(role="worker"), {})
        nodes.world.pause("d")
        await nodes.until(lambda: nodes.nodes["a"].registry.get(NodeId("d")) is None, 20.0)
        nodes.world.resume("d")
        await nodes.until(lambda: nodes.nodes["d"].epoch > first and nodes.converged(), 30.0)
        assert nodes.nodes["d"].lives == 2

        def card_again() -> bool:
            member = nodes.nodes["a"].registry.get(NodeId("d"))
            return member is not None and member.card is not None

        await nodes.until(card_again)


@virtually
async def test_what_comes_between_two_lives_is_dropped() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        node = nodes.nodes["a"]
        link = node.link_nowait(NodeId("b"))
        assert link is not None
        life, node._life = node._life, None
        node.on_tell(link, TELL, b"not even looked at")
        node._life = life
        with pytest.raises(ProtocolError):
            node.on_tell(link, TELL, b"now it is")


@virtually
async def test_a_wrong_key_is_named() -> None:
    async with cluster() as nodes:
        await nodes.add("a")
        for key, name, error in (
            (b"k" * 32, "test", WrongClusterKey),
            (KEY, "other", WrongCluster),
        ):
            stranger = nodes.make("x", cluster=name, keys=(key,))
            with pytest.raises(error):
                await stranger.start()
            await stranger.close()
        assert len(nodes.nodes["a"].registry) == 0


@virtually
async def test_the_earlier_of_two_nodes_with_one_name_ends() -> None:
    async with cluster() as nodes:
        await nodes.add("a")
        reasons: list[tuple[str, str]] = []
        twins = [nodes.make("x", host=host) for host in ("one", "two")]
        for twin, host in zip(twins, ("one", "two"), strict=True):
            twin.on_superseded = partial(lambda host, reason: reasons.append((host, reason)), host)
            await twin.start()
            await asyncio.sleep(1.0)
        await nodes.until(lambda: bool(reasons), 30.0)
        await asyncio.sleep(60.0)
        assert [host for host, _ in reasons] == ["one"]
        assert "a name of its own" in reasons[0][1]
        known = nodes.nodes["a"].registry.get(NodeId("x"))
        assert known is not None
        assert known.epoch == twins[1].epoch
        for twin in twins:
            await twin.close()


@virtually
async def test_requests_are_answered_by_method() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        nodes.nodes["a"].host(answering(ECHO, lambda question, call: Echo(question.payload + b"!")))
        link = await nodes.nodes["b"].link(NodeId("a"), timeout=1.0)
        assert await link.request(ECHO, Echo(b"hi"), timeout=1.0) == Echo(b"hi!")
        for _ in range(5):  # of a later release, say: no reason to end the link
            with pytest.raises(NoMethod, match="not served"):
                await link.request(HANG, Echo(), timeout=1.0)
            link.open_stream(HANG.id, b"", RecordingStreamSink())
        assert await link.request(ECHO, Echo(b"hi"), timeout=1.0) == Echo(b"hi!")
        with pytest.raises(LinkLost, match="not in the cluster"):
            await nodes.nodes["b"].link(NodeId("z"), timeout=1.0)


@virtually
async def test_links_that_roles_make_are_reported() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        events: list[MemberEvent] = []
        nodes.nodes["a"].on_member(events.append)
        nodes.world.reset("a", "b")
        nodes.world.reset("b", "a")
        await nodes.until(lambda: any(isinstance(event, MemberChanged) for event in events))

        def reachable() -> bool:
            member = nodes.nodes["a"].registry.get(NodeId("b"))
            return member is not None and member.reachable

        await nodes.until(reachable)


@virtually
async def test_a_part_on_its_way_is_given_up_with_the_life_that_wanted_it() -> None:
    """And asked for anew by the next: nobody joins a fetch that can never end."""
    async with cluster() as nodes:
        for name in ("a", "b", "c", "d"):
            await nodes.add(name)
        small, parts = summarize_card(MODEL)
        nodes.nodes["a"].publish_card(NodeCard(models=(small,)), parts)
        reader = nodes.nodes["d"]

        def known() -> bool:
            member = reader.registry.get(NodeId("a"))
            return member is not None and member.card is not None

        await nodes.until(known)
        nodes.world.partition("a", "d")
        waiting = asyncio.ensure_future(reader.part(NodeId("a"), small.tokenizer, timeout=600.0))
        nodes.world.pause("d")
        await nodes.until(lambda: nodes.nodes["b"].registry.get(NodeId("d")) is None, 30.0)
        nodes.world.heal()
        nodes.world.resume("d")
        with pytest.raises(LinkLost):
            await waiting
        await nodes.until(lambda: reader.lives == 2 and known(), 30.0)
        assert await reader.part(NodeId("a"), small.tokenizer, timeout=10.0)
        assert not reader._fetching


@virtually
async def test_without_a_life_there_are_no_parts() -> None:
    async with cluster() as nodes:
        node = nodes.nodes["a"] = nodes.make("a")
        for _ in range(2):
            with pytest.raises(LinkLost, match="not in the cluster"):
                await node.part(NodeId("b"), b"0" * 16, timeout=1.0)
        await node.start()
        waiting = asyncio.ensure_future(node.part(NodeId("b"), b"0" * 16, timeout=60.0))
        await asyncio.sleep(0)
        await node.close()
        with pytest.raises(LinkLost):
            await waiting
        assert not node._fetching


@virtually
async def test_closed_in_the_middle_of_its_rebirth_nothing_is_left() -> None:
    for turns in range(12):
        async with cluster() as nodes:
            for name in ("a", "b", "c"):
                await nodes.add(name)
            await nodes.until(nodes.converged)
            nodes.world.pause("c")
            await nodes.until(lambda: len(nodes.nodes["a"].registry) == 1, 30.0)
            nodes.world.resume("c")
            await begins_again(nodes.nodes["c"])
            for _ in range(turns):
                await asyncio.sleep(0)
            await nodes.nodes["c"].close()
            await nodes.nodes["c"].close()
            assert not nodes.nodes["c"].registry
            await asyncio.sleep(0.1)
            assert nodes.world.connections == 2


async def begins_again(node: Node) -> None:
    """Wait until it has heard of its own death."""
    heard = asyncio.Event()

    def hear(event: MemberEvent) -> None:
        if isinstance(event, MemberGone):
            heard.set()

    node.on_member(hear)
    await heard.wait()


@virtually
async def test_a_link_that_starts_nothing_more_is_replaced() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        nodes.nodes["b"].host(silent(HANG))
        nodes.nodes["b"].host(answering(ECHO, lambda question, call: question))
        link = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        asking = asyncio.ensure_future(link.request(HANG, Echo(), timeout=60.0))
        await asyncio.sleep(0.1)
        link.close("enough")
        again = await nodes.nodes["a"].link(NodeId("b"), timeout=1.0)
        assert await again.request(ECHO, Echo(b"x"), timeout=1.0) == Echo(b"x")
        assert not asking.done()
        asking.cancel()


@virtually
async def test_a_card_that_is_too_large_is_refused_and_the_old_one_stays() -> None:
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        node = nodes.nodes["a"]
        node.publish_card(NodeCard(host="here"), {})
        with pytest.raises(ConfigError, match="card"):
            node.publish_card(NodeCard(reason="x" * 9000), {})
        assert node.card is not None
        assert node.card.host == "here"


@virtually
async def test_one_whose_clock_went_back_joins_with_its_next_life() -> None:
    """The others remember a later life that has ended: `start` waits through both."""
    async with cluster() as nodes:
        for name in ("a", "b"):
            await nodes.add(name)
        await nodes.until(nodes.converged)
        first = nodes.nodes.pop("b")
        await first.leave()
        await first.close()
        second = nodes.nodes["b"] = nodes.make("b")
        second._wall = lambda: 1_600_000_000.0
        await second.start()
        assert second.lives == 2
        assert second.epoch == first.epoch + 1
        await nodes.until(nodes.converged)


@virtually
async def test_closed_while_it_begins_to_listen_nothing_is_left() -> None:
    async with cluster(together=True) as nodes:
        other = await nodes.add("b")
        node = nodes.make("a")
        listen = node._network.listen

        async def slowly(address: str, factory: Callable[[], asyncio.BaseProtocol]) -> NetListener:
            await asyncio.sleep(1.0)
            return await listen(address, factory)

        node._network.listen = slowly  # type: ignore[method-assign]
        starting = asyncio.ensure_future(node.start())
        await asyncio.sleep(0.5)
        await node.close()
        with pytest.raises(Draining):
            await starting
        assert nodes.neighbours is not None
        assert nodes.neighbours.link(other, node.id) is None
        await nodes.add("a")  # the address is free


@virtually
async def test_closed_while_it_joins_whoever_starts_it_hears_so() -> None:
    async with cluster() as nodes:
        node = nodes.make("a", join=("nowhere:7000",))
        nodes.world.partition("a", "nowhere")
        starting = asyncio.ensure_future(node.start())
        await asyncio.sleep(1.0)
        await node.close()
        with pytest.raises(Draining):
            await starting


@virtually
async def test_a_task_that_never_ends_is_told_and_does_not_hold_the_end_up() -> None:
    async with cluster() as nodes:
        heard: list[str] = []
        node, released = await nodes.add("a"), asyncio.Event()
        node.on_stuck = heard.append

        async def stay() -> None:
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()

        stays = node.tasks.spawn(stay(), "stays")
        await asyncio.sleep(0)
        await asyncio.wait_for(node.close(), 40.0)
        assert heard == ["node a: stays still run 30 s after they were cancelled"]
        released.set()
        await stays
