"""Returns free memory to the system after large requests; glibc keeps it in its heaps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes

__all__ = ["MemoryTrimmer", "malloc_trim"]

_WORTH: Final[Bytes] = 8 << 20
"""Bytes of bodies, in sum, from which trimming is worthwhile. Text takes up to 150 times as much
while it is tokenized: eight texts of a megabyte leave half a gigabyte."""


def malloc_trim() -> None:
    """Returns free heap pages to the system; does nothing where the C library cannot.

    Takes milliseconds and releases the GIL: call it off the event loop.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Trims memory after large bodies, once none is held."""

    def __init__(self, trim: Callable[[], None]) -> None:
        """`memory_trim` gives memory back, off the event loop."""
        self._trim = trim
        self._held: Bytes = 0
        self._come: Bytes = 0
        """Bytes of bodies since the last trim."""

    def held(self, size: Bytes) -> None:
        """Takes the number of bytes held now."""
        self._come += max(0, size - self._held)
        self._held = size
        if size == 0 and self._come >= _WORTH:
            self._come = 0
            self._trim()
