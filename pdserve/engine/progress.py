"""A page of memory in which a core shows its node that it gets on: written by one, read by both.

It lies outside the socket on purpose: a core in the middle of a step says nothing, and one that has
been stopped cannot; but a number that has not changed tells as much without anybody's help. Writing
costs less than a microsecond, so executors may do it for every layer.

Single words are written whole; a reader may see one word newer than another, which does no harm.
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

__all__ = ["Look", "ProgressPage"]

_BYTES: Final = 4096
_TICKS, _HEARD, _DUE, _STAGE, _STEP, _LAYER = range(6)
_LOADING, _COMMANDS, _COMPUTING, _RESTING = range(4)
_FOR_EVER: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Look:
    """What the page says at one moment."""

    ticks: int
    """Grows with every sign of progress."""
    heard: int
    """Commands that the core has taken."""
    due: Seconds
    """When it wants to be at work at the latest, on the machine's monotonic clock; 0: it is."""
    what: str
    """What it is doing, to follow "in"."""


class ProgressPage:
    """Use `create`, `attach` or `in_memory`."""

    def __init__(self, memory: bytearray | mmap.mmap, fd: int | None = None) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._last: Look | None = None
        """What it said when it was closed."""
        self.fd = fd
        """To be inherited by the core's process; None: closed, or there never was one."""

    @classmethod
    def create(cls) -> ProgressPage:
        """A new one that a child process can share. Raises `OSError`."""
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
    def attach(cls, fd: int) -> ProgressPage:
        """The one behind an inherited descriptor, which is closed. Raises `OSError`."""
        try:
            return cls(mmap.mmap(fd, _BYTES))
        finally:
            os.close(fd)

    @classmethod
    def in_memory(cls) -> ProgressPage:
        """One for a core in this process."""
        return cls(bytearray(_BYTES))

    # ------------------------------------------------------------------ by the core

    def tick(self, layer: int = 0) -> None:
        """Something was done; within a step, so many layers."""
        words = self._words
        words[_LAYER] = layer
        words[_TICKS] += 1

    def heard(self, count: int) -> None:
        """So many commands more have been taken."""
        self._words[_HEARD] += count
        self._awake(_COMMANDS)

    def compute(self) -> None:
        """A step begins."""
        self._words[_STEP] += 1
        self._awake(_COMPUTING)

    def rest(self, patience: Seconds | None) -> None:
        """There is nothing to do for so long, unless a command comes; None: for ever."""
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

    def look(self) -> Look:
        """What it says now; once closed, what it said last."""
        if self._last is not None:
            return self._last
        words = self._words
        what = _described(words[_STAGE], words[_STEP], words[_LAYER])
        return Look(words[_TICKS], words[_HEARD], words[_DUE] / 1e9, what)

    def close_fd(self) -> None:
        """The child has it by now. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Give the memory back. Idempotent."""
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
