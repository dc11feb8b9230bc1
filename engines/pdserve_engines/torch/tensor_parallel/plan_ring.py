"""Passes plans from rank 0 to the other ranks, by a ring in shared memory.

One writer, several readers; every reader gets every plan, in order. A slot has a sequence number, a
length and a checksum, and then the plan's bytes. A reader spins for a moment, then sleeps on its
own event descriptor. The ring knows bytes only; `rank_plan` says what they mean.

The number is written last. On machines that reorder writes a reader may see it before the bytes:
then the checksum differs, and the reader looks again.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pdserve.errors import EngineDied, EngineError
from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, Seconds

__all__ = ["PlanReader", "PlanRing", "RingBroken"]

_SLOTS: Final = 4
_PAGE: Final = 4096
_SLOT: Final = struct.Struct("<QII")
"""Sequence number from 1, bytes of the plan, their CRC-32."""
_LINE: Final = 64
"""Bytes of a cache line: each reader counts in a line of its own."""
_SPIN: Seconds = 50e-6
_SETTLE: Seconds = 0.1
"""Longest time that a plan's bytes may come after its number."""
_PAUSE: Seconds = 0.001


class RingBroken(Exception):
    """The ring's content is wrong: a plan was lost or damaged."""


class PlanRing:
    """The writer's end."""

    def __init__(self, capacity: Bytes, readers: int) -> None:
        """`capacity`: most bytes of a plan. The memory is taken when it is first written. Raises
        `OSError`."""
        self._slot_bytes = _rounded(_SLOT.size + capacity)
        size = _PAGE + _SLOTS * self._slot_bytes
        self.fd = os.memfd_create("pdserve-plans", os.MFD_CLOEXEC)
        """Descriptor that readers attach to."""
        try:
            os.ftruncate(self.fd, size)
            self._memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(readers)]
        """Event descriptors, one for each reader."""
        self._written = 0

    @property
    def capacity(self) -> Bytes:
        """Most bytes of a plan."""
        return self._slot_bytes - _SLOT.size

    def write(self, plan: bytes, patience: Seconds, alive: Callable[[], None]) -> None:
        """Write a plan for all readers. Waits up to `patience` seconds for a free slot, and then
        raises `EngineDied`; calls `alive` meanwhile, which may raise. Raises `EngineError` for a
        plan that is too large; nothing is written then."""
        if len(plan) > self.capacity:
            raise EngineError(
                f"a step's plan of {len(plan)} bytes is over the {self.capacity} for tensor "
                "parallel ranks; lower --max-batch-tokens or --max-sequences"
            )
        self._wait_for_slot(patience, alive)
        number = self._written + 1
        at = _slot_at(number, self._slot_bytes)
        self._memory[at + _SLOT.size : at + _SLOT.size + len(plan)] = plan
        _SLOT.pack_into(self._memory, at, 0, len(plan), crc32(plan))
        struct.pack_into("<Q", self._memory, at, number)
        self._written = number
        for bell in self.bells:
            os.eventfd_write(bell, 1)

    def taken(self, reader: int) -> int:
        """Number of plans that a reader has taken."""
        return _taken(self._memory, reader)

    def close(self) -> None:
        """Free memory and descriptors. Idempotent."""
        for fd in (self.fd, *self.bells):
            if fd >= 0:
                os.close(fd)
        self.fd, self.bells = -1, []
        self._memory.close()

    def _wait_for_slot(self, patience: Seconds, alive: Callable[[], None]) -> None:
        until = time.monotonic() + patience
        while (slowest := min(map(self.taken, range(len(self.bells))))) <= self._written - _SLOTS:
            alive()
            if time.monotonic() > until:
                raise EngineDied(
                    f"a rank has taken {slowest} of {self._written} plans, and no more for "
                    f"{patience:g} s"
                )
            time.sleep(_PAUSE)


class PlanReader:
    """One reader's end."""

    def __init__(self, fd: int, bell: int, place: int) -> None:
        """Map the ring behind `fd`, which the caller keeps. `place`: this reader's index. The
        reader closes `bell`."""
        size = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, size)
        self._slot_bytes = (size - _PAGE) // _SLOTS
        self._bell = bell
        self._place = place
        self._read = 0

    def read(self, patience: Seconds, also: Sequence[int] = ()) -> bytes | None:
        """The next plan; None if there is none for `patience` seconds, or if one of the descriptors
        `also` can be read. Raises `RingBroken` if a plan was lost or is damaged."""
        at = _slot_at(self._read + 1, self._slot_bytes)
        if not self._spin(at) and not self._sleep(at, patience, also):
            return None
        plan = self._settled(at)
        self._read += 1
        struct.pack_into("<Q", self._memory, _LINE * self._place, self._read)
        return plan

    def close(self) -> None:
        """Free memory and descriptor. Idempotent."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        self._memory.close()

    def _spin(self, at: int) -> bool:
        until = time.monotonic() + _SPIN
        while not self._is_there(at):
            if time.monotonic() > until:
                return False
        return True

    def _sleep(self, at: int, patience: Seconds, also: Sequence[int]) -> bool:
        # The writer writes first and rings then, so a plan that comes in between is not missed.
        until = time.monotonic() + patience
        while not self._is_there(at):
            rest = until - time.monotonic()
            ready, _, _ = select.select([self._bell, *also], [], [], max(0.0, rest))
            if self._bell in ready:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif ready or rest <= 0:
                return False
        return True

    def _is_there(self, at: int) -> bool:
        """Whether the next plan is in its slot. Raises `RingBroken` if a later one is there."""
        (number,) = struct.unpack_from("<Q", self._memory, at)
        if number > self._read + 1:
            raise RingBroken(f"plan {self._read + 1} is lost, plan {number} is in its place")
        return bool(number == self._read + 1)

    def _settled(self, at: int) -> bytes:
        """The bytes of the plan in this slot, once they fit their checksum."""
        until = time.monotonic() + _SETTLE
        while True:
            _, length, checksum = _SLOT.unpack_from(self._memory, at)
            plan = self._memory[at + _SLOT.size : at + _SLOT.size + length]
            if crc32(plan) == checksum:
                return plan
            if time.monotonic() > until:
                raise RingBroken(f"plan {self._read + 1} is damaged: its checksum differs")


def _slot_at(number: int, slot_bytes: int) -> int:
    return _PAGE + (number % _SLOTS) * slot_bytes


def _taken(memory: mmap.mmap, reader: int) -> int:
    (count,) = struct.unpack_from("<Q", memory, _LINE * reader)
    return int(count)


def _rounded(size: Bytes) -> Bytes:
    return -(-size // _PAGE) * _PAGE
