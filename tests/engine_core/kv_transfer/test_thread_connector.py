"""A mover with a thread of its own: real transports, real bytes, and an end that is an end."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.engine_core.kv_transfer import loop_connector, peer_paths, thread_connector
from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptKey,
    PartArrived,
    PartDelivered,
)
from pdserve.engine_core.kv_transfer.thread_connector import ThreadKvConnector
from pdserve.errors import ConfigError, EngineDied, EngineError
from pdserve.messages.engine import PeerGone, TransferSpec
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.backends import TransferBackend, make_backends
from pdserve.transfer.base import Region
from tests.engine_core.kv_transfer.world import World, delivered, filled, granted, part, revoked
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timeout(2 * PATIENCE)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than a worker would wait before it gives a path up."""
    monkeypatch.setattr(peer_paths, "READY_TIMEOUT", PATIENCE)
    monkeypatch.setattr(peer_paths, "CONNECT_TIMEOUT", PATIENCE)
    monkeypatch.setattr(loop_connector, "_REVOKE", PATIENCE)


class Two(World):
    """A decode and a prefill worker of this host."""

    def __init__(self, *backends: str) -> None:
        super().__init__()
        spec = TransferSpec(backends=backends, verify="all")
        self.d, self.p = self.end("d", 1, 64), self.end("p", 2, 64)
        for end in (self.d, self.p):
            mover = end.by_thread(make_backends(spec))
            assert mover.start(end.region, lambda: None) == backends
            mover.attach(end.key)


@asynccontextmanager
async def two(*backends: str) -> AsyncIterator[Two]:
    made = Two(*backends)
    try:
        yield made
    finally:
        for end in (made.d, made.p):
            await asyncio.to_thread(end.mover.close)
            end.mover.close()
            end.free()
        assert "pdserve-transports" not in {thread.name for thread in threading.enumerate()}


BOTH = pytest.mark.parametrize("backend", ["shm", "tcp"])


@BOTH
async def test_blocks_travel_between_pools(backend: str, seed: int) -> None:
    random = Random(seed)
    async with two(backend) as world:
        world.p.fill({block: block for block in range(64)})
        expected: dict[int, int] = {}
        free = list(range(64))
        random.shuffle(free)
        for number in range(8):
            size = random.randint(1, 8)
            to, free = free[:size], free[size:]
            from_ = random.sample(range(64), size)
            sent = await filled(world, world.d, world.p, AttemptKey(number, 1), from_, to)
            assert sent.size == size * world.d.memory.block_bytes
            expected |= dict(zip(to, from_, strict=True))
        assert world.d.holds(expected)
        await world.until(lambda: bool(world.d.paths and world.d.paths[0].received_bytes))
        assert [path.backend for path in world.d.paths] == [backend]
        moved = len(expected) * world.d.memory.block_bytes
        await world.until(lambda: world.d.paths[0].received_bytes == moved)
        await world.until(lambda: bool(world.p.paths) and world.p.paths[0].sent_bytes == moved)
        assert world.p.paths[0].sent_seconds > 0


@BOTH
async def test_revoked_blocks_stay_as_they_are(backend: str) -> None:
    async with two(backend) as world:
        world.p.fill(dict.fromkeys(range(64), 7))
        for number in range(20):
            key = AttemptKey(number, 1)
            blocks = list(range(32))
            ticket = (await granted(world, world.d, world.p, key, blocks)).ticket
            world.p.mover.deliver(number, world.d.key, ticket, part(0, blocks))
            if number % 2:
                world.p.mover.withdraw(number, world.d.key, ticket)
            await revoked(world, world.d, key, PATIENCE)
            world.d.poison(range(64))
            await delivered(world, world.p, number)
            assert world.d.holds({})


