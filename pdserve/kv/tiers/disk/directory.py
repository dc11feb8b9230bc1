"""Finds or makes the subdirectory that a worker writes to, and says which others may go.

Below the operator's directory each worker has a subdirectory of its own, under a lock that the
system gives back when the process ends:

    tier-3f1c22d0-9b77e5a1/    TIER         owner, epoch, fingerprint (JSON)
                               LOCK         locked by the worker that writes here
                               seg-000003-00000042   a segment, with its epoch and number

A worker takes the one that it had, else one of the same fingerprint that nobody has, else a new
one. Each opening has a new *epoch*.

*Leftovers* are subdirectories of other models, secrets or layouts that nobody has locked. They were
this owner's, or nobody has changed them for ten minutes: their own worker may just be restarting.
They count towards this worker's capacity and are removed when room is needed. Subdirectories of the
same fingerprint are never removed: their blocks can still be read, and their worker may come back.
"""

from __future__ import annotations

import errno as codes
import fcntl
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.errors import ConfigError
from pdserve.ids import Bytes
from pdserve.kv.tiers.disk.fingerprint import Fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = [
    "Leftover",
    "OwnDirectory",
    "SegmentName",
    "TierDescription",
    "disk_usage",
    "find_leftovers",
    "is_locked",
    "read_description",
    "remove_directory",
    "subdirectories",
    "take_directory",
]

FORMAT: Final = 1
IDLE: Final[Seconds] = 600.0
"""Time without a change after which a subdirectory of another owner is a leftover."""

_TRIES: Final = 3
_MOMENT: Final[Seconds] = 0.02
_FULL: Final = (codes.ENOSPC, codes.EDQUOT)
_DESCRIPTION: Final = "TIER"
_LOCK: Final = "LOCK"
_SUBDIRECTORY: Final = re.compile(r"tier-[0-9a-f]{8}-[0-9a-f]{8}")
_SEGMENT: Final = re.compile(r"seg-([0-9]{6,})-([0-9]{8,})")


class TierDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What TIER says. Another format is not read, and not changed."""

    format: int
    directory: str
    """Random id, hexadecimal."""
    owner: str
    epoch: int
    fingerprint: msgspec.Raw
    opened: float
    """Unix time of the last opening."""
    capacity: Bytes = 0
    """Most bytes that its worker writes; 0: an earlier release has opened it."""

    @property
    def of(self) -> Fingerprint | None:
        """The fingerprint; None if this release cannot read it."""
        try:
            return Fingerprint.unpacked(bytes(self.fingerprint))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class OwnDirectory:
    """A subdirectory that this process has locked."""

    path: Path
    lock: int
    """Descriptor of the lock."""
    directory: bytes
    """The random id."""
    epoch: int
    """Number of this opening."""
    was: str
    """Owner before this opening; empty: it is new."""

    def unlock(self) -> None:
        """Give the lock back."""
        os.close(self.lock)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A subdirectory that this worker may remove."""

    name: str
    bytes: Bytes
    description: TierDescription | None


class SegmentName(NamedTuple):
    """Names a segment's file. The epoch is in it, so that no other file ever has this name: what a
    removed file left on the medium cannot be taken for its content."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"seg-{self.epoch:06d}-{self.number:08d}"

    @staticmethod
    def parse(name: str) -> SegmentName | None:
        """The segment of a file; None: it is another file."""
        match = _SEGMENT.fullmatch(name)
        return SegmentName(int(match[1]), int(match[2])) if match else None


def subdirectories(root: Path) -> list[Path]:
    """All subdirectories that are tiers. Empty if the root cannot be read."""
    try:
        return sorted(path for path in root.iterdir() if _SUBDIRECTORY.fullmatch(path.name))
    except OSError:
        return []


def read_description(path: Path) -> TierDescription | None:
    """The description of a subdirectory; None: it has none that can be read."""
    try:
        description = msgspec.json.decode((path / _DESCRIPTION).read_bytes(), type=TierDescription)
    except (OSError, msgspec.MsgspecError):
        return None
    return description if description.format == FORMAT else None


def take_directory(
    root: Path, owner: str, fingerprint: Fingerprint, wall: Seconds, capacity: Bytes = 0
) -> OwnDirectory:
    """Lock a subdirectory for this worker, which writes `capacity` bytes at most; `wall`: Unix
    time.

    Errors: `ConfigError` if none can be locked or made.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in _candidates(root, owner, fingerprint):
            taken = _take(path, owner, fingerprint, wall, capacity)
            if taken is not None:
                return taken
        return _make(root, owner, fingerprint, wall, capacity)
    except OSError as error:
        raise ConfigError(
            f"the disk tier's directory {root} cannot be used: {error.strerror}; give a directory "
            "that this user may write to with --disk-kv"
        ) from error


def _candidates(root: Path, owner: str, fingerprint: Fingerprint) -> list[Path]:
    """Subdirectories of this fingerprint: the owner's first, then the ones opened last."""
    found = []
    for path in subdirectories(root):
        description = read_description(path)
        if description is not None and description.of == fingerprint:
            found.append((description.owner != owner, -description.opened, path))
    return [path for _, _, path in sorted(found)]


