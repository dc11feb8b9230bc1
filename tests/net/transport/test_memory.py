"""Every fault of the network in memory does what it says, is counted, and repeats from its seed."""

from __future__ import annotations

import asyncio
import contextvars
import random
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.errors import ConfigError, DialRefused, DialTimeout
from pdserve.net.transport.memory import MemoryWorld
from pdserve.testing import virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Peer(asyncio.Protocol):
    """Notes what happens, and when."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: list[tuple[float, object]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.note("made")

    def data_received(self, data: bytes) -> None:
        self.note(data)

    def eof_received(self) -> None:
        self.note("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.note(exc and type(exc).__name__)

    def note(self, what: object) -> None:
        self.events.append((round(self.loop.time(), 6), what))

    @property
    def data(self) -> bytes:
        return b"".join(what for _, what in self.events if isinstance(what, bytes))

    @property
    def last(self) -> object:
        return self.events[-1][1]


async def connected(world: MemoryWorld) -> tuple[Peer, Peer]:
    """A connection that `a` dialled and `b` accepted."""
    accepted: list[Peer] = []

    def accept() -> Peer:
        accepted.append(Peer())
        return accepted[-1]

    listener = await world.network("b").listen("b:0", accept)
    ours = Peer()
    await world.network("a").connect(listener.address, lambda: ours, timeout=5.0)
    await asyncio.sleep(0)
    await listener.close()
    return ours, accepted[0]


def in_world(
    test: Callable[[MemoryWorld], Coroutine[object, object, None]],
) -> Callable[[], None]:
    """Run a test in virtual time, with a world of its own."""

    def run() -> None:
        virtual_time.run(test(MemoryWorld(random.Random(0))))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_world
async def test_delay_takes_its_time_and_keeps_the_order(world) -> None:
    ours, theirs = await connected(world)
    world.set_conditions("a", "b", delay_min=1.0, delay_max=2.0)
    for number in range(20):
        ours.transport.write(b"%02d" % number)
    theirs.transport.write(b"back")
    await asyncio.sleep(0.5)
    assert ours.data == b"back", "the other direction is not delayed"
    assert theirs.data == b""
    await asyncio.sleep(5.0)
    assert theirs.data == b"".join(b"%02d" % number for number in range(20))
    assert all(1.0 <= when <= 2.0 for when, what in theirs.events if isinstance(what, bytes))
    assert world.faults["delay"] == 20


@in_world
async def test_bandwidth_spreads_bytes_over_time(world) -> None:
    ours, theirs = await connected(world)
    world.set_conditions("a", "b", bandwidth=10_000.0, segment=1000)
    ours.transport.write(bytes(50_000))
    await asyncio.sleep(2.5)
    assert 24_000 <= len(theirs.data) <= 26_000
    await asyncio.sleep(2.6)
    assert len(theirs.data) == 50_000


@in_world
async def test_a_partition_is_silence_and_its_end_delivers_what_was_sent(world) -> None:
    ours, theirs = await connected(world)
    world.partition("a", "b")
    ours.transport.write(b"there")
    theirs.transport.write(b"back")
    await asyncio.sleep(100.0)
    assert ours.data == theirs.data == b""
    assert ours.last == theirs.last == "made", "no error: nobody knows"
    world.heal("a", "b")
    await asyncio.sleep(0.1)
    assert (theirs.data, ours.data) == (b"there", b"back")
    assert world.faults["silence"] > 0


@in_world
async def test_a_one_way_partition_lets_the_other_way_through(world) -> None:
    ours, theirs = await connected(world)
    world.partition("a", "b", one_way=True)
    ours.transport.write(b"there")
    theirs.transport.write(b"back")
    await asyncio.sleep(1.0)
    assert (theirs.data, ours.data) == (b"", b"back")
    world.heal()
    await asyncio.sleep(0.1)
    assert theirs.data == b"there"


@in_world
async def test_a_reset_is_an_error_on_both_sides(world) -> None:
    ours, theirs = await connected(world)
    ours.transport.write(b"lost")
    world.reset("a", "b")
    await asyncio.sleep(0.1)
    assert ours.last == theirs.last == "ConnectionResetError"
    assert theirs.data == b""
    assert world.connections == 0
    assert world.faults["reset"] == 1


@in_world
async def test_a_reset_inside_a_stream_comes_at_the_byte(world) -> None:
    ours, theirs = await connected(world)
    world.reset_after("a", "b", 1234)
    ours.transport.write(bytes(100_000))
    await asyncio.sleep(0.1)
    assert len(theirs.data) == 1234
    assert ours.last == theirs.last == "ConnectionResetError"


@in_world
async def test_a_paused_process_takes_nothing_and_sends_nothing(world) -> None:
    ours, theirs = await connected(world)
    world.pause("b")
    ours.transport.write(b"in")
    theirs.transport.write(b"out")
    await asyncio.sleep(10.0)
    assert ours.data == theirs.data == b""
    late = Peer()
    listener = await world.network("b").listen("b:7000", Peer)
    await world.network("a").connect("b:7000", lambda: late, timeout=1.0)
    assert late.last == "made", "the kernel still accepts"
    world.resume("b")
    await asyncio.sleep(0.1)
    assert (theirs.data, ours.data) == (b"in", b"out")
    late.transport.abort()
    await listener.close()


@in_world
async def test_a_crash_resets_connections_and_refuses_dials(world) -> None:
    ours, theirs = await connected(world)
    await world.network("b").listen("b:7000", Peer)
    world.crash("b")
    await asyncio.sleep(0.1)
    assert ours.last == theirs.last == "ConnectionResetError"
    with pytest.raises(DialRefused):
        await world.network("a").connect("b:7000", Peer, timeout=1.0)


@in_world
async def test_a_crash_behind_a_partition_is_seen_when_that_ends(world) -> None:
    ours, theirs = await connected(world)
    theirs.transport.write(b"sent before")
    world.partition("a", "b")
    world.crash("b")
    await asyncio.sleep(10.0)
    assert theirs.last == "ConnectionResetError", "the dead end is gone at once"
    assert ours.last == "made"
    world.heal()
    await asyncio.sleep(0.01)
    assert [what for _, what in ours.events[1:]] == [b"sent before", "ConnectionResetError"]
    assert world.connections == 0


@in_world
async def test_each_protocol_is_called_in_the_context_that_made_it(world) -> None:
    whose = contextvars.ContextVar("whose", default="nobody")
    heard: list[tuple[str, str, str]] = []

    class Owned(Peer):
        def __init__(self, owner: str) -> None:
            super().__init__()
            self.owner = owner

        def note(self, what: object) -> None:
            heard.append((self.owner, whose.get(), str(what)))
            super().note(what)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if data == b"ping":
                self.transport.write(b"pong")

    async def as_(owner, work):
        context = contextvars.copy_context()
        context.run(whose.set, owner)
        return await asyncio.create_task(work, context=context)

    listener = await as_("b", world.network("b").listen("b:0", lambda: Owned("b")))
    ours = Owned("a")
    await as_("a", world.network("a").connect(listener.address, lambda: ours, timeout=5.0))
    ours.transport.write(b"ping")
    await asyncio.sleep(0.1)
    ours.transport.abort()
    await asyncio.sleep(0.1)
    assert {(owner, whose) for owner, whose, _ in heard} == {("a", "a"), ("b", "b")}
    assert [what for _, _, what in heard].count("b'pong'") == 1
    await listener.close()


@in_world
async def test_dialling_into_a_partition_times_out_and_healing_lets_it_through(world) -> None:
    listener = await world.network("b").listen("b:7000", Peer)
    world.partition("a", "b", one_way=True)
    with pytest.raises(DialTimeout, match="within 1 s"):
        await world.network("a").connect("b:7000", Peer, timeout=1.0)
    dial = asyncio.ensure_future(world.network("a").connect("b:7000", Peer, timeout=5.0))
    await asyncio.sleep(2.0)
    world.heal()
    await dial
    await listener.close()


@in_world
async def test_what_nobody_reads_any_more_is_answered_by_a_reset(world) -> None:
    ours, theirs = await connected(world)
    world.set_conditions(delay_min=0.1, delay_max=0.1)
    theirs.transport.close()
    ours.transport.write(b"too late")
    await asyncio.sleep(1.0)
    assert theirs.last is None
    assert ours.last in (None, "ConnectionResetError")


@in_world
async def test_addresses_belong_to_their_host_and_are_used_once(world) -> None:
    network = world.network("b")
    with pytest.raises(ConfigError, match="this host is b"):
        await network.listen("a:0", Peer)
    listener = await network.listen("b:7000", Peer)
    with pytest.raises(ConfigError, match="in use"):
        await network.listen("b:7000", Peer)
    await listener.close()
    again = await network.listen("b:7000", Peer)
    await again.close()


def history(seed: int) -> list[tuple[float, object]]:
    """What happens at one end of a connection in a rough world."""

    async def main() -> list[tuple[float, object]]:
        world = MemoryWorld(random.Random(seed))
        world.set_conditions(delay_max=0.01, split=True, capacity=5000)
        ours, theirs = await connected(world)
        for _ in range(30):
            ours.transport.write(world.random.randbytes(200))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.0)
        ours.transport.close()
        await asyncio.sleep(1.0)
        assert world.connections == 0
        return theirs.events

    return virtual_time.run(main())


def test_a_seed_repeats_and_seeds_differ() -> None:
    assert history(1) == history(1) != history(2)


def test_virtual_time_says_when_nothing_can_happen_any_more() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(main())
