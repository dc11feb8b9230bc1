"""Staged pools over tcp: no byte is late, no block comes back early, and planted bugs are found."""

from __future__ import annotations

import asyncio
import itertools
import threading
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import PathLost, TransferError, TransferTimeout
from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.cuda import host_staging
from pdserve.transfer.cuda.host_staging import StagingRing
from pdserve.transfer.tcp import transport
from pdserve.transfer.tcp.pool_access import StagedPools
from pdserve.transfer.tcp.transport import TcpTransport
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvTransport

BLOCKS = 32
ALL = {block: block for block in range(BLOCKS)}
WHOLE = KvPart(0, 0, range(BLOCKS), (0, 3))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have many frames, frames many buffers."""
    monkeypatch.setattr(host_staging, "BUFFER", 100)
    monkeypatch.setattr(transport, "_FRAME", 1000)


class Devices:
    """A device for each of two hosts."""

    def __init__(self, seed: int = 1, progress: float = 10.0) -> None:
        self.source = FakeCuda(Random(seed), b"p", hidden=True)
        self.destination = FakeCuda(Random(seed + 1), b"d", hidden=True)
        self.progress = progress

    def of(self, key: NodeLife) -> FakeCuda:
        return self.source if key.node == "p" else self.destination

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver, progress = self.of(key), self.progress
        return TcpTransport(
            key.node, key.epoch, regions, ask, host="127.0.0.1", driver=driver, progress=progress
        )

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.of(key), blocks, size)

    def world(self):
        sources, destinations = layouts(2, 1), layouts(2, 2)
        make, new = self.make, self.new_memory
        return transfer_pair(make, sources, destinations, blocks=BLOCKS, new_memory=new)


async def until(met: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if met():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come about")


async def a_buffer_is_used_again_after_its_copy() -> None:
    for seed in range(4):
        devices = Devices(seed)
        async with devices.world() as two:
            ours, theirs = await two.connect()
            two.source.fill(ALL)
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(BLOCKS), 4 * BLOCKS), sink)
            assert await deliver(ours, grant.ticket, WHOLE).wait() is None
            assert two.destination.holds(ALL, range(3))
            grant.finish()


async def a_part_has_arrived_after_its_copies() -> None:
    devices = Devices()
    async with devices.world() as two:
        ours, theirs = await two.connect()
        two.source.fill(ALL)
        sink = RecordingTransferSink()
        grant = theirs.grant(order([3], 4), sink)
        devices.destination.hold()
        waiter = deliver(ours, grant.ticket, KvPart(0, 0, [0], (0, 3)))
        try:
            await until(lambda: devices.destination.queued > 0)
            for _ in range(20):
                await asyncio.sleep(0.002)
                assert sink.parts == []
                assert waiter.calls == []
        finally:
            devices.destination.go_on()
        assert await waiter.wait() is None
        assert two.destination.holds({3: 0}, range(3))
        grant.finish()


async def a_fence_waits_for_the_device() -> None:
    devices = Devices()
    async with devices.world() as two:
        ours, theirs = await two.connect()
        grant = theirs.grant(order(range(BLOCKS), 4 * BLOCKS), RecordingTransferSink())
        devices.destination.hold()
        try:
            waiter = deliver(ours, grant.ticket, WHOLE)
            await until(lambda: devices.destination.queued > 0)
            early = False
            try:
                await grant.revoke(timeout=0.05)
                early = True
            except TransferTimeout:
                pass
            assert not early
            assert not grant.closed
        finally:
            devices.destination.go_on()
        await grant.revoke(timeout=5)
        assert grant.closed
        assert devices.destination.queued == 0
        await waiter.wait()


async def nothing_is_placed_behind_a_fence() -> None:
    """A buffer is full when the fence comes, and is not yet on its way to the device."""
    devices, full, fenced = Devices(), threading.Event(), threading.Event()
    usual = StagingRing._queue

    def late(ring: StagingRing, *arguments: Any, **options: Any) -> None:
        if not options["loading"]:
            full.set()
            assert fenced.wait(20)
        usual(ring, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingRing, "_queue", late)
        async with devices.world() as two:
            ours, theirs = await two.connect()
            two.source.fill(ALL)
            grant = theirs.grant(order(range(BLOCKS), 4 * BLOCKS), RecordingTransferSink())
            waiter = deliver(ours, grant.ticket, WHOLE)
            try:
                await until(full.is_set)
                await grant.revoke(timeout=5)
            finally:
                fenced.set()
            await waiter.wait()
            devices.destination.work(10_000)
            assert two.destination.holds({}, range(3))


async def blocks_are_the_sources_until_nothing_reads_them() -> None:
    devices = Devices()
    async with devices.world() as two:
        ours, theirs = await two.connect()
        grant = theirs.grant(order(range(BLOCKS), 4 * BLOCKS), RecordingTransferSink())
        devices.source.hold()
        try:
            waiter = deliver(ours, grant.ticket, WHOLE)
            await until(lambda: devices.source.queued > 0)
            closing = asyncio.create_task(ours.close("the test"))
            await asyncio.sleep(0.05)
            assert waiter.calls == []
        finally:
            devices.source.go_on()
        await closing
        assert isinstance(await waiter.wait(), PathLost)
        assert devices.source.queued == 0
        await theirs.close("the test")


SCENARIOS = (
    a_buffer_is_used_again_after_its_copy,
    a_part_has_arrived_after_its_copies,
    a_fence_waits_for_the_device,
    nothing_is_placed_behind_a_fence,
    blocks_are_the_sources_until_nothing_reads_them,
)


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_that(scenario) -> None:
    await scenario()


def no_wait_for_a_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagingRing, "_wait", lambda self, buffer: buffer.marks.clear())


def done_before_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedPools, "place", lambda self: None)


def a_fence_of_the_host_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedPools, "fence", lambda self: None)


def a_revoked_grant_is_filled(patch: pytest.MonkeyPatch) -> None:
    usual = StagingRing.store
    patch.setattr(StagingRing, "store", lambda self, runs, _: usual(self, runs, lambda: True))


def blocks_freed_while_staged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport.TcpPath, "_destroy", settle_at_once)


async def settle_at_once(self) -> None:
    for key in list(self.outgoing):
        self.settle(key, self.withdrawn(self.outgoing[key]))
    await USUAL_DESTROY(self)


USUAL_DESTROY = transport.TcpPath._destroy


BUGS = (
    no_wait_for_a_buffer,
    done_before_the_device,
    a_fence_of_the_host_alone,
    a_revoked_grant_is_filled,
    blocks_freed_while_staged,
)


@pytest.mark.parametrize(("bug", "scenario"), list(zip(BUGS, SCENARIOS, strict=True)))
async def test_a_planted_bug_is_found(bug, scenario, monkeypatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        await scenario()


async def test_a_device_that_stands_still_fails_the_path_and_keeps_the_blocks() -> None:
    devices = Devices(progress=0.1)
    async with devices.world() as two:
        ours, theirs = await two.connect()
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(BLOCKS), 4 * BLOCKS), sink)
        devices.destination.hold()
        try:
            waiter = deliver(ours, grant.ticket, WHOLE)
            await sink.until(lambda s: bool(s.failed))
            assert "staging: the device has not ended a copy for 0.1 s" in sink.failed[0].message
            await asyncio.sleep(0.02)
            assert not grant.closed
        finally:
            devices.destination.go_on()
        await theirs.close("the test")
        assert grant.closed
        assert devices.destination.queued == 0
        await waiter.wait()
        await ours.close("the test")


@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_call_of_the_driver_that_fails_ends_the_path_and_nothing_else(side: str) -> None:
    """Every call in turn, until there are no more."""
    for number in itertools.count():
        devices = Devices()
        device: FakeCuda = getattr(devices, side)
        async with devices.world() as two:
            ours, theirs = await two.connect()
            two.source.fill(ALL)
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(4), 16), sink)
            device.fails_at = number
            error = await deliver(ours, grant.ticket, KvPart(0, 0, range(4), (0, 3))).wait()
            if error is None:
                assert two.destination.holds({n: n for n in range(4)}, range(3))
                grant.finish()
                break
            assert isinstance(error, TransferError)
            assert sink.parts == []
            await theirs.close("the test")
            await ours.close("the test")
            assert grant.closed
            assert devices.source.queued == devices.destination.queued == 0
            assert device.mapped == len(getattr(two, side).memories), "buffers are left"
            ours, theirs = await two.connect()
            grant = theirs.grant(order(range(4), 16), sink)
            assert await deliver(ours, grant.ticket, KvPart(0, 0, range(4), (0, 3))).wait() is None
            grant.finish()
        assert device.mapped == 0
    assert number > 5


async def test_a_part_that_is_here_takes_no_more_bytes() -> None:
    """A source that sends it twice writes to nobody's blocks."""
    devices = Devices()
    async with devices.world() as two:
        ours, theirs = await two.connect()
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        part = KvPart(0, 0, range(4), (0, 3))
        assert await deliver(ours, grant.ticket, part).wait() is None
        error = await deliver(ours, grant.ticket, part).wait()
        assert error is not None
        assert "part 0 is here already" in error.message
        await grant.revoke(timeout=5)


def test_device_memory_needs_addresses() -> None:
    (one,) = layouts(1, 1)

    async def nobody(*_: object) -> None: ...

    with pytest.raises(ValueError, match="address"):
        TcpTransport("n", 1, [Region(one, 1)], nobody, host="127.0.0.1")  # type: ignore[arg-type]
