"""Reads and writes the segment files of one directory. Threads call it; it decides nothing.

A record is written with its header in one call, and counts only after the call returned. It is
served only if the header is the expected one in every field and the payload matches its checksum.
Files are made durable once, when they are sealed.

Where the file system can, bytes bypass the page cache: the host tier is the cache of what is read
again.
"""

from __future__ import annotations

import errno as codes
import threading
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.disk.directory import SegmentName, remove_directory
from pdserve.kv.tiers.disk.file_system.descriptors import OpenFiles
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.format import (
    ENTRY_BYTES,
    PAGE,
    RecordHeader,
    Superblock,
    Trailer,
    pages,
    record_bytes,
)
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    MoveRecords,
    RecordPlace,
    RemoveDirectory,
    SealSegment,
    TierReadError,
    TierWriteError,
    UnlinkSegment,
)
from pdserve.kv.tiers.disk.trouble import CORRUPT
from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pdserve.ids import Bytes
    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint
    from pdserve.kv.tiers.disk.records import NewRecord, SegmentCommand, WriteBatch

__all__ = ["SegmentFiles", "read_error", "read_record"]

_OPEN_FILES: Final = 64
"""Descriptors that are kept open."""
_PADDING: Final = bytes(PAGE)


class SegmentFiles:
    """The files of one directory. All methods may be called from several threads at once."""

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        *,
        directory: bytes,
        segment_bytes: Bytes,
        ops: FileOps | None = None,
    ) -> None:
        """`directory`: the directory's random id, as its description has it. Errors: ValueError
        for a fingerprint that no header can hold."""
        fingerprint.check()
        self.path = path
        self._fingerprint = fingerprint
        self._id = fingerprint.id
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._ops = OsFileOps() if ops is None else ops
        self._open = OpenFiles[tuple[SegmentName, bool]](self._ops.close, most=_OPEN_FILES)
        """By segment and whether it may be written."""
        self._creation = threading.Lock()
        self._created: set[SegmentName] = set()

    # ------------------------------------------------------------------ records

    def write(self, batch: WriteBatch, payloads: Sequence[memoryview]) -> None:
        """Write the batch's records. Errors: `TierWriteError`."""
        pairs = list(zip(batch.records, payloads, strict=True))
        with _writing(f"batch {batch.number}"):
            for _, group in groupby(pairs, lambda pair: pair[0].place.segment):
                self._write_run(list(group))

    def read(self, place: RecordPlace, hash: bytes, into: memoryview) -> None:
        """Read the payload of a block. Errors: `TierReadError`."""
        try:
            with self._file(SegmentName(place.epoch, place.segment)) as fd:
                read_record(self._ops, fd, place, hash, self._id, into)
        except OSError as error:
            raise read_error(error, place) from error

    def _write_run(self, run: list[tuple[NewRecord, memoryview]]) -> None:
        """Write records of one segment, which lie side by side."""
        first = run[0][0].place
        buffers: list[bytes | memoryview] = []
        for record, payload in run:
            buffers += self._record(record, payload)
        name = SegmentName(first.epoch, first.segment)
        self._create(name)
        with self._file(name, write=True) as fd:
            self._ops.write(fd, first.offset, buffers)
            self._ops.begin_sync(fd, first.offset, sum(len(buffer) for buffer in buffers))

    def _record(self, record: NewRecord, payload: memoryview) -> list[bytes | memoryview]:
        """Header, payload and padding."""
        block, place, about = record.block, record.place, self._fingerprint
        if len(payload) != place.payload_bytes:
            raise ValueError("a payload has another length than was announced")
        header = RecordHeader(
            seq=place.seq,
            epoch=place.epoch,
            segment=place.segment,
            offset=place.offset,
            fingerprint=self._id,
            key=block.hash,
            parent=block.parent,
            root=block.root,
            tokens=block.tokens,
            turns=block.turns,
            rank=about.rank,
            ranks=about.ranks,
            group=about.group,
            dtype=about.dtype,
            scales=about.scales,
            payload_bytes=place.payload_bytes,
            payload_crc=crc32(payload),
        )
        return [header.pack(), payload, _PADDING[: pages(len(payload)) - len(payload)]]

    # ------------------------------------------------------------------ commands

    def run(self, command: SegmentCommand) -> None:
        """Perform a command. Errors: `TierWriteError`."""
        with _writing(type(command).__name__):
            match command:
                case SealSegment():
                    self._seal(command)
                case EraseRecords():
                    self._erase(command)
                case MoveRecords():
                    self._move(command)
                case UnlinkSegment():
                    self._unlink(SegmentName(command.epoch, command.segment))
                case RemoveDirectory():
                    remove_directory(self.path.parent, command.name)

    def _seal(self, command: SealSegment) -> None:
        trailer = Trailer(
            command.segment,
            command.epoch,
            command.first_seq,
            records=len(command.table) // ENTRY_BYTES,
            table_offset=command.end,
            table_crc=crc32(command.table),
        )
        table = command.table.ljust(pages(len(command.table)), b"\0")
        name = SegmentName(command.epoch, command.segment)
        with self._file(name, write=True) as fd:
            self._ops.write(fd, command.end, [table, trailer.pack()])
            self._ops.truncate(fd, command.end + len(table) + PAGE)
            self._ops.sync(fd)
            self._ops.done_with(fd)
        self._open.forget((name, True))
        self._ops.sync_directory(self.path)

    def _erase(self, command: EraseRecords) -> None:
        with self._file(SegmentName(command.epoch, command.segment), write=True) as fd:
            for place in command.places:
                self._ops.erase(fd, place.offset, record_bytes(place.payload_bytes))
            self._ops.sync(fd)
        if command.seal is not None:
            self._seal(command.seal)

    def _move(self, command: MoveRecords) -> None:
        payloads = []
        for record, source in zip(command.batch.records, command.sources, strict=True):
            payload = memoryview(bytearray(source.payload_bytes))
            self.read(source, record.block.hash, payload)
            payloads.append(payload)
        self.write(command.batch, payloads)

    def _unlink(self, name: SegmentName) -> None:
        for write in (False, True):
            self._open.forget((name, write))
        with suppress(FileNotFoundError):  # never created, or somebody was faster
            self._ops.unlink(self.path / str(name))
            self._ops.sync_directory(self.path)
        self._created.discard(name)

    # ------------------------------------------------------------------ descriptors

    def close(self) -> None:
        """Close the files. No other call may be under way."""
        self._open.close()

    def _file(self, name: SegmentName, *, write: bool = False) -> AbstractContextManager[int]:
        """A descriptor of a segment. Reading has its own, which a read-only file system gives."""
        path = self.path / str(name)
        return self._open.use((name, write), lambda: self._ops.open(path, write=write))

    def _create(self, name: SegmentName) -> None:
        """Make the file of a segment at the first write to it."""
        with self._creation:
            if name in self._created:
                return
            path = self.path / str(name)
            fd = self._ops.create(path, self._segment_bytes)
            try:
                self._ops.write(fd, 0, [self._superblock(name).pack()])
            except OSError:
                self._ops.close(fd)
                self._ops.unlink(path)
                raise
            self._created.add(name)
        self._open.put((name, True), fd)

    def _superblock(self, name: SegmentName) -> Superblock:
        return Superblock(
            self._directory,
            name.number,
            name.epoch,
            self._segment_bytes,
            self._fingerprint.packed(),
        )


