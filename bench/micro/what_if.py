"""Measures what a what-if costs: CPU milliseconds for one replay of 2,000 arrivals.

    python bench/micro/what_if.py

The yardstick is what no event-driven model in Python can avoid: four events per request through a
heap. Both are measured in turn within the same rounds, and the best round counts, so the ratio
holds on a busy machine. The aim is 50 ms. Writes bench/results/what_if_cpu.md.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.disagg_grid.cells import KINDS, Scale, mix
from bench.machine import facts
from bench.planner_what_if import learnt
from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.evaluate import WhatIf
from pdserve.planner.what_if.records import (
    CandidatePool,
    CandidateWorker,
    Handoffs,
    LatencyObjective,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.planner.what_if.records import PoolMode

_REQUESTS: Final = 2000
_ROUNDS: Final = 7
_EVENTS: Final = 4
_AIM: Final = 0.05


def pools() -> dict[str, CandidatePool]:
    """Pools of several sizes."""

    def made(**counts: int) -> CandidatePool:
        modes: tuple[PoolMode, ...] = ("aggregated", "prefill", "decode")
        workers = tuple(
            CandidateWorker(mode=mode, kv_tokens=400_000)
            for mode in modes
            for _ in range(counts.get(mode, 0))
        )
        return CandidatePool(str(counts), workers)

    return {
        "8 aggregated": made(aggregated=8),
        "4:4 rule": made(prefill=4, decode=4),
        "64 aggregated": made(aggregated=64),
        "256 aggregated": made(aggregated=256),
    }


def questions() -> dict[str, Callable[[], object]]:
    """What is measured, by name. Each pool has 0.9 of the load that it just carries."""
    kind = KINDS[0]
    found: dict[str, Callable[[], object]] = {"yardstick": yardstick}
    for name, pool in pools().items():
        rate = 0.9 * 33.64 * len(pool.workers) / 8
        trace = list(mix(Scale(requests=_REQUESTS), rate, 1))
        lengths = [sum(count for _, count in one.pieces) for one in trace]
        recent = [RecentArrival(one.at, n) for one, n in zip(trace, lengths, strict=True)]
        finished = [(n, one.output_tokens) for one, n in zip(trace, lengths, strict=True)]
        objective = LatencyObjective(kind.ttft, kind.itl, 2.0)

        handoffs = Handoffs("rule", token=5e-6)
        what_if = WhatIf(
            learnt(kind.preset), objective, recent, finished, handoffs=handoffs, seeds=1
        )
        found[name] = partial(what_if.replay, pool, 0)
    return found


def yardstick() -> object:
    """The events of one replay, through a heap."""
    random, heap, count = Random(1), list[tuple[float, int, object]](), 0
    for _ in range(_REQUESTS):
        for _ in range(_EVENTS):
            heappush(heap, (random.random(), count, None))
            count += 1
        for _ in range(_EVENTS):
            heappop(heap)
    return heap


def main() -> int:
    """Measures, prints and writes the page."""
    asked = questions()
    best = dict.fromkeys(asked, float("inf"))
    for _ in range(_ROUNDS):
        for name, ask in asked.items():
            began = time.process_time()
            ask()
            best[name] = min(best[name], time.process_time() - began)
    rows = [
        f"| {name} | {seconds * 1e3:.1f} | {seconds / best['yardstick']:.1f} | "
        f"{'' if name == 'yardstick' else 'met' if seconds <= _AIM else 'missed'} |"
        for name, seconds in best.items()
    ]
    text = "\n".join(
        [
            "# CPU time of a what-if",
            "",
            "Repeat with `python bench/micro/what_if.py`.",
            "",
            *"\n\n".join(__doc__.split("\n\n")[2:]).strip().split("\n"),
            "",
            *(f"- {fact}" for fact in facts()),
            "",
            "| pool | ms per 2,000 arrivals | times the yardstick | 50 ms |",
            "| --- | ---: | ---: | --- |",
            *rows,
            "",
        ]
    )
    print(text)
    page = Path(__file__).parents[1] / "results" / "what_if_cpu.md"
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
