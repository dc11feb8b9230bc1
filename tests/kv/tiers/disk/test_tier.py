"""The disk tier as a worker opens it: lives after each other, and real processes."""

from __future__ import annotations

import errno as codes
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.directory import disk_usage, subdirectories
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.tier import DiskTier
from tests.support.disk_tiers import FINGERPRINT, PAYLOAD, Machine, chain, name, segment_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint

SLACK = 64 << 10
CAPACITY = 5 * segment_of(8) + SLACK


def open_tier(
    root: Path,
    owner: str = "a",
    fingerprint: Fingerprint = FINGERPRINT,
    capacity: int = CAPACITY,
    ops: FileOps | None = None,
) -> tuple[DiskTier, Machine]:
    tier = DiskTier.open(
        root,
        capacity,
        fingerprint,
        clock=ManualClock(),
        owner=owner,
        segment_bytes=segment_of(8),
        ops=ops,
    )
    machine = Machine(tier.index, tier.files)
    machine.look()
    return tier, machine


def own(tier: DiskTier) -> Path:
    assert tier.path is not None
    return tier.path


def test_a_tier_outlives_its_process(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    assert tier.report.records == 0
    for number in range(4):
        machine.store_all(chain(number, 5))
    tier.close()
    again, machine = open_tier(tmp_path)
    assert again.report.records == 20
    assert again.report.bytes == again.index.counts().valid_bytes
    assert (again.report.epoch, again.report.was) == (2, "a")
    assert str(tier.report) == "new"
    assert re.fullmatch(r"found 20 blocks \(.+B\) of a in .+ s", str(again.report))
    assert len(machine.served()) == 20
    again.close()


def test_closing_seals_what_is_open(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    machine.store_all(chain(0, 3))
    tier.close()
    (file,) = own(tier).glob("seg-*")
    assert file.stat().st_size == segment_of(3)


def test_another_secret_neither_reads_nor_keeps_more_than_its_share(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    for number in range(20):
        machine.store_all(chain(number, 2))
    old = own(tier)
    tier.close()
    other, machine = open_tier(tmp_path, fingerprint=replace(FINGERPRINT, secret_id=b"secret-2"))
    assert other.report.records == 0
    assert other.report.unreachable == disk_usage(old) > 0
    assert str(other.report).endswith("beside it are of another model or hash secret")
    for number in range(40):
        machine.store_all(chain(number, 2))
        assert sum(disk_usage(path) for path in subdirectories(tmp_path)) <= CAPACITY
    assert not old.exists()
    other.close()


def test_a_smaller_capacity_takes_effect(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    for number in range(16):
        machine.store_all(chain(number, 2))
    tier.close()
    smaller = 3 * segment_of(8) + SLACK
    tier, machine = open_tier(tmp_path, capacity=smaller)
    machine.settle()
    assert disk_usage(own(tier)) <= smaller
    # What was written last is still there.
    assert name(15, 1) in machine.served()
    tier.close()


def test_another_secret_while_it_is_open(tmp_path: Path):
    """The blocks of each secret wait for it in a subdirectory of their own."""
    tier, machine = open_tier(tmp_path)
    machine.store_all(chain(0, 3))
    first = own(tier)
    assert tier.index.idle
    tier = tier.renamed(b"secret-2")
    machine = Machine(tier.index, tier.files)
    assert own(tier) != first
    assert tier.report.unreachable == disk_usage(first)
    machine.store_all(chain(1, 3))
    tier = tier.renamed(FINGERPRINT.secret_id)
    machine = Machine(tier.index, tier.files)
    machine.look()
    assert own(tier) == first
    assert machine.served() == {name(0, at) for at in range(3)}
    tier.close()


def test_the_bound_holds_on_disk(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    for number in range(60):
        machine.store_all(chain(number, 2))
        assert disk_usage(own(tier)) <= CAPACITY
    tier.close()


def test_files_that_are_none_of_it_are_removed_and_counted(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    machine.store_all(chain(0, 3))
    path = own(tier)
    tier.close()
    (path / "seg-000001-00000007").write_bytes(b"nothing" * 1000)
    again, machine = open_tier(tmp_path)
    assert again.report.dropped == 1
    assert not (path / "seg-000001-00000007").exists()
    assert len(machine.served()) == 3
    again.close()


def test_a_tier_that_is_too_small_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        DiskTier.open(tmp_path, 1, FINGERPRINT, clock=ManualClock())
    assert caught.value.message.startswith(
        "--disk-kv is too small: this worker's part of it has 1 B for blocks of "
    )
    found = re.search(
        r"; (\d+)\.0 MiB for each worker of this process are enough", caught.value.message
    )
    assert found is not None
    DiskTier.open(tmp_path, int(found[1]) << 20, FINGERPRINT, clock=ManualClock()).close()


def test_a_tier_without_files_has_the_same_port():
    tier = DiskTier.in_memory(10 * segment_of(8), PAYLOAD, clock=ManualClock())
    machine = Machine(tier.index, tier.files)
    for number in range(60):
        machine.store_all(chain(number, 2))
    assert machine.served() == machine.known
    assert len(machine.known) >= 50
    tier.close()


def test_a_directory_that_is_deleted_is_noticed_and_not_made_again(tmp_path: Path):
    tier, machine = open_tier(tmp_path)
    machine.store_all(chain(0, 7))
    for file in own(tier).iterdir():
        file.unlink()
    own(tier).rmdir()
    machine.read_all()
    assert machine.known == set()
    assert tier.index.counts().failed_reads == 1  # the first one says it for its segment
    batch = machine.append(chain(1, 5))
    assert batch is not None
    assert not machine.write(batch)
    assert "No such file" in tier.index.trouble.text(0.0)
    assert machine.append(chain(2, 1)) is None
    assert not own(tier).exists()
    tier.close()


@contextmanager
def mounted(path: Path, size: int) -> Iterator[None]:
    """A file system in memory, of this size."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full(tmp_path: Path):
    """A file system smaller than the capacity: the tier keeps what fits, and says what is wrong."""
    with mounted(tmp_path, 3 * segment_of(8)):
        tier, machine = open_tier(tmp_path)
        refused = 0
        for number in range(60):
            batch = machine.append(chain(number, 2))
            if batch is None:
                refused += 1
                machine.now += 31.0
            else:
                machine.write(batch)
            machine.settle()
        assert refused
        assert set(tier.index.counts().errors) == {codes.ENOSPC}
        assert len(machine.served()) == len(machine.known) >= 8
        tier.close()
        # The next start finds the disk full, too, and its blocks.
        again, machine = open_tier(tmp_path)
        assert len(machine.served()) >= 8
        again.close()


class SometimesReadOnly(OsFileOps):
    """A file system that the kernel makes read-only after an error."""

    read_only = False

    def _check(self) -> None:
        if self.read_only:
            raise OSError(codes.EROFS, os.strerror(codes.EROFS))

    def create(self, path: Path, size: int) -> int:
        self._check()
        return super().create(path, size)

    def open(self, path: Path, *, write: bool = False) -> int:
        if write:
            self._check()
        return super().open(path, write=write)

    def write(self, fd: int, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        self._check()
        super().write(fd, offset, buffers)

    def unlink(self, path: Path) -> None:
        self._check()
        super().unlink(path)


def test_a_disk_that_becomes_read_only(tmp_path: Path):
    ops = SometimesReadOnly()
    tier, machine = open_tier(tmp_path, ops=ops)
    machine.store_all(chain(0, 9))
    ops.read_only = True
    batch = machine.append(chain(1, 2))
    assert batch is not None
    assert not machine.write(batch)
    assert "Read-only file system" in tier.index.trouble.text(0.0)
    machine.collect()
    (seal,) = machine.commands
    assert not machine.perform(seal)
    assert machine.append(chain(1, 2)) is None
    machine.settle()
    assert len(machine.served()) == 9
    ops.read_only = False
    machine.now = 31.0
    machine.store_all(chain(1, 2))
    assert tier.index.trouble.text(31.0) == ""
    assert len(machine.served()) == 11
    tier.close()


# ---------------------------------------------------------------- processes

WRITER = """
import sys
from pathlib import Path
from pdserve.clock import SystemClock
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.tier import DiskTier
from tests.support.disk_tiers import FINGERPRINT, Machine, chain, segment_of
tier = DiskTier.open(Path(sys.argv[1]), int(sys.argv[2]), FINGERPRINT, clock=SystemClock(),
                     owner=sys.argv[3], segment_bytes=segment_of(8))
machine = Machine(tier.index, tier.files)
machine.look()
print(tier.path, len(machine.served()), flush=True)
number = int(sys.argv[4])
while True:
    machine.store_all(chain(number, 3))
    number += 1
    print(number, flush=True)
"""


def writer(root: Path, owner: str, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(CAPACITY), owner, str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def test_kill_9_in_the_middle_of_writing(tmp_path: Path, long: bool):
    """Whole records only, and all that were reported as written but for evicted ones."""
    for round in range(12 if long else 2):
        with writer(tmp_path, "a", 1000 * round) as process:
            lines = read_lines(process, 4 + round)
            process.send_signal(signal.SIGKILL)
            process.wait()
        last = int(lines[-1]) - 1
        tier, machine = open_tier(tmp_path)
        assert tier.report.was == "a"
        assert machine.served() == machine.known
        assert {name(last, at) for at in range(3)} <= machine.known
        assert disk_usage(own(tier)) <= CAPACITY
        tier.close()
    assert len(subdirectories(tmp_path)) == 1


def test_two_processes_share_a_directory_and_one_comes_back(tmp_path: Path):
    first, second = writer(tmp_path, "a", 0), writer(tmp_path, "b", 1000)
    with first, second:
        paths = [read_lines(process, 1)[0].split()[0] for process in (first, second)]
        assert paths[0] != paths[1]
        for process in (first, second):
            read_lines(process, 3)
        first.kill()
        first.wait()
        with writer(tmp_path, "a", 2000) as again:
            path, served = read_lines(again, 1)[0].split()
            again.kill()
        second.kill()
    assert path == paths[0]
    assert int(served) >= 3 * 3
