"""A publisher and a reader joined by nothing but two lists of messages, and a model beside them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded
from pdserve.runtime.topics.config import LogConfig
from pdserve.runtime.topics.publisher import LogFeed, LogPublisher
from pdserve.runtime.topics.reader import LogReader
from pdserve.runtime.topics.replicated_set import Delta, SetLog, SetView, mix
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

SMALL = LogConfig(
    ring_bytes=2000,
    ring_events=20,
    pinned=2,
    batch_bytes=300,
    batch_events=3,
    snapshots=2,
    watermark_batches=4,
)


def digest_of(items: Mapping[bytes, bytes]) -> int:
    """From scratch."""
    digest = 0
    for key, value in items.items():
        digest ^= mix(key, value)
    return digest


class Publishing:
    """A set and its log; remembers the state before each event."""

    def __init__(self, epoch: int, config: LogConfig = SMALL) -> None:
        self.set = SetLog()
        self.log = LogPublisher((1, epoch), self.set, config)
        self.states: dict[int, dict[bytes, bytes]] = {0: {}}
        self.set.connect(self._append, lambda: None)

    def _append(self, event: bytes) -> None:
        self.log.append(event)
        self.states[self.log.head] = dict(self.set.items)


class Reading:
    """A reader and the two directions of its stream."""

    def __init__(self, publishing: Publishing, now: float = 0.0) -> None:
        self.publishing = publishing
        self.changed: dict[bytes, bytes] = {}  # as a listener of the view sees it
        self.view = SetView(self._on_change)
        self.reader = LogReader(self.view)
        self.down: deque[bytes] = deque()
        self.up: deque[bytes] = deque()
        self.ended = 0
        self.feed: LogFeed
        self.open(now)

    def _on_change(self, puts, drops) -> None:
        for key in drops:
            del self.changed[key]
        for key, value in puts.items():
            assert self.changed.get(key) != value, "told of what did not change"
            self.changed[key] = value

    def open(self, now: float) -> None:
        """A new stream, to the publisher there is now."""
        self.down.clear()
        self.up.clear()
        self.feed = self.publishing.log.feed(self.reader.resume(), now)

    def reset(self, now: float) -> None:
        """The stream is lost, and whatever was on it."""
        self.feed.close()
        self.open(now)

    def pump(self, now: float, credit: int) -> int:
        """Send up to `credit` messages; returns how many."""
        for sent in range(credit):
            try:
                message = self.feed.poll(now)
            except Overloaded:
                self.ended += 1
                self.reset(now)
                return credit
            if message is None:
                return sent
            self.down.append(message)
        return credit

    def deliver(self, count: int, now: float) -> None:
        for _ in range(min(count, len(self.down))):
            answer = self.reader.hear(self.down.popleft())
            if answer is not None:
                self.up.append(answer)
        while self.up:
            self.feed.hear(self.up.popleft(), now)

    def settle(self, now: float) -> float:
        """Let everything through until nothing more happens but watermarks; returns the time."""
        for _ in range(400):
            while self.pump(now, 50):
                self.deliver(len(self.down), now)
            now += 0.5
            before = self.publishing.log.watermarks
            now += 1.0
            self.pump(now, 50)
            self.deliver(len(self.down), now)
            if self.level and self.publishing.log.watermarks > before:
                return now
        raise AssertionError("it does not settle")

    @property
    def level(self) -> bool:
        """The reader has all there is, as far as it knows."""
        return self.reader.live and self.reader.next == self.publishing.log.head

    def check(self) -> None:
        """What holds at any time, as long as nobody meddled with the view."""
        assert self.view.digest() == digest_of(self.view.items)
        assert self.changed == self.view.items
        if self.reader.live:
            assert self.view.items == self.publishing.states[self.reader.next]

    def plant(self, key: bytes, value: bytes) -> None:
        """Make the view differ from the log, behind the reader's back."""
        self.view.apply(encode(Delta(False, {key: value})))