@BOTH
async def test_a_peer_that_is_gone_ends_all_with_it(backend: str) -> None:
    async with two(backend) as world:
        key = AttemptKey(1, 1)
        await granted(world, world.d, world.p, key, [1])
        world.d.tell(PeerGone(node="p", epoch=2))
        await world.until(lambda: bool(world.d.of(AttemptBroken, key)))
        await revoked(world, world.d, key, PATIENCE)
        world.p.fill({3: 3})
        await filled(world, world.d, world.p, AttemptKey(2, 1), [3], [4])
        assert world.d.holds({4: 3})


@BOTH
async def test_closing_one_end_in_the_middle_fails_the_other(backend: str) -> None:
    async with two(backend) as world:
        key = AttemptKey(1, 1)
        ticket = (await granted(world, world.d, world.p, key, [1])).ticket
        await asyncio.to_thread(world.p.mover.close)
        world.cut.add(world.p.key)
        await world.until(lambda: bool(world.d.of(AttemptBroken, key)))
        await revoked(world, world.d, key, PATIENCE)
        assert ticket.backend == backend


async def test_an_end_that_is_closed_hears_and_says_nothing() -> None:
    async with two("shm") as world:
        await asyncio.to_thread(world.p.mover.close)
        world.p.mover.open(AttemptKey(1, 1), world.d.key, world.p.order(AttemptKey(1, 1), [1]))
        world.p.tell(PeerGone(node="d", epoch=1))
        assert world.p.mover.poll() == []
        assert world.p.of((AttemptBroken, PartArrived), AttemptKey(1, 1)) == []
        assert [m for m in world.p.moved if isinstance(m, PartDelivered)] == []


def test_an_impossible_wish_starts_no_thread() -> None:
    never = TransferBackend(name="never", make=None, lacking=lambda regions: "no such device")  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    mover = ThreadKvConnector([never], lambda: None, theirs)
    layout = RankKvLayout(content="m", layers=1, heads=1, tokens=1, dim=1, itemsize=1)
    with pytest.raises(ConfigError, match="never: no such device"):
        mover.start(Region(layout, 1), lambda: None)
    mover.close()
    ours.close()
    theirs.close()


async def test_a_thread_that_breaks_down_is_heard_of(caplog) -> None:
    async with two("shm") as world:
        woken = threading.Event()
        mover = world.p.mover
        assert isinstance(mover, ThreadKvConnector)
        assert mover._loop is not None
        mover._wake = woken.set
        world.p.pump = lambda: None  # type: ignore[method-assign]
        mover._loop.call_soon_threadsafe(lambda: 1 / 0)
        assert await asyncio.to_thread(woken.wait, PATIENCE)
        with pytest.raises(EngineDied, match="ZeroDivisionError"):
            mover.poll()


async def test_an_end_that_does_not_come_is_not_kept_quiet(monkeypatch) -> None:
    monkeypatch.setattr(thread_connector, "_CLOSE", 0.1)
    async with two("tcp") as world:
        held = threading.Event()
        mover = world.p.mover
        assert isinstance(mover, ThreadKvConnector)
        assert mover._loop is not None
        mover._loop.call_soon_threadsafe(held.wait)
        with pytest.raises(EngineError, match="have not ended"):
            mover.close()
        held.set()
        monkeypatch.setattr(thread_connector, "_CLOSE", PATIENCE)


async def test_a_command_that_cannot_be_handled_is_heard_of(caplog, monkeypatch) -> None:
    """asyncio closes the socket of a protocol that raises, and does not report every error."""
    async with two("shm") as world:
        woken = threading.Event()
        mover = world.p.mover
        assert isinstance(mover, ThreadKvConnector)
        assert mover._mover is not None
        mover._wake = woken.set
        world.p.pump = lambda: None  # type: ignore[method-assign]

        def fail(peer: object) -> None:
            raise OSError("no more descriptors")

        monkeypatch.setattr(mover._mover, "_peer_gone", fail)
        world.p.tell(PeerGone(node="d", epoch=1))
        assert await asyncio.to_thread(woken.wait, PATIENCE)
        with pytest.raises(EngineDied, match="no more descriptors"):
            mover.poll()
