"""Publishes a log: numbered events, a ring of the latest ones, and each reader's position in it.

Readers have no queues: a `LogFeed` is a position in the one ring, so a hundred slow readers cost no
more memory than one. A reader that falls out of the ring gets `Lagged` and resumes with a
snapshot. While a snapshot is being sent, the ring keeps the later events up to a harder bound;
beyond that the snapshot restarts, after a longer pause each time.

Events are opaque bytes. Plain synchronous code: the owner of a feed calls `poll` whenever there is
credit, and again at `due`. Owned by the publishing node (`service`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.backoff import backoff_delay
from pdserve.errors import Overloaded, PayloadTooLarge
from pdserve.runtime.topics.messages import (
    CHUNK_BYTES,
    Begin,
    CatchUpMode,
    EventBatch,
    Lagged,
    SnapshotChunk,
    SnapshotEnd,
    Watermark,
    decode_resume,
)
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Bytes, Seconds
    from pdserve.runtime.topics.config import LogConfig
    from pdserve.runtime.topics.messages import LogEpoch, Resume
    from pdserve.wire.parser import Buffer

__all__ = ["LogFeed", "LogPublisher", "LogSource"]

_OVERHEAD: Final[Bytes] = 64
"""Memory of an event besides its bytes."""
_SLOT_WAIT: Final[Seconds] = 0.1
"""Interval at which a reader asks again for a snapshot slot."""


class LogSource(Protocol):
    """The state that the events add up to. Both methods describe it after the last appended event,
    and before any event that is not yet appended."""

    def snapshot(self) -> Iterator[bytes]:
        """The state as of this call, in pieces of at most `CHUNK_BYTES`. Changes made while the
        pieces are taken are not in them."""
        ...

    def digest(self) -> int:
        """64-bit digest of the state; equal states have equal digests. Cheap."""
        ...


class LogPublisher:
    """One life of one log."""

    def __init__(self, epoch: LogEpoch, source: LogSource, config: LogConfig) -> None:
        self.epoch = epoch
        self.source = source
        self.config = config
        self.head = 0
        """Number of the next event."""
        self.oldest = 0
        """Number of the oldest event in the ring."""
        self.bytes: Bytes = 0
        """What the ring holds."""
        self.changes = 0
        """Number of changes of the source, with those whose event was too large."""
        self.pins: dict[LogFeed, None] = {}
        """Readers with a snapshot under way, or not yet past what came after it."""
        self.replays = self.snapshots = self.restarts = self.lagged = self.watermarks = 0
        self._ring: dict[int, bytes] = {}
        self._encoded: tuple[int, int, bytes] = (-1, -1, b"")  # the last batch: first, end, bytes

    def append(self, event: bytes) -> None:
        """Append an event that has changed the source's state. Errors: `PayloadTooLarge`; it is not
        appended."""
        self.changes += 1
        size = len(event)
        if size > self.config.event_bytes:
            raise PayloadTooLarge(f"an event of {size} bytes is too large for a log")
        self._ring[self.head] = event
        self.head += 1
        self.bytes += size + _OVERHEAD
        if self.bytes > self.config.ring_bytes or self.head - self.oldest > self.config.ring_events:
            self._trim()

    def _trim(self) -> None:
        """Drop the oldest events down to the bounds, or down to the harder bounds what snapshots
        still need."""
        config, ring = self.config, self._ring
        floor = min((feed.next for feed in self.pins), default=self.head)
        most_bytes, most_events = config.ring_bytes, config.ring_events
        while self.bytes > most_bytes or self.head - self.oldest > most_events:
            if self.oldest >= floor:
                floor = self.head
                most_bytes, most_events = most_bytes * config.pinned, most_events * config.pinned
                continue
            self.bytes -= len(ring.pop(self.oldest)) + _OVERHEAD
            self.oldest += 1

    def feed(self, resume: Resume, now: Seconds) -> LogFeed:
        """Add a reader. Close the feed when the reader is gone."""
        feed = LogFeed(self)
        feed.resume(resume, now)
        return feed

    def batch(self, first: int) -> tuple[int, bytes]:
        """One message with the events from `first` on, as many as fit: (number after the last,
        message). Encoded once for all readers at the same position."""
        if self._encoded[0] != first:
            end, size, ring = first, 0, self._ring
            last = min(self.head, first + self.config.batch_events)
            while end < last and (size := size + len(ring[end])) <= self.config.batch_bytes:
                end += 1
            end = max(end, first + 1)
            events = [ring[number] for number in range(first, end)]
            self._encoded = (first, end, encode(EventBatch(self.epoch, first, events)))
        return self._encoded[1:]

    def free_slot(self, now: Seconds) -> bool:
        """Take the snapshot slot of a reader that has stalled; False: there is none."""
        for feed in self.pins:
            if now - feed.polled >= self.config.stalled:
                feed.give_way(now)
                return True
        return False

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the ring's size."""
        return {
            "events": self.head,
            "ring_events": self.head - self.oldest,
            "ring_bytes": self.bytes,
            "replays": self.replays,
            "snapshots": self.snapshots,
            "snapshot_restarts": self.restarts,
            "snapshots_under_way": len(self.pins),
            "lagged": self.lagged,
            "watermarks": self.watermarks,
        }


