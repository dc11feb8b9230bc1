"""Copies runs of bytes and computes checksums, in threads beside the event loop.

The native functions release the GIL while they work. The pure `copy_runs` holds it for one chunk,
so chunks are small enough not to delay the loop.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from pdserve import accel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Bytes
    from pdserve.transfer.copy_plan import CopyRuns

__all__ = ["CHUNK", "NON_TEMPORAL_BYTES", "checksum", "chunks", "copy_pure", "copy_runs", "crc32"]

CHUNK: Final[Bytes] = 8 << 20
"""Bytes copied between two checks for a stop: about a millisecond."""

NON_TEMPORAL_BYTES: Final[Bytes] = 1 << 20
"""Copies of at least this many bytes bypass the CPU caches, so that they do not evict other
data."""


def copy_pure(
    destination: memoryview,
    source: memoryview,
    to: Iterable[int],
    from_: Iterable[int],
    lengths: Iterable[int],
    streaming: bool = False,
) -> int:
    """Copy `lengths[i]` bytes from `from_[i]` to `to[i]`, for all i; returns the number of bytes.

    `streaming` bypasses the CPU caches: natively about 1.6 times as fast for runs of 64 KiB and
    more, and slower for what fits into the caches. The last three are arrays of int64. Source and
    destination must not overlap. Errors: ValueError, before anything is copied, for a run outside
    of its memory.
    """
    runs = list(zip(to, from_, lengths, strict=True))
    for there, here, length in runs:
        fits = here + length <= len(source) and there + length <= len(destination)
        if min(there, here, length) < 0 or not fits:
            raise ValueError("a run leaves its memory")
    for there, here, length in runs:
        destination[there : there + length] = source[here : here + length]
    return sum(length for _, _, length in runs)


copy_runs = accel.native.copy_runs if accel.NATIVE else copy_pure

crc32 = accel.native.crc32 if accel.NATIVE and accel.native.crc32_here() else zlib.crc32
"""`zlib.crc32`; the native version returns the same value several times as fast. The value does not
depend on how the bytes are divided into runs, so two ends with different runs can compare."""


def chunks(
    runs: CopyRuns, size: Bytes = CHUNK
) -> Iterator[tuple[memoryview, memoryview, memoryview]]:
    """Yield the runs' destinations, sources and lengths, a few runs at a time, of about `size`
    bytes together. Runs are not divided; `copy_plan.split_runs` does that."""
    if not len(runs):
        return
    each = max(1, size * len(runs) // max(1, runs.size))
    to, from_, lengths = (memoryview(c) for c in (runs.destination, runs.source, runs.length))
    for first in range(0, len(runs), each):
        own = slice(first, first + each)
        yield to[own], from_[own], lengths[own]


def checksum(memory: memoryview, runs: Iterable[tuple[Bytes, Bytes]], start: int = 0) -> int:
    """CRC-32 of runs (offset, length) of a memory, in order."""
    for at, length in runs:
        start = crc32(memory[at : at + length], start)
    return start
