"""Splits a byte stream into frames. Sans-I/O.

A length is checked against its kind's limit before any of the body is kept, so memory is bounded by
one frame plus one read. Small frames are slices of the read that contains them. A large body that
spans several reads is filled in place, directly from the socket if the reader uses `wanted()`. Each
connection owns one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import ProtocolError
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag
from pdserve.wire.limits import IGNORED_BODY, LARGE, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.wire.header import Header

__all__ = ["Buffer", "Frame", "FrameParser"]

Buffer = bytes | bytearray | memoryview
Frame = tuple["Header", Buffer]

_IGNORABLE: Final = int(FrameFlag.IGNORABLE)
_unpack_from = HEADER.unpack_from


class FrameParser:
    """Turns bytes into frames, each a `(header, body)`."""

    __slots__ = ("_filled", "_goal", "_header", "_tail", "large", "single", "table")

    def __init__(self, table: Sequence[int], *, single: bool = False) -> None:
        """Args: `table` holds each kind's largest body, `UNKNOWN` for kinds that are not
        allowed.
        """
        self.table = table
        self.single = single
        """True: return one frame per `feed`, because the next one may need another table."""
        self._tail = b""
        self._header: Header | None = None
        self._goal: Bytes = 0  # size of the large body
        self._filled: Bytes = 0  # received bytes of it
        self.large: memoryview | None = None
        """Memory of a large body being received; None: there is none."""

    @property
    def pending(self) -> Bytes:
        """Bytes received of an incomplete frame."""
        return len(self._tail) + self._filled

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises `ProtocolError` for a length over the
        limit and for a kind that is not allowed; after that the stream is unreadable.
        """
        frames: list[Frame] = []
        if self._goal:
            data = self._fill(data, frames)
            if self._goal:
                return frames
        if self._tail:
            data = self._tail + data
            self._tail = b""
        self._cut(data, frames)
        return frames

    def _cut(self, data: bytes, frames: list[Frame]) -> None:
        """Slices whole frames off `data`; keeps or begins an incomplete one."""
        table, single, append = self.table, self.single, frames.append
        position, end = 0, len(data)
        last = end - HEADER_BYTES
        while position <= last:
            header = _unpack_from(data, position)
            length, kind = header[0], header[1]
            if length > table[kind]:
                self._check_unknown(header)
            start = position + HEADER_BYTES
            stop = start + length
            if stop > end:
                if length >= LARGE:
                    self._begin(header, length)
                    self._fill(data[start:], frames)
                    position = end
                break
            append((header, data[start:stop]))
            position = stop
            if single:
                break
        self._tail = data[position:]

    def _check_unknown(self, header: Header) -> None:
        """Checks a frame that is over the limit or of a kind that is not allowed. Raises unless it
        is flagged ignorable and small.
        """
        length, kind, flags = header[:3]
        if self.table[kind] != UNKNOWN:
            limit = self.table[kind]
            raise ProtocolError(f"a frame of kind {kind} has {length} bytes, the limit is {limit}")
        if not flags & _IGNORABLE or self.single:
            raise ProtocolError(f"a frame of kind {kind} is not expected here")
        if length > IGNORED_BODY:
            raise ProtocolError(f"an unknown frame has {length} bytes, the limit is {IGNORED_BODY}")

    # ------------------------------------------------------------------ large bodies

    def _begin(self, header: Header, goal: Bytes) -> None:
        self._header, self._goal, self._filled = header, goal, 0
        self.large = memoryview(bytearray(goal))

    def _fill(self, data: bytes, frames: list[Frame]) -> bytes:
        """Copies `data` into the large body; returns the bytes behind the body."""
        take = min(self._goal - self._filled, len(data))
        if self.large is not None:
            self.large[self._filled : self._filled + take] = data[:take]
        frames += self.filled(take)
        return data[take:]

    def wanted(self) -> memoryview | None:
        """Memory for the next bytes, if they can be received in place; then call `filled`."""
        if self.large is None:
            return None
        return self.large[self._filled :]

    def drop(self) -> None:
        """Releases the memory of a body being received: no more bytes will come."""
        self.large = None

    def filled(self, count: Bytes) -> list[Frame]:
        """Notes `count` bytes received into `wanted()`; returns the frame if that completed it."""
        self._filled += count
        if self._filled < self._goal or self._header is None or self.large is None:
            return []
        frame: Frame = (self._header, self.large)
        self._header, self._goal, self._filled, self.large = None, 0, 0, None
        return [frame]
