"""Returns free memory to the system after large requests; glibc keeps it in its heaps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes

__all__ = ["MemoryTrimmer", "malloc_trim"]

_WORTH: Final[Bytes] = 8 << 20
"""Bytes of bodies, at once or one after the other; after less there is little to give back. Text
takes up to 150 times as much while it is tokenised: eight of a megabyte leave half a gigabyte."""


def malloc_trim() -> None:
    """Return free heap pages to the system; nothing where the C library cannot.

    Takes milliseconds and releases the GIL: call it off the event loop.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Notices when much has come and nothing is held any more."""

    def __init__(self, trim: Callable[[], None]) -> None:
        """`memory_trim` has the memory given back, off the event loop."""
        self._trim = trim
        self._held: Bytes = 0
        self._come: Bytes = 0
        """Since memory was given back."""

    def held(self, size: Bytes) -> None:
        """So much is held now."""
        self._come += max(0, size - self._held)
        self._held = size
        if size == 0 and self._come >= _WORTH:
            self._come = 0
            self._trim()