def _take(
    path: Path, owner: str, fingerprint: Fingerprint, wall: Seconds, capacity: Bytes
) -> OwnDirectory | None:
    lock = _lock_soon(path)
    if lock is None:
        return None
    try:
        before = read_description(path)
        if before is None or before.of != fingerprint:  # another process was faster
            os.close(lock)
            return None
        epoch = before.epoch + 1
        directory = bytes.fromhex(before.directory)
        while True:
            try:
                _describe(path, directory, owner, epoch, fingerprint, wall, capacity)
                break
            except OSError as error:
                if error.errno not in _FULL or not _remove_oldest(path):
                    raise
    except BaseException:
        os.close(lock)
        raise
    return OwnDirectory(path, lock, directory, epoch, before.owner)


def _remove_oldest(path: Path) -> bool:
    """Remove a segment: on a full disk, there would be no room to take the directory."""
    names = sorted(name for name in map(SegmentName.parse, os.listdir(path)) if name is not None)
    if names:
        os.unlink(path / str(names[0]))
    return bool(names)


def _make(
    root: Path, owner: str, fingerprint: Fingerprint, wall: Seconds, capacity: Bytes
) -> OwnDirectory:
    directory = secrets.token_bytes(16)
    path = root / f"tier-{fingerprint.id.hex()[:8]}-{directory.hex()[:8]}"
    path.mkdir(mode=0o700)
    lock = _lock(path)
    if lock is None:
        raise OSError(codes.EBUSY, "another process took the new subdirectory")
    try:
        _describe(path, directory, owner, 1, fingerprint, wall, capacity)
    except BaseException:
        os.close(lock)
        raise
    return OwnDirectory(path, lock, directory, 1, "")


def _lock_soon(path: Path) -> int | None:
    """`_lock`, and again: others lock a directory for a moment to see whether it is in use."""
    for _ in range(_TRIES):
        lock = _lock(path)
        if lock is not None:
            return lock
        time.sleep(_MOMENT)
    return _lock(path)


def _lock(path: Path) -> int | None:
    """A locked descriptor; None if another process, or another tier of this one, has the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path / _LOCK, flags, 0o600)
    except FileNotFoundError:
        return None  # removed meanwhile
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(fd), os.stat(path / _LOCK))
    except OSError as error:
        os.close(fd)
        if error.errno in (codes.EWOULDBLOCK, codes.EACCES, codes.ENOENT):
            return None
        raise
    if not same:  # its last owner removed the directory
        os.close(fd)
        return None
    return fd


def _describe(
    path: Path,
    directory: bytes,
    owner: str,
    epoch: int,
    fingerprint: Fingerprint,
    wall: Seconds,
    capacity: Bytes,
) -> None:
    """Write TIER: durable before any record has this epoch."""
    description = TierDescription(
        format=FORMAT,
        directory=directory.hex(),
        owner=owner,
        epoch=epoch,
        fingerprint=msgspec.Raw(fingerprint.packed()),
        opened=wall,
        capacity=capacity,
    )
    replace_file(path / _DESCRIPTION, msgspec.json.encode(description))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all, and make it durable."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- leftovers


def find_leftovers(
    root: Path, owner: str, fingerprint: Fingerprint, wall: Seconds
) -> list[Leftover]:
    """Subdirectories that this worker may remove when it needs room, the oldest first."""
    found = []
    for path in subdirectories(root):
        description = read_description(path)
        if description is not None and description.of == fingerprint:
            continue
        mine = description is not None and description.owner == owner
        changed = _last_change(path)
        if (mine or wall - changed >= IDLE) and not is_locked(path):
            found.append((changed, Leftover(path.name, disk_usage(path), description)))
    return [leftover for _, leftover in sorted(found, key=lambda pair: pair[0])]


def is_locked(path: Path) -> bool:
    """True if a worker has this subdirectory, or it cannot be told. Nothing is changed."""
    try:
        fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared: two that look do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def disk_usage(path: Path) -> Bytes:
    """Bytes that the files of a subdirectory take on disk."""
    total = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def remove_directory(root: Path, name: str) -> None:
    """Remove a subdirectory that nobody has locked, and nothing but a tier's files.

    Errors: OSError; EBUSY if somebody has it by now.
    """
    if not _SUBDIRECTORY.fullmatch(name):
        raise OSError(codes.EINVAL, f"{name} is no tier")
    path = root / name
    if not path.exists():
        return
    lock = _lock(path)
    if lock is None:
        raise OSError(codes.EBUSY, f"{name} is in use")
    try:
        # The description first: without it no worker takes the directory.
        own = [_DESCRIPTION, *(n for n in os.listdir(path) if _is_ours(n)), _LOCK]
        for file in own:
            with suppress(FileNotFoundError):
                os.unlink(path / file)
        os.rmdir(path)
    finally:
        os.close(lock)


def _is_ours(name: str) -> bool:
    return SegmentName.parse(name) is not None or name.startswith(f"{_DESCRIPTION}.")


def _last_change(path: Path) -> Seconds:
    try:
        return max(os.stat(file).st_mtime for file in (path, path / _LOCK))
    except OSError:
        return 0.0
