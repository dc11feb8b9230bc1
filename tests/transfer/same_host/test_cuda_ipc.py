"""Copying between devices: what breaks, what is out of reach, what must not be freed early."""

from __future__ import annotations

import asyncio
import threading
from array import array
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.errors import TransferCorrupt, TransferError
from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.copying import chunks, crc32
from pdserve.transfer.cuda.driver import CudaError
from pdserve.transfer.cuda.nvidia import unavailable_reason
from pdserve.transfer.same_host import cuda_ipc, pull_transport
from pdserve.transfer.same_host.cuda_ipc import CudaIpcPath, CudaIpcTransport
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvTransport
    from pdserve.transfer.same_host.pull_transport import Verify


class Devices:
    """A driver for each of two processes."""

    def __init__(self, verify: Verify = "all") -> None:
        self.source = FakeCuda(Random(1), b"p")
        self.destination = FakeCuda(Random(2), b"d")
        self.verify: Verify = verify

    def of(self, key: NodeLife) -> FakeCuda:
        return self.source if key.node == "p" else self.destination

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.of(key), blocks, size)

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.of(key)
        return CudaIpcTransport(
            key.node, key.epoch, regions, ask, verify=self.verify, driver=driver
        )

    def world(self, blocks: int = 8):
        sources, destinations = layouts(2, 1), layouts(2, 2)
        make, new = self.make, self.new_memory
        return transfer_pair(make, sources, destinations, blocks=blocks, new_memory=new)


WHOLE = KvPart(0, 0, range(8), (0, 3))


@pytest.mark.parametrize("after", [0, 3])
async def test_a_device_that_breaks_fails_the_grant_and_is_fenced(after: int) -> None:
    devices = Devices("off")
    async with devices.world() as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(8)})
        devices.destination.breaks_after = after
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(8), 32), sink)
        error = await deliver(ours, grant.ticket, WHOLE).wait()
        assert isinstance(error, TransferError)
        await sink.until(lambda s: bool(s.failed))
        assert isinstance(sink.failed[0], TransferCorrupt)
        assert "told to break" in sink.failed[0].message
        assert sink.parts == []
        await grant.revoke(timeout=5)
        await theirs.close("the test")
    assert devices.destination.copied == after


async def test_blocks_given_up_while_they_are_copied_are_not_served(monkeypatch) -> None:
    devices = Devices("off")
    async with devices.world() as two:
        ours, theirs = await two.connect()
        assert isinstance(two.source.transport, CudaIpcTransport)
        table = two.source.transport.table

        def give_up(*arguments):
            table.void(0)
            return chunks(*arguments)

        monkeypatch.setattr(cuda_ipc, "chunks", give_up)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(8), 32), sink)
        assert await deliver(ours, grant.ticket, WHOLE).wait() is not None
        await sink.until(lambda s: bool(s.failed))
        assert "given the blocks up" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_what_was_asked_for_ends_before_the_fence(monkeypatch) -> None:
    """Nothing that is queued on a stream outlives a revocation, at any point of a copy."""
    monkeypatch.setattr(cuda_ipc, "CHUNK", 100)
    devices = Devices("off")
    async with devices.world(blocks=64) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(64)})
        for turns in range(0, 40, 4):
            grant = theirs.grant(order(range(64), 256), RecordingTransferSink())
            waiter = deliver(ours, grant.ticket, KvPart(0, 0, range(64), (0, 3)))
            for _ in range(turns):
                await asyncio.sleep(0)
            await grant.revoke(timeout=5)
            assert not devices.destination.work(1), "something was still queued"
            await waiter.wait()


async def test_a_changed_byte_is_found_by_its_checksum(monkeypatch) -> None:
    devices = Devices("all")
    async with devices.world() as two:
        ours, theirs = await two.connect()

        def spoil(*arguments):
            two.source.memories[0].view(2)[:] = bytes(two.source.memories[0].block_bytes)
            return chunks(*arguments)

        monkeypatch.setattr(cuda_ipc, "chunks", spoil)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(8), 32), sink)
        await deliver(ours, grant.ticket, WHOLE).wait()
        await sink.until(lambda s: bool(s.failed))
        assert "checksum of block 2 differs" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_checksums_of_many_short_runs_cost_few_calls_and_leave_no_buffer() -> None:
    """Runs are short where both ends have other head counts."""
    devices = Devices("all")
    async with devices.world() as two:
        assert isinstance(two.source.transport, CudaIpcTransport)
        runs = range(0, two.source.regions[0].size, 4)
        offsets, lengths = array("q", runs), array("q", [2] * len(runs))
        content = two.source.memories[0]._driver.read(two.source.memories[0].address, runs.stop)
        before = devices.source.calls
        found = two.source.transport._sum(0, offsets, lengths, 7)
        assert found == crc32(b"".join(content[at : at + 2] for at in runs), 7)
        assert len(runs) > 100
        assert devices.source.calls - before < 12
        devices.source.fails_at = 2
        with pytest.raises(CudaError):
            two.source.transport._sum(0, offsets, lengths, 0)
        assert devices.source.mapped == 1, "buffers are left"
        assert two.source.transport._sum(0, offsets, lengths, 7) == found


