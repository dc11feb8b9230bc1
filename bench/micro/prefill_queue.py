"""Measures what an item costs a router's prefill queue, from its arrival to its claim.

    python bench/micro/prefill_queue.py

4,000 items wait, and 64 workers take turns. In each round one item comes, a worker offers a credit
and gets the first item in order, and another claim ends. There are two measurements: the queue
alone, which gets the workers' cached parts of a prompt as input; and the queue with a router's
index, which it asks for them and in which it notes the item's worker. There is no network and no
encoding. Times are CPU time, the median of several runs. Writes bench/results/prefill_queue.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.handoff import CreditOffer, ItemClaimed, PrefillItem
from pdserve.router.config import RouterConfig
from pdserve.router.prefill_queue.queue import PrefillQueue, QueueStreamId
from pdserve.router.prefix_index.index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.messages.handoff import FromQueue

RESULT = Path(__file__).parent.parent / "results" / "prefill_queue.md"
WAITING = 4000
WORKERS = 64
ROUNDS = 4000
RUNS = 5
BLOCK = 32


class Setting:
    """A queue with workers and items."""

    def __init__(self, shared: int, *, alone: bool) -> None:
        """`shared`: leading blocks that all prompts of a family, one of 256, have in common."""
        self.alone = alone
        self.holders: dict[bytes, Mapping[NodeId, int]] = {}
        """Cached blocks of workers by family, for the queue without an index."""
        self.random = random.Random(1)
        self.now = 0.0
        self.claims: list[tuple[QueueStreamId, int]] = []
        self.sent: Counter[QueueStreamId] = Counter()
        self.requests = count()
        self.shared = shared
        self.families = [self.random.randbytes(8 * shared) for _ in range(256)]
        self.index = PrefixIndex(RouterConfig(predict_ttl=1e9))
        self.workers = [QueueStreamId(NodeId(f"p{n}"), 1, n) for n in range(WORKERS)]
        self.decoder = QueueStreamId(NodeId("d"), 1, 0)
        for worker in self.workers:
            self.index.worker_up(NodeLife(worker.node, 1), events=True)
        self.queue = PrefillQueue(
            "m", self._send, count(1), overlap=self._overlap, claimed=self._claimed
        )
        for family in self.families:
            some = self.random.sample(self.workers, 16 if shared else 0)
            self.holders[family] = {worker.node: shared for worker in some}
        for worker in self.workers:
            self.queue.offer(0.0, worker, CreditOffer(model="m", credits=0))
        for _ in range(WAITING):
            self.queue.enqueue(self.now, self.decoder, self.item())

    def item(self) -> PrefillItem:
        """Makes an item whose prompt has a thousand tokens or a few."""
        own = self.random.randrange(1, 64)
        names = self.random.choice(self.families) + self.random.randbytes(8 * own)
        tokens = BLOCK * (self.shared + own) + 7
        return PrefillItem(
            request=next(self.requests),
            round=0,
            model="m",
            prompt_tokens=tokens,
            names=names,
            block_size=BLOCK,
            deadline=600.0,
        )

    def _send(self, to: QueueStreamId, message: FromQueue) -> None:
        if isinstance(message, ItemClaimed):
            self.claims.append((to, message.claim))
            self.sent[to] += 1

    def _overlap(self, now: float, item: PrefillItem) -> Mapping[NodeId, int]:
        if self.alone:
            return self.holders[item.names[: 8 * self.shared]]
        return self.index.find(now, item.names, item.names_id).overlaps

    def _claimed(self, now: float, item: PrefillItem, worker: QueueStreamId) -> None:
        if self.alone:
            return
        self.index.placed(now, NodeLife(worker.node, worker.epoch), item.names)

    def run(self) -> tuple[float, float, float]:
        """Microseconds of enqueuing, of offering and claiming, and of ending a claim."""
        queue, clock = self.queue, time.process_time
        spent = [0.0, 0.0, 0.0]
        claimed = self.sent.total()
        for _ in range(ROUNDS):
            self.now += 0.001
            item, worker = self.item(), self.random.choice(self.workers)
            load = self.random.randrange(500)
            start = clock()
            queue.enqueue(self.now, self.decoder, item)
            came = clock()
            queue.offer(
                self.now,
                worker,
                CreditOffer(model="m", credits=1, uncomputed_tokens=load, claims=self.sent[worker]),
            )
            given = clock()
            if len(self.claims) > 200:
                to, number = self.claims.pop(0)
                queue.ended(self.now, to, number, "done")
            ended = clock()
            for index, seconds in enumerate((came - start, given - came, ended - given)):
                spent[index] += seconds
        assert self.sent.total() - claimed >= 0.9 * ROUNDS, self.queue.state()
        queue.check()
        enqueue, claim, end = (seconds / ROUNDS * 1e6 for seconds in spent)
        return enqueue, claim, end


def main() -> None:
    """Measure, print, write."""
    rows = []
    for words, shared, alone in (
        ("the queue alone, no prefixes", 0, True),
        ("the queue alone, 16 workers have a prefix of 32 blocks", 32, True),
        ("with the index, prompts of 1 to 63 blocks", 0, False),
        ("with the index, a prefix of 32 blocks and as many of their own", 32, False),
    ):
        runs = []
        for _ in range(RUNS):
            setting = Setting(shared, alone=alone)
            setting.run()
            runs.append(setting.run())
        enqueue, claim, end = (statistics.median(run[n] for run in runs) for n in range(3))
        rows.append(
            f"| {words} | {enqueue:.1f} | {claim:.1f} | {end:.1f} | {enqueue + claim:.1f} |"
        )
    lines = [
        "# The prefill queue",
        "",
        f"{WAITING:,} items wait for {WORKERS} workers. The queue alone gets the workers' cached",
        "parts of a prompt; with a router's index it looks them up when an item comes and when it",
        "goes, and notes the item's worker. No network, no encoding.",
        "Other work ran on the machine. Repeat with `python bench/micro/prefill_queue.py`.",
        "",
        *[f"- {fact}" for fact in facts()],
        f"- {accel.describe()}",
        "",
        "| µs per item | enqueue | offer and claim | end | enqueue and claim |",
        "|---|---:|---:|---:|---:|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
