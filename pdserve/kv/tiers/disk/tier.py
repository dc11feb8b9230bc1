"""Opens the disk tier of a worker: its directory, what an earlier life left, index and files."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.directory import find_leftovers, take_directory
from pdserve.kv.tiers.disk.file_system.direct_io import can_bypass
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.files import SegmentFiles
from pdserve.kv.tiers.disk.format import record_bytes
from pdserve.kv.tiers.disk.index import DiskIndex, segment_size
from pdserve.kv.tiers.disk.memory_segments import MemorySegments
from pdserve.kv.tiers.disk.records import TierWriteError
from pdserve.kv.tiers.disk.recovery import find_segments
from pdserve.kv.tiers.disk.sealed_reader import SealedReader
from pdserve.kv.tiers.measuring.first_rates import measure_disk
from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.clock import Clock
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.directory import Leftover, OwnDirectory
    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint
    from pdserve.kv.tiers.disk.records import SegmentStore
    from pdserve.kv.tiers.measuring.first_rates import Rates

__all__ = ["DiskTier", "RecoveryReport"]

_log = logging.getLogger(__name__)

_SLACK: Final[Bytes] = 64 << 10
"""Bytes of a capacity that are left for the directory itself and for what the file system keeps
beside the segments."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What was found at opening."""

    records: int = 0
    bytes: Bytes = 0
    """Bytes of the payloads found."""
    dropped: int = 0
    """Files that were no segment of this directory, or could not be read: removed."""
    unreachable: Bytes = 0
    """Bytes in leftovers: blocks of another model, secret or layout, kept until room is needed."""
    seconds: Seconds = 0.0
    epoch: int = 1
    was: str = ""
    """Who had the directory before; empty: it is new."""

    def __str__(self) -> str:
        """For the log."""
        words = ["new"]
        if self.was:
            size = approximate_size(self.bytes)
            words = [f"found {self.records} blocks ({size}) of {self.was} in {self.seconds:.2f} s"]
        if self.dropped:
            words.append(f"removed {self.dropped} files that could not be read")
        if self.unreachable:
            size = approximate_size(self.unreachable)
            words.append(f"{size} beside it are of another model or hash secret")
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a tier was opened with."""

    root: Path
    capacity: Bytes
    fingerprint: Fingerprint
    owner: str
    segment_bytes: Bytes
    wall: Callable[[], Seconds]
    ops: FileOps | None


class DiskTier:
    """The disk tier of one worker. `index` belongs to the core's thread; `files` to I/O threads."""

    def __init__(
        self,
        index: DiskIndex,
        files: SegmentStore,
        report: RecoveryReport,
        *,
        clock: Clock,
        settings: _Settings | None = None,
        directory: OwnDirectory | None = None,
        ops: FileOps | None = None,
        shared: SealedReader | None = None,
    ) -> None:
        """`shared`: what reads the sealed segments of other workers."""
        self.index = index
        self.files = files
        self.report = report
        self.shared = shared
        self._clock = clock
        self._settings = settings
        self._directory = directory
        self._ops = ops

    @property
    def path(self) -> Path | None:
        """The worker's subdirectory; None in memory."""
        return None if self._directory is None else self._directory.path

    def measure(self) -> Rates:
        """How fast this disk reads and writes records, as far as that can be measured now. It
        blocks, for a tenth of a second at most on a disk that is not broken."""
        if self._settings is None or self._directory is None or self._ops is None:
            return {}
        size = record_bytes(self._settings.fingerprint.block_bytes)
        return measure_disk(self._directory.path, self._ops, size, self._settings.segment_bytes)

    @staticmethod
    def open(
        root: Path,
        capacity: Bytes,
        fingerprint: Fingerprint,
        *,
        clock: Clock,
        owner: str = "",
        segment_bytes: Bytes = 0,
        wall: Callable[[], Seconds] = time.time,
        ops: FileOps | None = None,
    ) -> DiskTier:
        """Take a subdirectory of `root` and recover what is in it. It blocks, for seconds if the
        tier is large. `segment_bytes` 0: chosen from the capacity. An empty `owner` has no earlier
        subdirectory.

        Errors: `ConfigError`.
        """
        if sys.platform != "linux":
            raise ConfigError("the disk tier needs Linux: leave out --disk-kv")
        settings = _Settings(
            root,
            capacity,
            fingerprint,
            owner or f"unnamed-{secrets.token_hex(8)}",
            segment_bytes or segment_size(capacity, fingerprint.block_bytes, _SLACK),
            wall,
            ops,
        )
        return _open(settings, clock)

    def renamed(self, secret_id: bytes) -> DiskTier:
        """The tier under another hash secret. This one is closed; its blocks stay on disk until
        room is needed. The index must be idle. It blocks as `open` does.

        Errors: `ConfigError`; this tier is closed even so.
        """
        self.close()
        if self._settings is None:
            self.index.clear()
            return self
        fingerprint = replace(self._settings.fingerprint, secret_id=secret_id)
        return _open(replace(self._settings, fingerprint=fingerprint), self._clock)

    @staticmethod
    def in_memory(
        capacity: Bytes, payload: Bytes, *, clock: Clock, segment_bytes: Bytes = 0
    ) -> DiskTier:
        """A tier without files, for simulations."""
        index = DiskIndex(capacity, segment_bytes or segment_size(capacity, payload))
        return DiskTier(index, MemorySegments(), RecoveryReport(), clock=clock)

    def close(self) -> None:
        """Seal what is open, so that the next opening is quick, and give the directory back.

        No batch or command may be under way; without this call the next opening reads headers.
        """
        self.index.seal_open()
        try:
            for command in self.index.commands(self._clock.now()):
                self.files.run(command)
        except TierWriteError as error:
            _log.warning("the disk tier was not closed in order: %s", error.message)
        self.files.close()
        if self._directory is not None:
            self._directory.unlock()


