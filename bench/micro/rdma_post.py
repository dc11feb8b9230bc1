"""Measures what posting costs Python per work request, from runs of bytes to the device's function.

    python bench/micro/rdma_post.py

The device's function is replaced by one that does nothing, so that only this project's work is
left: filling C structures from runs, linking, one call per chain, the queue's accounting, and a
completion per quarter of the queue. `fill and post` begins when a path passes a chain to a rail.
`deliver` is the whole cost of a part: binding its blocks to runs, stripes for two rails, and a
notification for each. Times are CPU time, the best of several rounds. Writes
bench/results/rdma_post.md.
"""

from __future__ import annotations

import ctypes
import random
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.messages.transfer import RegionCard
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.block_mapping import BlockMapper, RegionCopy
from pdserve.transfer.copy_plan import CopyRuns, block_bytes
from pdserve.transfer.path_base import DeliveryKey
from pdserve.transfer.rdma.send_queue import RailRegions, SendQueue
from pdserve.transfer.rdma.verbs_path import STRIPE_BYTES, WorkRequestChain, stripe_copies
from pdserve.transfer.rdma.work_requests import SendTablePure, new_table, region_slices

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.transfer.rdma.work_requests import SendTable

ROUNDS = 15
DEPTH = 1024
RESULT = Path(__file__).parent.parent / "results" / "rdma_post.md"
# int abs(int) reads a null pointer as 0 and returns 0, like a post that accepted everything.
NOTHING = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0


class Rail:
    """Posts like `pdserve.transfer.rdma.rail.Rail`, with completions at once."""

    def __init__(self, table: SendTable, regions: RailRegions) -> None:
        self.queue = SendQueue(DEPTH, regions)
        self.table = table

    def post(self, chain: WorkRequestChain) -> int:
        """Posts a chain; returns the number of its work requests."""
        queue, before = self.queue, self.queue.posted
        queue.push(chain)
        while count := queue.fill(self.table):
            first = queue.posted - count + 1
            error, _ = self.table.post(NOTHING, 0, count, first, queue.every)
            assert not error
            queue.complete(queue.posted)
        return queue.posted - before


def best(call: Callable[[], int]) -> tuple[float, int]:
    """Microseconds per work request, and the number of work requests."""
    least, count = 1e9, 1
    for _ in range(ROUNDS):
        start = time.process_time()
        count = call()
        least = min(least, time.process_time() - start)
    return least / count * 1e6, count


def chain_of(count: int, size: int) -> WorkRequestChain:
    """Makes a chain of runs in random order."""
    places = [n * size for n in range(count)]
    random.Random(1).shuffle(places)
    columns = array("q", places), array("q", places[::-1]), array("q", [size]) * count
    return WorkRequestChain((RegionCopy(0, 0, CopyRuns(*columns)),), 1, DeliveryKey(0, 1, 0))


def post(count: int, table: SendTable, size: int = 1 << 16) -> tuple[float, int]:
    """Posts one chain of `count` runs."""
    region = region_slices(0, count * size, (1,))
    rail = Rail(table, RailRegions([region], [region]))
    chain = chain_of(count, size)
    repeats = max(1, 20_000 // count)
    return best(lambda: sum(rail.post(chain) for _ in range(repeats)))


def deliver(blocks: int) -> tuple[float, int]:
    """Delivers one part of scattered blocks over two rails."""
    (layout,) = layouts(8, 1, layers=4, tokens=16, dim=64)
    card = RegionCard(layout=layout, blocks=blocks)
    route = BlockMapper((card,), (card,))
    region = region_slices(0, blocks * block_bytes(layout), (1,))
    rails = [Rail(new_table(DEPTH), RailRegions([region], [region])) for _ in "12"]
    here, there = (random.Random(n).sample(range(blocks), blocks) for n in (1, 2))
    tokens = blocks * layout.tokens

    def one() -> int:
        share = route.share(0, tokens, 0, here, (0, layout.layers))
        parts = stripe_copies(route.moves(share, there), 2, STRIPE_BYTES)
        return sum(
            r.post(WorkRequestChain(p, 1, DeliveryKey(0, 1, 0)))
            for r, p in zip(rails, parts, strict=True)
        )

    repeats = max(1, 10_000 // blocks)
    return best(lambda: sum(one() for _ in range(repeats)))


def main() -> None:
    """Measures, prints and writes the result."""
    rows = []
    for count in (16, 64, 256, 1024, 4096):
        native = post(count, new_table(DEPTH))[0] if accel.NATIVE else float("nan")
        pure = post(count, SendTablePure(DEPTH))[0]
        rows.append(f"| {count:,} | {native:.4f} | {pure:.3f} | {deliver(count)[0]:.3f} |")
    lines = [
        "# Posting RDMA writes: CPU per work request",
        "",
        "Written by `python bench/micro/rdma_post.py`, which says what is measured.",
        "",
        *(f"- {fact}" for fact in (*facts(), accel.describe())),
        "",
        "Microseconds of CPU per work request, notifications counted; the device's function does",
        "nothing.",
        "",
        "| runs in a chain | fill and post | the same, pure Python | deliver, two rails |",
        "|---:|---:|---:|---:|",
        *rows,
        "",
        "The aim is 0.1 µs for filling and posting; a short chain pays for its notification and",
        "for the calls that every chain makes. `deliver` also turns the blocks' ids, which are",
        "Python's integers, into runs.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
