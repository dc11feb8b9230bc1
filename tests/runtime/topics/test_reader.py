"""What a reader makes of each message in each stage."""

from __future__ import annotations

import pytest

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
    decode_resume,
)
from pdserve.runtime.topics.reader import LogReader, Stage
from pdserve.wire.codec import encode

EPOCH = (7, 1)


class Target:
    """A list of events; its digest is their number."""

    def __init__(self) -> None:
        self.state: list[bytes] = []
        self.shadow: list[bytes] = []
        self.commits = 0
        self.fails = False

    def reset(self) -> None:
        self.shadow = []

    def load(self, chunk: bytes) -> None:
        self.shadow.append(chunk)

    def commit(self) -> None:
        self.state, self.shadow = self.shadow, []
        self.commits += 1

    def apply(self, event: bytes) -> None:
        if self.fails:
            raise RuntimeError("a bug")
        self.state.append(event)

    def digest(self) -> int:
        return len(self.state)


def say(reader: LogReader, *messages: object) -> list[Resume]:
    """What it answers."""
    answers = [reader.hear(encode(message)) for message in messages]
    return [decode_resume(answer) for answer in answers if answer is not None]


def loaded(pieces: int = 2, head: int = 10) -> tuple[LogReader, Target]:
    """A live reader that has taken a snapshot."""
    target = Target()
    reader = LogReader(target)
    assert reader.resume() == Resume(1, None)
    said = [SnapshotChunk(number, b"piece") for number in range(pieces)]
    begin = Begin(1, EPOCH, CatchUpMode.SNAPSHOT, head)
    assert say(reader, begin, *said, SnapshotEnd(pieces, pieces)) == []
    assert reader.live
    return reader, target


def test_a_snapshot_shows_when_it_is_complete() -> None:
    target = Target()
    reader = LogReader(target)
    reader.resume()
    say(reader, Begin(1, EPOCH, CatchUpMode.SNAPSHOT, 10), SnapshotChunk(0, b"x"))
    assert reader.stage is Stage.LOADING
    assert target.state == []
    say(reader, SnapshotEnd(1, 1))
    assert target.state == [b"x"]
    assert (reader.next, reader.snapshots) == (10, 1)


def test_events_are_applied_once_and_in_order() -> None:
    reader, target = loaded(0)
    say(reader, EventBatch(EPOCH, 10, [b"a", b"b"]), EventBatch(EPOCH, 11, [b"b", b"c"]))
    say(reader, EventBatch(EPOCH, 10, [b"a"]))
    assert target.state == [b"a", b"b", b"c"]
    assert (reader.next, reader.applied, reader.duplicates) == (13, 3, 2)


def test_a_gap_asks_once() -> None:
    reader, target = loaded(0)
    answers = say(reader, EventBatch(EPOCH, 12, [b"c"]), EventBatch(EPOCH, 13, [b"d"]))
    assert answers == [Resume(2, Position(EPOCH, 10))]
    assert target.state == []
    say(reader, Begin(1, EPOCH, CatchUpMode.LIVE, 10))  # answers an earlier question
    assert not reader.live
    say(reader, Begin(2, EPOCH, CatchUpMode.REPLAY, 10), EventBatch(EPOCH, 10, [b"a"]))
    assert target.state == [b"a"]
    assert (reader.gaps, reader.replays) == (1, 1)


@pytest.mark.parametrize(
    "message",
    [
        EventBatch((8, 1), 10, [b"other epoch"]),
        Watermark(EPOCH, 11, 0),
        Watermark((8, 1), 10, 0),
    ],
)
def test_other_gaps(message: object) -> None:
    reader, _ = loaded(0)
    assert say(reader, message) == [Resume(2, Position(EPOCH, 10))]
    assert reader.gaps == 1


def test_a_state_is_compared_again_with_what_was_said_last() -> None:
    reader, target = loaded(2)
    assert reader.recheck() is None
    target.state.append(b"a whim")
    answer = reader.recheck()
    assert answer is not None
    assert decode_resume(answer) == Resume(2, None)
    assert reader.recheck() is None, "it waits for the snapshot"
    reader, target = loaded(2)
    say(reader, EventBatch(EPOCH, 10, [b"a"]))
    assert reader.recheck() is None, "the publisher has not said how its state is by now"
    say(reader, Watermark(EPOCH, 11, 3))
    assert reader.recheck() is None
    target.state.pop()
    assert reader.recheck() is not None


