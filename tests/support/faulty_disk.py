"""A disk in memory whose power can fail at any write, and whose operations can fail on request.

Until a file is synced, each of its pages may have any of the contents it was given, in any
combination: writes are lost, reordered and torn at pages. Names may be lost until the directory is
synced. A new file may show what a removed one left on the medium.
"""

from __future__ import annotations

import errno as codes
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from random import Random

PAGE = 4096
_ZEROS = bytes(PAGE)


class PowerCut(BaseException):
    """The machine has no power: nothing is executed any more."""


@dataclass
class _File:
    size: int
    stale: dict[int, bytes] = field(default_factory=dict)
    """What the medium holds where nothing was written."""
    kept: dict[int, bytes] = field(default_factory=dict)
    """Pages that are safe."""
    fresh: dict[int, list[bytes]] = field(default_factory=dict)
    """Contents of pages since the last sync."""
    kept_size: int = 0

    def page(self, number: int) -> bytes:
        fresh = self.fresh.get(number)
        return fresh[-1] if fresh else self.kept.get(number, _ZEROS)

    def put(self, number: int, content: bytes) -> None:
        self.fresh.setdefault(number, []).append(content)

    def sync(self) -> None:
        self.kept |= {number: contents[-1] for number, contents in self.fresh.items()}
        self.fresh.clear()
        self.kept_size = self.size

    def after_cut(self, random: Random) -> _File:
        file = _File(random.choice([self.size, self.kept_size]))
        file.kept_size = file.size
        for number in {*self.kept, *self.fresh, *self.stale}:
            safe = self.kept.get(number, self.stale.get(number, _ZEROS))
            file.kept[number] = random.choice([safe, *self.fresh.get(number, [])])
        return file


class FaultyDisk:
    """Implements `FileOps`. Paths are only keys: nothing of the real file system is touched."""

    def __init__(self) -> None:
        self._names: dict[Path, _File] = {}
        self._safe_names: dict[Path, _File] = {}
        self._fds: dict[int, tuple[Path, _File, bool]] = {}
        self._removed: list[_File] = []
        self.steps = 0
        """Changes so far: each page of a write is one."""
        self.cut_after: int | None = None
        """The power fails after so many changes."""
        self.fault: Callable[[str, Path], int] = lambda operation, path: 0
        """Returns the errno with which an operation fails; 0: it succeeds. Operation `short` is no
        call: any number but 0 makes a read return half of what it was asked for."""
        self.shows_removed = True
        """A new file may show what a removed one left on the medium, if power fails."""

    # ------------------------------------------------------------------ for tests

    def after_cut(self, random: Random) -> FaultyDisk:
        """What is found when the power is back."""
        disk = FaultyDisk()
        for path in {*self._names, *self._safe_names}:
            states = {id(f): f for f in (self._names.get(path), self._safe_names.get(path)) if f}
            both = path in self._names and path in self._safe_names
            if both or random.random() < 0.5:
                file = random.choice(list(states.values()))
                disk._names[path] = disk._safe_names[path] = file.after_cut(random)
        return disk

    def allocated(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._names.values())

    def find(self, content: bytes) -> bool:
        """Whether the bytes are in some page of a file that has a name."""
        return any(
            content in file.page(number)
            for file in self._names.values()
            for number in {*file.kept, *file.fresh}
        )

    def flip(self, path: Path, offset: int) -> None:
        """Change one bit."""
        file = self._names[path]
        page = bytearray(file.page(offset // PAGE))
        page[offset % PAGE] ^= 0x10
        file.kept[offset // PAGE] = bytes(page)
        file.fresh.pop(offset // PAGE, None)

    def shorten(self, path: Path, size: int) -> None:
        """Cut a file's end off."""
        self._names[path].size = size

    def paths(self) -> list[Path]:
        return sorted(self._names)

    @property
    def open_files(self) -> int:
        return len(self._fds)

    # ------------------------------------------------------------------ FileOps

    def create(self, path: Path, size: int) -> int:
        self._begin("create", path)
        if path in self._names:
            raise OSError(codes.EEXIST, "exists")
        stale = self._removed.pop(0).kept if self._removed and self.shows_removed else {}
        file = self._names[path] = _File(size, stale=dict(stale))
        self._step()
        return self._descriptor(path, file, True)

    def open(self, path: Path, *, write: bool = False) -> int:
        self._begin("open", path)
        if path not in self._names:
            raise FileNotFoundError(codes.ENOENT, "absent")
        return self._descriptor(path, self._names[path], write)

    def close(self, fd: int) -> None:
        del self._fds[fd]

    def write(self, fd: int, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        path, file, writable = self._fds[fd]
        self._begin("write", path)
        assert writable
        content = b"".join(bytes(buffer) for buffer in buffers)
        assert offset % PAGE == 0
        assert len(content) % PAGE == 0
        for at in range(0, len(content), PAGE):
            file.put((offset + at) // PAGE, content[at : at + PAGE])
            file.size = max(file.size, offset + at + PAGE)
            self._step()

    def read(self, fd: int, offset: int, buffers: Sequence[bytearray | memoryview]) -> int:
        path, file, _ = self._fds[fd]
        self._begin("read", path)
        wanted = sum(len(buffer) for buffer in buffers)
        end = min(offset + wanted, file.size)
        pages = range(offset // PAGE, -(-end // PAGE))
        content = b"".join(file.page(number) for number in pages)
        content = content[offset % PAGE :][: max(0, end - offset)]
        if self.fault("short", path):
            content = content[: len(content) // 2]
        at = 0
        for buffer in buffers:
            part = content[at : at + len(buffer)]
            memoryview(buffer)[: len(part)] = part
            at += len(part)
        return len(content)

    def size(self, fd: int) -> int:
        return self._fds[fd][1].size

    def truncate(self, fd: int, size: int) -> None:
        path, file, _ = self._fds[fd]
        self._begin("truncate", path)
        file.size = size
        self._step()

    def erase(self, fd: int, offset: int, size: int) -> None:
        path, file, _ = self._fds[fd]
        self._begin("erase", path)
        for number in range(offset // PAGE, (offset + size) // PAGE):
            file.put(number, _ZEROS)
            self._step()

    def sync(self, fd: int) -> None:
        path, file, _ = self._fds[fd]
        self._begin("sync", path)
        file.sync()
        self._step()

    def sync_directory(self, path: Path) -> None:
        self._begin("sync_directory", path)
        self._safe_names = dict(self._names)
        self._step()

    def begin_sync(self, fd: int, offset: int, size: int) -> None:
        assert fd in self._fds

    def done_with(self, fd: int) -> None:
        assert fd in self._fds

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        if path not in self._names:
            raise FileNotFoundError(codes.ENOENT, "absent")
        self._removed.append(self._names.pop(path))
        self._step()

    def names(self, path: Path) -> list[str]:
        self._begin("names", path)
        return [file.name for file in self._names if file.parent == path]

    # ------------------------------------------------------------------ inside

    def _descriptor(self, path: Path, file: _File, write: bool) -> int:
        fd = max(self._fds, default=2) + 1
        self._fds[fd] = (path, file, write)
        return fd

    def _begin(self, operation: str, path: Path) -> None:
        errno = self.fault(operation, path)
        if errno:
            raise OSError(errno, os.strerror(errno))

    def _step(self) -> None:
        self.steps += 1
        if self.cut_after is not None and self.steps >= self.cut_after:
            raise PowerCut
