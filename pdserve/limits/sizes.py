"""Formats byte sizes for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["approximate_size"]

_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def approximate_size(size: Bytes) -> str:
    """Formats a size for reading, not for parsing: `3.9 GiB`."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
