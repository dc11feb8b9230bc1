"""The rdma back end keeps the promises of the transfer port, over real verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.testing.transfer_support import RecordingTransferSink, Waiter, deliver, order
from pdserve.transfer.base import KvPart
from pdserve.transfer.rdma.adapter import QueuePairOptions
from tests.rdma.conftest import DEVICES, PATIENT, sent, transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvTransport, Region


class TestRdma(TransferConformance):
    """One adapter at each end."""

    options = PATIENT
    devices: tuple[str, ...] = ()

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return transport(key, regions, ask, self.options, self.devices)

    async def test_it_is_rdma_that_moves_the_bytes(self) -> None:
        before = sent(DEVICES[0])
        await self.test_a_part_is_there_when_its_sink_hears_of_it()
        assert sent(DEVICES[0]) - before >= 64


class TestRails(TestRdma):
    """All adapters at both ends, pools in several registrations, queues that are always full."""

    options = QueuePairOptions(depth=8, receives=4, timeout=17, slice=3000)
    devices = tuple(DEVICES)

    async def test_every_rail_carries_something(self) -> None:
        before = [sent(device) for device in DEVICES]
        async with self.world(layouts(2, 1), layouts(2, 2), blocks=64) as world:
            ours, theirs = await world.connect()
            world.source.fill({block: block for block in range(64)})
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(63, -1, -1), 256), sink)
            waiter = deliver(ours, grant.ticket, KvPart(0, 0, range(64), (0, 3)))
            assert await waiter.wait() is None
            await sink.until(lambda s: s.parts == [0])
            grant.finish()
            there = {63 - block: block for block in range(64)}
            assert world.destination.holds(there, range(3))
            assert ours.stats.runs_delivered >= 128
        assert all(sent(d) - n >= 60 for d, n in zip(DEVICES, before, strict=True))

    async def test_more_notifications_than_the_peer_has_room_for(self) -> None:
        async with self.world(blocks=64) as world:
            ours, theirs = await world.connect()
            world.source.fill({block: block for block in range(64)})
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(64), 256), sink)
            waiters: list[Waiter] = [
                deliver(ours, grant.ticket, KvPart(n, 4 * n, [n], (0, 3))) for n in range(64)
            ]
            assert [await waiter.wait() for waiter in waiters] == [None] * 64
            await sink.until(lambda s: len(s.parts) == 64)
            grant.finish()
            assert world.destination.holds({block: block for block in range(64)}, range(3))
