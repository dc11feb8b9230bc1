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

__all__ = [
    "CHUNK",
    "NON_TEMPORAL_BYTES",
    "checksum",
    "checksum_pure",
    "chunks",
    "copy_pure",
    "copy_runs",
    "copy_summed",
    "copy_summed_pure",
    "crc32",
]

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


def copy_summed_pure(
    destination: memoryview,
    source: memoryview,
    to: Iterable[int],
    from_: Iterable[int],
    lengths: Iterable[int],
    streaming: bool = False,
    start: int = 0,
) -> int:
    """Copy as `copy_pure` does; returns the CRC-32 of the bytes as they were written, in order.

    It continues `start`. The source is read once, so the sum holds for what was written even if
    others write to the source meanwhile.
    """
    runs = list(zip(to, from_, lengths, strict=True))
    copy_pure(destination, source, *zip(*runs, strict=True) if runs else ((), (), ()))
    return checksum_pure(destination, [run[0] for run in runs], [run[2] for run in runs], start)


def checksum_pure(
    memory: memoryview, from_: Iterable[int], lengths: Iterable[int], start: int = 0
) -> int:
    """CRC-32 of runs of a memory, in order. Errors: ValueError for a run outside of it."""
    runs = list(zip(from_, lengths, strict=True))
    if any(min(at, length) < 0 or at + length > len(memory) for at, length in runs):
        raise ValueError("a run leaves its memory")
    for at, length in runs:
        start = zlib.crc32(memory[at : at + length], start)
    return start


_CRC_HERE: Final = accel.NATIVE and accel.native.crc32_here()

copy_runs = accel.native.copy_runs if accel.NATIVE else copy_pure
copy_summed = accel.native.copy_summed if _CRC_HERE else copy_summed_pure
checksum = accel.native.crc32_runs if _CRC_HERE else checksum_pure

crc32 = accel.native.crc32 if _CRC_HERE else zlib.crc32
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
