"""Handshakes under pressure, dials that fail, keys that change, and nothing left at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    ConfigError,
    DialFailed,
    DialRefused,
    DialTimeout,
    NoCommonVersion,
    WrongCluster,
    WrongClusterKey,
    WrongPeer,
)
from pdserve.ids import NodeId
from pdserve.net.base import LinkDownReason
from pdserve.net.endpoint import Endpoint
from pdserve.net.settings import NetSettings
from pdserve.net.transport.memory import MemoryWorld
from pdserve.testing import virtual_time
from pdserve.wire.handshake import Identity, Versions
from pdserve.wire.protocol import GoAwayCode
from tests.net.world import Two, two, virtually
from tests.support.net_support import (
    ECHO,
    HANG,
    KEY,
    Echo,
    RecordingHandler,
    RecordingStreamSink,
    node,
)

if TYPE_CHECKING:
    from pdserve.net.link import PeerLink

NEW_KEY = b"the key that replaces the other, 32 bytes"


class Mute(asyncio.Protocol):
    """Connects and says nothing, or what it is told to."""

    def __init__(self, words: bytes = b"") -> None:
        self.words = words
        self.lost = False
        self.got = b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.words)

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


# ---------------------------------------------------------------------- handshakes


@virtually
async def test_a_silent_stranger_is_cut_off_at_the_deadline() -> None:
    async with two(NetSettings(handshake_timeout=3.0)) as t:
        mute = Mute()
        await t.world.network("x").connect(t.address, lambda: mute, timeout=1.0)
        await asyncio.sleep(2.9)
        assert t.b.unauthenticated == 1
        assert not mute.lost
        await asyncio.sleep(0.2)
        assert t.b.unauthenticated == 0
        assert mute.lost
        assert b"unfinished" in mute.got, "even that is said"


@virtually
async def test_newer_handshakes_push_out_the_oldest_of_the_busiest_host() -> None:
    async with two(NetSettings(pending_handshakes=8)) as t:
        mutes = [Mute() for _ in range(20)]
        for mute in mutes:
            await t.world.network("x").connect(t.address, lambda mute=mute: mute, timeout=1.0)  # type: ignore[misc]
        await asyncio.sleep(0.1)
        assert t.b.unauthenticated == 8
        assert [mute.lost for mute in mutes] == [True] * 12 + [False] * 8
        c = t.node("c", RecordingHandler())
        link = await c.dial(t.address)
        assert (await link.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
        await c.close()


@virtually
async def test_a_stranger_of_another_kind_is_turned_away_at_once() -> None:
    async with two() as t:
        for words in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01" + bytes(300),
            bytes(64),
        ):
            mute = Mute(words)
            await t.world.network("x").connect(t.address, lambda mute=mute: mute, timeout=1.0)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            assert mute.lost
        assert list(t.b.links) == ["a"]
        assert t.b.refused == {"HandshakeRefused": 3}


@virtually
async def test_errors_of_the_handshake_reach_the_dialler_by_name() -> None:
    async with two() as t:
        cases = [
            (t.node("c", RecordingHandler(), keys=(NEW_KEY,)), WrongClusterKey),
            (t.node("c", RecordingHandler(), cluster="other"), WrongCluster),
            (t.node("b", RecordingHandler(), host="c", epoch=9), WrongPeer),
        ]
        later = NetSettings(versions=Versions(7, 8))
        cases.append(
            (node("c", t.world.network("c"), RecordingHandler(), settings=later), NoCommonVersion)
        )
        for stranger, kind in cases:
            with pytest.raises(kind):
                await stranger.dial(t.address)
            await stranger.close()
        assert list(t.b.links) == ["a"]
        assert t.b.connections == 1


@virtually
async def test_complaints_about_strangers_are_few() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pdserve.net.endpoint")
    logger.addHandler(handler)
    try:
        async with two() as t:
            stranger = t.node("c", RecordingHandler(), keys=(NEW_KEY,))
            for _ in range(30):
                with pytest.raises(WrongClusterKey):
                    await stranger.dial(t.address)
            await asyncio.sleep(11.0)
            with pytest.raises(WrongClusterKey):
                await stranger.dial(t.address)
            await stranger.close()
    finally:
        logger.removeHandler(handler)
    assert records == [
        "refused a connection from c: a peer does not have this cluster's key",
        "refused a connection from c: a peer does not have this cluster's key"
        " (29 more like it were not logged)",
    ]


# ---------------------------------------------------------------------- keys


@virtually
async def test_a_key_is_replaced_in_a_running_cluster() -> None:
    """Old alone, old and new, new and old, new alone: at every moment all pairs can talk."""
    world = MemoryWorld(random.Random(0))
    steps = [(KEY,), (KEY, NEW_KEY), (NEW_KEY, KEY), (NEW_KEY,)]
    keys = {"a": steps[0], "b": steps[0]}
    handlers = RecordingHandler(), RecordingHandler()
    nodes = [
        Endpoint(
            Identity("test", NodeId(name), 1),
            handler,
            world.network(name),
            keys=lambda name=name: keys[name],  # type: ignore[misc]
            entropy=random.Random(name).randbytes,
        )
        for name, handler in zip("ab", handlers, strict=True)
    ]
    addresses = [await one.listen(f"{name}:7000") for name, one in zip("ab", nodes, strict=True)]
    first = await nodes[0].dial(addresses[1])
    for step in steps[1:]:
        for name in "ab":
            keys[name] = step
            for dialling in (0, 1):
                link = await nodes[dialling].dial(addresses[1 - dialling])
                assert (await link.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
                await asyncio.sleep(0.1)
    assert first.down is not None
    for one in nodes:
        await one.close()


class Keyed:
    """Nodes `a` and `b` whose keys a test replaces; `a` has dialled."""

    def __init__(self) -> None:
        world = MemoryWorld(random.Random(0))
        self.keys: dict[str, tuple[bytes, ...]] = dict.fromkeys("ab", (KEY,))
        self.nodes = {
            name: Endpoint(
                Identity("test", NodeId(name), 1),
                RecordingHandler(),
                world.network(name),
                keys=lambda name=name: self.keys[name],  # type: ignore[misc]
                entropy=random.Random(name).randbytes,
            )
            for name in "ab"
        }

    async def connect(self) -> PeerLink:
        address = await self.nodes["b"].listen("b:7000")
        return await self.nodes["a"].dial(address)

    def replace(self, *names: str, keys: tuple[bytes, ...] = (NEW_KEY,)) -> None:
        for name in names:
            self.keys[name] = keys
        for name in names:
            self.nodes[name].keys_changed()

    async def close(self) -> None:
        for one in self.nodes.values():
            await one.close()


@virtually
async def test_links_of_a_removed_key_are_made_anew_and_their_work_goes_on() -> None:
    k = Keyed()
    old = await k.connect()
    asking = asyncio.ensure_future(old.request(HANG, Echo(), timeout=5000.0))
    k.replace("a", "b", keys=(NEW_KEY, KEY))
    await asyncio.sleep(1.0)
    assert k.nodes["a"].link(NodeId("b")) is old, "both keys are accepted still"
    k.replace("b")
    await asyncio.sleep(1.0)
    k.replace("a")
    await asyncio.sleep(1.0)
    new = k.nodes["a"].link(NodeId("b"))
    assert new is not None
    assert new is not old
    assert new.key == NEW_KEY
    await asyncio.sleep(NetSettings().revoke_after + 1)
    assert old.down is None, "its request is under way, and the peer has shown the new key"
    assert not asking.done()
    await asyncio.sleep(NetSettings().retire_after)
    assert old.down is not None
    asking.cancel()
    await k.close()


def test_the_protocols_page_says_how_long_a_replaced_connection_goes_on() -> None:
    page = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
    assert f"after {NetSettings().retire_after / 60:g} minutes at the latest" in page


@virtually
async def test_a_peer_that_gets_the_new_key_a_little_later_is_connected_anew() -> None:
    k = Keyed()
    old = await k.connect()
    asking = asyncio.ensure_future(old.request(HANG, Echo(), timeout=5000.0))
    k.replace("a")
    await asyncio.sleep(20.0)
    assert k.nodes["a"].link(NodeId("b")) is old
    k.replace("b")
    await asyncio.sleep(NetSettings().revoke_after + 1)
    new = k.nodes["a"].link(NodeId("b"))
    assert new is not None
    assert new.key == NEW_KEY
    assert not asking.done()
    asking.cancel()
    await k.close()


@virtually
async def test_a_key_that_is_removed_during_a_handshake_counts_as_removed() -> None:
    k = Keyed()
    seen = [(KEY,)]
    k.nodes["b"]._keys = lambda: seen.pop() if seen else (NEW_KEY,)
    link = await k.connect()
    await asyncio.sleep(NetSettings().revoke_after - 1)
    assert link.down is None
    await asyncio.sleep(2.0)
    assert link.down is not None
    await k.close()


@virtually
async def test_a_peer_that_has_only_the_removed_key_is_cut_off() -> None:
    k = Keyed()
    link = await k.connect()
    k.replace("b")
    await asyncio.sleep(NetSettings().revoke_after - 1)
    assert link.down is None, "nodes get their new key one after the other"
    await asyncio.sleep(2.0)
    assert link.down is not None
    assert not k.nodes["b"].links
    with pytest.raises(WrongClusterKey):
        await k.nodes["a"].dial("b:7000")
    await k.close()


@virtually
async def test_the_side_that_dialled_and_cannot_any_more_ends_the_link_too() -> None:
    k = Keyed()
    link = await k.connect()
    k.replace("a")
    await asyncio.sleep(1.0)
    assert link.down is None
    await asyncio.sleep(NetSettings().revoke_after)
    assert link.down is not None
    await k.close()


# ---------------------------------------------------------------------- dialling


class _Mute(asyncio.Protocol):
    """Accepts, and says nothing."""


@virtually
async def test_a_dial_given_up_in_the_turn_its_connection_is_lost_leaves_no_error() -> None:
    """Found by the world of seed 1194."""
    world = MemoryWorld(random.Random(0))
    listener = await world.network("b").listen("b:1", _Mute)
    endpoint = Endpoint(
        Identity("test", NodeId("a"), 1),
        RecordingHandler(),
        world.network("a"),
        keys=lambda: (KEY,),
        entropy=random.Random(0).randbytes,
    )
    dial = asyncio.ensure_future(endpoint.dial("b:1"))
    await asyncio.sleep(0.1)
    world.reset("a", "b")
    await asyncio.sleep(0)
    await endpoint.close()
    with pytest.raises(DialFailed):
        await dial
    del dial, endpoint
    gc.collect()  # the loop hears of errors that nobody looked at; the test's end raises them
    await listener.close()


@virtually
async def test_dials_fail_by_name_and_in_time() -> None:
    async with two(NetSettings(dial_timeout=2.0)) as t:
        with pytest.raises(DialRefused):
            await t.a.dial("b:1")
        with pytest.raises(ConfigError):
            await t.a.dial("nonsense")
        t.world.pause("b")
        start = asyncio.get_running_loop().time()
        with pytest.raises(DialTimeout, match="did not complete the handshake"):
            await t.a.dial(t.address)
        assert asyncio.get_running_loop().time() - start == pytest.approx(2.0, abs=0.05)
        t.world.resume("b")
        t.world.partition("a", "b")
        with pytest.raises(DialTimeout, match="did not answer"):
            await t.a.dial(t.address)
        t.world.heal()
        assert t.a.connections == 1


@virtually
async def test_a_connection_lost_during_the_handshake_is_a_failed_dial() -> None:
    async with two() as t:
        t.world.set_conditions("a", "b", delay_min=0.1, delay_max=0.1)
        dial = asyncio.ensure_future(t.a.dial(t.address))
        await asyncio.sleep(0.25)
        t.world.reset("a", "b")
        with pytest.raises(DialFailed, match="lost during the handshake"):
            await dial


@virtually
async def test_cancelling_one_waiter_leaves_the_dial_to_the_others() -> None:
    async with two() as t:
        c = t.node("c", RecordingHandler())
        t.world.set_conditions("c", "b", delay_min=0.1, delay_max=0.1)
        first, second = (asyncio.ensure_future(c.dial(t.address)) for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        link = await second
        assert first.cancelled()
        assert (await link.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
        assert c.connections == 1
        await c.close()


@virtually
async def test_a_failed_dial_that_nobody_waits_for_is_forgotten() -> None:
    async with two(NetSettings(dial_timeout=1.0)) as t:
        t.world.partition("a", "b")
        dial = asyncio.ensure_future(t.a.dial(t.address))
        await asyncio.sleep(0.1)
        dial.cancel()
        await asyncio.sleep(2.0)
        assert t.a.connections == 1


@virtually
async def test_a_wrong_peer_is_linked_but_not_returned() -> None:
    async with two() as t:
        with pytest.raises(WrongPeer, match="b is at b:7000, not z"):
            await t.a.dial(t.address, expect=NodeId("z"))


# ---------------------------------------------------------------------- closing


@pytest.mark.parametrize("us", ["a", "b"])
def test_a_link_that_retires_is_no_link_to_start_something_on(us) -> None:
    """A second connection that was lost too early leaves both sides with the one it replaced."""
    virtual_time.run(dialling_beside_a_retiring_link(us))


async def dialling_beside_a_retiring_link(us: str) -> None:
    async with two() as t:
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=9.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        t.back.retire(LinkDownReason("duplicate", "another took over"), GoAwayCode.DUPLICATE)
        await asyncio.sleep(0.1)
        assert t.link.retiring
        dialling, there, peer = (t.a, t.address, "b") if us == "a" else (t.b, "a:7000", "a")
        if us == "b":
            await t.a.listen(there)
        link = await dialling.dial(there, expect=NodeId(peer))
        assert (await link.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
        t.at_b.calls[0].reply(Echo(b"late"))
        assert (await waiting).payload == b"late"
        await t.at_a.until(lambda handler: bool(handler.downs))
        assert t.at_a.downs[0][0] is t.link
        assert dialling.link(NodeId(peer)) is link


@virtually
async def test_closing_during_everything_leaves_nothing() -> None:
    t = Two(NetSettings(), 0)
    await t.connect()
    t.world.set_conditions(delay_min=0.05, delay_max=0.1)
    c = t.node("c", RecordingHandler())
    busy = [
        asyncio.ensure_future(t.link.request(ECHO, Echo(), timeout=9.0)),
        asyncio.ensure_future(t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=9.0)),
        asyncio.ensure_future(c.dial(t.address)),
        asyncio.ensure_future(t.a.dial("b:1")),
    ]
    t.link.open_stream(1, b"", RecordingStreamSink())
    await asyncio.sleep(0.12)
    await asyncio.gather(t.a.close(), t.b.close(), c.close())
    done, pending = await asyncio.wait(busy, timeout=5.0)
    assert not pending
    assert all(task.cancelled() or task.exception() for task in done)
    await asyncio.sleep(5.0)
    assert t.a.connections == t.b.connections == c.connections == t.world.connections == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtually
async def test_close_waits_for_work_only_as_long_as_it_is_told() -> None:
    for grace, answered in ((1.0, True), (1.0, False)):
        t = Two(NetSettings(), 0)
        await t.connect()
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=9.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        start = asyncio.get_running_loop().time()
        closing = asyncio.ensure_future(t.b.close(grace=grace))
        await asyncio.sleep(0.5)
        if answered:
            t.at_b.calls[0].reply(Echo(b"done"))
            assert (await waiting).payload == b"done"
        await closing
        took = asyncio.get_running_loop().time() - start
        assert took == pytest.approx(0.52 if answered else 1.0, abs=0.1)
        await asyncio.wait([waiting])
        assert (waiting.exception() is None) is answered
        await t.a.close()


@virtually
async def test_a_peer_that_does_not_answer_cannot_hold_up_a_close() -> None:
    async with two(NetSettings(close_timeout=0.5)) as t:
        t.world.partition("a", "b")
        t.link.tell(1, bytes(4 << 20))
        start = asyncio.get_running_loop().time()
        await t.a.close()
        assert asyncio.get_running_loop().time() - start <= 1.1
        assert t.a.connections == 0


async def test_listening_twice_is_a_mistake_of_the_operator() -> None:
    t = Two(None, 0)
    await t.connect()
    with pytest.raises(ConfigError, match="in use"):
        await t.b.listen("b:7000")
    await t.a.close()
    await t.b.close()