def read_record(
    ops: FileOps,
    fd: int,
    place: RecordPlace,
    hash: bytes,
    fingerprint: bytes,
    into: memoryview,
) -> None:
    """Read a record's payload, if header and payload are the expected ones.

    Errors: `TierReadError`, OSError.
    """
    size = place.payload_bytes
    page = bytearray(PAGE)
    done = ops.read(fd, place.offset, [page, into[:size]])
    header = RecordHeader.unpack(page)
    if done < PAGE + size or header is None or not _matches(header, place, hash, fingerprint):
        raise TierReadError("format", f"{_where(place)} has another record, or none")
    if crc32(into[:size]) != header.payload_crc:
        raise TierReadError("crc", f"{_where(place)} does not match its checksum")


def _matches(header: RecordHeader, place: RecordPlace, hash: bytes, fingerprint: bytes) -> bool:
    """True if this is the header of that block, written at that time for this very place."""
    found = RecordPlace(
        header.segment, header.epoch, header.offset, header.payload_bytes, header.seq
    )
    return found == place and header.key == hash and header.fingerprint == fingerprint


def _where(place: RecordPlace) -> str:
    return f"offset {place.offset} of segment {place.segment}"


def read_error(error: OSError, place: RecordPlace) -> TierReadError:
    """The error of a read that the system refused."""
    gone = error.errno in (codes.ENOENT, codes.ESTALE)
    return TierReadError(
        "absent" if gone else "io", f"{_where(place)}: {error.strerror}", error.errno or codes.EIO
    )


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Maps errors."""
    try:
        yield
    except OSError as error:
        raise TierWriteError(error.errno or codes.EIO, f"{what}: {error.strerror}") from error
    except TierReadError as error:
        raise TierWriteError(error.errno or CORRUPT, f"{what}: {error.message}") from error
