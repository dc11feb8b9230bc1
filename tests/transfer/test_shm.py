"""Fetching from a peer: what is given away meanwhile is never served, strangers get nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import (
    PathLost,
    TransferCorrupt,
    TransferError,
    TransferRefused,
    TransferWithdrawn,
)
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingSink, deliver, ends, order
from pdserve.transfer import pull, shm, shm_socket, shm_table
from pdserve.transfer.base import Part, PeerKey, Region
from pdserve.transfer.copying import copy_runs
from pdserve.transfer.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.transfer.base import Ask, Transport
    from pdserve.transfer.pull import Verify


def making(verify: Verify = "all"):
    def make(key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        return ShmTransport(key.node, key.epoch, regions, ask, verify=verify)

    return make


def world(verify: Verify = "all", blocks: int = 8):
    return ends(making(verify), layouts(2, 1), layouts(2, 2), blocks=blocks)


FOUR = Part(0, 0, [0, 1, 2, 3], (0, 3), bytes(range(64)))


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
        sink = RecordingSink()
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
    error = await spoilt(monkeypatch, "copy_runs", other_content)
    assert isinstance(error, TransferCorrupt)
    assert "checksum of block 2 differs" in error.message
    assert "transfer r-1/0 with p/1 over shm, fetch" in error.message


async def test_blocks_given_up_while_they_are_copied_are_not_served(monkeypatch) -> None:
    for verify in ("all", "off"):
        with monkeypatch.context() as patch:
            error = await spoilt(patch, "copy_runs", lambda two, table: table.void(0), verify)
        assert "given the blocks up" in error.message


async def test_a_block_that_holds_something_else_is_not_served(monkeypatch) -> None:
    def rename(two, table) -> None:
        shm_table._HEADER.pack_into(table._map, shm_table.header_at(3), b"another block...", 1, 0)

    with monkeypatch.context() as patch:
        error = await spoilt(patch, "copy_runs", rename, "off")
    assert "block 3 of the source holds something else" in error.message

    def other_life(two, table) -> None:
        shm_table._HEADER.pack_into(table._map, shm_table.header_at(0), bytes(range(16)), 99, 0)

    error = await spoilt(monkeypatch, "chunks", other_life, "off")
    assert "block 0" in error.message


async def test_without_verification_content_is_not_compared(monkeypatch) -> None:
    async with world("off") as two:
        ours, theirs = await two.connect()
        monkeypatch.setattr(shm, "checksum", None)  # would fail if it were called
        two.source.fill({block: block for block in range(8)})
        grant = theirs.grant(order(range(4), 16), RecordingSink())
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


async def test_a_changed_byte_is_found_among_many_blocks(monkeypatch) -> None:
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with ends(making("all"), (one,), (one,), blocks=300) as two:
        ours, theirs = await two.connect()
        sink = RecordingSink()
        grant = theirs.grant(order(range(300), 300), sink)

        def flipping(*args: Any) -> int:
            size = copy_runs(*args)
            two.destination.memories[0].view(257)[0] ^= 1
            return size

        monkeypatch.setattr(shm, "copy_runs", flipping)
        part = Part(0, 0, list(range(300)), (0, 1))
        assert await deliver(ours, grant.ticket, part).wait() is not None
        assert "the checksum of block 256 and the next 3 differs" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_a_long_part_comes_in_pieces() -> None:
    count = 3 * pull.PIECE
    (one,) = layouts(1, 1, layers=1, tokens=1, dim=1, itemsize=1)
    async with ends(making("sample"), (one,), (one,), blocks=count) as two:
        ours, theirs = await two.connect()
        two.source.fill({block: block for block in range(count)})
        backwards = range(count - 1, -1, -1)
        sink = RecordingSink()
        grant = theirs.grant(order(range(count), count), sink)
        part = Part(0, 0, backwards, (0, 1), os.urandom(16 * count))
        assert await deliver(ours, grant.ticket, part).wait() is None
        assert sink.parts == [0]
        names = {block: count - 1 - block for block in range(count)}
        assert two.destination.holds(names, range(1))
        grant.finish()


async def test_a_peer_that_fetches_nothing_is_given_up(monkeypatch) -> None:
    async with world() as two:
        ours, theirs = await two.connect()
        grant = theirs.grant(order([1], 4), RecordingSink())
        monkeypatch.setattr(theirs, "_on_packet", lambda packet: None)
        ours.patience = 0.05
        error = await deliver(ours, grant.ticket, Part(0, 0, [1], (0, 3))).wait()
        assert isinstance(error, PathLost)
        assert "taken nothing" in error.message
        await grant.revoke(timeout=5)


async def test_strangers_are_sent_away() -> None:
    async with world() as two:
        await two.connect()
        transport = two.source.transport
        assert isinstance(transport, ShmTransport)
        loop = asyncio.get_running_loop()
        for packet in (b"", b"\x00", pull.encode(shm_socket.Greeting(b"x" * 32))):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.setblocking(False)
                stranger.connect("\0" + transport._listen())
                if packet:
                    stranger.send(packet)
                else:
                    stranger.shutdown(socket.SHUT_WR)
                assert await asyncio.wait_for(loop.sock_recv(stranger, 100), 10) == b""
        assert not transport._strangers


async def test_another_user_or_host_gets_no_path(monkeypatch) -> None:
    async with world() as two:
        user = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: user + 1)
            with pytest.raises(TransferError, match="runs as user"):
                await two.source.transport.connect(two.destination.key, timeout=5)
        monkeypatch.setattr(pull, "boot_id", iter(["one host", "another"]).__next__)
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
