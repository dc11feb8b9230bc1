"""What real queue pairs do when something goes wrong: the path ends, named, fenced, and clean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.errors import PathLost, TransferError
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import (
    RecordingTransferSink,
    TransferPair,
    deliver,
    order,
    transfer_pair,
)
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.rdma.adapter import QueuePairOptions
from pdserve.transfer.rdma.ibverbs_ffi import unregister
from pdserve.transfer.rdma.transport import RdmaTransport
from tests.rdma.conftest import DEVICES, held, transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, Grant, KvPath, KvTransport

HASTY = QueuePairOptions(depth=64, receives=64, timeout=14, retries=3)
"""A dead link is noticed after 0.3 s, and longer on a busy host."""

LINK = ("dev", "rdma1", "root")


def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
    return transport(key, regions, ask, HASTY)


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[TransferPair, Any, Any]]:
    """Two nodes and both ends of a path."""
    async with transfer_pair(make, layouts(2, 1), layouts(2, 2), blocks=16) as world:
        ours, theirs = await world.connect()
        world.source.fill({block: block for block in range(16)})
        yield world, ours, theirs


def granted(theirs: KvPath) -> tuple[Grant, RecordingTransferSink]:
    sink = RecordingTransferSink()
    return theirs.grant(order(range(16), 64), sink), sink


async def fails(ours: KvPath, grant: Grant) -> TransferError:
    """A delivery of everything, which must not succeed."""
    waiter = deliver(ours, grant.ticket, KvPart(0, 0, range(16), (0, 3)))
    error = await waiter.wait()
    assert isinstance(error, PathLost), error
    for word in ("r-1/0", "d/2", "rdma", "write"):
        assert word in error.message, error.message
    return error


async def test_a_wrong_key_ends_the_path_at_both_ends() -> None:
    async with two() as (world, ours, theirs):
        grant, sink = granted(theirs)
        for rail in ours.rails:
            for region in rail.queue.regions.theirs:
                region[2] ^= 0xFF
        error = await fails(ours, grant)
        assert "status 10" in error.message
        assert "remote access error" in error.message
        assert "slot 0, part 0" in error.message
        await sink.until(lambda s: bool(s.failed))
        assert isinstance(sink.failed[0], PathLost)
        await grant.revoke(timeout=10)
        assert world.destination.holds({}, range(3))
        assert ours.down is not None
        assert theirs.down is not None
        assert await again(world) is not ours


async def again(world: TransferPair) -> KvPath:
    """A new path, with new queue pairs, carries bytes."""
    for _ in range(500):
        if world.destination.transport.path(world.source.key) is None:
            break
        await asyncio.sleep(0.01)
    ours, theirs = await world.connect()
    grant, sink = granted(theirs)
    waiter = deliver(ours, grant.ticket, KvPart(0, 0, range(16), (0, 3)))
    assert await waiter.wait() is None
    await sink.until(lambda s: s.parts == [0])
    grant.finish()
    assert world.destination.holds({block: block for block in range(16)}, range(3))
    return ours


async def test_a_region_that_is_no_longer_registered_is_not_written_to() -> None:
    async with two() as (world, ours, theirs):
        grant, _ = granted(theirs)
        (adapter,) = world.destination.transport.adapters  # type: ignore[attr-defined]
        while adapter._registered:
            unregister(adapter._registered.pop())
        error = await fails(ours, grant)
        assert "status 10" in error.message
        await grant.revoke(timeout=10)
        assert world.destination.holds({}, range(3))


def queue_pairs() -> int:
    return sum(adapter["qp"] for adapter in held().values())


async def test_a_peer_whose_queue_pair_is_gone_does_not_acknowledge() -> None:
    async with two() as (world, ours, theirs):
        grant, _ = granted(theirs)
        opened = queue_pairs()
        world.cut = True  # nobody says that the path has ended
        await theirs.close("the test")
        assert grant.closed
        error = await fails(ours, grant)
        assert "status 12" in error.message
        assert "retries exhausted" in error.message
        assert world.destination.holds({}, range(3))
        assert queue_pairs() == opened - 2, "both ends have destroyed theirs"


@contextlib.contextmanager
def impaired(*how: str) -> Iterator[None]:
    """The link between the adapters loses or delays; control goes another way."""
    subprocess.run(["tc", "qdisc", "add", *LINK, "netem", *how], check=True, timeout=50)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", *LINK], check=True, timeout=50)


needs_link = pytest.mark.skipif(
    os.environ.get("RDMA_VM_HOSTS") != "1", reason="needs both adapters on one virtual machine"
)


@needs_link
async def test_a_dead_link_loses_the_path_and_fences_it() -> None:
    async with two() as (world, ours, theirs):
        grant, sink = granted(theirs)
        with impaired("loss", "100%"):
            error = await fails(ours, grant)
            assert "status 12" in error.message
            await sink.until(lambda s: bool(s.failed))  # control still works
            await grant.revoke(timeout=10)
            assert grant.closed
            assert theirs.stats.fenced == 1
            world.destination.poison(range(16))
        await asyncio.sleep(0.3)
        assert world.destination.holds({}, range(3)), "written to after the fence"
        await again(world)


@needs_link
async def test_a_lossy_link_only_takes_longer() -> None:
    async with two() as (world, _, _):
        with impaired("loss", "5%", "delay", "1ms"):
            await again(world)


async def test_a_notification_of_nobodys_slot_is_counted_not_acted_on() -> None:
    async with two() as (world, ours, theirs):
        grant, sink = granted(theirs)
        foreign = msgspec.structs.replace(grant.ticket, slot=9)
        waiter = deliver(ours, foreign, KvPart(3, 0, [], (0, 3)))
        assert await waiter.wait() is None
        for _ in range(500):
            if theirs.stats.stale:
                break
            await asyncio.sleep(0.01)
        assert theirs.stats.stale == 1
        assert not sink.parts
        grant.finish()
        assert world.destination.holds({}, range(3))


async def test_device_memory_that_cannot_be_registered_is_said() -> None:
    (layout,) = layouts(2, 1)
    fd = os.memfd_create("no-dma-buf")

    async def ask(*_: object) -> Any:
        raise AssertionError("nobody is asked")

    region = Region(layout, 4, None, fd, 1 << 40)
    node: Any = "p"
    mine = RdmaTransport(node, 1, [region], ask, devices=DEVICES[:1])
    try:
        with pytest.raises(TransferError, match="bytes of device memory cannot be registered"):
            await mine.open()
    finally:
        await mine.close()
        os.close(fd)


async def test_adapters_and_ports_that_are_not_there() -> None:
    async def ask(*_: object) -> Any:
        raise AssertionError("nobody is asked")

    node: Any = "p"
    for name in ("nobody0", f"{DEVICES[0]}:7", f"{DEVICES[0]}:1:200", "a:b"):
        mine = RdmaTransport(node, 1, [], ask, devices=[name])
        with pytest.raises(TransferError, match="over rdma"):
            await mine.open()
        await mine.close()
