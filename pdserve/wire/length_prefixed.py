"""Frames bodies with a length prefix: a big-endian u32 length, then that many bytes.

Sans-I/O. Each connection owns one decoder.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from pdserve.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HEADER_BYTES", "MAX_FRAME", "FrameDecoder", "encode_frame", "encode_frames"]

HEADER_BYTES = 4
MAX_FRAME = 64 * 1024 * 1024
"""Default limit of a body: any prompt and any step fit, and most corrupt lengths are refused."""

_HEADER = struct.Struct(">I")


def encode_frame(body: bytes, *, limit: int = MAX_FRAME) -> bytes:
    """Encodes one frame. Raises `ProtocolError` over the limit, since the other side would refuse
    it.
    """
    return encode_frames((body,), limit=limit)


def encode_frames(bodies: Iterable[bytes], *, limit: int = MAX_FRAME) -> bytes:
    """Encodes several frames into one buffer, for one write."""
    parts: list[bytes] = []
    for body in bodies:
        if len(body) > limit:
            raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {limit}")
        parts.append(_HEADER.pack(len(body)))
        parts.append(body)
    return b"".join(parts)


class FrameDecoder:
    """Splits a byte stream into bodies. Memory is bounded by one frame of `limit` bytes plus one
    chunk given to `feed`.
    """

    def __init__(self, *, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._pending = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame; if not 0 at the end of a stream, the frame is lost."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order. Raises `ProtocolError` as soon as a header
        announces more than the limit; after that the stream is unreadable.
        """
        if self._pending:
            self._pending += data
            # A long frame arrives in many chunks: copy it once, when it is whole.
            if len(self._pending) < self._wanted(self._pending, 0):
                return []
            data = bytes(self._pending)
            self._pending.clear()
        bodies: list[bytes] = []
        position, end = 0, len(data)
        while position < end:
            after = position + self._wanted(data, position)
            if after > end:
                self._pending += data[position:]
                break
            bodies.append(data[position + HEADER_BYTES : after])
            position = after
        return bodies

    def _wanted(self, data: bytes | bytearray, position: int) -> int:
        """Bytes from `position` to the end of its frame, as far as known."""
        if len(data) - position < HEADER_BYTES:
            return HEADER_BYTES
        (length,) = _HEADER.unpack_from(data, position)
        if length > self._limit:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self._limit}")
        return HEADER_BYTES + int(length)
