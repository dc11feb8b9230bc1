"""Bounds of the wire protocol, with unit and reason.

Connections get their limits when they are made and never change them. Bounds on what an
unauthenticated peer may send are constants: no configuration loosens them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.wire.header import HEADER_BYTES, FrameKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes

__all__ = [
    "FRAME_COST",
    "HANDSHAKE_BODY",
    "HANDSHAKE_BYTES",
    "HANDSHAKE_FRAMES",
    "HANDSHAKE_TABLE",
    "IGNORED_BODY",
    "LARGE",
    "MAX_STREAMS",
    "UNKNOWN",
    "Limits",
]

HANDSHAKE_BODY: Final[Bytes] = 1024
"""Largest body before authentication: a nonce, a proof and three names fit four times."""
HANDSHAKE_FRAMES: Final = 2
"""Most frames of each side of a handshake; from an unauthenticated peer half a page is read."""
HANDSHAKE_BYTES: Final[Bytes] = HANDSHAKE_FRAMES * (HEADER_BYTES + HANDSHAKE_BODY)
"""Most bytes read from a peer before it is authenticated, beyond one socket read."""

LARGE: Final[Bytes] = 16 * 1024
"""A body of at least this length that a read cuts is filled in place instead of joined from
pieces.
"""
FRAME_COST: Final = 128
"""Credit that a DATA frame costs beyond its body, so that one number bounds bytes and frames."""
MAX_STREAMS: Final = 1 << 16
"""Slots of one side of a connection: 16 bits of a stream id hold the slot."""

UNKNOWN: Final = -1
"""In a table of limits: this kind is not allowed."""

IGNORED_BODY: Final[Bytes] = 4096
"""Largest body of an unknown, ignorable frame; it is read whole and dropped."""

_SMALL: Final[Bytes] = 4096
_SPARE: Final[Bytes] = 256
"""Largest body of kinds that need only a header; later versions may add fields."""


def _table(bounds: Mapping[int, Bytes]) -> tuple[int, ...]:
    return tuple(bounds.get(kind, UNKNOWN) for kind in range(256))


HANDSHAKE_TABLE: Final = _table(
    dict[int, int].fromkeys(range(FrameKind.HELLO, FrameKind.REFUSE + 1), HANDSHAKE_BODY)
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one authenticated peer may use of one connection."""

    body: Bytes = 4 << 20
    """Largest body of a TELL, REQUEST, RESPONSE, OPEN or DATA frame. A prompt of a million tokens
    fits; larger data travels as a stream. One such frame delays the frames behind it.
    """
    pending: int = 4096
    """Most own requests under way at the peer; one more raises `Overloaded`."""
    incoming: int = 8192
    """Most requests and streams of the peer under way here; one more is answered `Overloaded`."""
    asked: Bytes = 64 << 20
    """Most bytes of the peer's request bodies under way here; one more is answered `Overloaded`. A
    full queue of ordinary prompts is a fraction of it.
    """
    asked_least: Bytes = 1 << 20
    """Share of the node's request bodies that is reserved for each peer."""
    streams: int = 4096
    """Most own streams open to the peer; one more raises `Overloaded`."""
    window: int = 64 * 1024
    """Default credit granted per stream."""
    least_window: int = 4096
    """A stream that cannot get this much of the budget is refused; with less it would be slow."""
    budget: int = 16 << 20
    """Credit granted to the peer over all streams: the most that its data can occupy here."""
    unsent: Bytes = 8 << 20
    """Bytes waiting for a slow peer at which a further request or tell raises `Overloaded`."""
    unsent_hard: Bytes = 64 << 20
    """Bytes up to which answers and control frames may still queue; beyond it the connection
    ends.
    """

    def __post_init__(self) -> None:
        if self.pending + self.streams >= MAX_STREAMS:
            raise ValueError(f"requests and streams together must stay under {MAX_STREAMS}")
        if min(self.body, self.unsent) < LARGE:
            raise ValueError(f"bounds on bytes must not be under {LARGE}")

    def table(self) -> tuple[int, ...]:
        """The largest body of each kind on an authenticated connection."""
        carriers: tuple[int, ...] = (
            FrameKind.TELL,
            FrameKind.REQUEST,
            FrameKind.RESPONSE,
            FrameKind.OPEN,
            FrameKind.DATA,
        )
        words: tuple[int, ...] = (FrameKind.GOAWAY, FrameKind.ERROR, FrameKind.RESET)
        numbers: tuple[int, ...] = (
            FrameKind.PING,
            FrameKind.PONG,
            FrameKind.BULK,
            FrameKind.CANCEL,
            FrameKind.END,
            FrameKind.CREDIT,
        )
        return _table(
            dict.fromkeys(carriers, self.body)
            | dict.fromkeys(words, _SMALL)
            | dict.fromkeys(numbers, _SPARE)
        )
