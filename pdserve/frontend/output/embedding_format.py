"""Truncates, normalizes and encodes embedding vectors for JSON.

Pure: an engine's bytes in, numbers or text out.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import EngineError

if TYPE_CHECKING:
    from pdserve.ids import Bytes

_NUMBER = 4
_BASE64 = 4 / 3
_DECIMAL = 24
"""Approximate characters of a number in JSON."""


class EmbeddingFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of an answer's vectors."""

    made: int
    """Numbers per vector from the engine."""
    kept: int
    """Leading numbers of each vector that are sent."""
    normalize: bool
    """If true, the sent vector is scaled to length 1."""
    base64: bool

    @property
    def size(self) -> Bytes:
        """Approximate size in bytes of a vector in the answer."""
        return int(self.kept * (_NUMBER * _BASE64 if self.base64 else _DECIMAL))

    def checked(self, vector: bytes) -> bytes:
        """Checks the size of an engine's vector and returns it. Errors: `EngineError`."""
        if len(vector) != self.made * _NUMBER:
            raise EngineError(
                f"the worker's vector has {len(vector) // _NUMBER} numbers, not {self.made}"
                if vector
                else "the worker answered with text: it is of a release that makes no vectors"
            )
        return vector

    def written(self, vector: bytes) -> list[float] | str:
        """The vector as it is written in the answer."""
        numbers = self._scaled(vector)
        if not self.base64:
            return numbers.tolist()
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()

    def numbers(self, vector: bytes) -> list[float]:
        """The vector as numbers."""
        return self._scaled(vector).tolist()

    def _scaled(self, vector: bytes) -> array[float]:
        numbers = array("f", vector[: self.kept * _NUMBER])
        if sys.byteorder == "big":
            numbers.byteswap()
        if self.normalize and (length := math.hypot(*numbers)) > 0:
            numbers = array("f", [number / length for number in numbers])
        return numbers
