"""Shares an engine core's heartbeat with its node, in a page of memory that the core writes.

It is separate from the socket on purpose: a core in a long step sends nothing, and a stopped core
cannot; a counter that does not change shows both. A write costs less than a microsecond, so
executors may tick for every layer. Words are written whole; a reader may see one word newer than
another, which is harmless.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["HeartbeatPage", "HeartbeatReading"]

_BYTES: Final = 4096
_TICKS, _HEARD, _DUE, _STAGE, _STEP, _LAYER = range(6)
_LOADING, _COMMANDS, _COMPUTING, _RESTING = range(4)
_FOR_EVER: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """The page's content at one moment."""

    ticks: int
    """Grows with every sign of progress."""
    heard: int
    """Number of commands that the core has taken."""
    due: Seconds
    """Time by which it will work again, on the machine's monotonic clock; 0: it is working."""
    what: str
    """What the core is doing; a noun phrase that follows "in"."""


class HeartbeatPage:
    """The shared page; make it with `create`, `attach` or `in_memory`."""

    def __init__(self, memory: bytearray | mmap.mmap, fd: int | None = None) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._last: HeartbeatReading | None = None
        """The reading at the time of closing."""
        self.fd = fd
        """Descriptor for the core's process to inherit; None: closed or in memory."""

    @classmethod
    def create(cls) -> HeartbeatPage:
        """Makes a page that a child process can share. Raises `OSError`."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("pdserve-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, _BYTES)
            return cls(mmap.mmap(fd, _BYTES), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> HeartbeatPage:
        """Maps the page behind an inherited descriptor and closes the descriptor. Raises
        `OSError`.
        """
        try:
            return cls(mmap.mmap(fd, _BYTES))
        finally:
            os.close(fd)

    @classmethod
    def in_memory(cls) -> HeartbeatPage:
        """Makes a page for a core in this process."""
        return cls(bytearray(_BYTES))

    # ------------------------------------------------------------------ by the core

    def tick(self, layer: int = 0) -> None:
        """Notes progress, for example layers done within a step."""
        words = self._words
        words[_LAYER] = layer
        words[_TICKS] += 1

    def heard(self, count: int) -> None:
        """Notes that further commands were taken."""
        self._words[_HEARD] += count
        self._awake(_COMMANDS)

    def compute(self) -> None:
        """Notes that a step begins."""
        self._words[_STEP] += 1
        self._awake(_COMPUTING)

    def rest(self, patience: Seconds | None) -> None:
        """Notes that there is no work for so long unless a command comes; None: without limit."""
        words = self._words
        words[_DUE] = (
            _FOR_EVER if patience is None else time.monotonic_ns() + int(max(0.0, patience) * 1e9)
        )
        words[_STAGE] = _RESTING
        words[_TICKS] += 1

    def _awake(self, stage: int) -> None:
        words = self._words
        words[_DUE] = words[_LAYER] = 0
        words[_STAGE] = stage
        words[_TICKS] += 1

    # ------------------------------------------------------------------ by the node

    def look(self) -> HeartbeatReading:
        """Reads the page; once closed, returns the last reading."""
        if self._last is not None:
            return self._last
        words = self._words
        what = _described(words[_STAGE], words[_STEP], words[_LAYER])
        return HeartbeatReading(words[_TICKS], words[_HEARD], words[_DUE] / 1e9, what)

    def close_fd(self) -> None:
        """Closes the descriptor after the child has it. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self.close_fd()
        if self._last is not None:
            return
        self._last = self.look()
        self._words.release()
        if isinstance(self._memory, mmap.mmap):
            with suppress(BufferError):
                self._memory.close()


def _described(stage: int, step: int, layer: int) -> str:
    if stage == _COMPUTING:
        return f"step {step}, after layer {layer}" if layer else f"step {step}"
    return {_LOADING: "loading", _COMMANDS: "taking commands"}.get(stage, "its sleep")
