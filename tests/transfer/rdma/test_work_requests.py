"""Work requests say exactly what the runs say, by either twin, as the device would read them."""

from __future__ import annotations

import ctypes
import errno
import struct
from array import array
from random import Random
from typing import NamedTuple

import pytest

from pdserve import accel
from pdserve.transfer.rdma import work_requests as tables
from pdserve.transfer.rdma.work_requests import SendTablePure, region_slices

TABLES = [SendTablePure] + ([accel.native.SendTable] if accel.NATIVE else [])
POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class Seen(NamedTuple):
    """One work request, as a device reads it."""

    id: int
    opcode: int
    flags: int
    piece: tuple[int, int, int] | None
    address: int
    key: int
    word: int


class Device:
    """Takes what is posted to it, by C's rules; refuses the request at `refuse`."""

    def __init__(self, refuse: int = -1) -> None:
        self.seen: list[Seen] = []
        self.pairs: list[int] = []
        self.refuse = refuse
        self._call = POST(self._post)
        self.address = ctypes.cast(self._call, ctypes.c_void_p).value or 0

    def _post(self, pair: int, request: int | None, bad: int) -> int:
        self.pairs.append(pair)
        while request:
            number, following, pieces, count, opcode, flags = struct.unpack(
                "<QQQiiI", ctypes.string_at(request, 36)
            )
            (word,) = struct.unpack(">I", ctypes.string_at(request + 36, 4))
            address, key = struct.unpack("<QI", ctypes.string_at(request + 40, 12))
            piece = struct.unpack("<QII", ctypes.string_at(pieces, 16)) if count else None
            if len(self.seen) == self.refuse:
                ctypes.c_uint64.from_address(bad).value = request
                return errno.ENOMEM
            self.seen.append(Seen(number, opcode, flags, piece, address, key, word))
            request = following
        return 0


def runs(random: Random, count: int, size: int) -> tuple[array[int], array[int], array[int]]:
    """Inside two regions of this size."""
    lengths = [random.randrange(1, 500) for _ in range(count)]
    places = [[random.randrange(size - n) for n in lengths] for _ in range(2)]
    return array("q", places[0]), array("q", places[1]), array("q", lengths)


def filled(kind, columns, ours, theirs, room: int = 8) -> list[Seen]:
    """All of it, a table at a time."""
    device, table, run, done, first = Device(), kind(room), 0, 0, 1
    while run < len(columns[0]):
        at, run, done = table.fill(0, room, *columns, run, done, ours, theirs)
        assert table.post(device.address, 77, at, first, 4) == (0, at)
        first += at
    assert set(device.pairs) == {77}
    return device.seen


