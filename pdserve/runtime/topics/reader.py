"""Reads a log: applies each event once, in order, and notices when that fails.

    WAITING   it has asked to resume; only the answer to that request counts
    LOADING   a snapshot is arriving, beside the state in use
    LIVE      events are applied as they arrive

An event number that is too high is a gap: the reader asks to resume. A watermark with a higher
number reveals events lost at the end; one with another digest reveals that the states differ, for
whatever reason, and the reader asks for a snapshot. A log of another life begins with an empty
state.

It has no clock: the publisher paces snapshots. Plain synchronous code, owned by `service`; it knows
no streams, and events only as what `LogTarget` applies.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.errors import ProtocolError
from pdserve.runtime.topics.messages import (
    Begin,
    CatchUpMode,
    EventBatch,
    Lagged,
    Position,
    Resume,
    SnapshotChunk,
    SnapshotEnd,
    Watermark,
    decode_publisher_message,
)
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from pdserve.runtime.topics.messages import LogEpoch
    from pdserve.wire.parser import Buffer

__all__ = ["LogReader", "LogTarget", "Stage"]

_PATIENCE: Final = 2
"""Watermarks without an answer to `Resume` before it is repeated; doubles up to `_MOST`: one or two
may have been under way."""
_MOST: Final = 16
_NO_MARK: Final = (-1, 0)


class LogTarget(Protocol):
    """What events are applied to. After an exception the reader starts over with a snapshot."""

    def reset(self) -> None:
        """Begin a new state beside the present one; it replaces any that was begun before."""
        ...

    def load(self, chunk: bytes) -> None:
        """Add a piece of a snapshot to the new state."""
        ...

    def commit(self) -> None:
        """The new state is complete: it replaces the present one at once."""
        ...

    def apply(self, event: bytes) -> None:
        """Apply an event to the present state."""
        ...

    def digest(self) -> int:
        """Digest of the present state, as `LogSource.digest`."""
        ...


class Stage(Enum):
    """The reader's stage; see the module's docstring."""

    WAITING = 0
    LOADING = 1
    LIVE = 2


class LogReader:
    """One reader of one publisher's log, over any number of streams."""

    def __init__(self, target: LogTarget) -> None:
        self.target = target
        self.stage = Stage.WAITING
        self.epoch: LogEpoch | None = None
        self.next = 0
        """Number of the first event that was not applied."""
        self.applied = self.duplicates = self.gaps = self.lagged = 0
        self.replays = self.snapshots = self.divergences = self.epochs = self.repeats = 0
        self._trusted = False  # the target's state is the log's before `next`
        self._attempt = 0
        self._coming = 0  # `next` of the snapshot that comes in
        self._chunks = 0
        self._unanswered = 0
        self._patience = _PATIENCE
        self._mark = _NO_MARK

    @property
    def live(self) -> bool:
        """True if the state follows the publisher's."""
        return self.stage is Stage.LIVE

    # ------------------------------------------------------------------ asking

    def resume(self) -> Resume:
        """The message to open a stream with; earlier messages under way are ignored from now on."""
        self._attempt += 1
        self._unanswered = 0
        self.stage = Stage.WAITING
        position = None
        if self._trusted and self.epoch is not None:
            position = Position(self.epoch, self.next)
        return Resume(self._attempt, position)

    def lost(self) -> None:
        """The stream has ended."""
        self.stage = Stage.WAITING

    def forget(self) -> None:
        """The publisher is gone: empty the state."""
        self.target.reset()
        self.target.commit()
        self.epoch = None
        self.next = 0
        self._trusted = False
        self._mark = _NO_MARK
        self.stage = Stage.WAITING

    def recheck(self) -> bytes | None:
        """Compare the state with the last watermark once more, since those are rare while the log
        rests; returns the message to send to the publisher, if any."""
        head, digest = self._mark
        if self.live and head == self.next and digest != self.target.digest():
            return self._diverged()
        return None

    # ------------------------------------------------------------------ hearing

    def hear(self, body: Buffer) -> bytes | None:
        """Handle one message; returns the message to send to the publisher, if any.

        Errors: `ProtocolError`, and what the target raises; then start over with `resume` on
        another stream.
        """
        said = decode_publisher_message(body)
        if isinstance(said, Begin):
            return self._begin(said)
        if self.stage is Stage.WAITING:
            return self._lose_patience() if isinstance(said, Watermark | Lagged) else None
        if isinstance(said, EventBatch):
            return self._batch(said)
        if isinstance(said, SnapshotChunk):
            return self._chunk(said)
        if isinstance(said, SnapshotEnd):
            return self._snapshot_end(said)
        if isinstance(said, Watermark):
            return self._watermark(said)
        self.lagged += 1
        return encode(self.resume())

    def _begin(self, said: Begin) -> bytes | None:
        if said.attempt != self._attempt:
            return None  # it answers what was asked before
        if said.epoch != self.epoch:
            self._new_epoch(said.epoch)
        self._patience = _PATIENCE
        if said.mode is CatchUpMode.SNAPSHOT:
            self.target.reset()
            self._coming, self._chunks = said.next, 0
            self.stage = Stage.LOADING
        elif self._trusted and said.next == self.next:
            self.replays += said.mode is CatchUpMode.REPLAY
            self.stage = Stage.LIVE
        elif said.next > self.next or not self._trusted:
            raise ProtocolError("the publisher continues from another position than the reader's")
        return None  # else: the same answer once more, after events

    def _new_epoch(self, epoch: LogEpoch) -> None:
        if self.epoch is not None:
            self.epochs += 1
            self.forget()
        self.epoch = epoch

    def _batch(self, said: EventBatch) -> bytes | None:
        known = self.next - said.first
        if self.stage is Stage.LOADING or known < 0 or said.epoch != self.epoch:
            return self._gap()
        events = said.events
        if known:
            self.duplicates += min(known, len(events))
            events = events[known:]
        apply = self.target.apply
        self._trusted = False  # unless all of it could be applied
        for event in events:
            apply(event)
        self._trusted = True
        self.next += len(events)
        self.applied += len(events)
        return None

    def _chunk(self, said: SnapshotChunk) -> bytes | None:
        if self.stage is Stage.LIVE or said.index < self._chunks:
            self.duplicates += 1
            return None
        if said.index > self._chunks:
            return self._gap()
        self.target.load(said.data)
        self._chunks += 1
        return None

    def _snapshot_end(self, said: SnapshotEnd) -> bytes | None:
        if self.stage is Stage.LIVE:
            self.duplicates += 1
            return None
        if said.chunks != self._chunks:
            return self._gap()
        self._trusted = False
        self.target.commit()
        self._trusted = True
        self.next = self._coming
        self.snapshots += 1
        self.stage = Stage.LIVE
        self._mark = (self.next, said.digest)
        return None if self.target.digest() == said.digest else self._diverged()

    def _watermark(self, said: Watermark) -> bytes | None:
        if self.stage is Stage.LOADING or said.epoch != self.epoch or said.head > self.next:
            return self._gap()
        self._mark = (said.head, said.digest)
        if said.head == self.next and said.digest != self.target.digest():
            return self._diverged()
        return None

    # ------------------------------------------------------------------ starting over

    def _gap(self) -> bytes:
        self.gaps += 1
        return encode(self.resume())

    def _diverged(self) -> bytes:
        self.divergences += 1
        self._trusted = False
        return encode(self.resume())

    def _lose_patience(self) -> bytes | None:
        """The publisher has nothing more to say, yet did not answer: the request or the answer was
        lost."""
        self._unanswered += 1
        if self._unanswered < self._patience:
            return None
        self._patience = min(_MOST, 2 * self._patience)
        self.repeats += 1
        return encode(self.resume())

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            "events": self.applied,
            "duplicates": self.duplicates,
            "gaps": self.gaps,
            "replays": self.replays,
            "snapshots": self.snapshots,
            "lagged": self.lagged,
            "divergences": self.divergences,
            "epochs": self.epochs,
            "repeats": self.repeats,
        }
