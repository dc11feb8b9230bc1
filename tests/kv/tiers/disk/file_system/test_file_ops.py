"""File operations on the real file system."""

from __future__ import annotations

import errno as codes
import os
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.disk.file_system import file_ops
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
OPS = OsFileOps()


def test_a_new_file_has_its_bytes(tmp_path: Path):
    fd = OPS.create(tmp_path / "file", 10 * PAGE)
    assert OPS.size(fd) == 10 * PAGE
    assert os.fstat(fd).st_blocks * 512 >= 10 * PAGE
    OPS.close(fd)
    with pytest.raises(FileExistsError):
        OPS.create(tmp_path / "file", PAGE)


def test_zeros_stand_in_where_the_system_cannot_reserve(tmp_path: Path, monkeypatch):
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(codes.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    fd = OPS.create(tmp_path / "file", 3 * PAGE + 5)
    assert OPS.size(fd) == 3 * PAGE + 5
    OPS.close(fd)


def test_a_file_that_does_not_fit_is_not_left_behind(tmp_path: Path, monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(codes.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        OPS.create(tmp_path / "file", PAGE)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv

    def one(buffers: list[memoryview]) -> list[memoryview]:
        return [buffers[0][:3]]

    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: pwritev(fd, one(b), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, one(b), at))
    fd = OPS.create(tmp_path / "file", PAGE)
    OPS.write(fd, 100, [b"hello", b"", b", ", memoryview(b"world")])
    first, second = bytearray(4), bytearray(8)
    assert OPS.read(fd, 100, [first, second]) == 12
    assert bytes(first + second) == b"hello, world"
    assert OPS.read(fd, PAGE - 2, [bytearray(5)]) == 2
    OPS.close(fd)


def test_many_buffers_take_several_calls(tmp_path: Path):
    fd = OPS.create(tmp_path / "file", PAGE)
    OPS.write(fd, 0, [bytes([n % 256]) for n in range(1500)])
    back = [bytearray(1) for _ in range(1500)]
    assert OPS.read(fd, 0, back) == 1500
    assert b"".join(back) == bytes(n % 256 for n in range(1500))
    OPS.close(fd)


def test_a_write_that_makes_no_progress_fails(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: 0)
    fd = OPS.create(tmp_path / "file", PAGE)
    with pytest.raises(OSError, match="nothing was written"):
        OPS.write(fd, 0, [b"x"])
    OPS.close(fd)


@pytest.mark.parametrize("punches", [True, False])
def test_erasing_leaves_zeros(tmp_path: Path, monkeypatch, punches: bool):
    if not punches:
        monkeypatch.setattr(file_ops, "_punch", lambda fd, offset, size: False)
    fd = OPS.create(tmp_path / "file", 4 * PAGE)
    OPS.write(fd, 0, [b"x" * 4 * PAGE])
    OPS.erase(fd, PAGE, 2 * PAGE)
    OPS.sync(fd)
    OPS.begin_sync(fd, 0, PAGE)
    OPS.done_with(fd)
    content = (tmp_path / "file").read_bytes()
    assert content == b"x" * PAGE + bytes(2 * PAGE) + b"x" * PAGE
    OPS.close(fd)


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        OPS.open(tmp_path / "link")


def test_directories_are_listed_and_synced(tmp_path: Path):
    OPS.close(OPS.create(tmp_path / "file", PAGE))
    assert OPS.names(tmp_path) == ["file"]
    OPS.sync_directory(tmp_path)
    OPS.unlink(tmp_path / "file")
    assert OPS.names(tmp_path) == []
