"""Messages between publishers and readers on a topic's stream.

A stream is opened with `Subscribe`. On a state's stream each further item is the value, as its
owner encoded it. On a log's:

    Resume                       reader: start from here; also inside `Subscribe`
    Begin                        publisher: what follows, in answer to the `Resume` of that number
    SnapshotChunk SnapshotEnd    the state as of `Begin.next`
    EventBatch                   events, numbered
    Watermark                    the reader has every event; head and digest of the state
    Lagged                       the reader was too slow and its events were dropped: resume
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
    "Begin",
    "CatchUpMode",
    "Digest",
    "EventBatch",
    "Lagged",
    "LogEpoch",
    "Position",
    "Resume",
    "SnapshotChunk",
    "SnapshotEnd",
    "Subscribe",
    "Watermark",
    "decode_publisher_message",
    "decode_resume",
    "decode_subscribe",
]

STATE: Final = 0x0210
"""Method number of a state's stream."""
LOG: Final = 0x0211
"""Method number of a log's stream."""

CHUNK_BYTES: Final[Bytes] = 256 * 1024
"""Longest chunk of a snapshot."""

Counter = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[int, Meta(ge=0)]
LogEpoch = tuple[Counter, Counter]
"""One life of a log: its node's epoch, and its number within that process."""


class CatchUpMode(IntEnum):
    """How a reader catches up."""

    LIVE = 0
    """The reader has every event."""
    REPLAY = 1
    """The missing events are in the ring."""
    SNAPSHOT = 2
    """The reader needs a snapshot."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The reader has applied every event of this log before number `next`."""

    epoch: LogEpoch
    next: Counter


class Resume(msgspec.Struct, frozen=True, array_like=True):
    attempt: Counter
    """Counted up by the reader, to tell the answer from earlier messages under way."""
    position: Position | None = None
    """The reader's position; None: it has no state, or none it trusts."""


class Subscribe(msgspec.Struct, frozen=True, array_like=True):
    topic: Annotated[str, Meta(min_length=1, max_length=255)]
    resume: Resume | None = None
    """The reader's `Resume`; for logs only."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    attempt: Counter
    epoch: LogEpoch
    mode: CatchUpMode
    next: Counter
    """Number of the first event to come; a snapshot is the state before it."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    epoch: LogEpoch
    first: Counter
    """Number of the first event; the others follow without gaps."""
    events: list[bytes]


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag=3):
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
    """Digest of the state before `head`."""


PublisherMessage = Begin | EventBatch | SnapshotChunk | SnapshotEnd | Lagged | Watermark

decode_subscribe: Callable[[Buffer], Subscribe] = decoder(Subscribe)
decode_resume: Callable[[Buffer], Resume] = decoder(Resume)
decode_publisher_message: Callable[[Buffer], PublisherMessage] = decoder(
    cast("Any", PublisherMessage)
)
"""Decodes a publisher's message. Raises `ProtocolError`."""