def test_the_end_of_a_watermark() -> None:
    reader, _ = loaded(2)
    assert say(reader, Watermark(EPOCH, 10, 2), Watermark(EPOCH, 9, 77)) == []
    assert say(reader, Watermark(EPOCH, 10, 3)) == [Resume(2, None)]
    assert reader.divergences == 1


def test_a_snapshot_with_the_wrong_digest() -> None:
    reader = LogReader(Target())
    reader.resume()
    answers = say(reader, Begin(1, EPOCH, CatchUpMode.SNAPSHOT, 10), SnapshotEnd(0, 5))
    assert answers == [Resume(2, None)]


@pytest.mark.parametrize(
    "message",
    [
        SnapshotChunk(1, b"x"),
        SnapshotEnd(1, 0),
        EventBatch(EPOCH, 10, [b"a"]),
        Watermark(EPOCH, 10, 0),
    ],
)
def test_a_snapshot_with_holes(message: object) -> None:
    reader, target = loaded(0)
    say(reader, Lagged(5), Begin(2, EPOCH, CatchUpMode.SNAPSHOT, 30))
    assert say(reader, message) == [Resume(3, Position(EPOCH, 10))]
    assert reader.gaps == 1
    assert target.state == []


def test_pieces_twice() -> None:
    reader, target = loaded(2)
    assert say(reader, SnapshotChunk(1, b"again"), SnapshotEnd(2, 2)) == []
    assert target.commits == 1
    assert reader.duplicates == 2


def test_a_snapshot_may_begin_anew() -> None:
    target = Target()
    reader = LogReader(target)
    reader.resume()
    begin = Begin(1, EPOCH, CatchUpMode.SNAPSHOT, 10)
    say(reader, begin, SnapshotChunk(0, b"old"), begin, SnapshotChunk(0, b"new"), SnapshotEnd(1, 1))
    assert target.state == [b"new"]


def test_lagging_keeps_the_state_until_there_is_a_better_one() -> None:
    reader, target = loaded(2)
    assert say(reader, Lagged(50)) == [Resume(2, Position(EPOCH, 10))]
    assert (reader.lagged, reader.live) == (1, False)
    say(reader, Begin(2, EPOCH, CatchUpMode.SNAPSHOT, 60))
    assert len(target.state) == 2


def test_another_epoch_drops_all_at_once() -> None:
    reader, target = loaded(2)
    assert reader.resume() == Resume(2, Position(EPOCH, 10))
    say(reader, Begin(2, (8, 1), CatchUpMode.SNAPSHOT, 3))
    assert target.state == []
    assert reader.epochs == 1
    assert reader.resume() == Resume(3, None)


def test_a_publisher_that_goes_on_from_elsewhere() -> None:
    reader, _ = loaded(0)
    reader.resume()
    with pytest.raises(ProtocolError):
        say(reader, Begin(2, EPOCH, CatchUpMode.REPLAY, 11))
    with pytest.raises(ProtocolError):
        say(reader, Begin(2, (8, 1), CatchUpMode.LIVE, 0))


def test_a_target_that_fails_is_not_trusted() -> None:
    reader, target = loaded(0)
    target.fails = True
    with pytest.raises(RuntimeError):
        say(reader, EventBatch(EPOCH, 10, [b"a"]))
    assert reader.resume().position is None


def test_patience() -> None:
    reader, _ = loaded(0)
    reader.resume()
    asked = [bool(say(reader, Watermark(EPOCH, 10, 0), Lagged(0))) for _ in range(16)]
    assert [number for number, again in enumerate(asked) if again] == [0, 2, 6, 14]
    assert reader.repeats == 4
    reader.resume()
    assert say(reader, *[EventBatch(EPOCH, 10, [b"a"])] * 100) == []


def test_forgetting() -> None:
    reader, target = loaded(2)
    reader.forget()
    assert target.state == []
    assert reader.resume().position is None


def test_nonsense_is_refused() -> None:
    reader, _ = loaded()
    with pytest.raises(ProtocolError):
        reader.hear(b"\xc1")
