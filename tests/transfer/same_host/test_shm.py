"""Fetching from a peer: what is given away meanwhile is never served, strangers get nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import (
    PathLost,
    TransferCorrupt,
    TransferError,
    TransferRefused,
    TransferWithdrawn,
)
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import (
    RecordingTransferSink,
    TransferPair,
    deliver,
    order,
    transfer_pair,
)
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.copying import copy_runs, copy_summed
from pdserve.transfer.same_host import pull_transport, shared_table, shm, unix_socket
from pdserve.transfer.same_host.shm import ShmPath, ShmTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.net.transport.bounded_acceptor import BoundedAcceptor
    from pdserve.transfer.base import CallPeer, KvPath, KvTransport
    from pdserve.transfer.same_host.pull_transport import Verify


def making(verify: Verify = "all"):
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return ShmTransport(key.node, key.epoch, regions, ask, verify=verify)

    return make


def world(verify: Verify = "all", blocks: int = 8):
    return transfer_pair(making(verify), layouts(2, 1), layouts(2, 2), blocks=blocks)


FOUR = KvPart(0, 0, [0, 1, 2, 3], (0, 3), bytes(range(64)))


async def spoilt(monkeypatch, at: str, spoil, verify: Verify = "all") -> TransferError:
    """What a sink hears when something happens at a point of the copy."""
    async with world(verify) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(8)})
        assert isinstance(two.source.transport, ShmTransport)
        table = two.source.transport.table
        real = getattr(shm, at)

        def instead(*args, **kwargs):
            spoil(two, table)
            return real(*args, **kwargs)

        monkeypatch.setattr(shm, at, instead)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        error = await deliver(ours, grant.ticket, FOUR).wait()
        await sink.until(lambda s: bool(s.failed))
        assert sink.parts == []
        assert isinstance(error, TransferWithdrawn)
        await grant.revoke(timeout=5)
        return sink.failed[0]


def other_content(two, table) -> None:
    two.source.memories[0].view(2)[7] ^= 1


async def test_a_changed_byte_is_found_by_its_checksum(monkeypatch) -> None:
    error = await spoilt(monkeypatch, "copy_summed", other_content)
    assert isinstance(error, TransferCorrupt)
    assert "checksum of block 2 differs" in error.message
    assert "transfer r-1/0 with p/1 over shm, fetch" in error.message


async def test_blocks_given_up_while_they_are_copied_are_not_served(monkeypatch) -> None:
    for verify in ("all", "off"):
        with monkeypatch.context() as patch:
            copy = "copy_summed" if verify == "all" else "copy_runs"
            error = await spoilt(patch, copy, lambda two, table: table.void(0), verify)
        assert "given the blocks up" in error.message


async def test_a_block_that_holds_something_else_is_not_served(monkeypatch) -> None:
    def rename(two, table) -> None:
        shared_table._HEADER.pack_into(
            table._map, shared_table.header_at(3), b"another block...", 1, 0
        )

    with monkeypatch.context() as patch:
        error = await spoilt(patch, "copy_runs", rename, "off")
    assert "block 3 of the source holds something else" in error.message

    def other_life(two, table) -> None:
        shared_table._HEADER.pack_into(
            table._map, shared_table.header_at(0), bytes(range(16)), 99, 0
        )

    error = await spoilt(monkeypatch, "chunks", other_life, "off")
    assert "block 0" in error.message


async def test_without_verification_content_is_not_compared(monkeypatch) -> None:
    async with world("off") as two:
        ours, theirs = await two.connect()
        monkeypatch.setattr(shm, "checksum", None)  # would fail if they were called
        monkeypatch.setattr(shm, "copy_summed", None)
        two.source.fill({block: block for block in range(8)})
        grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
        assert await deliver(ours, grant.ticket, FOUR).wait() is None
        grant.finish()


async def test_samples_are_some_of_every_part() -> None:
    async with world("sample") as two:
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        for count in (1, 5, 16, 17, 100):
            for number in range(40):
                places = transport.sampled(count, number)
                assert 1 <= len(places) <= count // 16 + 1
                assert {many for _, many in places} == {1}
                assert {place for place, _ in places} <= set(range(count))


async def test_all_is_every_block_once() -> None:
    async with world("all") as two:
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        for count in (1, 5, 64, 127, 128, 1000, 4097):
            groups = transport.sampled(count, 7)
            assert [n for at, many in groups for n in range(at, at + many)] == list(range(count))
            assert len(groups) < 130


async def sampling_to_strict(two: TransferPair) -> tuple[KvPath, KvPath]:
    """Only the destination compares all."""
    ours, theirs = await two.connect()
    assert isinstance(two.destination.transport, ShmTransport)
    two.destination.transport.verify = "all"
    two.source.fill({block: block for block in range(8)})
    return ours, theirs


async def test_a_destination_that_compares_all_gets_all_checksums(caplog) -> None:
    async with world("sample") as two:
        ours, theirs = await sampling_to_strict(two)
        sink = RecordingTransferSink()
        with caplog.at_level("INFO", logger="pdserve.transfer"):
            for _ in range(2):
                grant = theirs.grant(order(range(4), 16), sink)
                assert await deliver(ours, grant.ticket, FOUR).wait() is None
                grant.finish()
        assert sink.parts == [0, 0]
        assert caplog.text.count("as --verify-kv=all there wants, not sample as here") == 1


async def test_a_sample_is_refused_by_name_if_the_source_does_not_know_better() -> None:
    """It is of a release that does not read the setting in tickets."""
    async with world("sample") as two:
        ours, theirs = await sampling_to_strict(two)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        assert grant.ticket.verify == "all"
        assert await deliver(ours, replace(grant.ticket, verify=""), FOUR).wait() is not None
        assert "checksums of 1 blocks of 4, and --verify-kv=all" in sink.failed[0].message
        await grant.revoke(timeout=5)


@pytest.mark.parametrize("verify", ["all", "off"])
async def test_small_parts_are_copied_on_the_loop(verify: Verify) -> None:
    async with world(verify) as two:
        ours, theirs = await two.connect()
        transports = [node.transport for node in (two.source, two.destination)]
        for transport in transports:
            assert isinstance(transport, ShmTransport)
            assert transport._thread is not None
            transport._thread.shutdown()  # it takes no further work
        two.source.fill({block: block for block in range(8)})
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        assert await deliver(ours, grant.ticket, FOUR).wait() is None
        assert sink.parts == [0]
        assert two.destination.holds({block: block for block in range(4)}, range(3))
        grant.finish()
        for transport in transports:
            assert isinstance(transport, ShmTransport)
            transport._thread = None


async def test_a_small_part_that_cannot_be_summed_ends_the_path_alone(monkeypatch) -> None:
    async with world() as two:
        ours, theirs = await two.connect()

        def fail(*arguments: object, **named: object) -> int:
            raise ValueError("released")

        monkeypatch.setattr(two.source.transport, "sum_of", fail)
        grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
        error = await deliver(ours, grant.ticket, FOUR).wait()
        assert isinstance(error, PathLost)
        assert "released" in error.message
        await grant.revoke(timeout=5)


def flipping(two: TransferPair, block: int = 257):
    """`copy_summed`, but this block of the source changes before it is copied."""

    def copy(memory, source, to, from_, lengths, *rest) -> int:
        view = two.source.memories[0].view(block)
        at = block * len(view)
        if any(first <= at < first + n for first, n in zip(from_, lengths, strict=True)):
            view[0] ^= 1
        return copy_summed(memory, source, to, from_, lengths, *rest)

    return copy


async def test_a_changed_byte_is_found_among_many_blocks(monkeypatch) -> None:
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with transfer_pair(making("all"), (one,), (one,), blocks=300) as two:
        ours, theirs = await two.connect()
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(300), 300), sink)

        two.source.fill({block: block for block in range(300)})
        monkeypatch.setattr(shm, "copy_summed", flipping(two))
        part = KvPart(0, 0, list(range(300)), (0, 1))
        assert await deliver(ours, grant.ticket, part).wait() is not None
        assert "the checksum of block 256 and the next 3 differs" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_pieces_are_copied_while_later_ones_are_summed(monkeypatch) -> None:
    """Neither end waits for all of the part, whichever packets hold its checksums."""
    monkeypatch.setattr(pull_transport, "_PIECE", 100)
    monkeypatch.setattr(ShmTransport, "inline", 0)
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with transfer_pair(making("all"), (one,), (one,), blocks=3000) as two:
        ours, theirs = await two.connect()
        assert isinstance(theirs, ShmPath)
        two.source.fill({block: block for block in range(3000)})
        packets: list[Any] = []
        usual = theirs._on_fetch

        def record(fetch: Any) -> None:
            packets.append((fetch.more, len(fetch.blocks) // 4, len(theirs._jobs)))
            usual(fetch)

        monkeypatch.setattr(theirs, "_on_fetch", record)
        for count in (1, 64, 300, 3000):
            packets.clear()
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(count), count), sink)
            part = KvPart(0, 0, range(count), (0, 1), os.urandom(16 * count))
            assert await deliver(ours, grant.ticket, part).wait() is None
            assert sink.parts == [0]
            assert two.destination.holds({block: block for block in range(count)}, range(1))
            assert sum(blocks for _, blocks, _ in packets) == count
            assert [more for more, *_ in packets] == [True] * (len(packets) - 1) + [False]
            assert len(packets) == 1 if count == 1 else len(packets) > 1
            assert not theirs._arriving
            grant.finish()


async def test_a_checksum_that_reaches_into_the_next_packet_waits_for_it(monkeypatch) -> None:
    """Nodes of an older release cut packets without regard to checksums."""
    monkeypatch.setattr(pull_transport, "BLOCKS_PER_PACKET", 3)
    monkeypatch.setattr(ShmTransport, "inline", 0)
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with transfer_pair(making("all"), (one,), (one,), blocks=300) as two:
        ours, theirs = await two.connect()
        assert isinstance(theirs, ShmPath)
        two.source.fill({block: block for block in range(300)})
        for copy, good in ((copy_summed, True), (flipping(two), False)):
            monkeypatch.setattr(shm, "copy_summed", copy)
            sink = RecordingTransferSink()
            grant = theirs.grant(order(range(300), 300), sink)
            error = await deliver(ours, grant.ticket, KvPart(0, 0, range(300), (0, 1))).wait()
            assert (error is None) == good
            assert sink.parts == [0] * good
            assert good or "checksum of block 256 and the next 3 differs" in sink.failed[0].message
            assert not theirs._arriving
            await grant.revoke(timeout=5)


async def test_a_packet_after_the_last_one_ends_the_path(monkeypatch) -> None:
    async with world("off") as two:
        ours, theirs = await two.connect()
        assert isinstance(theirs, ShmPath)
        monkeypatch.setattr(ShmTransport, "inline", 0)
        monkeypatch.setattr(theirs, "_fetch", lambda job: asyncio.run(asyncio.sleep(0.1)))
        usual = theirs._on_fetch
        monkeypatch.setattr(theirs, "_on_fetch", lambda fetch: (usual(fetch), usual(fetch)))
        grant = theirs.grant(order(range(4), 16), RecordingTransferSink())
        error = await deliver(ours, grant.ticket, FOUR).wait()
        assert isinstance(error, PathLost)
        assert theirs.down is not None
        assert "packets of a part" in theirs.down.message
        await grant.revoke(timeout=5)


async def test_a_long_part_comes_in_pieces() -> None:
    count = 3 * pull_transport.BLOCKS_PER_PACKET
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with transfer_pair(making("sample"), (one,), (one,), blocks=count) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(count)})
        backwards = range(count - 1, -1, -1)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(count), count), sink)
        part = KvPart(0, 0, backwards, (0, 1), os.urandom(16 * count))
        assert await deliver(ours, grant.ticket, part).wait() is None
        assert sink.parts == [0]
        names = {block: count - 1 - block for block in range(count)}
        assert two.destination.holds(names, range(1))
        grant.finish()


async def test_a_peer_that_fetches_nothing_is_given_up(monkeypatch) -> None:
    async with world() as two:
        ours, theirs = await two.connect()
        grant = theirs.grant(order([1], 4), RecordingTransferSink())
        monkeypatch.setattr(theirs, "_on_packet", lambda packet: None)
        ours.patience = 0.05
        error = await deliver(ours, grant.ticket, KvPart(0, 0, [1], (0, 3))).wait()
        assert isinstance(error, PathLost)
        assert "received nothing" in error.message
        await grant.revoke(timeout=5)


async def test_strangers_are_sent_away() -> None:
    async with world() as two:
        await two.connect()
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        loop = asyncio.get_running_loop()
        for packet in (
            b"",
            b"\x00",
            pull_transport.encode_packet(unix_socket.SocketGreeting(b"x" * 32)),
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.setblocking(False)
                stranger.connect("\0" + transport._listen())
                if packet:
                    stranger.send(packet)
                else:
                    stranger.shutdown(socket.SHUT_WR)
                assert await asyncio.wait_for(loop.sock_recv(stranger, 100), 10) == b""
        assert not listener(transport).pending


def listener(transport: ShmTransport) -> BoundedAcceptor:
    transport._listen()
    assert transport._accepting is not None
    return transport._accepting


def dial(transport: ShmTransport) -> socket.socket:
    """A connection that says nothing."""
    made = unix_socket.seqpacket()
    made.connect("\0" + transport._listen())
    return made


async def test_silent_processes_shut_nobody_out(monkeypatch) -> None:
    """The oldest connection goes, and the next one may still greet."""
    monkeypatch.setattr(pull_transport, "_STRANGERS", 4)
    async with world() as two:
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        loop = asyncio.get_running_loop()
        silent = []
        for _ in range(6):
            silent.append(dial(transport))
            await asyncio.sleep(0)  # the backlog has as many places
        await two.connect()
        for each in silent[:2]:
            assert await asyncio.wait_for(loop.sock_recv(each, 100), 10) == b""
        assert listener(transport).evicted >= 2
        for each in silent:
            each.close()


class FullUp(socket.socket):
    """In a process that may open no more files."""

    def accept(self) -> None:  # type: ignore[override]
        raise OSError(errno.EMFILE, "Too many open files")


async def test_without_files_accepting_pauses(monkeypatch) -> None:
    """What waits would only wake it again at once; after the pause it is served."""
    monkeypatch.setattr("pdserve.net.transport.bounded_acceptor._PAUSE", 0.05)
    async with world() as two:
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        accepting = listener(transport)
        with FullUp(socket.AF_UNIX) as full:
            accepting._accept(full)
        paused = accepting.paused
        await two.connect()
        assert (paused, accepting.paused) == (True, False)


async def test_processes_of_another_user_count_as_one(monkeypatch) -> None:
    """So that they end each other's connections, and none of this user's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        user = os.geteuid()
        assert unix_socket.who_connects(ours) == f"process {os.getpid()}"
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert unix_socket.who_connects(ours) == f"user {user}"


