"""Measures what a block costs on its way from an engine's pool to a router's index.

    python bench/micro/kv_events.py

A worker's mirror and log are on one side, the log's reader and the index on the other. Each is
timed on its own, without a network. The engine's batches are the events of its pool: prompts of
many blocks, and decode steps in which many sequences fill one block each. Times are CPU time, the
best of several rounds. Writes bench/results/kv_events.md.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.ids import NodeId
from pdserve.messages.kv_events import BlockRemoved, BlockStored
from pdserve.router.config import RouterConfig
from pdserve.router.prefix_index.index import PrefixIndex
from pdserve.runtime.registry import Member
from pdserve.worker.kv_event_publisher import KvEventPublisher

if TYPE_CHECKING:
    from pdserve.messages.kv_events import KvEvent
    from pdserve.router.prefix_index.worker_events import WorkerEventFeed

ROUNDS = 5
BLOCKS = 100_000
RESULT = Path(__file__).parent.parent / "results" / "kv_events.md"


class Source:
    """Batches of a full pool's events: each removes as many blocks as it stores."""

    def __init__(self, run: int, runs: int) -> None:
        """Each batch stores `runs` runs of `run` blocks."""
        self.run, self.runs = run, runs
        self.random = random.Random(1)
        self.batches: list[list[KvEvent]] = []
        stored: list[bytes] = []
        while len(stored) < BLOCKS:
            batch: list[KvEvent] = []
            for _ in range(runs):
                names = [self.random.randbytes(16) for _ in range(run)]
                batch.append(BlockStored(names, self.random.randbytes(16)))
                stored += names
            self.batches.append(batch)
        for start in range(0, BLOCKS, run * runs):
            self.batches.append([BlockRemoved(stored[start : start + run * runs])])
        self.changes = 2 * BLOCKS


def target() -> tuple[PrefixIndex, WorkerEventFeed]:
    """An index with one worker."""
    index = PrefixIndex(RouterConfig())
    member = Member(node=NodeId("w"), epoch=1, address="w:1", role="worker")
    return index, index.target(member)


def measure(source: Source) -> tuple[float, float, float]:
    """Microseconds per block at the worker and at the router, bytes of the log per block."""
    best = [1e9, 1e9]
    size = 0
    for _ in range(ROUNDS):
        events: list[bytes] = []
        log = KvEventPublisher()
        log.connect(events.append)
        start = time.process_time()
        for batch in source.batches:
            log.apply(batch)
        best[0] = min(best[0], time.process_time() - start)
        _, feed = target()
        start = time.process_time()
        for event in events:
            feed.apply(event)
        best[1] = min(best[1], time.process_time() - start)
        assert feed.digest() == log.digest()
        size = sum(map(len, events))
    there, here = (seconds / source.changes * 1e6 for seconds in best)
    return there, here, size / source.changes


def snapshot(source: Source) -> tuple[float, float, float, float]:
    """Measures like `measure`, with a reader that starts late; also the seconds of the copy."""
    log = KvEventPublisher()
    for batch in source.batches[: len(source.batches) // 2]:
        log.apply(batch)
    count = len(log)
    best = [1e9, 1e9, 1e9]
    size = 0
    for _ in range(ROUNDS):
        start = time.process_time()
        pieces = log.snapshot()
        copied = time.process_time()
        held = list(pieces)
        best[0] = min(best[0], time.process_time() - start)
        best[2] = min(best[2], copied - start)
        _, feed = target()
        start = time.process_time()
        feed.reset()
        for piece in held:
            feed.load(piece)
        feed.commit()
        best[1] = min(best[1], time.process_time() - start)
        assert feed.digest() == log.digest()
        size = sum(map(len, held))
    return best[0] / count * 1e6, best[1] / count * 1e6, size / count, best[2]


def main() -> None:
    """Measure, print, write."""
    rows = []
    for words, run, runs in (
        ("a prompt's 64 blocks in one step", 64, 1),
        ("8 prompts, 8 blocks each", 8, 8),
        ("decode: 16 sequences, a block each", 1, 16),
        ("decode: one block", 1, 1),
    ):
        there, here, size = measure(Source(run, runs))
        rows.append(f"| {words} | {there:.2f} | {here:.2f} | {size:.1f} |")
    there, here, size, copy = snapshot(Source(8, 8))
    rows.append(f"| snapshot of {BLOCKS:,} blocks | {there:.2f} | {here:.2f} | {size:.1f} |")
    lines = [
        "# KV events, pool to index",
        "",
        "From the engine's batch in the worker's node to the log's event, and from that to the",
        "index, digests included, no network; as many blocks are removed as stored. On a machine",
        "that others used at the time. Repeat with `python bench/micro/kv_events.py`.",
        "",
        *[f"- {fact}" for fact in facts()],
        f"- {accel.describe()}",
        "",
        "| one batch | µs per block, worker | µs per block, router | bytes per block |",
        "|---|---:|---:|---:|",
        *rows,
        "",
        f"Taking the copy that a snapshot is made from holds up the worker's node for "
        f"{copy * 1e3:.1f} ms.",
    ]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
