"""Reads the type and the size of a picture from the first bytes of its file, without decoding it.

The type is what the bytes say; names and headers are not asked. So a picture of a hundred million
pixels is refused before anything decodes it, and a file of another type never reaches a decoder.
Work is bounded: a JPEG has its size behind segments, of which at most `_SEGMENTS` are passed. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMATS", "ImageFormat", "PictureSize", "UnreadableImage", "read_size"]

ImageFormat = Literal["png", "jpeg", "gif", "webp"]
FORMATS: Final = "PNG, JPEG, GIF and WebP"

_SEGMENTS: Final = 256
"""Most segments of a JPEG before its size; cameras write about twenty."""
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG's frame header, which has the size."""
_SCAN: Final = 0xDA
_NO_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers that stand alone."""


class UnreadableImage(ValueError):
    """The bytes are no picture of a type that is served, or end before its size."""


@dataclass(frozen=True, slots=True)
class PictureSize:
    """What the beginning of a file says."""

    format: ImageFormat
    width: int
    height: int


def read_size(data: bytes) -> PictureSize:
    """The type and size of a picture. Errors: `UnreadableImage`, which says what is wrong."""
    found = next((each for each in _READERS if data.startswith(each[0])), None)
    if found is None:
        raise UnreadableImage(f"its bytes are none of {FORMATS}")
    _, format, read = found
    try:
        width, height = read(data)
    except (struct.error, IndexError):
        raise UnreadableImage(f"this {format.upper()} ends before its size") from None
    if not (width and height):
        raise UnreadableImage(f"this {format.upper()} is {width} by {height} pixels")
    return PictureSize(format, width, height)


def _png(data: bytes) -> tuple[int, int]:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise UnreadableImage("this PNG does not begin with its header")
    return width, height


def _gif(data: bytes) -> tuple[int, int]:
    """The size of the canvas, which all frames share."""
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    if data[8:12] != b"WEBP":
        raise UnreadableImage(f"its bytes are none of {FORMATS}")
    kind = data[12:16]
    if kind == b"VP8X":
        (low, high) = struct.unpack_from("<IH", data, 24)
        both = low | high << 32
        return (both & 0xFFFFFF) + 1, (both >> 24) + 1
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise UnreadableImage("this WebP has no lossless picture where it should begin")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        if start != b"\x9d\x01\x2a":
            raise UnreadableImage("this WebP has no picture where it should begin")
        return width & 0x3FFF, height & 0x3FFF
    raise UnreadableImage("this WebP begins with an unknown part")


def _jpeg(data: bytes) -> tuple[int, int]:
    """The size of the frame. A second frame header could say another size than the first one, so
    all of them are looked at, up to the first scan."""
    at, found = 2, None
    for _ in range(_SEGMENTS):
        if data[at] != 0xFF:
            raise UnreadableImage("this JPEG has no segment where one should begin")
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        if marker == _SCAN:
            if found is None:
                raise UnreadableImage("this JPEG has no size before its picture")
            return found
        if marker in _FRAMES:
            if found is not None:
                raise UnreadableImage("this JPEG says its size twice")
            height, width = struct.unpack_from(">HH", data, at + 5)
            found = width, height
        if marker in _NO_LENGTH:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        at += 2 + max(2, length)
    raise UnreadableImage(f"this JPEG has {_SEGMENTS} segments before its picture")


_READERS: Final[tuple[tuple[bytes, ImageFormat, Callable[[bytes], tuple[int, int]]], ...]] = (
    (b"\x89PNG\r\n\x1a\n", "png", _png),
    (b"\xff\xd8\xff", "jpeg", _jpeg),
    (b"GIF87a", "gif", _gif),
    (b"GIF89a", "gif", _gif),
    (b"RIFF", "webp", _webp),
)
