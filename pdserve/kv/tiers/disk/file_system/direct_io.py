"""Reads and writes past the page cache (O_DIRECT), from and to any buffers.

The device takes whole pages at page-aligned addresses. Aligned parts of a buffer go as they are;
the rest goes through page-aligned memory of the calling thread. So a payload in an arena with
page-aligned blocks is not copied, and its header is.

Measured on a virtual disk with random reads of 1 and 4 MiB, four threads: 1.5 GB/s and 0.06 CPU
seconds per GiB, against 0.6 to 0.9 GB/s and 0.3 to 0.45 through the page cache. Writes: 2.3 GB/s
against 0.2 to 2.3.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.ids import Bytes

__all__ = ["PAGE", "AlignedMemory", "can_bypass", "gather", "scatter"]

_log = logging.getLogger(__name__)

PAGE: Final[Bytes] = 4096
_KEPT: Final[Bytes] = 4 << 20
"""Aligned memory that a thread keeps; what is larger is for one call."""


class AlignedMemory:
    """Page-aligned memory for each thread, reused by its next call."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size: Bytes) -> memoryview:
        """Memory of this size, until the thread's next call."""
        if size > _KEPT:
            return memoryview(mmap.mmap(-1, size))
        view: memoryview | None = getattr(self._local, "view", None)
        if view is None or len(view) < size:
            view = self._local.view = memoryview(mmap.mmap(-1, max(size, 16 * PAGE)))
        return view[:size]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a buffer."""

    view: memoryview
    direct: bool
    """The device may take it as it is."""


def gather(buffers: Sequence[bytes | memoryview], memory: AlignedMemory) -> list[memoryview]:
    """The buffers' bytes in order, as views that a device takes. Together they are whole pages."""
    pieces = _pieces(buffers)
    scratch = memory.take(sum(len(piece.view) for piece in pieces if not piece.direct))
    at = 0
    for piece in pieces:
        if not piece.direct:
            scratch[at : at + len(piece.view)] = piece.view
            at += len(piece.view)
    return _joined(pieces, scratch)


def scatter(
    fd: int, offset: Bytes, buffers: Sequence[bytearray | memoryview], memory: AlignedMemory
) -> Bytes:
    """Fill the buffers from a file, in one call; returns less than their sizes at its end.
    Errors: OSError."""
    pieces = _pieces(buffers)
    wanted = sum(len(piece.view) for piece in pieces)
    copied = sum(len(piece.view) for piece in pieces if not piece.direct)
    scratch = memory.take(copied + -wanted % PAGE)  # the last page is read as a whole
    done = os.preadv(fd, _joined(pieces, scratch), offset)
    at = position = 0
    for piece in pieces:
        size = len(piece.view)
        if not piece.direct:
            here = max(0, min(size, done - position))
            piece.view[:here] = scratch[at : at + here]
            at += size
        position += size
    return min(done, wanted)


def can_bypass(folder: Path, size: Bytes) -> bool:
    """Whether files in a folder can be written and read past the page cache, whole pages of about
    `size` bytes at once. Some file systems take the flag and refuse the write."""
    path = folder / "TIER.probe.new"
    size = max(PAGE, size // PAGE * PAGE)
    written, back = mmap.mmap(-1, size), mmap.mmap(-1, size)
    written.write(os.urandom(PAGE))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            os.pwritev(fd, [written], 0)
            os.preadv(fd, [back], 0)
        finally:
            os.close(fd)
    except OSError as error:
        _log.info("%s: the page cache is not bypassed: %s", folder, error.strerror)
        return False
    finally:
        with suppress(OSError):
            os.unlink(path)
    return written[:] == back[:]


def _pieces(buffers: Sequence[bytes | bytearray | memoryview]) -> list[_Piece]:
    """Divide buffers into parts that go as they are, and parts that are copied. Before a part that
    goes as it is, the copied ones fill whole pages."""
    pieces = []
    copied = 0
    for buffer in buffers:
        view = memoryview(buffer)
        whole = len(view) // PAGE * PAGE
        if whole and copied % PAGE == 0 and _aligned(view):
            pieces.append(_Piece(view[:whole], True))
            view = view[whole:]
        if len(view):
            pieces.append(_Piece(view, False))
            copied += len(view)
    return pieces


def _joined(pieces: list[_Piece], scratch: memoryview) -> list[memoryview]:
    """The views to pass to the system: copied parts that follow each other are one. The last one
    has what is left of the scratch memory."""
    views: list[memoryview] = []
    start = at = 0
    for piece in pieces:
        if not piece.direct:
            at += len(piece.view)
            continue
        if at > start:
            views.append(scratch[start:at])
            start = at
        views.append(piece.view)
    if start < len(scratch):
        views.append(scratch[start:])
    return views


def _aligned(view: memoryview) -> bool:
    """True if the memory begins at a page. Read-only memory does not tell its address."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