@pytest.mark.parametrize("kind", TABLES)
def test_every_byte_goes_where_the_runs_say_with_its_slices_keys(kind, seed: int) -> None:
    random = Random(seed)
    size = 10_000
    for _ in range(20):
        ours = region_slices(1 << 40, 3_000, (11, 12, 13, 14))
        theirs = region_slices(1 << 41, random.choice((700, size)), tuple(range(21, 36)))
        columns = runs(random, random.randrange(1, 40), size)
        seen = filled(kind, columns, ours, theirs)
        expected = [
            (ours[0] + s + n, theirs[0] + d + n, ours[2 + (s + n) // ours[1]],
             theirs[2 + (d + n) // theirs[1]])
            for s, d, length in zip(*columns, strict=True)
            for n in range(length)
        ]  # fmt: skip
        moved = [
            (piece[0] + n, write.address + n, piece[2], write.key)
            for write in seen
            for piece in [write.piece or (0, 0, 0)]
            for n in range(piece[1])
        ]
        assert moved == expected
        assert {write.opcode for write in seen} == {0}
        assert [write.id for write in seen] == list(range(1, len(seen) + 1))


@pytest.mark.parametrize("kind", TABLES)
def test_one_in_so_many_and_the_last_ask_for_a_completion(kind) -> None:
    table, device = kind(16), Device()
    region = region_slices(0, 1 << 20, (1,))
    columns = (array("q", range(10)), array("q", range(10)), array("q", [1]) * 10)
    assert table.fill(0, 16, *columns, 0, 0, region, region) == (10, 10, 0)
    table.empty(10, 0x1234_5678, region)
    assert table.post(device.address, 1, 11, 100, 4) == (0, 11)
    assert [write.id for write in device.seen if write.flags == 2] == [100, 104, 108, 110]
    assert device.seen[-1][1:] == (1, 2, None, 0, 1, 0x1234_5678)
    assert table.post(device.address, 1, 3, 200, 4) == (0, 3)  # the table is linked as before
    assert [write.id for write in device.seen[11:]] == [200, 201, 202]
    table.empty(0, -1, region)
    assert table.post(device.address, 1, 1, 7, 4) == (0, 1)
    assert device.seen[-1][:4] == (7, 0, 2, None)


@pytest.mark.parametrize("kind", TABLES)
def test_a_refused_request_is_counted_from(kind) -> None:
    table, device = kind(8), Device(refuse=5)
    region = region_slices(0, 100, (1,))
    columns = (array("q", range(8)), array("q", range(8)), array("q", [1]) * 8)
    table.fill(0, 8, *columns, 0, 0, region, region)
    assert table.post(device.address, 1, 8, 1, 4) == (errno.ENOMEM, 5)


@pytest.mark.parametrize("kind", TABLES)
def test_what_leaves_its_region_or_its_table_is_no_request(kind) -> None:
    table = kind(4)
    region = region_slices(0, 100, (1, 2))
    one = array("q", [0])
    for source, destination, length in (
        (200, 0, 1),
        (0, 200, 1),
        (-1, 0, 1),
        (0, 0, 0),
        (0, 0, -1),
    ):
        columns = (array("q", [source]), array("q", [destination]), array("q", [length]))
        with pytest.raises(ValueError, match="run"):
            table.fill(0, 4, *columns, 0, 0, region, region)
    for wrong in (
        lambda: table.fill(0, 5, one, one, one, 0, 0, region, region),
        lambda: table.fill(0, 4, one, array("q"), one, 0, 0, region, region),
        lambda: table.fill(-1, 4, one, one, one, 0, 0, region, region),
        lambda: table.post(0, 0, 0, 1, 1),
        lambda: table.post(0, 0, 5, 1, 1),
        lambda: table.empty(4, 0, region),
        lambda: table.row(-1),
        lambda: kind(0),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_reads_as_it_was_written(kind) -> None:
    table, region = kind(2), region_slices(1000, 100, (5,))
    table.fill(0, 1, *(array("q", [n]) for n in (7, 9, 11)), 0, 0, region, region)
    table.empty(1, 3, region)
    assert table.row(0)[1:9] == (0, 0, 1, 1007, 11, 5, 1009, 5)
    assert (table.row(1)[1], table.row(1)[3], table.row(1)[9]) == (1, 0, 3)


@pytest.mark.parametrize("native", [False, True] if accel.NATIVE else [False])
def test_receives_and_completions(native: bool) -> None:
    receives = accel.native.post_receives if native else tables.post_receives_pure
    poll = accel.native.poll_completions if native else tables.poll_completions_pure
    chains: list[int] = []

    def take(pair: int, request: int | None, bad: int) -> int:
        count = 0
        while request:
            _, request, _, pieces = struct.unpack("<QQQi", ctypes.string_at(request, 28))
            assert pieces == 0
            count += 1
        chains.append(count)
        return errno.ENOMEM if count > 100 else 0

    def give(queue: int, most: int, room: int) -> int:
        assert (queue, most) == (55, 64)
        first = struct.pack("<QiiII", 9, 0, 129, 0, 0) + struct.pack(">I", 0xABCD) + bytes(20)
        second = struct.pack("<QiiII", 10, 12, 0, 7, 0) + bytes(24)
        ctypes.memmove(room, first + second, 96)
        return 2

    post, look = POST(take), POLL(give)
    address = ctypes.cast(post, ctypes.c_void_p).value or 0
    assert receives(address, 1, 7) == 0
    assert receives(address, 1, 101) == errno.ENOMEM
    assert chains == [7, 101]
    found = poll(ctypes.cast(look, ctypes.c_void_p).value or 0, 55)
    assert found == [(9, 0, 129, 0xABCD, 0), (10, 12, 0, 0, 7)]
