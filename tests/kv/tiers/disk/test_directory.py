"""Subdirectories of the disk tier: who takes which, and which may go."""

from __future__ import annotations

import errno as codes
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk import directory
from pdserve.kv.tiers.disk.directory import (
    IDLE,
    SegmentName,
    find_leftovers,
    is_locked,
    read_description,
    remove_directory,
    subdirectories,
    take_directory,
)
from tests.support.disk_tiers import FINGERPRINT

if TYPE_CHECKING:
    from pathlib import Path

AGES = ((0, 1.0), (1, 3.0), (2, 2.0))
OTHER = replace(FINGERPRINT, secret_id=b"secret-2")


def age(path: Path, seconds: float) -> None:
    """Make a subdirectory look unchanged since then."""
    for file in (path, path / "LOCK"):
        then = os.stat(file).st_mtime - seconds
        os.utime(file, (then, then))


def names(root: Path, owner: str, wall: float) -> list[str]:
    return [leftover.name for leftover in find_leftovers(root, owner, FINGERPRINT, wall)]


def test_a_worker_takes_what_it_had_in_a_new_epoch(tmp_path: Path):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    first.unlock()
    again = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
    again.unlock()
    assert again.path == first.path
    assert again.directory == first.directory
    assert (first.epoch, again.epoch) == (1, 2)
    assert (first.was, again.was) == ("", "a")


def test_its_own_comes_before_one_that_was_used_later(tmp_path: Path):
    mine = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    theirs = take_directory(tmp_path, "b", FINGERPRINT, 2.0)
    for each in (mine, theirs):
        each.unlock()
    again = take_directory(tmp_path, "a", FINGERPRINT, 3.0)
    again.unlock()
    assert again.path == mine.path


def test_a_new_worker_takes_what_nobody_has(tmp_path: Path):
    """Of several, the one opened last: it has what is recent."""
    several = [take_directory(tmp_path, f"w{at}", FINGERPRINT, wall) for at, wall in AGES]
    for each in several:
        each.unlock()
    heir = take_directory(tmp_path, "new", FINGERPRINT, 9.0)
    heir.unlock()
    assert heir.was == "w1"


def test_what_is_locked_is_not_taken(tmp_path: Path):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    second = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
    assert second.path != first.path
    assert is_locked(first.path)
    first.unlock()
    assert not is_locked(first.path)
    second.unlock()
    (first.path / "LOCK").unlink()
    assert not is_locked(first.path)
    assert not (first.path / "LOCK").exists()


def test_a_lock_of_a_moment_is_waited_for(tmp_path: Path, monkeypatch):
    """Another process looks whether the directory is in use."""
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: first.unlock())
    again = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
    again.unlock()
    assert again.path == first.path


def test_another_fingerprint_gets_another_subdirectory(tmp_path: Path):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    first.unlock()
    for other in (OTHER, replace(FINGERPRINT, rank=1, ranks=2)):
        second = take_directory(tmp_path, "a", other, 2.0)
        second.unlock()
        assert second.path != first.path


