"""The feed hands batches over in order, and fills gaps by replays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve_engines.sglang import event_feed
from pdserve_engines.sglang.event_feed import EventFeed
from tests.engines.sglang.fake_sglang import PUBLISHERS, FakePublisher, FakeSockets

if TYPE_CHECKING:
    from collections.abc import Iterator

LOST = "lost"


class Feed:
    """A feed under test, with a publisher in memory."""

    def __init__(self) -> None:
        self.publisher = PUBLISHERS["test"] = FakePublisher()
        self.got: list[Any] = []
        self.sockets: FakeSockets | None = None
        self._came = asyncio.Event()

    def publish(self, number: int) -> None:
        assert number == self.publisher.number
        self.publisher.publish([{"type": "AllBlocksCleared", "number": number}])

    def start(self) -> asyncio.Task[None]:
        self.sockets = FakeSockets("test", "test")
        feed = EventFeed(self.sockets, self._batch, lambda: self.got.append(LOST))
        return asyncio.create_task(feed.run())

    def _batch(self, events: list[dict[str, Any]]) -> None:
        self.got += [event["number"] for event in events]
        self._came.set()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(10):
            while number not in self.got:
                self._came.clear()
                await self._came.wait()


@pytest.fixture
def feed() -> Iterator[Feed]:
    yield Feed()
    del PUBLISHERS["test"]


async def ended(task: asyncio.Task[None], feed: Feed) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert feed.sockets is not None
    assert feed.sockets.closed


async def test_batches_come_in_order_and_sockets_are_closed(feed: Feed):
    task = feed.start()
    for number in range(5):
        feed.publish(number)
    await feed.until(4)
    assert feed.got == [0, 1, 2, 3, 4]
    await ended(task, feed)


async def test_what_was_published_before_the_subscription_is_replayed(feed: Feed):
    for number in range(3):
        feed.publish(number)
    task = feed.start()
    await feed.until(2)
    feed.publish(3)
    await feed.until(3)
    assert feed.got == [0, 1, 2, 3]
    await ended(task, feed)


async def test_a_gap_is_filled_by_a_replay(feed: Feed):
    task = feed.start()
    feed.publisher.dropped = {1, 2}
    for number in range(5):
        feed.publish(number)
    await feed.until(4)
    assert feed.got == [0, 1, 2, 3, 4]
    await ended(task, feed)


async def test_a_gap_that_cannot_be_filled_is_reported_once_before_what_follows(feed: Feed):
    task = feed.start()
    feed.publish(0)
    await feed.until(0)
    feed.publisher.dropped = feed.publisher.forgotten = {1, 2}
    for number in range(1, 5):
        feed.publish(number)
    await feed.until(4)
    assert feed.got == [0, LOST, 3, 4]
    await ended(task, feed)


async def test_a_replay_that_does_not_end_is_given_up(feed: Feed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_feed, "REPLAY_TIMEOUT", 0.01)
    task = feed.start()
    feed.publish(0)
    await feed.until(0)
    silent = asyncio.Event()

    async def never() -> list[bytes]:
        await silent.wait()
        raise AssertionError

    assert feed.sockets is not None
    monkeypatch.setattr(feed.sockets.replay, "recv_multipart", never)
    feed.publisher.dropped = {1}
    feed.publish(1)
    feed.publish(2)
    await feed.until(2)
    assert feed.got == [0, LOST, 2]
    await ended(task, feed)


async def test_a_batch_that_cannot_be_read_counts_as_lost(feed: Feed):
    task = feed.start()
    feed.publish(0)
    await feed.until(0)
    for queue in feed.publisher.live:
        queue.put_nowait([b"", (1).to_bytes(8, "big"), b"\xc1"])
    feed.publisher.number = 2
    feed.publish(2)
    await feed.until(2)
    assert feed.got == [0, LOST, 2]
    await ended(task, feed)
