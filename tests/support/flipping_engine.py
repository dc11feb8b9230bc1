"""The sim engine with bad luck: bytes of KV that arrive from another worker are not what was sent.

`--engine tests.support.flipping_engine:create` in a real worker. While the file that `FLIPS` names
has a number, so many of the next arrivals have one flipped bit each: over TCP what the socket
received, over shared memory what was copied. Everything above that is the product's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.transfer.copying import checksum
from pdserve.transfer.same_host import shm
from pdserve.transfer.tcp.framing import BulkSocket
from pdserve_engines.sim.executor import SimExecutor

if TYPE_CHECKING:
    from pdserve.transfer.tcp.framing import WriteGuard

Runs = memoryview
"""Offsets or lengths, as int64."""

FLIPS = "TESTS_FLIPS"
"""Environment variable with the path of the file."""


def create() -> SimExecutor:
    """The factory of the engine; it runs in the engine process."""
    path = Path(os.environ[FLIPS])
    _flip_received(path)
    _flip_copied(path)
    return SimExecutor()


def ordered(path: Path) -> int:
    """Flips that are still to come."""
    return int(path.read_text()) if path.exists() else 0


def order(path: Path, count: int) -> None:
    """Have the next arrivals flipped."""
    new = path.with_suffix(".new")
    new.write_text(str(count))
    new.replace(path)


def _takes_one(path: Path) -> bool:
    count = ordered(path)
    if count:
        order(path, count - 1)
    return count > 0


def _flip_received(path: Path) -> None:
    usual = BulkSocket._read_guarded

    def read(self: BulkSocket, views: list[memoryview], guard: WriteGuard) -> int:
        count = usual(self, views, guard)
        if count and _takes_one(path):
            views[0][0] ^= 0x10
        return count

    BulkSocket._read_guarded = read  # type: ignore[method-assign]


def _flip_copied(path: Path) -> None:
    patched: Any = shm
    copy_runs, copy_summed = patched.copy_runs, patched.copy_summed

    def copy(memory: memoryview, source: memoryview, to: Runs, *rest: Any) -> int:
        size = copy_runs(memory, source, to, *rest)
        if size and _takes_one(path):
            memory[to[0]] ^= 0x10
        return size

    def summed(
        memory: memoryview, source: memoryview, to: Runs, from_: Runs, lengths: Runs, *rest: Any
    ) -> int:
        total = copy_summed(memory, source, to, from_, lengths, *rest)
        if not _takes_one(path):
            return total
        memory[to[0]] ^= 0x10
        return checksum(memory, to, lengths, rest[1])

    patched.copy_runs, patched.copy_summed = copy, summed