def test_only_the_owner_can_read_it(tmp_path: Path):
    own = take_directory(tmp_path / "deep" / "tier", "a", FINGERPRINT, 1.0)
    own.unlock()
    assert (tmp_path / "deep" / "tier").stat().st_mode & 0o777 == 0o700
    assert own.path.stat().st_mode & 0o777 == 0o700
    files = sorted(own.path.iterdir())
    assert [file.name for file in files] == ["LOCK", "TIER"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_subdirectory_without_description_is_not_taken(tmp_path: Path):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    first.unlock()
    (first.path / "TIER").write_bytes(b"\0" * 200)
    second = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
    second.unlock()
    assert second.path != first.path


def test_another_format_is_left_alone(tmp_path: Path):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    first.unlock()
    text = (first.path / "TIER").read_bytes()
    (first.path / "TIER").write_bytes(text.replace(b'"format":1', b'"format":2'))
    assert read_description(first.path) is None
    take_directory(tmp_path, "a", FINGERPRINT, 2.0).unlock()
    assert len(subdirectories(tmp_path)) == 2


def test_a_root_that_cannot_be_used_names_the_flag(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-kv"):
        take_directory(tmp_path / "file", "a", FINGERPRINT, 1.0)


def test_a_full_disk_costs_the_oldest_segments(tmp_path: Path, monkeypatch):
    first = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    first.unlock()
    for number in range(4):
        (first.path / str(SegmentName(1, number))).write_bytes(b"x")
    replace_file, left = directory.replace_file, [2]

    def full(path: Path, content: bytes) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(codes.ENOSPC, "full")
        replace_file(path, content)

    monkeypatch.setattr(directory, "replace_file", full)
    again = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
    again.unlock()
    assert again.path == first.path
    assert len(list(first.path.glob("seg-*"))) == 2
    left[0] = 99
    with pytest.raises(ConfigError, match="full"):
        take_directory(tmp_path, "a", FINGERPRINT, 3.0)
    assert not is_locked(first.path)


# ---------------------------------------------------------------- leftovers


def test_leftovers_are_of_other_fingerprints_and_unlocked(tmp_path: Path):
    same = take_directory(tmp_path, "a", FINGERPRINT, 1.0)
    mine = take_directory(tmp_path, "a", OTHER, 1.0)
    theirs = take_directory(tmp_path, "b", replace(OTHER, group=1), 1.0)
    wall = os.stat(theirs.path).st_mtime
    assert names(tmp_path, "a", wall) == []
    for each in (same, mine, theirs):
        each.unlock()
    # Another worker's may be just restarting.
    assert names(tmp_path, "a", wall) == [mine.path.name]
    age(theirs.path, IDLE + 1)
    assert names(tmp_path, "a", wall) == [theirs.path.name, mine.path.name]
    (leftover, _) = find_leftovers(tmp_path, "a", FINGERPRINT, wall)
    assert leftover.bytes == sum(f.stat().st_blocks * 512 for f in theirs.path.iterdir())


def test_removal_takes_a_tier_s_files_only(tmp_path: Path):
    own = take_directory(tmp_path, "a", OTHER, 1.0)
    (own.path / str(SegmentName(1, 2))).write_bytes(b"x")
    with pytest.raises(OSError, match="in use"):
        remove_directory(tmp_path, own.path.name)
    own.unlock()
    (own.path / "notes.txt").write_text("the operator's")
    with pytest.raises(OSError, match="not empty"):
        remove_directory(tmp_path, own.path.name)
    assert [file.name for file in own.path.iterdir()] == ["notes.txt"]
    (own.path / "notes.txt").unlink()
    remove_directory(tmp_path, own.path.name)
    assert subdirectories(tmp_path) == []
    remove_directory(tmp_path, own.path.name)


@pytest.mark.parametrize("name", ["..", "data", "tier-xyz", "tier-00000000-00000000/.."])
def test_nothing_else_is_ever_removed(tmp_path: Path, name: str):
    (tmp_path / "data").mkdir()
    with pytest.raises(OSError, match="is no tier"):
        remove_directory(tmp_path, name)


# ---------------------------------------------------------------- processes

HOLDER = """
import sys
import time
from pathlib import Path
from pdserve.kv.tiers.disk.directory import take_directory
from tests.support.disk_tiers import FINGERPRINT
own = take_directory(Path(sys.argv[1]), sys.argv[2], FINGERPRINT, 1.0)
print(own.path, own.epoch, flush=True)
sys.stdin.read()
"""


def test_the_lock_ends_with_the_process(tmp_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), "a"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        path, epoch = holder.stdout.readline().split()
        mine = take_directory(tmp_path, "a", FINGERPRINT, 2.0)
        assert str(mine.path) != path
        holder.kill()
        holder.wait()
    heir = take_directory(tmp_path, "b", FINGERPRINT, 3.0)
    assert str(heir.path) == path
    assert heir.epoch == int(epoch) + 1
    for each in (mine, heir):
        each.unlock()
