"""Where readers are in a log: replay, lag, snapshots and their pins, watermarks, all bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Overloaded, PayloadTooLarge, ProtocolError
from pdserve.runtime.topics.config import LogConfig
from pdserve.runtime.topics.messages import (
    CHUNK_BYTES,
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
from pdserve.runtime.topics.publisher import LogPublisher
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from pdserve.runtime.topics.messages import PublisherMessage
    from pdserve.runtime.topics.publisher import LogFeed

CONFIG = LogConfig(ring_events=10, batch_events=4, batch_bytes=1000, snapshots=1, pinned=3)
EPOCH = (7, 1)


class Source:
    """Five pieces; the digest is the number of events."""

    def __init__(self) -> None:
        self.pieces = [b"piece%d" % number for number in range(5)]
        self.count = 0

    def snapshot(self):
        return iter(list(self.pieces))

    def digest(self) -> int:
        return self.count


def make(events: int = 0, config: LogConfig = CONFIG) -> LogPublisher:
    log = LogPublisher(EPOCH, Source(), config)
    add(log, events)
    return log


def add(log: LogPublisher, events: int) -> None:
    for _ in range(events):
        assert isinstance(log.source, Source)
        log.source.count += 1
        log.append(b"event%d" % log.head)


def at(log: LogPublisher, number: int, now: float = 0.0) -> LogFeed:
    """A reader that has everything before `number`."""
    return log.feed(Resume(1, Position(EPOCH, number)), now)


def take(feed: LogFeed, now: float, most: int = 100) -> list[PublisherMessage]:
    """What it is sent."""
    said: list[PublisherMessage] = []
    while len(said) < most and (message := feed.poll(now)) is not None:
        said.append(decode_publisher_message(message))
    return said


def kinds(said: list[PublisherMessage]) -> str:
    return " ".join(type(one).__name__ for one in said)


def test_a_reader_with_everything_goes_on_live() -> None:
    log = make(3)
    feed = at(log, 3)
    assert take(feed, 0.0) == [Begin(1, EPOCH, CatchUpMode.LIVE, 3), Watermark(EPOCH, 3, 3)]
    add(log, 1)
    assert take(feed, 0.0) == [EventBatch(EPOCH, 3, [b"event3"])]
    assert log.replays == log.snapshots == 0


def test_a_reader_behind_gets_what_it_misses() -> None:
    log = make(8)
    said = take(at(log, 2), 0.0)
    assert kinds(said) == "Begin EventBatch EventBatch Watermark"
    assert said[0] == Begin(1, EPOCH, CatchUpMode.REPLAY, 2)
    events = [event for one in said if isinstance(one, EventBatch) for event in one.events]
    assert events == [b"event%d" % number for number in range(2, 8)]
    assert log.replays == 1


@pytest.mark.parametrize(
    "position",
    [None, Position((7, 2), 15), Position((8, 1), 15), Position(EPOCH, 4), Position(EPOCH, 21)],
)
def test_others_start_over(position: Position | None) -> None:
    log = make(20)
    said = take(log.feed(Resume(5, position), 0.0), 0.0)
    assert said[0] == Begin(5, EPOCH, CatchUpMode.SNAPSHOT, 20)
    assert said[1:6] == [SnapshotChunk(number, b"piece%d" % number) for number in range(5)]
    assert said[6:] == [SnapshotEnd(5, 20), Watermark(EPOCH, 20, 20)]


def test_batches_are_bounded_and_encoded_once() -> None:
    log = make(0, replace(CONFIG, ring_events=1000))
    for size in (400, 400, 400, 5000, 10, 10):
        log.append(bytes(size))
    feeds = [at(log, 0), at(log, 0)]
    said = take(feeds[0], 0.0)
    lengths = [[len(event) for event in one.events] for one in said if isinstance(one, EventBatch)]
    assert lengths == [[400, 400], [400], [5000], [10, 10]]
    assert [log.batch(0)[1] is log.batch(0)[1]] == [True]


def test_the_ring_is_bounded_by_count_and_bytes() -> None:
    log = make(100)
    assert (log.oldest, log.head) == (90, 100)
    log = make(0, replace(CONFIG, ring_bytes=10_000))
    for _ in range(10):
        log.append(bytes(3000))
    assert log.bytes <= 10_000
    assert log.head - log.oldest == 3


def test_one_event_has_a_bound() -> None:
    log = make()
    with pytest.raises(PayloadTooLarge):
        log.append(bytes(CONFIG.event_bytes + 1))
    assert log.head == 0


def test_a_reader_that_falls_out_is_told_until_it_resumes() -> None:
    log = make()
    feed = at(log, 0)
    take(feed, 0.0)
    add(log, 30)
    assert take(feed, 0.0) == [Lagged(20)]
    assert feed.due == 1.0
    add(log, 1)
    assert take(feed, 0.5) == []
    assert take(feed, 1.0) == [Lagged(21)]
    assert log.lagged == 1
    feed.hear(encode(Resume(2, Position(EPOCH, 0))), 1.1)
    assert kinds(take(feed, 1.1)) == "Begin" + " SnapshotChunk" * 5 + " SnapshotEnd Watermark"


def test_falling_out_before_the_answer() -> None:
    log = make(5)
    feed = at(log, 5)
    add(log, 30)
    assert take(feed, 0.0) == [Lagged(25)]


def test_what_follows_a_snapshot_is_kept_for_it() -> None:
    log = make(5)
    feed = log.feed(Resume(1), 0.0)
    take(feed, 0.0, 3)
    add(log, 25)  # more than the ring takes otherwise
    said = take(feed, 0.0)
    assert (
        kinds(said)
        == "SnapshotChunk SnapshotChunk SnapshotChunk SnapshotEnd"
        + " EventBatch" * 7
        + " Watermark"
    )
    assert isinstance(said[4], EventBatch)
    assert said[4].first == 5
    add(log, 1)
    assert log.head - log.oldest == CONFIG.ring_events
    assert log.restarts == log.lagged == 0


def test_a_snapshot_that_takes_too_long_begins_anew() -> None:
    log = make(5)
    feed = log.feed(Resume(1), 0.0)
    take(feed, 0.0, 3)
    add(log, 31)
    assert log.head - log.oldest <= CONFIG.ring_events * CONFIG.pinned
    assert take(feed, 0.0) == []
    assert feed.due == pytest.approx(CONFIG.retry_first)
    assert not log.pins
    said = take(feed, 0.2)
    assert said[0] == Begin(1, EPOCH, CatchUpMode.SNAPSHOT, 36)
    assert kinds(said[1:]) == "SnapshotChunk " * 5 + "SnapshotEnd Watermark"
    assert log.restarts == 1


def test_so_does_one_that_is_overtaken_after_its_end() -> None:
    log = make(5)
    feed = log.feed(Resume(1), 0.0)
    take(feed, 0.0, 7)
    add(log, 31)
    assert take(feed, 0.0) == []
    assert take(feed, 1.0)[0] == Begin(1, EPOCH, CatchUpMode.SNAPSHOT, 36)


def test_a_large_snapshot_is_sent_slowly_after_its_first_part() -> None:
    """Pieces have 6 bytes: two at once, then one every two seconds."""
    log = make(30, replace(CONFIG, snapshot_burst=11, snapshot_rate=3.0))
    feed = at(log, 0)
    assert kinds(take(feed, 5.0)) == "Begin SnapshotChunk SnapshotChunk"
    for number in range(1, 4):
        due = 5.0 + (6 * (number + 1) - 11) / 3.0
        assert feed.due == pytest.approx(due)
        assert take(feed, due - 0.01) == []
        assert take(feed, due)[0].data == b"piece%d" % (number + 1)  # type: ignore[union-attr]
    assert kinds(take(feed, 100.0)) == "SnapshotEnd Watermark"


def test_snapshots_that_never_help_come_to_an_end() -> None:
    log, now = make(5), 0.0
    feed = log.feed(Resume(1), now)
    waits: list[float] = []
    for _ in range(CONFIG.attempts):
        assert kinds(take(feed, now, 1)) == "Begin"
        add(log, 31)
        assert take(feed, now) == []
        assert feed.due is not None
        waits.append(feed.due - now)
        now = feed.due
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    with pytest.raises(Overloaded):
        feed.poll(now)


def test_asking_again_and_again_is_slowed_down_too() -> None:
    log, now = make(5), 0.0
    feed = log.feed(Resume(0), now)
    waits: list[float] = []
    for attempt in range(1, 4):
        assert kinds(take(feed, now, 1)) == "Begin"
        feed.hear(encode(Resume(attempt)), now)
        assert take(feed, now) == []
        assert feed.due is not None
        waits.append(feed.due - now)
        now = feed.due
    assert waits == pytest.approx([0.1, 0.2, 0.4])
    now += CONFIG.healthy
    feed.hear(encode(Resume(9)), now)
    assert kinds(take(feed, now, 1)) == "Begin"


def test_few_snapshots_at_a_time() -> None:
    log = make(5)
    first, second = log.feed(Resume(1), 0.0), log.feed(Resume(1), 0.0)
    take(first, 0.0, 2)
    assert take(second, 0.0) == []
    assert second.due is not None
    first.close()
    assert kinds(take(second, second.due, 1)) == "Begin"


def test_a_slot_is_held_until_the_reader_has_caught_up() -> None:
    log = make(5)
    first, second = log.feed(Resume(1), 0.0), log.feed(Resume(1), 0.0)
    take(first, 0.0, 7)
    assert take(second, 0.0) == []
    take(first, 0.0)
    assert kinds(take(second, 0.2, 1)) == "Begin"


@pytest.mark.parametrize("taken", [2, 7])
def test_a_reader_that_stands_still_gives_its_slot_away(taken: int) -> None:
    log = make(5)
    stuck, second = log.feed(Resume(1), 0.0), log.feed(Resume(1), 0.0)
    take(stuck, 0.0, taken)
    assert take(second, CONFIG.stalled - 0.1) == []
    said = take(second, CONFIG.stalled)
    assert kinds(said) == "Begin" + " SnapshotChunk" * 5 + " SnapshotEnd Watermark"
    said = take(stuck, CONFIG.stalled + 1.0)
    anew = "Begin" + " SnapshotChunk" * 5 + " SnapshotEnd Watermark"
    assert kinds(said) == (anew if taken == 2 else "Watermark")
    assert log.restarts == (taken == 2)
    assert not log.pins


def test_watermarks_when_idle_and_among_batches() -> None:
    log = make(0, replace(CONFIG, watermark_batches=3))
    feed = at(log, 0)
    take(feed, 0.0)
    assert take(feed, 0.9) == []
    assert feed.due == 1.0
    assert take(feed, 1.0) == [Watermark(EPOCH, 0, 0)]
    seen = []
    for _ in range(7):
        add(log, 1)
        seen += take(feed, 1.1)
    assert kinds(seen) == "EventBatch EventBatch EventBatch Watermark " * 2 + "EventBatch"


def test_watermarks_become_rare_while_nothing_changes_and_a_change_brings_one_soon() -> None:
    log = make(0, replace(CONFIG, event_bytes=100))
    feed = at(log, 0)
    said = [now for now in range(1000) if "Watermark" in kinds(take(feed, float(now)))]
    assert len(said) < 40
    add(log, 1)
    take(feed, 1000.0)
    assert feed.due is not None
    assert feed.due <= 1001.0
    take(feed, 1001.0)
    with pytest.raises(PayloadTooLarge):
        log.append(bytes(101))
    take(feed, 1001.5)
    assert feed.due is not None
    assert feed.due <= 1002.5


def test_a_piece_has_a_bound() -> None:
    log = make()
    assert isinstance(log.source, Source)
    log.source.pieces.append(bytes(CHUNK_BYTES + 1))
    with pytest.raises(PayloadTooLarge):
        take(log.feed(Resume(1), 0.0), 0.0)


def test_nonsense_is_refused() -> None:
    log = make()
    with pytest.raises(ProtocolError):
        at(log, 0).hear(b"\xc1", 0.0)
