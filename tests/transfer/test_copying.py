"""Copies of runs: the native function and its twin do the same, and nothing outside."""

from __future__ import annotations

import threading
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import accel
from pdserve.transfer.copy_plan import CopyRuns
from pdserve.transfer.copying import (
    checksum,
    checksum_pure,
    chunks,
    copy_pure,
    copy_runs,
    copy_summed,
    copy_summed_pure,
    crc32,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SUMS = (checksum, checksum_pure)
BOTH = [copy_pure, copy_runs] if accel.NATIVE else [copy_pure]


def q(*values: int) -> array[int]:
    return array("q", values)


def apart(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same runs, to places that do not overlap."""
    ends = accumulate((n for *_, n in runs), initial=0)
    return [(to, at, n) for to, (_, at, n) in zip(ends, runs, strict=False)]


def columns(runs: list[tuple[int, int, int]]) -> tuple[array[int], array[int], array[int]]:
    """Where they go, where they come from, how long they are."""
    return q(*(to for to, _, _ in runs)), q(*(at for _, at, _ in runs)), q(*(n for *_, n in runs))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6)), max_size=9))
def test_twins_copy_the_same(runs: list[tuple[int, int, int]]) -> None:
    source = bytes(range(16))
    results = []
    for copy in BOTH:
        out = bytearray(b"." * 16)
        tos, froms, lengths = columns(runs)
        assert copy(memoryview(out), memoryview(source), tos, froms, lengths) == sum(lengths)
        results.append(bytes(out))
    plain = bytearray(b"." * 16)
    for to, at, length in runs:
        plain[to : to + length] = source[at : at + length]
    assert results == [bytes(plain)] * len(BOTH)


def test_streamed_copies_are_the_same_at_any_alignment(seed: int) -> None:
    random = Random(seed)
    source = random.randbytes(200_000)
    for copy in BOTH:
        out, plain = bytearray(300_000), bytearray(300_000)
        at = 0
        runs = []
        for length in (0, 1, 63, 64, 16_384, 16_385, 16_447, 16_448, 32_768, 70_000, 65_536):
            at += random.randrange(130)
            begin = random.randrange(len(source) - length)
            runs.append((at, begin, length))
            plain[at : at + length] = source[begin : begin + length]
            at += length
        tos, froms, lengths = columns(runs)
        moved = copy(memoryview(out), memoryview(source), tos, froms, lengths, True)
        assert moved == sum(lengths)
        assert out == plain


@pytest.mark.parametrize("copy", BOTH)
@pytest.mark.parametrize(
    ("to", "at", "length"),
    [(13, 0, 4), (0, 13, 4), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (1 << 62,) * 3],
)
def test_a_run_that_leaves_its_memory_moves_nothing(copy, to: int, at: int, length: int) -> None:
    out = bytearray(16)
    with pytest.raises(ValueError, match="leaves its memory"):
        copy(memoryview(out), memoryview(b"x" * 16), q(0, to), q(0, at), q(4, length))
    assert out == bytes(16)


@pytest.mark.parametrize("copy", BOTH)
def test_columns_of_other_lengths_and_read_only_memory_are_refused(copy) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each twin has its own words
        copy(memoryview(bytearray(4)), memoryview(b"abcd"), q(0), q(0, 0), q(1))
    with pytest.raises((TypeError, BufferError)):
        copy(memoryview(bytes(4)), memoryview(b"abcd"), q(0), q(0), q(1))


def test_chunks_cover_all_runs_in_order() -> None:
    runs = CopyRuns(q(*range(0, 700, 7)), q(*range(100)), array("q", [7]) * 100)
    for size in (1, 7, 50, 10_000):
        seen = [run for chunk in chunks(runs, size) for run in zip(*chunk, strict=True)]
        assert seen == [(to, at, 7) for to, at in zip(range(100), range(0, 700, 7), strict=True)]
    assert list(chunks(CopyRuns(q(), q(), q()))) == []


def test_a_checksum_is_that_of_the_bytes_in_a_row() -> None:
    memory = memoryview(bytes(range(100)))
    for sum_of in SUMS:
        found = sum_of(memory, q(10, 3), q(5, 2), 7)
        assert found == zlib.crc32(bytes([10, 11, 12, 13, 14, 3, 4]), 7)
        for at, length in ((99, 2), (-1, 1), (0, -1), (1 << 62, 1 << 62)):
            with pytest.raises(ValueError, match="leaves its memory"):
                sum_of(memory, q(0, at), q(4, length))
        with pytest.raises(ValueError):  # noqa: PT011 - each twin has its own words
            sum_of(memory, q(1), q(1, 2))


@pytest.fixture(params=["wide", "narrow"])
def registers(request) -> Iterator[None]:
    """Registers of 512 bits, where the machine has them, and of 128."""
    if accel.NATIVE:
        accel.native.crc32_wide(request.param == "wide")
    yield
    if accel.NATIVE:
        accel.native.crc32_wide(True)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_summed_copy_copies_and_sums(streaming: bool, seed: int) -> None:
    random = Random(seed)
    source = random.randbytes(200_000)
    lengths = q(0, 1, 63, 64, 16_384, 16_385, 16_447, 16_448, 32_768, 70_000, 65_536, 100)
    starts = q(*(random.randrange(len(source) - length) for length in lengths))
    places, end = q(), 0
    for length in lengths:
        places.append(end + random.randrange(130))
        end = places[-1] + length
    plain = bytearray(end)
    copy_pure(memoryview(plain), memoryview(source), places, starts, lengths)
    row = b"".join(source[at : at + n] for at, n in zip(starts, lengths, strict=True))
    for copy in {copy_summed, copy_summed_pure}:
        out = bytearray(end)
        found = copy(memoryview(out), memoryview(source), places, starts, lengths, streaming, 99)
        assert found == zlib.crc32(row, 99)
        assert out == plain


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6)), max_size=9))
def test_summed_twins_write_the_same(runs: list[tuple[int, int, int]]) -> None:
    source, results = bytes(range(16)), set()
    for copy in (copy_summed, copy_summed_pure):
        out = bytearray(b"." * 64)
        tos, froms, lengths = columns(apart(runs))
        found = copy(memoryview(out), memoryview(source), tos, froms, lengths)
        results.add((found, bytes(out)))
    assert len(results) == 1


@pytest.mark.parametrize("copy", [copy_summed, copy_summed_pure])
def test_a_summed_copy_moves_nothing_if_a_run_leaves_its_memory(copy) -> None:
    for to, at, length in [(13, 0, 4), (0, 13, 4), (-1, 0, 1), (0, -1, 1), (0, 0, -1)]:
        out = bytearray(16)
        with pytest.raises(ValueError, match="leaves its memory"):
            copy(memoryview(out), memoryview(b"x" * 16), q(0, to), q(0, at), q(4, length))
        assert out == bytes(16)


def test_what_is_summed_was_written_though_the_source_changes(seed: int) -> None:
    """A thread flips a byte of the source all the time; sum and destination agree nevertheless."""
    size = 4 << 20
    source, out = (memoryview(bytearray(b)) for b in (Random(seed).randbytes(size), size))
    ended = threading.Event()

    def flip() -> None:
        while not ended.is_set():
            source[size // 2] ^= 255

    with ThreadPoolExecutor(1) as pool:
        flipping = pool.submit(flip)
        try:
            for _ in range(20):
                found = copy_summed(out, source, q(0), q(0), q(size), True)
                assert found == zlib.crc32(out)
        finally:
            ended.set()
        flipping.result()


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 0xFFFF_FFFF))
def test_crc_is_zlibs_wherever_the_bytes_are_cut(data: bytes, cut: int, start: int) -> None:
    whole = memoryview(data)
    assert crc32(whole, start) == zlib.crc32(data, start)
    assert crc32(whole[cut:], crc32(whole[:cut], start)) == zlib.crc32(data, start)


@pytest.mark.usefixtures("registers")
def test_crc_of_long_memory_is_zlibs(seed: int) -> None:
    data = Random(seed).randbytes(100_003)
    for at in range(64):
        assert crc32(memoryview(data)[at:]) == zlib.crc32(data[at:])
    for size in range(0, 1100, 3):
        assert crc32(memoryview(data)[5 : 5 + size], 3) == zlib.crc32(data[5 : 5 + size], 3)
