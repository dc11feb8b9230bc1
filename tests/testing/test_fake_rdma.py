"""The fake device has RDMA's dangers, and the rules of the port hold against them."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import PathLost, TransferError, TransferTimeout
from pdserve.testing.fake_rdma import FakeFabric, FakeFaults, FakeTransport
from pdserve.testing.kv_oracle import expected_block, layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.testing.virtual_time import run
from pdserve.transfer.base import KvPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.messages.transfer import TransferControl
    from pdserve.transfer.base import CallPeer, KvTransport, Region


def making(fabric: FakeFabric, rails: int = 3):
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return FakeTransport(
            key.node, key.epoch, regions, ask, fabric, key=key, rails=rails, stripe=100
        )

    return make


def world(fabric: FakeFabric, rails: int = 3):
    return transfer_pair(making(fabric, rails), layouts(4, 2), layouts(4, 1), blocks=8)


FOUR = KvPart(0, 0, [0, 1, 2, 3], (0, 3))


def test_rails_overtake_each_other_but_no_notification_its_data(seed: int) -> None:
    """On one rail order holds; a part is complete when every rail has said so."""

    async def main() -> None:
        fabric = FakeFabric(Random(seed), FakeFaults(delay=(0.0, 0.1)))
        async with world(fabric) as two:
            ours, theirs = await two.connect()
            two.source.fill({block: block for block in range(8)})
            whole: list[bool] = []

            def look(part: int) -> None:
                whole.append(two.destination.holds({b: b for b in range(4)}, range(3)))

            grant = theirs.grant(order(range(4), 16), RecordingTransferSink(look))
            assert await deliver(ours, grant.ticket, FOUR).wait() is None
            assert whole == [True]
            grant.finish()

    run(main())


def test_a_late_write_lands_unless_the_queue_pairs_are_destroyed(seed: int) -> None:
    """What the fence is for: without it the same fault changes a block that was given away."""

    async def after(fence: bool) -> tuple[bool, int]:
        fabric = FakeFabric(Random(seed), FakeFaults(late=1.0, late_by=(1.0, 2.0)))
        async with world(fabric) as two:
            ours, theirs = await two.connect()
            two.source.fill({block: block for block in range(8)})
            two.cut = True  # the source's farewell does not arrive
            grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
            error = await deliver(ours, grant.ticket, FOUR).wait()
            assert isinstance(error, PathLost)
            assert "retries exhausted" in error.message
            with pytest.raises(TransferError, match="stop"):
                await grant.revoke(timeout=0.1)
            assert not grant.closed
            if fence:
                await theirs.close("the test")
                assert grant.closed
            two.destination.poison(range(8))
            await asyncio.sleep(10)
            return two.destination.holds({}, range(3)), fabric.counts["late_landed"]

    clean, landed = run(after(fence=True))
    assert clean
    assert not landed
    clean, landed = run(after(fence=False))
    assert landed
    assert not clean


def test_a_stop_waits_for_what_has_been_posted(seed: int) -> None:
    async def main() -> None:
        fabric = FakeFabric(Random(seed), FakeFaults(delay=(0.0, 0.01)))
        async with world(fabric) as two:
            ours, theirs = await two.connect()
            two.source.fill({block: block for block in range(8)})
            grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
            fabric.hold(two.source.key)
            waiter = deliver(ours, grant.ticket, FOUR)
            with pytest.raises(TransferTimeout, match=r"transfer r-1/0 with p/1 over fake, stop"):
                await grant.revoke(timeout=3)
            assert not waiter.calls
            fabric.release(two.source.key)
            await grant.revoke(timeout=3)
            assert waiter.calls == [None]
            two.destination.poison(range(8))
            await asyncio.sleep(10)
            assert two.destination.holds({}, range(3))

    run(main())


def test_a_stop_hears_of_deliveries_that_end_together(seed: int) -> None:
    async def main() -> None:
        fabric = FakeFabric(Random(seed))
        async with world(fabric) as two:
            ours, theirs = await two.connect()
            grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
            fabric.hold(two.source.key)
            waiters = [deliver(ours, grant.ticket, KvPart(n, 4 * n, [n], (0, 3))) for n in range(3)]
            draining = asyncio.ensure_future(ours.drain(grant.ticket.slot, grant.ticket.generation))
            await asyncio.sleep(0)
            for key in list(ours.outgoing):
                ours.settle(key)
            await asyncio.wait_for(draining, 5)
            assert [waiter.calls for waiter in waiters] == [[None]] * 3

    run(main())


def test_a_wrong_key_writes_nothing_and_ends_the_path(seed: int) -> None:
    async def main() -> None:
        fabric = FakeFabric(Random(seed))
        async with world(fabric) as two:
            ours, theirs = await two.connect()
            assert isinstance(two.destination.transport, FakeTransport)
            two.destination.transport.break_keys()
            two.source.fill({block: block for block in range(8)})
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(4), 16), sink)
            error = await deliver(ours, grant.ticket, FOUR).wait()
            assert isinstance(error, PathLost)
            assert "key or" in error.message
            await sink.until(lambda s: bool(s.failed))
            await grant.revoke(timeout=1)
            assert two.destination.holds({}, range(3))
            assert fabric.counts["refused"] >= 1

    run(main())


@pytest.mark.parametrize("round", range(12))
def test_whatever_goes_wrong_no_byte_lands_after_a_fence(round: int, seed: int, long: bool) -> None:
    """Random faults in random orders: every delivery ends once, every part that was notified was
    whole, and nothing that was given back is written to."""
    for turn in range(20 if long else 2):
        run(_stormy(Random(f"{seed} {round} {turn}")))


async def _stormy(random: Random) -> None:
    faults = FakeFaults(
        delay=(0.0, 0.2),
        lost=random.choice((0.0, 0.02)),
        late=random.choice((0.0, 0.05)),
        late_by=(0.0, 5.0),
    )
    fabric = FakeFabric(random, faults)
    async with world(fabric, rails=random.randint(1, 3)) as two:
        for attempt in range(5):
            two.cut = False
            with contextlib.suppress(PathLost):  # it ended too soon; the next attempt makes one
                await _attempt(two, fabric, random, attempt)
            assert two.destination.holds({}, range(3)), "written to after the fence"


async def _attempt(two, fabric: FakeFabric, random: Random, attempt: int) -> None:
    ours, theirs = await two.connect()
    two.source.fill({block: block for block in range(8)})
    blocks = random.sample(range(8), 4)

    def look(part: int) -> None:
        there = {block: n for n, block in enumerate(blocks) if n // 2 in sink.parts}
        assert all(_equal(two, block, name) for block, name in there.items())

    sink = RecordingTransferSink(look)
    grant = theirs.grant(order(blocks, 16, name=f"r-{attempt}"), sink)
    waiters = [
        deliver(ours, grant.ticket, KvPart(n, 8 * n, [2 * n, 2 * n + 1], (0, 3))) for n in range(2)
    ]
    if random.random() < 0.3:
        fabric.hold(two.source.key)
    await asyncio.sleep(random.random() * 3)
    two.cut = random.random() < 0.3
    if random.random() < 0.1:
        fabric.kill(two.source.key)
    try:
        await grant.revoke(timeout=1)
    except TransferError:
        await theirs.close("no acknowledgement")
    assert grant.closed
    two.destination.poison(range(8))
    fabric.release(two.source.key)
    await asyncio.sleep(20)
    await ours.close("the attempt is over")
    assert all(len(waiter.calls) == 1 for waiter in waiters)


def _equal(two, block: int, name: int) -> bool:
    side = two.destination
    return all(
        memory.view(block) == expected_block(layout, name)
        for layout, memory in zip(side.layouts, side.memories, strict=True)
    )


def test_who_joins_a_connection_under_way_waits_no_longer_than_it_asked() -> None:
    async def main() -> None:
        async with world(FakeFabric(Random(1))) as two:
            transport = two.source.transport

            async def deaf(
                peer: NodeLife, control: TransferControl, timeout: float
            ) -> TransferControl:
                await asyncio.sleep(3600.0)
                raise AssertionError("nobody waits so long")

            transport.ask = deaf
            loop = asyncio.get_running_loop()
            first = asyncio.ensure_future(transport.connect(two.destination.key, timeout=30.0))
            await asyncio.sleep(0.0)
            begun = loop.time()
            with pytest.raises(TransferTimeout, match="not done within 1 s"):
                await transport.connect(two.destination.key, timeout=1.0)
            assert loop.time() - begun == pytest.approx(1.0, abs=0.1)
            assert not first.done()
            with pytest.raises(TransferTimeout, match="not done within 30 s"):
                await first

    run(main())