async def test_another_user_or_host_gets_no_path(monkeypatch) -> None:
    async with world() as two:
        user = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: user + 1)
            with pytest.raises(TransferError, match="runs as user"):
                await two.source.transport.connect(two.destination.key, timeout=5)
        monkeypatch.setattr(pull_transport, "boot_id", iter(["one host", "another"]).__next__)
        with pytest.raises(TransferRefused, match="another host"):
            await two.source.transport.connect(two.destination.key, timeout=5)


async def test_memory_that_could_shrink_or_is_too_small_is_refused() -> None:
    async with world() as two:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        try:
            transport = two.destination.transport
            assert isinstance(transport, ShmTransport)
            (region, *_) = transport.regions
            for size, complaint in ((1 << 20, "sealed"), (10, "smaller")):
                os.ftruncate(fd, size)
                transport.regions = (
                    Region(region.layout, region.blocks, region.view, fd),
                    *transport.regions[1:],
                )
                with pytest.raises(TransferError, match=complaint):
                    await two.source.transport.connect(two.destination.key, timeout=5)
        finally:
            os.close(fd)


def test_memory_without_a_descriptor_is_no_memory_to_share() -> None:
    (one,) = layouts(1, 1)

    async def nobody(*_: object) -> None: ...

    with pytest.raises(ValueError, match="descriptor"):
        ShmTransport("n", 1, [Region(one, 1, memoryview(bytearray(96)))], nobody)  # type: ignore[arg-type]