class _Stage(Enum):
    """What a reader is sent next."""

    BEGIN = 0
    """Sends `Begin`."""
    WAITING = 1
    """Sends nothing until `due`; then a snapshot begins."""
    SNAPSHOT = 2
    """Sends the snapshot's next piece."""
    EVENTS = 3
    """Sends events, or watermarks if there are none."""
    LAGGED = 4
    """Sends `Lagged`, until the reader resumes."""


class LogFeed:
    """One reader's position in a log."""

    def __init__(self, log: LogPublisher) -> None:
        self.due: Seconds | None = None
        """The time at which `poll` may have something although nothing was appended."""
        self.next = 0
        """Number of the first event that the reader was not sent."""
        self.polled: Seconds = 0.0
        """The time when the reader last took something, or could have."""
        self._log = log
        self._stage = _Stage.WAITING
        self._attempt = 0  # the reader's, to be repeated in `Begin`
        self._chunks: Iterator[bytes] = iter(())
        self._chunk = 0  # pieces sent
        self._sent: Bytes = 0  # of the snapshot
        self._piece_at: Seconds = 0.0  # its next piece
        self._digest = 0  # of the state in the snapshot
        self._tries = 0  # snapshots in a row
        self._tried: Seconds = 0.0
        self._not_before: Seconds = 0.0  # the next snapshot
        self._batches = 0  # since the last watermark
        self._say_again: Seconds = 0.0  # a watermark, or that it lags
        self._pause: Seconds = 0.0  # after the next watermark
        self._noted = -1  # changes of the source at the last poll

    # ------------------------------------------------------------------ from the reader

    def hear(self, body: Buffer, now: Seconds) -> None:
        """Handle a message of the reader. Errors: `ProtocolError`."""
        self.resume(decode_resume(body), now)

    def resume(self, resume: Resume, now: Seconds) -> None:
        """Start over from the reader's position."""
        self._drop_snapshot()
        self._attempt = resume.attempt
        position, log = resume.position, self._log
        if (
            position is not None
            and position.epoch == log.epoch
            and log.oldest <= position.next <= log.head
        ):
            self.next = position.next
            self._stage = _Stage.BEGIN
        else:
            self._want_snapshot(now)

    def close(self) -> None:
        """The reader is gone."""
        self._drop_snapshot()
        self._stage = _Stage.LAGGED

    # ------------------------------------------------------------------ to the reader

    def poll(self, now: Seconds) -> bytes | None:
        """The next message for the reader, to be sent at once; None: nothing until `due` or the
        next event.

        Errors: `Overloaded` after too many unsuccessful snapshots, which ends the stream; and what
        the source raises.
        """
        self.due = None
        self.polled = now
        if self._stage is _Stage.EVENTS:
            return self._poll_events(now)
        if self._stage is _Stage.SNAPSHOT:
            return self._poll_snapshot(now)
        if self._stage is _Stage.WAITING:
            return self._poll_waiting(now)
        if self._stage is _Stage.LAGGED:
            return self._poll_lagged(now)
        return self._begin(now)

    def _begin(self, now: Seconds) -> bytes | None:
        log = self._log
        if self.next < log.oldest:  # it fell out of the ring before it heard the answer
            return self._lag(now)
        mode = CatchUpMode.LIVE if self.next == log.head else CatchUpMode.REPLAY
        log.replays += mode is CatchUpMode.REPLAY
        self._stage = _Stage.EVENTS
        self._batches = log.config.watermark_batches  # so that one comes as soon as possible
        return encode(Begin(self._attempt, log.epoch, mode, self.next))

    def _poll_events(self, now: Seconds) -> bytes | None:
        log = self._log
        if self.next < log.oldest:
            return self._restart(now) if self in log.pins else self._lag(now)
        if self._noted != log.changes:
            self._noted, self._pause = log.changes, log.config.watermark_interval
            self._say_again = min(self._say_again, now + self._pause)
        if self.next < log.head:
            self.next, message = log.batch(self.next)
            self._batches += 1
            return message
        log.pins.pop(self, None)
        if self._batches >= log.config.watermark_batches:
            self._say_again = now
        if not self._is_time(now, self._pause):
            return None
        self._pause = min(2 * self._pause, log.config.watermark_rest)
        self._batches = 0
        log.watermarks += 1
        return encode(Watermark(log.epoch, log.head, log.source.digest()))

    def _is_time(self, now: Seconds, pause: Seconds) -> bool:
        """True if a repeated message is due; the next one is due after `pause`."""
        if now < self._say_again:
            self.due = self._say_again
            return False
        self._say_again = now + pause
        return True

    def _lag(self, now: Seconds) -> bytes | None:
        """Drop everything that waits for the reader, and tell it that it lags until it resumes."""
        self._log.lagged += 1
        self._stage = _Stage.LAGGED
        self._say_again = now
        return self._poll_lagged(now)

    def _poll_lagged(self, now: Seconds) -> bytes | None:
        log = self._log
        again = self._is_time(now, log.config.watermark_interval)
        return encode(Lagged(log.oldest)) if again else None

    # ------------------------------------------------------------------ snapshots

    def _want_snapshot(self, now: Seconds) -> None:
        """Begin a snapshot at once the first time, and after longer and longer pauses if they do
        not help."""
        config = self._log.config
        if now - self._tried >= config.healthy:
            self._tries = 0
        self._not_before = now
        if self._tries:
            before = self._tries - 1
            self._not_before += backoff_delay(config.retry_first, config.retry_most, before)
        self._stage = _Stage.WAITING

    def _poll_waiting(self, now: Seconds) -> bytes | None:
        log = self._log
        if now < self._not_before:
            self.due = self._not_before
            return None
        if len(log.pins) >= log.config.snapshots and not log.free_slot(now):
            self.due = now + _SLOT_WAIT
            return None
        if self._tries >= log.config.attempts:
            raise Overloaded(
                f"{self._tries} snapshots in a row did not catch up with the log", retry_after=1.0
            )
        self._tries += 1
        self._tried = now
        self._stage = _Stage.SNAPSHOT
        self.next = log.head
        log.pins[self] = None
        log.snapshots += 1
        self._chunks, self._chunk = log.source.snapshot(), 0
        self._sent, self._piece_at = 0, now
        self._digest = log.source.digest()
        return encode(Begin(self._attempt, log.epoch, CatchUpMode.SNAPSHOT, self.next))

    def _poll_snapshot(self, now: Seconds) -> bytes | None:
        if self.next < self._log.oldest:
            return self._restart(now)
        if now < self._piece_at:
            self.due = self._piece_at
            return None
        data = next(self._chunks, None)
        if data is not None:
            if len(data) > CHUNK_BYTES:
                raise PayloadTooLarge(
                    f"a snapshot piece has {len(data)} bytes; the limit is {CHUNK_BYTES}"
                )
            self._chunk += 1
            self._pace(len(data))
            return encode(SnapshotChunk(self._chunk - 1, data))
        self._chunks = iter(())
        self._stage = _Stage.EVENTS
        self._batches = self._log.config.watermark_batches
        return encode(SnapshotEnd(self._chunk, self._digest))

    def _pace(self, size: Bytes) -> None:
        """Set the time of the next piece."""
        config = self._log.config
        self._sent += size
        beyond = max(0, self._sent - config.snapshot_burst)
        self._piece_at = self._tried + beyond / config.snapshot_rate

    def _restart(self, now: Seconds) -> bytes | None:
        """Begins another snapshot, because more events came during this one than can be kept."""
        self._log.restarts += 1
        self._drop_snapshot()
        self._want_snapshot(now)
        return self._poll_waiting(now)

    def give_way(self, now: Seconds) -> None:
        """Lose the snapshot slot to another reader; this reader's snapshot starts over later."""
        if self._stage is _Stage.SNAPSHOT:
            self._log.restarts += 1
            self._want_snapshot(now)
        self._drop_snapshot()

    def _drop_snapshot(self) -> None:
        self._log.pins.pop(self, None)
        self._chunks = iter(())
