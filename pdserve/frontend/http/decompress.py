"""Decompresses a body piece by piece, so that the caller can stop at any limit.

Pure: no piece is larger than asked for, whatever the body claims to contain. Not thread-safe.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["ENCODINGS", "BadCompression", "Decompressor"]

ENCODINGS: Final = frozenset(("gzip", "deflate"))
"""Supported compressions; `identity` needs none."""
_INPUT: Final[Bytes] = 64 * 1024
"""Compressed bytes handed to zlib at once; the rest that it does not take is copied."""
_GZIP: Final = 16 + zlib.MAX_WBITS
_MOST_MEMBERS: Final = 1024
"""Most members of a gzip body: empty ones cost time and contain nothing."""
_ZLIB_METHOD: Final = 8
"""The low half of the first byte of zlib's format (RFC 1950); raw deflate begins otherwise."""


class BadCompression(ValueError):
    """The bytes are not in the format, or end too early."""


class Decompressor:
    """One compressed body."""

    def __init__(self, encoding: str, packed: bytes) -> None:
        """`encoding` is one of `ENCODINGS`."""
        self._packed = memoryview(packed)
        self._at = 0
        self._pending = b""
        self._members = 1
        self._bits = _window_bits(encoding, packed)
        self._zlib = zlib.decompressobj(self._bits)

    def piece(self, most: Bytes) -> bytes:
        """The next bytes, at most `most`; empty at the end.

        Errors: `BadCompression`.
        """
        while True:
            try:
                found = self._zlib.decompress(self._input(), most)
            except zlib.error as error:
                raise BadCompression(str(error)) from None
            self._pending = self._zlib.unconsumed_tail
            if found:
                return found
            if self._zlib.eof:
                if not self._next_member():
                    return b""
            elif not self._pending and self._at == len(self._packed):
                raise BadCompression("it ends too soon")

    def _input(self) -> bytes | memoryview:
        if self._pending:
            return self._pending
        begin, self._at = self._at, min(self._at + _INPUT, len(self._packed))
        return self._packed[begin : self._at]

    def _next_member(self) -> bool:
        """Starts the next member: a gzip file may contain several (RFC 1952, 2.2)."""
        rest = self._zlib.unused_data
        if not rest and self._at == len(self._packed):
            return False
        if self._bits != _GZIP:
            raise BadCompression("something follows its end")
        if self._members == _MOST_MEMBERS:
            raise BadCompression("it has too many members")
        self._members += 1
        self._pending = rest
        self._zlib = zlib.decompressobj(self._bits)
        return True


def _window_bits(encoding: str, packed: bytes) -> int:
    if encoding == "gzip":
        return _GZIP
    if packed and packed[0] & 0x0F != _ZLIB_METHOD:
        # Some clients send raw deflate.
        return -zlib.MAX_WBITS
    return zlib.MAX_WBITS
