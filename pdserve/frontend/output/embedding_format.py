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
"""Characters of a number as it is written in JSON, about."""


class EmbeddingFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer's vectors look like."""

    made: int
    """Numbers that the engine makes."""
    kept: int
    """Of those, how many leading ones are told."""
    normalize: bool
    """What is told has length 1."""
    base64: bool

    @property
    def size(self) -> Bytes:
        """Of one vector in the answer, about."""
        return int(self.kept * (_NUMBER * _BASE64 if self.base64 else _DECIMAL))

    def checked(self, vector: bytes) -> bytes:
        """Errors: `EngineError` for a vector that does not fit what its worker said."""
        if len(vector) != self.made * _NUMBER:
            raise EngineError(
                f"the worker's vector has {len(vector) // _NUMBER} numbers, not {self.made}"
                if vector
                else "the worker answered with text: it is of a release that makes no vectors"
            )
        return vector

    def written(self, vector: bytes) -> list[float] | str:
        """As it stands in the answer."""
        numbers = array("f", vector[: self.kept * _NUMBER])
        if sys.byteorder == "big":
            numbers.byteswap()
        if self.normalize and (length := math.hypot(*numbers)) > 0:
            numbers = array("f", [number / length for number in numbers])
        if not self.base64:
            return numbers.tolist()
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()
