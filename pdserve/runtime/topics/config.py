"""Times and bounds of topics, with unit, effect and the default's reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["LogConfig", "TopicsConfig"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Settings of one log at its publisher."""

    ring_bytes: Bytes = 4 << 20
    """Bytes of events kept for replay; a reader further behind gets `Lagged`."""
    ring_events: int = 1 << 16
    """Most events kept for replay, for logs of small events."""
    pinned: int = 4
    """Factor by which the ring may exceed its bounds while snapshots are sent; beyond it those
    restart. Bounds the memory that a slow reader can cost.
    """
    event_bytes: Bytes = 1 << 20
    """Longest event; far below the frame limit."""
    batch_bytes: Bytes = 64 * 1024
    """Most bytes of events in one message; a longer event travels alone."""
    batch_events: int = 256
    snapshots: int = 4
    """Readers that take a snapshot at a time; others wait. Each may hold a copy of the set."""
    snapshot_burst: Bytes = 4 << 20
    """Bytes of a snapshot that are sent as fast as the reader takes them: half a million block
    hashes, more than a device holds."""
    snapshot_rate: float = 1.6e6
    """Bytes per second after those: 200,000 block hashes, which take a router a fraction of its
    time. A disk may hold millions.
    """
    stalled: Seconds = 5.0
    """A reader that takes nothing for this long gives its snapshot slot to a waiting one."""

    watermark_interval: Seconds = 1.0
    """Interval of watermarks to a reader that has every event; doubles while nothing changes."""
    watermark_rest: Seconds = 32.0
    """Longest interval that the doubling reaches: a log at rest costs next to nothing."""
    watermark_batches: int = 64
    """Messages after which a watermark is due, if the reader has every event then."""

    retry_first: Seconds = 0.1
    """Pause before a reader's second snapshot; doubles with each further one."""
    retry_most: Seconds = 5.0
    attempts: int = 8
    """Unsuccessful snapshots in a row after which the stream ends; the reader reconnects with its
    own back-off.
    """
    healthy: Seconds = 30.0
    """Time after a snapshot from which the next one counts as the first again."""


@dataclass(frozen=True, slots=True)
class TopicsConfig:
    """Settings of all topics of one node."""

    log: LogConfig = field(default_factory=LogConfig)
    subscribers: int = 1024
    """Most subscribers of one topic; one more is refused as overloaded."""
    link_timeout: Seconds = 5.0
    """Timeout of a connection to a publisher."""
    log_window: int = 64 * 1024
    """Credit for a log's publisher. With one message beyond it, this is the most that a reader
    applies in one turn of its event loop.
    """
    state_window: int = 1
    """Credit for a value's publisher: one frame, so that the next value is chosen when the last one
    has arrived.
    """
    resume_window: int = 4096
    """Credit for messages of a log's reader: one request at a time, a few dozen bytes each."""
    linger: Seconds = 0.01
    """A change of a `SetLog` that was not flushed is published after this."""