async def test_pieces_are_announced_in_order_whichever_is_summed_first(monkeypatch) -> None:
    """Two threads sum them; the last piece is often the shortest."""
    monkeypatch.setattr(pull_transport, "_PIECE", 1)
    devices = Devices("all")
    async with devices.world() as two:
        ours, theirs = await two.connect()
        assert isinstance(ours, CudaIpcPath)
        two.source.fill({block: block for block in range(8)})
        usual, second = ours._sums, threading.Event()

        def second_first(outgoing, places):
            assert places[0][0] != 0 or second.wait(10)
            found = usual(outgoing, places)
            if places[0][0] == 1:
                second.set()
            return found

        monkeypatch.setattr(ours, "_sums", second_first)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(8), 32), sink)
        assert await deliver(ours, grant.ticket, WHOLE).wait() is None
        assert sink.parts == [0]
        assert two.destination.holds({block: block for block in range(8)}, range(3))
        grant.finish()


async def test_all_is_compared_where_one_end_wants_it() -> None:
    devices = Devices("sample")
    async with devices.world() as two:
        ours, theirs = await two.connect()
        theirs.transport.verify = "all"
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(8), 32), sink)
        assert await deliver(ours, grant.ticket, WHOLE).wait() is None
        grant.finish()
        theirs.transport.verify = "all"
        grant = theirs.grant(order(range(8), 32), sink)
        await deliver(ours, replace(grant.ticket, verify=""), WHOLE).wait()
        await sink.until(lambda s: bool(s.failed))
        assert "checksums of 1 blocks of 8, and --verify-kv=all" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_devices_that_do_not_reach_each_other_have_no_path() -> None:
    devices = Devices()
    devices.source.device = b"gpu-7"
    async with devices.world() as two:
        with pytest.raises(TransferError, match="no peer access to gpu-7"):
            await two.source.transport.connect(two.destination.key, timeout=5)
    assert devices.source.mapped == devices.destination.mapped == 0


async def test_pools_that_others_have_open_are_not_let_go_of_early() -> None:
    devices = Devices()
    async with devices.world() as two:
        ours, _ = await two.connect()
        assert devices.source.mapped == 1 + 2
        assert devices.destination.mapped == 2 + 1
        await ours.close("the test")
        assert devices.source.mapped == 1
        assert devices.destination.mapped == 2, "the peer had not closed it when this returned"


async def test_a_peer_that_does_not_let_go_is_told_of(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cuda_ipc, "UNMAPPING", 0.05)
    devices = Devices()
    async with devices.world() as two:
        ours, theirs = await two.connect()
        with monkeypatch.context() as patch:
            patch.setattr(theirs, "_read", lambda: None)
            loop = asyncio.get_running_loop()
            loop.remove_reader(theirs._socket)
            two.cut = True
            await ours.close("the test")
        assert "do not free it" in caplog.text
        await theirs.close("the test")


async def test_a_greeting_that_is_none_makes_no_path(monkeypatch) -> None:
    for words, complaint in ((b"\xc1", "greeting"), (msgspec.msgpack.encode([[]]), "0 pools")):
        devices = Devices()
        async with devices.world() as two:
            monkeypatch.setattr(two.destination.transport, "_pass", lambda words=words: ([], words))
            with pytest.raises(TransferError, match=complaint):
                await two.source.transport.connect(two.destination.key, timeout=5)


def test_regions_need_an_address_that_can_be_exported() -> None:
    (one,) = layouts(1, 1)

    async def nobody(*_: object) -> None: ...

    for region, kind in ((Region(one, 1), ValueError), (Region(one, 1, address=64), CudaError)):
        with pytest.raises(kind):
            CudaIpcTransport("n", 1, [region], nobody, driver=FakeCuda(Random(1)))  # type: ignore[arg-type]


def test_copies_of_one_stream_keep_their_order_and_those_of_two_do_not() -> None:
    driver = FakeCuda(Random(3))
    address = driver.allocate(200)
    driver.write(address, bytes(range(200)))
    one, other = driver.stream(address), driver.stream(address)
    finished: list[str] = []
    for _ in range(40):
        for stream in (one, other):
            stream.copy(array("q", [address]), array("q", [address + 100]), array("q", [1]))
    while one.queued or other.queued:
        before = len(one.queued), len(other.queued)
        driver.work(1)
        finished.append("one" if len(one.queued) < before[0] else "other")
    assert finished != sorted(finished)
    one.copy(array("q", [address]), array("q", [address + 7]), array("q", [1]))
    one.copy(array("q", [address]), array("q", [address + 9]), array("q", [1]))
    one.wait(one.mark())
    assert driver.read(address, 1) == b"\x09"
    other.close()
    one.close()
    driver.free(address)


def test_it_says_why_it_cannot_be_used() -> None:
    reason = unavailable_reason()
    assert reason is None or len(reason) > 10
