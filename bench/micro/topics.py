"""Measures the cost of a log: a set's changes from its publisher to a reader, and a large snapshot.

    python bench/micro/topics.py

The real state machines and their encoding run without a network. Times are CPU time of both sides
together, the best of several rounds. Writes bench/results/topics.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve.runtime.topics.config import LogConfig
from pdserve.runtime.topics.publisher import LogPublisher
from pdserve.runtime.topics.reader import LogReader
from pdserve.runtime.topics.replicated_set import SetLog, SetView, mix

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.runtime.topics.publisher import LogFeed

ROUNDS = 5
RESULT = Path(__file__).parent.parent / "results" / "topics.md"
VALUE = b"01234567"


class Pair:
    """A set and a view of it, at the same position."""

    def __init__(self, entries: int = 0) -> None:
        self.source = SetLog()
        self.log = LogPublisher((1, 1), self.source, LogConfig())
        self.source.connect(self.log.append, lambda: None)
        for number in range(entries):
            self.source.put(key(number), VALUE)
        self.source.flush()
        self.reader = LogReader(SetView())
        self.feed: LogFeed = self.log.feed(self.reader.resume(), 0.0)

    def move(self) -> None:
        """Moves all waiting messages to the reader."""
        while (message := self.feed.poll(0.0)) is not None:
            self.reader.hear(message)


def key(number: int) -> bytes:
    """Makes a key of 16 bytes, like a block hash."""
    return number.to_bytes(16, "little")


def best(work: Callable[[], float]) -> float:
    """Returns the smallest CPU seconds that `work` reports."""
    return min(work() for _ in range(ROUNDS))


def events(count: int) -> float:
    """Moves `count` opaque events of 64 bytes in batches."""

    def work() -> float:
        pair = Pair()
        pair.move()
        pair.reader.target.apply = lambda event: None  # type: ignore[method-assign]
        event = bytes(64)
        start = time.process_time()
        for number in range(count):
            pair.log.append(event)
            if number % 64 == 63:
                pair.move()
        pair.move()
        return time.process_time() - start

    return best(work)


def changes(count: int, batch: int) -> float:
    """Makes `count` puts and as many drops, and flushes and moves each `batch`."""

    def work() -> float:
        pair = Pair()
        pair.move()
        source = pair.source
        start = time.process_time()
        for change in (lambda k: source.put(k, VALUE), source.drop):
            for number in range(count):
                change(key(number))
                if number % batch == batch - 1:
                    source.flush()
                    pair.move()
        seconds = time.process_time() - start
        assert pair.reader.next == pair.log.head
        assert pair.reader.target.digest() == source.digest() == 0
        return seconds

    return best(work)


def snapshot(entries: int) -> float:
    """Lets a new reader load `entries`."""

    def work() -> float:
        pair = Pair(entries)
        start = time.process_time()
        pair.move()
        seconds = time.process_time() - start
        assert pair.reader.live
        return seconds

    return best(work)


def hashing() -> float:
    """Measures the hash of one entry."""

    def work() -> float:
        start = time.process_time()
        for number in range(100_000):
            mix(key(number), VALUE)
        return (time.process_time() - start) / 100_000

    return best(work)


def main() -> None:
    """Measure, print, write."""
    rows = []
    seconds = events(100_000)
    rows.append(f"| opaque events of 64 bytes, 64 a message | {1e5 / seconds:,.0f}/s | |")
    for batch in (1, 16, 256):
        seconds = changes(20_480, batch)
        cost = seconds / 40_960 * 1e6
        rows.append(f"| set changes, {batch} an event | {1e6 / cost:,.0f}/s | {cost:.2f} µs |")
    seconds = snapshot(200_000)
    cost = seconds / 200_000 * 1e6
    rows.append(f"| snapshot of 200,000 entries ({seconds:.2f} s) | | {cost:.2f} µs |")
    lines = [
        "# Logs, publisher to reader",
        "",
        "Both sides in one process and on one core, encoding and digests included, no network.",
        "Keys of 16 bytes, values of 8. Repeat with `python bench/micro/topics.py`.",
        "",
        *[f"- {fact}" for fact in facts()],
        "",
        "| what | rate | one entry, both sides |",
        "|---|---:|---:|",
        *rows,
        "",
        f"Hashing an entry for the digest takes {hashing() * 1e6:.2f} µs of it, on each side.",
    ]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
