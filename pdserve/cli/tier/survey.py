"""Reads the directory of a disk tier without a worker: who wrote what, and whether it is whole.

It only reads and takes no lock that a worker needs, so it may run beside workers. Files that vanish
meanwhile are no errors.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.directory import (
    SegmentName,
    disk_usage,
    is_locked,
    read_description,
    subdirectories,
)
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.files import read_record
from pdserve.kv.tiers.disk.records import RecordPlace, TierReadError
from pdserve.kv.tiers.disk.recovery import find_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.directory import TierDescription
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint
    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.disk.segment import FoundSegment

__all__ = ["BlockCheck", "WorkerPart", "read_parts", "verify_part"]


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The subdirectory of one worker."""

    name: str
    owner: str = ""
    fingerprint: Fingerprint | None = None
    """What its blocks are; None: this release cannot read it."""
    opened: Seconds = 0.0
    """Unix time of its last opening."""
    in_use: bool = False
    """A worker has it now."""
    segments: int = 0
    sealed: int = 0
    """Segments that are full and have a table."""
    records: int = 0
    payload: Bytes = 0
    """Bytes of the blocks."""
    disk: Bytes = 0
    """Bytes that its files take."""
    chains: int = 0
    """Different beginnings of prompts: model, adapter and salt."""
    newest: Seconds = 0.0
    """Unix time of the last write."""
    strange: int = 0
    """Files that look like segments and are none of this part."""


@dataclass(slots=True)
class BlockCheck:
    """What reading every block of a part has shown."""

    whole: int = 0
    read: Bytes = 0
    vanished: int = 0
    """Blocks that a worker removed meanwhile."""
    bad: dict[ReadFault, int] = field(default_factory=dict)
    """Blocks that cannot be used, by reason."""
    seconds: Seconds = 0.0


def read_parts(root: Path) -> list[WorkerPart]:
    """Every subdirectory. Errors: `ConfigError` if there is no directory, or it cannot be read."""
    try:
        os.listdir(root)
    except OSError as error:
        raise ConfigError(f"{root} cannot be read: {error.strerror}") from None
    return [_part(path) for path in subdirectories(root)]


def _part(path: Path) -> WorkerPart:
    description = read_description(path)
    fingerprint = None if description is None else description.of
    if description is None or fingerprint is None:
        return WorkerPart(path.name, in_use=is_locked(path), disk=disk_usage(path))
    names = _names(path)
    segments = [segment for _, segment in _segments(path, names, description, fingerprint)]
    entries = [entry for segment in segments for entry in segment.entries]
    return WorkerPart(
        path.name,
        owner=description.owner,
        fingerprint=fingerprint,
        opened=description.opened,
        in_use=is_locked(path),
        segments=len(segments),
        sealed=sum(segment.sealed for segment in segments),
        records=len({entry.key for entry in entries}),
        payload=sum(entry.payload_bytes for entry in entries),
        disk=disk_usage(path),
        chains=len({entry.root for entry in entries}),
        newest=_newest(path, names),
        strange=len(names) - len(segments),
    )


def _names(path: Path) -> list[SegmentName]:
    with suppress(OSError):
        return sorted(n for n in map(SegmentName.parse, os.listdir(path)) if n is not None)
    return []


def _newest(path: Path, names: list[SegmentName]) -> Seconds:
    times = [0.0]
    for name in names:
        with suppress(OSError):
            times.append(os.stat(path / str(name)).st_mtime)
    return max(times)


def _segments(
    path: Path, names: list[SegmentName], description: TierDescription, fingerprint: Fingerprint
) -> Iterator[tuple[SegmentName, FoundSegment]]:
    """The segments that can be read."""
    directory = bytes.fromhex(description.directory)
    for name in names:
        with suppress(OSError):
            found = find_segment(OsFileOps(), path, name, directory, fingerprint)
            if found is not None:
                yield name, found


def verify_part(
    path: Path, told: Callable[[BlockCheck], None] = lambda verdict: None
) -> BlockCheck:
    """Read every block of a subdirectory and compare it with its checksum. `told` is called after
    each segment."""
    verdict, began = BlockCheck(), time.monotonic()
    description = read_description(path)
    fingerprint = None if description is None else description.of
    if description is None or fingerprint is None:
        return verdict
    for name, segment in _segments(path, _names(path), description, fingerprint):
        try:
            _verify_segment(path / str(name), segment, fingerprint, verdict)
        except OSError:
            # It was opened a moment ago: its worker has removed it.
            verdict.vanished += len(segment.entries)
        verdict.seconds = time.monotonic() - began
        told(verdict)
    return verdict


def _verify_segment(
    file: Path, segment: FoundSegment, fingerprint: Fingerprint, verdict: BlockCheck
) -> None:
    ops = OsFileOps()
    fd = ops.open(file)
    try:
        for entry in segment.entries:
            place = RecordPlace(
                *(segment.number, segment.epoch, entry.offset, entry.payload_bytes, entry.seq)
            )
            payload = memoryview(bytearray(entry.payload_bytes))
            try:
                read_record(ops, fd, place, entry.key, fingerprint.id, payload)
            except TierReadError as error:
                verdict.bad[error.reason] = verdict.bad.get(error.reason, 0) + 1
            except OSError:
                verdict.bad["io"] = verdict.bad.get("io", 0) + 1
            else:
                verdict.whole += 1
                verdict.read += entry.payload_bytes
    finally:
        ops.close(fd)
