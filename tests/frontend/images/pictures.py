"""Files of pictures for tests, made by hand: their headers say what a test wants."""

from __future__ import annotations

import base64
import struct
import zlib

import msgspec


def png(width: int = 30, height: int = 20, shows: bytes = b"") -> bytes:
    """A PNG with a header and some content; nothing decodes it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"tEXt", b"shows " + shows)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def segment(marker: int, content: bytes) -> bytes:
    """A segment of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def frame(width: int, height: int, marker: int = 0xC0) -> bytes:
    """A JPEG's frame header."""
    return segment(marker, struct.pack(">BHHB", 8, height, width, 3) + bytes(9))


def jpeg(width: int = 30, height: int = 20, before: bytes = b"") -> bytes:
    """A JPEG up to its first scan."""
    start = b"\xff\xd8" + segment(0xE0, b"JFIF\0" + bytes(9))
    return start + before + frame(width, height) + segment(0xDA, bytes(10)) + bytes(40)


def gif(width: int = 30, height: int = 20) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + bytes(60)


def webp(kind: bytes, width: int = 30, height: int = 20) -> bytes:
    """A WebP: `VP8 `, `VP8L` or `VP8X`."""
    if kind == b"VP8X":
        both = (width - 1) | (height - 1) << 24
        body = bytes(4) + both.to_bytes(6, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
    else:
        body = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    chunk = kind + struct.pack("<I", len(body)) + body + bytes(40)
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def data_url(file: bytes, kind: str = "image/png") -> str:
    """The file as a URL."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def user(*parts: str | bytes) -> dict[str, object]:
    """A message of texts, files and URLs (texts that begin with `url:`)."""
    content: list[dict[str, object]] = []
    for part in parts:
        if isinstance(part, bytes):
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
        elif part.startswith("url:"):
            content.append({"type": "image_url", "image_url": {"url": part[4:], "detail": "low"}})
        else:
            content.append({"type": "text", "text": part})
    return msgspec.to_builtins({"role": "user", "content": content})