def _open(settings: _Settings, clock: Clock) -> DiskTier:
    started = clock.now()
    ops = OsFileOps() if settings.ops is None else settings.ops
    fingerprint, owner = settings.fingerprint, settings.owner
    directory = take_directory(
        settings.root, owner, fingerprint, settings.wall(), settings.capacity
    )
    try:
        found, bad = find_segments(ops, directory.path, directory.directory, fingerprint)
    except OSError as error:
        directory.unlock()
        raise ConfigError(
            f"the disk tier in {directory.path} cannot be read: {error.strerror}"
        ) from error
    for name in bad:
        with suppress(OSError):
            ops.unlink(directory.path / str(name))
    leftovers = find_leftovers(settings.root, owner, fingerprint, settings.wall())
    index = DiskIndex(
        settings.capacity - _SLACK,
        settings.segment_bytes,
        epoch=directory.epoch,
        found=found,
        leftovers=[(leftover.name, leftover.bytes) for leftover in leftovers],
        next_segment=max([name.number + 1 for name in bad], default=0),
    )
    fastest = settings.ops or _fastest_ops(directory.path, fingerprint)
    files = SegmentFiles(
        directory.path,
        fingerprint,
        directory=directory.directory,
        segment_bytes=settings.segment_bytes,
        ops=fastest,
    )
    report = _report(index, directory, leftovers, len(bad), clock.now() - started)
    _log.info("disk tier %s: %s", directory.path, report)
    return DiskTier(
        index,
        files,
        report,
        clock=clock,
        settings=settings,
        directory=directory,
        ops=fastest,
        shared=SealedReader(settings.root, fingerprint, directory.path, ops=settings.ops),
    )


def _fastest_ops(folder: Path, fingerprint: Fingerprint) -> FileOps:
    """Operations past the page cache, where the file system can."""
    return OsFileOps(direct=can_bypass(folder, record_bytes(fingerprint.block_bytes)))


def _report(
    index: DiskIndex,
    directory: OwnDirectory,
    leftovers: list[Leftover],
    dropped: int,
    seconds: Seconds,
) -> RecoveryReport:
    counts = index.counts()
    return RecoveryReport(
        records=counts.blocks,
        bytes=counts.valid_bytes,
        dropped=dropped,
        unreachable=sum(leftover.bytes for leftover in leftovers),
        seconds=seconds,
        epoch=directory.epoch,
        was=directory.was,
    )
