"""Reads the numbers and bytes that a fuzz target wants out of one input; past its end, zeros."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

__all__ = ["Input", "look_at_refusal"]


class Input:
    """Consumed from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        """Something is left."""
        return self._position < len(self._data)

    def number(self, size: int = 1) -> int:
        """An unsigned number of `size` bytes."""
        return int.from_bytes(self.bytes(size).ljust(size, b"\0"), "big")

    def bytes(self, size: int) -> bytes:
        """That many bytes, or what is left."""
        start, self._position = self._position, self._position + size
        return self._data[start : self._position]


def look_at_refusal(error: PdserveError) -> None:
    """It says something, in words that can be sent."""
    assert error.message
    json.dumps([error.message, error.param]).encode()
