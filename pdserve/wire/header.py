"""Defines the 16-byte frame header, and the numbers of all frame kinds and flags.

    0        4     5      6      8         12        16
    | length | kind | flags | tag | stream | value | body: `length` bytes
      u32      u8     u8      u16   u32      u32            all big-endian

The meaning of `tag`, `stream` and `value` depends on the kind; `FrameKind` documents it. Numbers
are never reused; `docs/protocol.md` holds the rules. This file knows neither states nor bodies.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final

__all__ = ["HEADER", "HEADER_BYTES", "FrameFlag", "FrameKind", "Header"]

HEADER: Final = struct.Struct(">IBBHII")
HEADER_BYTES: Final = HEADER.size

Header = tuple[int, int, int, int, int, int]
"""(length, kind, flags, tag, stream, value)."""


class FrameKind(IntEnum):
    """Frame types. Those below 16 are sent before authentication and only then."""

    HELLO = 1
    """Dialler, first: versions, features, nonce."""
    CHALLENGE = 2
    """Acceptor: version and features chosen, nonce."""
    AUTH = 3
    """Dialler: its proof and its identity."""
    READY = 4
    """Acceptor: its proof and its identity. After it, only the frames from PING on are sent."""
    REFUSE = 5
    """Acceptor, instead of any of the above: the reason. The connection ends."""

    PING = 16
    """value: any number."""
    PONG = 17
    """value: the ping's value."""
    GOAWAY = 18
    """Body: `GoAway`. The sender starts nothing more on this connection."""
    BULK = 19
    """Acceptor: asks the dialler to dial the bulk connection."""

    TELL = 32
    """tag: method. A one-way message."""
    REQUEST = 33
    """tag: method, value: milliseconds left. `stream` is the sender's slot."""
    RESPONSE = 34
    """Ends a request."""
    ERROR = 35
    """Body: `Failure`. Ends a request."""
    CANCEL = 36
    """Asks the other side to end a request, or its half of a stream whose other half has ended."""

    OPEN = 48
    """tag: method, value: credit granted to the other side. `stream` is the sender's slot."""
    DATA = 49
    """One item of a stream."""
    END = 50
    """The sender's half of the stream is complete."""
    RESET = 51
    """Body: `Failure`. Ends the sender's half unfinished; the sender also stops reading the other
    half."""
    CREDIT = 52
    """value: credit granted in addition."""


class FrameFlag(IntFlag):
    """Bits of the flags byte."""

    RAW = 0x01
    """Reserved: no release sends it. A DATA frame with it is a violation."""
    LAST = 0x02
    """OPEN, DATA: the sender's half of the stream ends with this frame."""
    IGNORABLE = 0x80
    """A receiver that does not know the kind skips the frame instead of failing."""
