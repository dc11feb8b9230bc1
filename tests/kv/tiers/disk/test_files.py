"""Segment files on a real file system, and with faults."""

from __future__ import annotations

import errno as codes
import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.disk.directory import SegmentName
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.files import SegmentFiles
from pdserve.kv.tiers.disk.format import PAGE, RecordHeader, record_bytes
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    RecordPlace,
    TierReadError,
    TierWriteError,
    UnlinkSegment,
)
from tests.support.disk_tiers import (
    DIRECTORY,
    FINGERPRINT,
    FOLDER,
    PAYLOAD,
    Machine,
    chain,
    name,
    payload_of,
    segment_of,
)
from tests.support.faulty_disk import FaultyDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A tier of real files."""
    machine = Machine.boot(OsFileOps(), folder=tmp_path)
    yield machine
    machine.store.close()


def faulty(disk: FaultyDisk, blocks: int = 3) -> Machine:
    machine = Machine.boot(disk)
    machine.store_all(chain(0, blocks))
    return machine


def fails(operation: str, errno: int = codes.EIO) -> Callable[[str, Path], int]:
    """A fault of one operation."""
    return lambda wanted, path: errno if wanted == operation else 0


def place_of(machine: Machine, hash: bytes) -> RecordPlace:
    place = machine.index.place(hash)
    assert place is not None
    return place


def test_what_was_written_is_read_back(machine: Machine, tmp_path: Path):
    for number in range(6):
        machine.store_all(chain(number, 5))
    assert len(machine.served()) == 30
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [str(SegmentName(1, n)) for n in range(4)]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize("direct", [True, False])
def test_payloads_of_an_arena_come_and_go(tmp_path: Path, direct: bool):
    """Aligned ones of whole pages, which are not copied, and others."""
    for size in (4 * PAGE, PAYLOAD):
        fingerprint = replace(FINGERPRINT, block_bytes=size)
        folder = tmp_path / str(size)
        folder.mkdir()
        machine = Machine.boot(OsFileOps(direct=direct), folder=folder, fingerprint=fingerprint)
        arena = memoryview(mmap.mmap(-1, 8 * size))
        frames = [arena[at * size : (at + 1) * size] for at in range(8)]
        blocks = chain(0, 4)
        for frame, block in zip(frames, blocks, strict=False):
            frame[:] = payload_of(block.hash, size)
        batch = machine.index.append(blocks, size, 0.0)
        assert batch is not None
        machine.store.write(batch, frames[:4])
        machine.index.written(batch, 0.0)
        for frame, record in zip(frames[4:], batch.records, strict=True):
            machine.store.read(record.place, record.block.hash, frame)
            assert frame == payload_of(record.block.hash, size)
        machine.store.close()


def test_an_open_segment_has_its_bytes_from_the_start(machine: Machine, tmp_path: Path):
    machine.store_all(chain(0, 1))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == segment_of(8)
    assert file.stat().st_blocks * 512 >= segment_of(8)


def test_a_sealed_segment_ends_behind_its_trailer(machine: Machine, tmp_path: Path):
    machine.store_all(chain(0, 2))
    machine.index.seal_open()
    machine.settle()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == segment_of(2)
    assert machine.index.counts().allocated == segment_of(2)


def test_erased_bytes_are_gone_from_the_file(machine: Machine, tmp_path: Path):
    machine.store_all(chain(0, 3))
    machine.index.drop(name(0, 1), erase=True)
    machine.settle()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert payload_of(name(0, 1))[:64] not in content
    assert name(0, 1) not in content[: PAGE + 2 * record_bytes(PAYLOAD)]
    assert payload_of(name(0, 2)) in content
    assert machine.served() == {name(0, 0), name(0, 2)}


def test_a_read_only_file_system_still_serves(tmp_path: Path):
    """Reading opens files for reading alone."""
    machine = Machine.boot(OsFileOps(), folder=tmp_path)
    machine.store_all(chain(0, 8))
    machine.store.close()

    class ReadOnly(OsFileOps):
        def open(self, path: Path, *, write: bool = False) -> int:
            if write:
                raise OSError(codes.EROFS, "read-only")
            return super().open(path)

    again = Machine.boot(ReadOnly(), 2, folder=tmp_path)
    assert len(again.served()) == 8
    again.store.close()


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(0, "format"), (60, "format"), (PAGE - 1, ""), (PAGE, "crc"), (PAGE + PAYLOAD - 1, "crc")],
)
def test_a_flipped_bit_is_noticed(offset: int, reason: str):
    disk = FaultyDisk()
    machine = faulty(disk)
    place = place_of(machine, name(0, 1))
    disk.flip(disk.paths()[0], place.offset + offset)
    if not reason:  # of the header's page, behind what means something
        assert machine.read(name(0, 1)) == payload_of(name(0, 1))
        return
    with pytest.raises(TierReadError) as error:
        machine.read(name(0, 1))
    assert error.value.reason == reason


def test_each_field_of_the_place_must_match():
    machine = faulty(FaultyDisk())
    place = place_of(machine, name(0, 1))
    into = memoryview(bytearray(2 * PAYLOAD))
    machine.store.read(place, name(0, 1), into)
    wrong = [
        replace(place, seq=place.seq + 1),
        replace(place, payload_bytes=PAYLOAD - 1),
        replace(place, offset=place.offset + PAGE),
        place_of(machine, name(0, 2)),
    ]
    for other in wrong:
        with pytest.raises(TierReadError, match="another record"):
            machine.store.read(other, name(0, 1), into)


def test_errors_say_what_happened():
    disk = FaultyDisk()
    machine = faulty(disk)
    disk.fault = fails("read")
    with pytest.raises(TierReadError) as read:
        machine.read(name(0, 0))
    assert (read.value.reason, read.value.errno) == ("io", codes.EIO)
    disk.fault = fails("write", codes.ENOSPC)
    batch = machine.append(chain(1, 1))
    assert batch is not None
    payload = memoryview(payload_of(name(1, 0)))
    with pytest.raises(TierWriteError) as written:
        machine.store.write(batch, [payload])
    assert written.value.errno == codes.ENOSPC


def test_a_file_that_is_gone_is_absent():
    disk = FaultyDisk()
    machine = faulty(disk)
    machine.store.close()
    disk.unlink(disk.paths()[0])
    with pytest.raises(TierReadError) as error:
        machine.read(name(0, 0))
    assert error.value.reason == "absent"


def test_a_short_file_is_noticed():
    disk = FaultyDisk()
    machine = faulty(disk)
    place = place_of(machine, name(0, 2))
    disk.shorten(disk.paths()[0], place.offset + PAGE + 100)
    with pytest.raises(TierReadError, match="another record, or none"):
        machine.read(name(0, 2))


def test_a_segment_that_cannot_be_made_leaves_no_file():
    disk = FaultyDisk()
    machine = Machine.boot(disk)
    disk.fault = fails("write", codes.ENOSPC)
    batch = machine.append(chain(0, 1))
    assert batch is not None
    assert not machine.write(batch)
    assert disk.paths() == []
    assert disk.open_files == 0


def test_a_payload_of_another_length_is_refused():
    machine = Machine.boot(FaultyDisk())
    batch = machine.append(chain(0, 1))
    assert batch is not None
    with pytest.raises(ValueError, match="another length"):
        machine.store.write(batch, [memoryview(bytes(PAYLOAD - 1))])


def test_unlinking_closes_and_a_file_that_never_was_is_fine():
    disk = FaultyDisk()
    machine = faulty(disk)
    machine.read(name(0, 0))
    machine.store.run(UnlinkSegment(0, 1))
    machine.store.run(UnlinkSegment(0, 1))
    assert disk.open_files == 0
    with pytest.raises(TierWriteError) as error:
        machine.store.run(EraseRecords(0, 1, (), None))
    assert error.value.errno == codes.ENOENT


@pytest.mark.parametrize(
    "fingerprint",
    [
        replace(FINGERPRINT, dtype="float8_e4m3", scales="per-head float32", block_bytes=3210),
        replace(FINGERPRINT, rank=1, ranks=2, group=3),
    ],
    ids=["fp8", "rank 1 of 2"],
)
def test_the_header_says_what_the_payload_is(fingerprint):
    """A payload is bytes to the tier, whatever a dtype or a rank makes of them."""
    disk = FaultyDisk()
    machine = Machine.boot(disk, fingerprint=fingerprint)
    size = fingerprint.block_bytes
    (block,) = chain(0, 1)
    batch = machine.index.append([block], size, 0.0)
    assert batch is not None
    payload = payload_of(block.hash, size)
    machine.store.write(batch, [memoryview(payload)])
    machine.index.written(batch, 0.0)
    again = Machine.boot(disk, 2, fingerprint=fingerprint)
    assert again.read(block.hash) == payload
    page = disk._names[FOLDER / str(SegmentName(1, 0))].page(1)
    header = RecordHeader.unpack(page)
    assert header is not None
    assert (header.dtype, header.scales) == (fingerprint.dtype, fingerprint.scales)
    assert (header.rank, header.ranks, header.group) == (
        fingerprint.rank,
        fingerprint.ranks,
        fingerprint.group,
    )


def test_long_names_of_a_dtype_are_refused_at_the_start():
    with pytest.raises(ValueError, match="longer than"):
        SegmentFiles(
            FOLDER,
            replace(FINGERPRINT, dtype="x" * 17),
            directory=DIRECTORY,
            segment_bytes=segment_of(1),
        )


def test_descriptors_are_bounded(tmp_path: Path):
    machine = Machine.boot(OsFileOps(), folder=tmp_path, segments=90, records=1)
    for number in range(85):
        machine.store_all(chain(number, 1))
    assert len(machine.served()) == 85
    own = [
        link
        for fd in os.listdir("/proc/self/fd")
        if str(tmp_path) in (link := _link(f"/proc/self/fd/{fd}"))
    ]
    assert 0 < len(own) <= 64
    machine.store.close()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