async def test_a_fence_does_not_wait_for_what_the_thread_has_not_begun(monkeypatch) -> None:
    """One thread copies for all peers: its backlog may be that of others."""
    monkeypatch.setattr(ShmTransport, "inline", 0)
    begun, go = threading.Event(), threading.Event()
    copies: list[int] = []

    def slow(*args: Any, **kwargs: Any) -> int:
        copies.append(len(copies))
        begun.set()
        assert go.wait(20)
        return copy_runs(*args, **kwargs)

    async with world("off", blocks=8) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(8)})
        monkeypatch.setattr(shm, "copy_runs", slow)
        first, second = RecordingTransferSink(), RecordingTransferSink()
        one, other = theirs.grant(order([0, 1], 8), first), theirs.grant(order([2, 3], 8), second)
        part = KvPart(0, 0, [0, 1], (0, 3), bytes(range(32)))
        sent = deliver(ours, one.ticket, part)
        await asyncio.to_thread(begun.wait, 20)
        unsent = deliver(ours, other.ticket, part)
        await asyncio.sleep(0)
        for _ in range(1000):
            if len(theirs._jobs) == 2:
                break
            await asyncio.sleep(0.001)
        await other.revoke(timeout=10)  # while the first copy goes on
        assert isinstance(await unsent.wait(), TransferError)
        go.set()
        assert await sent.wait() is None
        assert len(copies) == 2, "one for each of the destination's pools"
        one.finish()


async def test_what_was_under_way_ends_although_a_path_cannot_be_destroyed(monkeypatch) -> None:
    """The source's blocks come back; the destination's stay fenced off."""
    async with world("off", blocks=8) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(8)})
        grant = theirs.grant(order([0, 1], 8), RecordingTransferSink())
        monkeypatch.setattr(theirs, "_fetch", lambda job: ("not now", 0))
        monkeypatch.setattr(theirs, "_on_done", lambda *_: None)
        sent = deliver(ours, grant.ticket, KvPart(0, 0, [0, 1], (0, 3), bytes(range(32))))
        destroy = ours._destroy

        async def fails() -> None:
            await destroy()
            raise OSError("ibv_destroy_qp: device or resource busy")

        monkeypatch.setattr(ours, "_destroy", fails)
        with pytest.raises(OSError, match="busy"):
            await ours.close("the test is over")
        assert isinstance(await sent.wait(), PathLost)
        monkeypatch.undo()
        ours._forget(ours)
