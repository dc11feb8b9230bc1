"""Every time and bound of topics, with unit, effect and the default's reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["LogConfig", "TopicsConfig"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """One log at its publisher."""

    ring_bytes: Bytes = 4 << 20
    """Events kept for replay; a reader further behind than this is told that it lags."""
    ring_events: int = 1 << 16
    """The same bound as a count, for small events."""
    pinned: int = 4
    """The ring may grow to this many times its bounds while snapshots are under way; then those
    begin anew. Bounds what a reader that takes its snapshot slowly can cost."""
    event_bytes: Bytes = 1 << 20
    """The longest event; far below what one frame may hold."""
    batch_bytes: Bytes = 64 * 1024
    """Events of one message; one that is longer travels alone."""
    batch_events: int = 256
    snapshots: int = 4
    """Readers that take a snapshot at a time; others wait. Each may hold a copy of the set."""
    stalled: Seconds = 5.0
    """A reader that takes nothing for this long gives its slot to one that waits."""

    watermark_interval: Seconds = 1.0
    """A reader that has everything is told so this often."""
    watermark_batches: int = 64
    """And at least once in so many messages, if it has everything by then."""

    retry_first: Seconds = 0.1
    """Before a reader's second snapshot; doubles with each further one."""
    retry_most: Seconds = 5.0
    attempts: int = 8
    """Snapshots in a row that did not help; then the stream ends and its reader comes back with
    its own back-off."""
    healthy: Seconds = 30.0
    """This long after a snapshot, the next one counts as the first again."""


@dataclass(frozen=True, slots=True)
class TopicsConfig:
    """All topics of one node."""

    log: LogConfig = field(default_factory=LogConfig)
    subscribers: int = 1024
    """Of one topic; one more is refused as overloaded."""
    link_timeout: Seconds = 5.0
    """For a connection to a publisher."""
    log_window: int = 64 * 1024
    """Credit for a log's publisher: with one message beyond it, the most that a reader applies in
    one turn of its event loop."""
    state_window: int = 1
    """Credit for a value's publisher: one frame, so that the next value to travel is chosen when
    the last one has arrived."""
    resume_window: int = 4096
    """Credit for what a log's reader says: one request at a time, a few dozen bytes each."""
    linger: Seconds = 0.01
    """A change of a `SetLog` that nobody flushed is published after this."""
