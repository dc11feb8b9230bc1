"""Reads and writes past the page cache, whatever buffers they come from."""

from __future__ import annotations

import errno as codes
import mmap
import os
import threading
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.disk.file_system import file_ops
from pdserve.kv.tiers.disk.file_system.direct_io import (
    PAGE,
    AlignedMemory,
    can_bypass,
    gather,
    scatter,
)
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = AlignedMemory()


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def filled(view: memoryview, random: Random) -> memoryview:
    view[:] = random.randbytes(len(view))
    return view


def is_taken(view: memoryview) -> bool:
    """Whether a device takes the view: whole pages, as far as the address can be told."""
    return len(view) % PAGE == 0


def some_buffers(random: Random) -> list[memoryview]:
    """Buffers as records have them: whole, shifted, with tails; whole pages together."""
    buffers = []
    for _ in range(random.randint(1, 6)):
        size = random.choice([1, 100, PAGE, PAGE + 1, 3 * PAGE, 2 * PAGE + 900])
        shift = random.choice([0, 0, 8])
        buffers.append(filled(aligned(size + 64)[shift : shift + size], random))
    rest = -sum(map(len, buffers)) % PAGE
    return [*buffers, filled(aligned(rest + 1)[:rest], random)] if rest else buffers


def test_views_have_all_bytes_in_order(seed: int):
    random = Random(seed)
    for _ in range(200):
        buffers = some_buffers(random)
        views = gather(buffers, MEMORY)
        assert b"".join(views) == b"".join(buffers)
        assert all(is_taken(view) for view in views)


def test_an_aligned_payload_is_not_copied():
    payload = aligned(4 * PAGE + 100)
    header, padding = bytes(PAGE), bytes(PAGE - 100)
    views = gather([header, payload, padding], MEMORY)
    assert [len(view) for view in views] == [PAGE, 4 * PAGE, PAGE]
    assert views[1].obj is payload.obj
    assert views[0].obj is not payload.obj


def test_read_only_and_shifted_payloads_are_copied():
    for payload in (memoryview(bytes(2 * PAGE)), aligned(3 * PAGE)[8 : 8 + 2 * PAGE]):
        (view,) = gather([bytes(PAGE), payload], MEMORY)
        assert len(view) == 3 * PAGE


def test_what_was_written_is_read_back(tmp_path: Path, seed: int):
    random = Random(seed)
    if not can_bypass(tmp_path, PAGE):
        pytest.skip("this file system cannot bypass the page cache")
    ops = OsFileOps(direct=True)
    fd = ops.create(tmp_path / "file", 64 * PAGE)
    for _ in range(30):
        buffers = some_buffers(random)
        ops.write(fd, 8 * PAGE, buffers)
        shifted = [aligned(len(buffer) + 64)[random.choice([0, 8]) :] for buffer in buffers]
        back = [view[: len(buffer)] for view, buffer in zip(shifted, buffers, strict=True)]
        assert ops.read(fd, 8 * PAGE, back) == sum(map(len, buffers))
        assert [bytes(view) for view in back] == [bytes(view) for view in buffers]
    assert ops.direct
    ops.begin_sync(fd, 0, PAGE)
    ops.done_with(fd)
    ops.close(fd)


def test_zeros_bypass_the_cache_too(tmp_path: Path, monkeypatch):
    """Where the file system can neither reserve nor punch."""
    if not can_bypass(tmp_path, PAGE):
        pytest.skip("this file system cannot bypass the page cache")

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(codes.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(file_ops, "_punch", lambda fd, offset, size: False)
    ops = OsFileOps(direct=True)
    fd = ops.create(tmp_path / "file", 300 * PAGE)
    ops.write(fd, 0, [b"x" * 3 * PAGE])
    ops.erase(fd, PAGE, PAGE)
    ops.close(fd)
    assert ops.direct
    content = (tmp_path / "file").read_bytes()
    assert content == b"x" * PAGE + bytes(PAGE) + b"x" * PAGE + bytes(297 * PAGE)


def test_the_end_of_a_file_is_noticed(tmp_path: Path):
    if not can_bypass(tmp_path, PAGE):
        pytest.skip("this file system cannot bypass the page cache")
    (tmp_path / "file").write_bytes(b"x" * (3 * PAGE))
    ops = OsFileOps(direct=True)
    fd = ops.open(tmp_path / "file")
    header, payload = bytearray(PAGE), bytearray(b"-" * 5000)
    assert ops.read(fd, 2 * PAGE, [header, payload]) == PAGE
    assert header == b"x" * PAGE
    assert payload == b"-" * 5000
    assert ops.read(fd, PAGE, [payload]) == 5000
    assert payload == b"x" * 5000
    ops.close(fd)


def test_a_refused_write_goes_through_the_cache_from_then_on(tmp_path: Path, monkeypatch, caplog):
    if not can_bypass(tmp_path, PAGE):
        pytest.skip("this file system cannot bypass the page cache")
    ops = OsFileOps(direct=True)
    fd = ops.create(tmp_path / "file", 4 * PAGE)
    other = ops.open(tmp_path / "file")
    pwritev = os.pwritev
    refusals = [OSError(codes.EINVAL, "Invalid argument")]

    def refuse(fd: int, buffers: list[memoryview], at: int) -> int:
        if refusals:
            raise refusals.pop()
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    ops.write(fd, 0, [b"hello".ljust(PAGE)])
    assert not ops.direct
    assert "refuses" in caplog.text
    back = bytearray(5)
    assert ops.read(other, 0, [back]) == 5  # a descriptor that was opened before
    assert back == b"hello"
    refusals.append(OSError(codes.EIO, "I/O error"))
    with pytest.raises(OSError, match="I/O error"):
        ops.write(fd, 0, [bytes(PAGE)])
    for each in (fd, other):
        ops.close(each)


def test_a_refused_opening_goes_through_the_cache(tmp_path: Path, monkeypatch):
    opened = os.open

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            (tmp_path / "file").touch()  # some systems refuse only after they made the file
            raise OSError(codes.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    ops = OsFileOps(direct=True)
    fd = ops.create(tmp_path / "file", PAGE)
    assert not ops.direct
    ops.write(fd, 0, [b"x" * PAGE])
    ops.close(fd)
    assert (tmp_path / "file").read_bytes() == b"x" * PAGE


def test_a_folder_that_cannot_is_told(tmp_path: Path, monkeypatch):
    assert not can_bypass(tmp_path / "absent", PAGE)

    def refuse(fd: int, buffers: list[memoryview], at: int) -> int:
        raise OSError(codes.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refuse)
    assert not can_bypass(tmp_path, 10 * PAGE)
    assert list(tmp_path.iterdir()) == []


def test_each_thread_has_its_own_memory():
    mine = MEMORY.take(PAGE)
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(MEMORY.take(PAGE)))
    thread.start()
    thread.join()
    mine[0] = 7
    theirs[0][0] = 9
    assert mine[0] == 7
    assert MEMORY.take(PAGE).obj is mine.obj
    assert len(MEMORY.take(16 << 20)) == 16 << 20


def test_scattering_fills_only_what_was_asked_for(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"ab" * PAGE)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    buffer = bytearray(6)
    assert scatter(fd, 0, [memoryview(buffer)[:4]], MEMORY) == 4
    assert buffer == b"abab\0\0"
    os.close(fd)
