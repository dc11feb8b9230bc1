"""Computes the batch sizes that graphs are captured for. Plain numbers, no device.

A batch takes the smallest graph that has room for it. Its other rows are computed, too, and thrown
away, so sizes lie closer where a row costs a larger part of the step.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_ROWS", "bucket_sizes", "smallest_bucket"]

MOST_ROWS: Final = 512
"""Most rows of a graph. Larger steps take the device longer than the host needs to launch them."""
_FEWEST: Final = (1, 2, 4)
_RANGES: Final = ((8, 64, 8), (80, 128, 16), (160, MOST_ROWS, 32))
"""First size, last size and distance of those that follow."""


def bucket_sizes(max_sequences: int) -> tuple[int, ...]:
    """The sizes for batches of up to `max_sequences`, ascending; the last one is `max_sequences`,
    or `MOST_ROWS` if that is less."""
    most = min(max_sequences, MOST_ROWS)
    sizes = [*_FEWEST]
    for first, last, distance in _RANGES:
        sizes += range(first, last + 1, distance)
    return (*(size for size in sizes if size < most), most)


def smallest_bucket(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest size that has room for `rows`; None: none has."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None
