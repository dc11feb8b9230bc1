"""Tests that a transfer backend keeps to the transfer port: a suite to inherit.

A backend's test derives from `TransferConformance` and implements `make`. `kv_oracle` computes the
expected bytes; all other memory has a pattern, so that one stray byte shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.errors import PathLost, TransferError, TransferRefused, TransferWithdrawn
from pdserve.ids import NodeLife
from pdserve.testing.kv_oracle import expected_block, layouts
from pdserve.testing.transfer_support import (
    RecordingTransferSink,
    TransferPair,
    Waiter,
    deliver,
    host_memory,
    order,
    transfer_pair,
)
from pdserve.transfer.base import KvPart
from pdserve.transfer.copy_plan import layer_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from pdserve.ids import Bytes
    from pdserve.kv.storage import BlockMemory
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.testing.device_memory import DeviceMemory
    from pdserve.transfer.base import CallPeer, Grant, KvPath, KvTransport, Region
    from pdserve.transfer.path_base import PathBase

__all__ = ["SIZES", "TransferConformance"]

SIZES = (1, 2, 3, 4, 6, 8)
"""Tensor-parallel sizes; each is tested with each."""
ALL = range(99)
"""Every layer."""


class TransferConformance:
    """Derive from it, and implement `make`."""

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        """Create the transport of one side."""
        raise NotImplementedError

    def new_memory(self, key: NodeLife, blocks: int, size: Bytes) -> BlockMemory | DeviceMemory:
        """Create the pool of one rank of this side."""
        return host_memory(key, blocks, size)

    def world(
        self,
        sources: Sequence[RankKvLayout] = (),
        destinations: Sequence[RankKvLayout] = (),
        blocks: int = 16,
    ) -> AbstractAsyncContextManager[TransferPair]:
        """Two connected nodes; without layouts, each has one rank."""
        one = layouts(2, 1)
        return transfer_pair(
            self.make,
            sources or one,
            destinations or one,
            blocks=blocks,
            new_memory=self.new_memory,
        )

    # ------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("heads", [24, 2])
    async def test_any_two_sizes(self, heads: int) -> None:
        random = Random(heads)
        sizes = [size for size in SIZES if not (heads % size and size % heads)]
        for p, d in product(sizes, sizes):
            async with self.world(layouts(heads, p), layouts(heads, d)) as world:
                await self._one_sequence(world, random)

    async def _one_sequence(self, world: TransferPair, random: Random) -> None:
        """Random blocks and parts; the destination may have a prefix, the last block is partial."""
        ours, theirs = await world.connect()
        names = list(range(100, 107))
        here = random.sample(range(16), 7)
        prefix = random.randrange(3)
        there = random.sample(range(16), 7 - prefix)
        world.source.fill(dict(zip(here, names, strict=True)))
        sink = RecordingTransferSink()
        tokens = 4 * (7 - prefix) - random.randrange(4)
        grant = theirs.grant(order(there, tokens, 4 * prefix), sink)
        parts = self._parts(here, random)
        waiters = [deliver(ours, grant.ticket, part) for part in parts]
        assert [await waiter.wait() for waiter in waiters] == [None] * len(parts)
        await sink.until(lambda s: len(s.parts) == len(parts))
        grant.finish()
        assert sorted(sink.parts) == [part.number for part in parts]
        assert world.destination.holds(dict(zip(there, names[prefix:], strict=True)), ALL)
        assert theirs.stats.granted == ours.stats.outgoing == 0
        assert grant.closed

    def _parts(self, blocks: list[int], random: Random) -> list[KvPart]:
        """Chunks of blocks, each in groups of layers, in any order."""
        cut = random.randrange(1, len(blocks))
        chunks = [(0, blocks[:cut]), (4 * cut, blocks[cut:])]
        groups = layer_groups((0, 3), random.randint(1, 3))
        pieces = [(start, chunk, group) for start, chunk in chunks for group in groups]
        random.shuffle(pieces)
        return [KvPart(n, *piece) for n, piece in enumerate(pieces)]

    async def test_a_probe_touches_no_block(self) -> None:
        async with self.world() as world:
            ours, theirs = await world.connect()
            world.source.fill({1: 11})
            for size in (1000, 1 << 20):
                with contextlib.suppress(TransferRefused):  # this backend has no probes
                    assert 0 < await ours.probe(size) <= size
            assert world.destination.holds({}, ALL)
            sink = RecordingTransferSink()
            grant = theirs.grant(order([5], 4), sink)
            assert await deliver(ours, grant.ticket, KvPart(0, 0, [1], (0, 3))).wait() is None
            await sink.until(lambda s: len(s.parts) == 1)
            grant.finish()
            assert world.destination.holds({5: 11}, ALL)

    async def test_a_part_is_there_when_its_sink_hears_of_it(self) -> None:
        async with self.world(layouts(4, 2), layouts(4, 4), blocks=64) as world:
            ours, theirs = await world.connect()
            world.source.fill({block: block for block in range(64)})
            seen: list[bool] = []

            def look(part: int) -> None:
                done = {b: b for b in range(64) if b // 8 in sink.parts}
                seen.append(all(self._there(world, block) for block in done))

            sink = RecordingTransferSink(look)
            grant = theirs.grant(order(range(64), 256), sink)
            for n in range(8):
                part = KvPart(n, 32 * n, range(8 * n, 8 * n + 8), (0, 3))
                deliver(ours, grant.ticket, part)
            await sink.until(lambda s: len(s.parts) == 8)
            assert seen == [True] * 8
            grant.finish()

    def _there(self, world: TransferPair, block: int) -> bool:
        side = world.destination
        return all(
            memory.view(block) == expected_block(layout, block)
            for layout, memory in zip(side.layouts, side.memories, strict=True)
        )

    async def test_many_sequences_at_once_and_both_ways(self) -> None:
        async with self.world(layouts(4, 2), layouts(4, 1), blocks=40) as world:
            ours, theirs = await world.connect()
            world.source.fill({block: block for block in range(20)})
            world.destination.fill({block: block for block in range(20, 40)})
            grants: list[Grant] = []
            waiters: list[Waiter] = []
            for n in range(10):
                pair = range(2 * n, 2 * n + 2)
                back = range(20 + 2 * n, 22 + 2 * n)
                grants.append(theirs.grant(order(pair, 8, name=f"r-{n}"), RecordingTransferSink()))
                waiters.append(deliver(ours, grants[-1].ticket, KvPart(0, 0, pair, (0, 3))))
                grants.append(ours.grant(order(back, 8, name=f"b-{n}"), RecordingTransferSink()))
                waiters.append(deliver(theirs, grants[-1].ticket, KvPart(0, 0, back, (0, 3))))
            assert [await waiter.wait() for waiter in waiters] == [None] * 20
            for grant in grants:
                await grant.revoke(timeout=5)
            everything = {block: block for block in range(40)}
            assert world.destination.holds(everything, ALL)
            assert world.source.holds(everything, ALL)

    async def test_a_part_that_the_destination_has_is_notified_all_the_same(self) -> None:
        async with self.world() as world:
            ours, theirs = await world.connect()
            sink = RecordingTransferSink()
            grant = theirs.grant(order([3], 4, first_token=8), sink)
            waiter = deliver(ours, grant.ticket, KvPart(5, 0, [0, 1], (0, 3)))
            assert await waiter.wait() is None
            await sink.until(lambda s: s.parts == [5])
            grant.finish()
            assert world.destination.holds({}, ALL)

    # ------------------------------------------------------------------ fences

    async def test_nothing_arrives_after_a_revocation(self) -> None:
        async with self.world(layouts(24, 3), layouts(24, 4), blocks=64) as world:
            ours, theirs = await world.connect()
            for round in range(4):
                grant, sink, waiters = self._flood(world, ours, theirs)
                for _ in range(round * 3):
                    await asyncio.sleep(0)
                await grant.revoke(timeout=10)
                world.destination.poison(range(64))
                heard = len(sink.parts)
                await self._ended(waiters)
                assert world.destination.holds({}, ALL), "written to after the fence"
                assert len(sink.parts) == heard
                assert not sink.failed
            assert theirs.stats.granted == 0
            assert theirs.stats.fenced == 4
            assert theirs.stats.stale == 0

    async def test_nothing_arrives_after_the_path_is_closed(self) -> None:
        for side in ("source", "destination"):
            async with self.world(layouts(24, 3), layouts(24, 4), blocks=64) as world:
                ours, theirs = await world.connect()
                grant, sink, waiters = self._flood(world, ours, theirs)
                await asyncio.sleep(0)
                await theirs.close("the test")
                assert grant.closed
                world.destination.poison(range(64))
                if side == "source":
                    await ours.close("the test")
                await self._ended(waiters)
                assert world.destination.holds({}, ALL), "written to after the fence"
                for error in sink.failed:
                    assert isinstance(error, PathLost)
                    self._names(error, "r-1/0", "p/1", "the test")
                # The grant is revoked already; a second call returns at once.
                await grant.revoke(timeout=1)

    async def test_the_end_of_the_source_fails_and_fences(self) -> None:
        async with self.world(layouts(24, 3), layouts(24, 4), blocks=64) as world:
            ours, theirs = await world.connect()
            grant, sink, waiters = self._flood(world, ours, theirs, last=63)
            await world.source.transport.close()
            await self._ended(waiters)
            await sink.until(lambda s: bool(s.failed))
            self._names(sink.failed[0], "r-1/0", "p/1")
            await grant.revoke(timeout=10)
            world.destination.poison(range(64))
            await asyncio.sleep(0.01)
            assert world.destination.holds({}, ALL)
            assert theirs.down is not None
            with pytest.raises(PathLost):
                theirs.grant(order([0], 4), RecordingTransferSink())

    async def test_a_withdrawn_ticket_delivers_nothing_more(self) -> None:
        async with self.world(blocks=64) as world:
            ours, theirs = await world.connect()
            grant, sink, waiters = self._flood(world, ours, theirs)
            ours.withdraw(grant.ticket)
            await self._ended(waiters)
            await sink.until(lambda s: bool(s.failed))
            assert isinstance(sink.failed[0], TransferWithdrawn)
            self._names(sink.failed[0], "r-1/0", "p/1")
            # The blocks of a withdrawn ticket are free, and nothing reads them any more.
            world.source.poison(range(64))
            with pytest.raises(TransferRefused, match="stopped"):
                ours.deliver(grant.ticket, KvPart(77, 0, [0], (0, 3)), Waiter())
            await grant.revoke(timeout=10)
            assert ours.stats.outgoing == 0

    async def test_a_withdrawal_is_heard_of_although_nothing_is_under_way(self) -> None:
        async with self.world() as world:
            ours, theirs = await world.connect()
            world.source.fill({0: 7})
            sink = RecordingTransferSink()
            grant = theirs.grant(order([1, 2], 8), sink)
            assert await deliver(ours, grant.ticket, KvPart(0, 0, [0], (0, 3))).wait() is None
            await sink.until(lambda s: s.parts == [0])
            ours.withdraw(grant.ticket)
            await sink.until(lambda s: bool(s.failed))
            assert isinstance(sink.failed[0], TransferWithdrawn)
            self._names(sink.failed[0], "r-1/0", "p/1", "withdrawn")
            await grant.revoke(timeout=10)
            other = theirs.grant(order([1], 4), RecordingTransferSink())
            # A second withdrawal must not touch the grant that has the blocks now.
            ours.withdraw(grant.ticket)
            assert await deliver(ours, other.ticket, KvPart(0, 0, [0], (0, 3))).wait() is None
            other.finish()
            assert ours.down is None

    def _flood(
        self, world: TransferPair, ours: KvPath, theirs: KvPath, last: int = 64
    ) -> tuple[Grant, RecordingTransferSink, list[Waiter]]:
        """A part per block, all at once; those from `last` on are never delivered."""
        world.source.fill({block: block for block in range(64)})
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(64), 256), sink)
        waiters = [deliver(ours, grant.ticket, KvPart(n, 4 * n, [n], (0, 3))) for n in range(last)]
        return grant, sink, waiters

    async def _ended(self, waiters: Sequence[Waiter]) -> None:
        """Every delivery ends exactly once, well or by a named error."""
        for waiter in waiters:
            error = await waiter.wait()
            assert error is None or isinstance(error, TransferError)
            if error is not None:
                self._names(error, "r-1/0", "d/2")
        await asyncio.sleep(0)
        assert all(len(waiter.calls) == 1 for waiter in waiters)

    def _names(self, error: TransferError, *words: str) -> None:
        for word in words:
            assert word in error.message, f"{error.message!r} does not name {word!r}"

    # ------------------------------------------------------------------ refusals

    async def test_pools_that_do_not_fit_have_no_path(self) -> None:
        (one,) = layouts(2, 1)
        other = msgspec.structs.replace(one, content="another model")
        async with self.world((one,), (other,)) as world:
            with pytest.raises(TransferError, match="content differs") as caught:
                await world.connect()
            self._names(caught.value, "d/2", "connect")
            assert world.destination.transport.path(world.source.key) is None

    async def test_a_peer_of_another_life_has_no_path(self) -> None:
        async with self.world() as world:
            ask = world.source.transport
            world.destination.key = NodeLife(world.destination.key.node, 3)
            with pytest.raises(TransferError, match="restarted"):
                await ask.connect(world.destination.key, timeout=5)

    async def test_a_later_life_of_the_peer_ends_its_earlier_paths(self) -> None:
        async with self.world() as world:
            _, theirs = await world.connect()
            sink = RecordingTransferSink()
            grant = theirs.grant(order([1], 4), sink)
            source = world.source
            later = NodeLife(source.key.node, source.key.epoch + 1)
            before = source.transport
            source.key = later
            source.transport = self.make(later, source.regions, world.ask_of(later))
            try:
                ours, again = await world.connect()
                await sink.until(lambda s: bool(s.failed))
                self._names(sink.failed[0], "r-1/0", "p/1", "later life")
                await grant.revoke(timeout=5)
                assert again is not theirs
                fresh = again.grant(order([1], 4), RecordingTransferSink())
                waiter = deliver(ours, fresh.ticket, KvPart(0, 0, [1], (0, 3)))
                assert await waiter.wait() is None
                fresh.finish()
            finally:
                await before.close()

    async def test_a_path_that_is_never_ready_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pdserve.transfer.transport_base.HALF_OPEN", 0.5)
        async with self.world() as world:
            monkeypatch.setattr(type(world.source.transport), "_say_ready", _never_ready)
            with pytest.raises(TransferError, match="never"):
                await world.connect()
            transport = world.destination.transport
            for _ in range(500):
                if not transport._paths:  # type: ignore[attr-defined]
                    break
                await asyncio.sleep(0.01)
            assert not transport._paths  # type: ignore[attr-defined]

    async def test_without_control_there_is_no_path(self) -> None:
        async with self.world() as world:
            world.cut = True
            with pytest.raises(TransferError, match="connect") as caught:
                await world.connect()
            self._names(caught.value, "d/2")

    async def test_what_cannot_be_granted(self) -> None:
        async with self.world() as world:
            _, theirs = await world.connect()
            held = theirs.grant(order([1, 2], 8), RecordingTransferSink())
            for wrong in (
                # Block 2 belongs to another grant.
                order([2], 4),
                order([3, 3], 8),
                order([16], 4),
                order([-1], 4),
                order([3], 5),
                order([3], 0),
                order([3], 4, first_token=2),
            ):
                with pytest.raises(TransferRefused, match="r-1/0"):
                    theirs.grant(wrong, RecordingTransferSink())
            held.finish()
            theirs.grant(order([2], 4), RecordingTransferSink()).finish()
            assert theirs.stats.granted == 0

    async def test_what_cannot_be_delivered(self) -> None:
        async with self.world() as world:
            ours, theirs = await world.connect()
            grant = theirs.grant(order([1, 2], 7, first_token=4), RecordingTransferSink())
            ticket = grant.ticket
            for wrong in (
                # These blocks reach beyond the end of the grant.
                KvPart(0, 4, [1, 2, 3], (0, 3)),
                KvPart(0, 6, [1], (0, 3)),
                KvPart(0, 4, [16], (0, 3)),
                KvPart(0, 4, [-1], (0, 3)),
                KvPart(0, 4, [1], (0, 3), b"short"),
            ):
                with pytest.raises(
                    TransferRefused, match=r"transfer r-1/0 with d/2 over .*, deliver"
                ):
                    ours.deliver(ticket, wrong, Waiter())
            foreign = msgspec.structs.replace(ticket, epoch=9)
            with pytest.raises(TransferRefused, match="epoch"):
                ours.deliver(foreign, KvPart(0, 4, [1], (0, 3)), Waiter())
            outside = msgspec.structs.replace(ticket, blocks=(1, 16))
            with pytest.raises(TransferRefused):
                ours.deliver(outside, KvPart(0, 4, [1, 2], (0, 3)), Waiter())
            assert ours.stats.outgoing == 0
            grant.finish()
            assert world.destination.holds({}, ALL)

    async def test_a_revoked_ticket_is_worth_nothing(self) -> None:
        async with self.world() as world:
            ours, theirs = await world.connect()
            grant = theirs.grant(order([1], 4), RecordingTransferSink())
            await grant.revoke(timeout=5)
            world.source.fill({0: 1})
            try:
                error = await deliver(ours, grant.ticket, KvPart(0, 0, [0], (0, 3))).wait()
            except TransferRefused as refused:
                error = refused
            assert isinstance(error, TransferError)
            assert world.destination.holds({}, ALL)

    async def test_a_slot_comes_back_in_another_generation(self) -> None:
        async with self.world() as world:
            _, theirs = await world.connect()
            seen = set()
            for _ in range(5000):
                grant = theirs.grant(order([1], 4), RecordingTransferSink())
                seen.add((grant.ticket.slot, grant.ticket.generation))
                grant.finish()
            assert len(seen) == 5000

    async def test_connecting_twice_is_one_path(self) -> None:
        async with self.world() as world:
            first, _ = await world.connect()
            second, _ = await world.connect()
            assert first is second
            await first.close("the test")
            await first.close("again")
            # The other end learns of the close a little later.
            for _ in range(200):
                if world.destination.transport.path(world.source.key) is None:
                    break
                await asyncio.sleep(0.01)
            third, theirs = await world.connect()
            assert third is not first
            grant = theirs.grant(order([1], 4), RecordingTransferSink())
            assert await deliver(third, grant.ticket, KvPart(0, 0, [1], (0, 3))).wait() is None
            grant.finish()


async def _never_ready(self: object, path: PathBase, timeout: float) -> None:
    """Replaces `TransportBase._say_ready`: the path fails before it is ready."""
    path.fail("connect", "never")
    assert path.down is not None
    raise path.down
