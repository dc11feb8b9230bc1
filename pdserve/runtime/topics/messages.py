"""What publishers and readers say to each other on a topic's stream.

A stream is opened with `Subscribe`. On a state's stream each further item is the value, as its
owner encoded it. On a log's:

    Resume                       reader: from here on, please; also inside `Subscribe`
    Begin                        publisher: what comes now, in answer to the `Resume` of that number
    Chunk SnapshotEnd            the state as of `Begin.next`
    Batch                        events, numbered
    Watermark                    you have everything, and this is what it amounts to
    Lagged                       you were too slow: what waited for you is dropped; resume
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from pdserve.wire.codec import decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes
    from pdserve.wire.parser import Buffer

__all__ = [
    "CHUNK_BYTES",
    "LOG",
    "STATE",
    "Batch",
    "Begin",
    "Chunk",
    "Digest",
    "Lagged",
    "LogEpoch",
    "Mode",
    "Position",
    "Resume",
    "SnapshotEnd",
    "Subscribe",
    "Watermark",
    "decode_resume",
    "decode_said",
    "decode_subscribe",
]

STATE: Final = 0x0210
"""The method number of a state's stream."""
LOG: Final = 0x0211
"""The method number of a log's stream."""

CHUNK_BYTES: Final[Bytes] = 256 * 1024
"""The longest piece of a snapshot."""

Counter = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[int, Meta(ge=0)]
LogEpoch = tuple[Counter, Counter]
"""One life of one log: its node's epoch, and which log it is of that process."""


class Mode(IntEnum):
    """How a reader catches up."""

    LIVE = 0
    """It has everything."""
    REPLAY = 1
    """What it misses is in the ring."""
    SNAPSHOT = 2
    """It starts over."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A reader has applied everything of this log before number `next`."""

    epoch: LogEpoch
    next: Counter


class Resume(msgspec.Struct, frozen=True, array_like=True):
    attempt: Counter
    """Raised by the reader, so that it knows the answer from what was under way before."""
    position: Position | None = None
    """None: the reader has nothing, or nothing it trusts."""


class Subscribe(msgspec.Struct, frozen=True, array_like=True):
    topic: Annotated[str, Meta(min_length=1, max_length=255)]
    resume: Resume | None = None
    """For logs."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    attempt: Counter
    epoch: LogEpoch
    mode: Mode
    next: Counter
    """Number of the first event to come; a snapshot is the state before it."""


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    epoch: LogEpoch
    first: Counter
    """Number of the first event; the others follow without gaps."""
    events: list[bytes]


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag=3):
    index: Counter
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


class SnapshotEnd(msgspec.Struct, frozen=True, array_like=True, tag=4):
    chunks: Counter
    digest: Digest


class Lagged(msgspec.Struct, frozen=True, array_like=True, tag=5):
    oldest: Counter
    """Number of the oldest event that can still be replayed."""


class Watermark(msgspec.Struct, frozen=True, array_like=True, tag=6):
    epoch: LogEpoch
    head: Counter
    """Number of the next event."""
    digest: Digest
    """Of the state before it."""


Said = Begin | Batch | Chunk | SnapshotEnd | Lagged | Watermark

decode_subscribe: Callable[[Buffer], Subscribe] = decoder(Subscribe)
decode_resume: Callable[[Buffer], Resume] = decoder(Resume)
decode_said: Callable[[Buffer], Said] = decoder(cast("Any", Said))
"""What a publisher said. Raises `ProtocolError`, as the other two do."""
