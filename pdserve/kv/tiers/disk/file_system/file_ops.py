"""Performs the file operations of the disk tier: one port, so that tests can put faults in between.

Each method is one or a few system calls, which release the GIL. It knows no format. With `direct`,
reads and writes bypass the page cache; a file system that refuses one gets them through the cache
from then on. Through the cache, writing back begins at once, and what was written leaves the cache
when a segment is sealed: to drop it after each write would wait for other processors.
"""

from __future__ import annotations

import ctypes
import errno as codes
import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING, Final, Protocol, cast

from pdserve.kv.tiers.disk.file_system.direct_io import AlignedMemory, gather, scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdserve.ids import Bytes

__all__ = ["FileOps", "OsFileOps"]

_log = logging.getLogger(__name__)

FILE_MODE: Final = 0o600
_ZEROS: Final = memoryview(mmap.mmap(-1, 1 << 20))
"""Page-aligned, so that it can bypass the page cache. Nothing writes to it."""
_MOST_BUFFERS: Final = 512
"""Buffers of one call; the system takes 1024."""

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_SYNC_WRITE: Final = 2


class FileOps(Protocol):
    """File operations. Errors: OSError from each of them."""

    def create(self, path: Path, size: Bytes) -> int:
        """A descriptor of a new file whose `size` bytes are allocated. After an error there is no
        new file; a file that is there already is an error."""
        ...

    def open(self, path: Path, *, write: bool = False) -> int:
        """A descriptor of a file that exists."""
        ...

    def close(self, fd: int) -> None: ...

    def write(self, fd: int, offset: Bytes, buffers: Sequence[bytes | memoryview]) -> None:
        """Write all buffers, one after the other."""
        ...

    def read(self, fd: int, offset: Bytes, buffers: Sequence[bytearray | memoryview]) -> Bytes:
        """Fill the buffers, one after the other; returns less than their sizes at the file's
        end."""
        ...

    def size(self, fd: int) -> Bytes: ...

    def truncate(self, fd: int, size: Bytes) -> None: ...

    def erase(self, fd: int, offset: Bytes, size: Bytes) -> None:
        """Make the bytes read as zeros, on the device too as far as it is told."""
        ...

    def sync(self, fd: int) -> None:
        """Make what was written durable."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make created, renamed and removed names of a directory durable."""
        ...

    def begin_sync(self, fd: int, offset: Bytes, size: Bytes) -> None:
        """Begin to write these bytes to the device, without waiting."""
        ...

    def done_with(self, fd: int) -> None:
        """The file's bytes are not needed in the page cache any more."""
        ...

    def unlink(self, path: Path) -> None: ...

    def names(self, path: Path) -> list[str]:
        """Names in a directory."""
        ...


class OsFileOps:
    """The operating system's operations."""

    def __init__(self, *, direct: bool = False) -> None:
        self.direct = direct
        self._direct: set[int] = set()
        """Descriptors that bypass the page cache."""
        self._memory = AlignedMemory()

    def create(self, path: Path, size: Bytes) -> int:
        fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            allocate(fd, size)
        except OSError:
            self.close(fd)
            os.unlink(path)
            raise
        return fd

    def open(self, path: Path, *, write: bool = False) -> int:
        return self._open(path, os.O_RDWR if write else os.O_RDONLY)

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if not self.direct:
            return os.open(path, flags, FILE_MODE)
        try:
            fd = os.open(path, flags | os.O_DIRECT, FILE_MODE)
        except OSError as error:
            self._refused(error)
            return os.open(path, flags & ~os.O_EXCL, FILE_MODE)  # it may have been made
        self._direct.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._direct.discard(fd)
        os.close(fd)

    def write(self, fd: int, offset: Bytes, buffers: Sequence[bytes | memoryview]) -> None:
        if fd in self._direct:
            try:
                return self._write(fd, offset, gather(buffers, self._memory))
            except OSError as error:
                self._stop_bypassing(fd, error)
        self._write(fd, offset, buffers)

    def _write(self, fd: int, offset: Bytes, buffers: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            done = os.pwritev(fd, left[:_MOST_BUFFERS], offset)
            if not done:
                raise OSError(codes.EIO, "nothing was written")
            offset += done
            left = _after(left, done)

    def read(self, fd: int, offset: Bytes, buffers: Sequence[bytearray | memoryview]) -> Bytes:
        if fd in self._direct:
            try:
                return scatter(fd, offset, buffers, self._memory)
            except OSError as error:
                self._stop_bypassing(fd, error)
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        total = 0
        while left:
            done = os.preadv(fd, left[:_MOST_BUFFERS], offset + total)
            if not done:
                break
            total += done
            left = _after(left, done)
        return total

    def size(self, fd: int) -> Bytes:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: Bytes) -> None:
        os.ftruncate(fd, size)

    def erase(self, fd: int, offset: Bytes, size: Bytes) -> None:
        if not _punch(fd, offset, size):
            _write_zeros(fd, offset, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != codes.EINVAL:  # some network file systems cannot, and need not
                raise
        finally:
            os.close(fd)

    def begin_sync(self, fd: int, offset: Bytes, size: Bytes) -> None:
        if fd not in self._direct:
            _begin_sync(fd, offset, size)

    def done_with(self, fd: int) -> None:
        if fd not in self._direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def _stop_bypassing(self, fd: int, error: OSError) -> None:
        """Go through the page cache from now on, if that is what the system wants. Errors: the same
        error, if it is another one."""
        self._refused(error)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct.discard(fd)

    def _refused(self, error: OSError) -> None:
        """Note that the page cache cannot be bypassed. Errors: the same one, if it is another."""
        if error.errno != codes.EINVAL:
            raise error
        if self.direct:
            self.direct = False
            _log.warning("the disk tier's file system refuses to bypass the page cache; it is used")


def allocate(fd: int, size: Bytes) -> None:
    """Reserve a new file's bytes, so that a full disk is noticed now; by zeros, where the file
    system cannot reserve."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (codes.EOPNOTSUPP, codes.EINVAL, codes.ENOSYS):
            raise
        _write_zeros(fd, 0, size)


def _write_zeros(fd: int, offset: Bytes, size: Bytes) -> None:
    end = offset + size
    while offset < end:
        offset += os.pwritev(fd, [_ZEROS[: end - offset]], offset)


def _after(buffers: list[memoryview], done: Bytes) -> list[memoryview]:
    """What is left of buffers after the first `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []


def _function(name: str, *types: type) -> Callable[..., int] | None:
    """A function of the C library that Python does not have; None where there is none."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    function.restype = ctypes.c_int
    return cast("Callable[..., int]", function)


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _function(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)


def _begin_sync(fd: int, offset: Bytes, size: Bytes) -> None:
    """Only a hint: where the system cannot, it writes the bytes later."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_WRITE)


def _punch(fd: int, offset: Bytes, size: Bytes) -> bool:
    """Give the blocks of a range back; False where the system cannot."""
    if _fallocate is None:
        return False
    if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size) == 0:
        return True
    errno = ctypes.get_errno()
    if errno in (codes.EOPNOTSUPP, codes.ENOSYS, codes.EINVAL):
        return False
    raise OSError(errno, os.strerror(errno))
