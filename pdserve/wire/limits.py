"""Every bound of the wire, with unit and reason.

Owned by whoever makes connections; a connection never changes its limits. Bounds on what an
unauthenticated peer may send are constants: no configuration loosens them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.wire.header import HEADER_BYTES, Kind

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
    "META",
    "UNKNOWN",
    "Limits",
]

HANDSHAKE_BODY: Final[Bytes] = 1024
"""One frame before authentication: a nonce, a proof and three names fit four times."""
HANDSHAKE_FRAMES: Final = 2
"""Each side of a handshake sends two; so an unauthenticated peer gets half a page read."""
HANDSHAKE_BYTES: Final[Bytes] = HANDSHAKE_FRAMES * (HEADER_BYTES + HANDSHAKE_BODY)
"""All that is read from a peer before it is authenticated, beyond one read of the socket."""

LARGE: Final[Bytes] = 16 * 1024
"""A body at least this long, cut by a read, is filled in place instead of joined from pieces."""
FRAME_COST: Final = 128
"""Credit that a DATA frame costs beyond its body: one number then bounds bytes and frames."""
MAX_STREAMS: Final = 1 << 16
"""Slots of one side of a connection: what 16 bits of a stream id can name."""

UNKNOWN: Final = -1
"""In a table of limits: this kind has no business here."""

IGNORED_BODY: Final[Bytes] = 4096
"""An unknown frame that may be ignored is read whole before it is dropped."""
META: Final[Bytes] = 4096
"""The msgpack part of a raw DATA frame."""

_SMALL: Final[Bytes] = 4096
_SPARE: Final[Bytes] = 256
"""Kinds whose header says all; the room is for fields of later versions."""


def _table(bounds: Mapping[int, Bytes]) -> tuple[int, ...]:
    return tuple(bounds.get(kind, UNKNOWN) for kind in range(256))


HANDSHAKE_TABLE: Final = _table(
    dict[int, int].fromkeys(range(Kind.HELLO, Kind.REFUSE + 1), HANDSHAKE_BODY)
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one authenticated peer may ask of one connection."""

    body: Bytes = 4 << 20
    """Body of a TELL, REQUEST, RESPONSE, OPEN or DATA frame. A prompt of a million tokens fits;
    what is larger travels as a stream of pieces. One such frame delays those behind it."""
    pending: int = 4096
    """Requests we have under way with the peer; one more is `Overloaded`."""
    incoming: int = 8192
    """Requests and streams the peer has under way with us; one more is answered `Overloaded`."""
    streams: int = 4096
    """Streams we have open to the peer; one more is `Overloaded`."""
    window: int = 64 * 1024
    """Credit granted per stream unless its owner says otherwise."""
    least_window: int = 4096
    """A stream that cannot get this much of the budget is refused instead of crawling."""
    budget: int = 16 << 20
    """Credit granted to the peer over all streams: the most its data can occupy here."""
    unsent: Bytes = 8 << 20
    """Bytes waiting for a peer that reads slowly; a further request or tell is `Overloaded`."""
    unsent_hard: Bytes = 64 << 20
    """Answers and control frames may go this far; then the connection ends."""

    def __post_init__(self) -> None:
        if self.pending + self.streams >= MAX_STREAMS:
            raise ValueError(f"requests and streams together must stay under {MAX_STREAMS}")
        if min(self.body, self.unsent) < LARGE:
            raise ValueError(f"bounds on bytes must not be under {LARGE}")

    def table(self) -> tuple[int, ...]:
        """The longest body of each kind on an authenticated connection."""
        carriers: tuple[int, ...] = (Kind.TELL, Kind.REQUEST, Kind.RESPONSE, Kind.OPEN, Kind.DATA)
        words: tuple[int, ...] = (Kind.GOAWAY, Kind.ERROR, Kind.RESET)
        numbers: tuple[int, ...] = (
            Kind.PING,
            Kind.PONG,
            Kind.BULK,
            Kind.CANCEL,
            Kind.END,
            Kind.CREDIT,
        )
        return _table(
            dict.fromkeys(carriers, self.body)
            | dict.fromkeys(words, _SMALL)
            | dict.fromkeys(numbers, _SPARE)
        )
