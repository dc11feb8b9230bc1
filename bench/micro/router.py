"""What a routing decision costs, by policy and number of workers.

    python bench/micro/router.py

A decision is all that a router computes for one request: the view of the model brought up to date,
the policy, the booking, the worker's word that it has it, and the release; a load report of one
worker comes with every tenth. Decoding and sending are not in it. Rows are measured in turn within
the same rounds and reported as their best round, so the ratios hold on a busy machine.
Writes bench/results/router.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

from bench.machine import facts
from pdserve.ids import NodeId
from pdserve.messages.routing import Route, WorkerLoad
from pdserve.router.bookings import Life
from pdserve.router.config import RouterConfig
from pdserve.router.desk import Desk
from pdserve.router.policies.load import load_policy
from pdserve.router.pool import Facts

POLICIES = ("round_robin", "power_of_two", "least_loaded")
SIZES = (8, 64, 512)
DECISIONS = 500
"""Per round: short, so that some rounds go undisturbed."""
OPEN = 500
"""Bookings open at a time."""
REPORT_EVERY = 10
ROUNDS = 60
RESULT = Path(__file__).parent.parent / "results" / "router.md"

ASKER = Life(NodeId("frontend"), 1)
QUESTION = Route(request_id="r", model="m", prompt_tokens=1000, max_tokens=100)


class Bench:
    """One router with `size` workers under load."""

    def __init__(self, policy: str, size: int) -> None:
        self.random = Random(1)
        self.desk = Desk(RouterConfig(), load_policy(policy), self.random)
        self.workers = [Life(NodeId(f"worker-{i:03}"), 1) for i in range(size)]
        for worker in self.workers:
            self.desk.worker(0.0, Facts(worker, ("m",)))
            self.report(worker)
        self.open = [self.decide() for _ in range(OPEN)]

    def report(self, worker: Life) -> None:
        running = self.random.randrange(200)
        self.desk.load(worker, WorkerLoad(ready=True, running=running, max_sequences=256))

    def decide(self) -> int:
        booking = self.desk.route(0.0, ASKER, QUESTION)
        self.desk.bookings.held(booking.worker, booking.id)
        return booking.id

    def run(self) -> None:
        """One round."""
        bookings = self.desk.bookings
        for number in range(DECISIONS):
            bookings.release(self.open[number % OPEN])
            self.open[number % OPEN] = self.decide()
            if number % REPORT_EVERY == 0:
                self.report(self.workers[number % len(self.workers)])


def measured(size: int) -> dict[str, float]:
    """Seconds per decision, by policy."""
    benches = {policy: Bench(policy, size) for policy in POLICIES}
    best = dict.fromkeys(POLICIES, float("inf"))
    for _ in range(ROUNDS):
        for policy, bench in benches.items():
            start = time.perf_counter()
            bench.run()
            best[policy] = min(best[policy], (time.perf_counter() - start) / DECISIONS)
    for bench in benches.values():
        bench.desk.bookings.check()
    return best


def rows(size: int) -> list[str]:
    """The table's rows for one number of workers."""
    return [
        f"| {size} | {policy} | {seconds * 1e6:.1f} | {1 / seconds:,.0f} |"
        for policy, seconds in measured(size).items()
    ]


def report() -> str:
    """The result file's text."""
    return "\n".join(
        [
            "# Routing decisions",
            "",
            "View, policy, booking, the worker's word and the release, with one load report in ten",
            f"decisions and {OPEN} bookings open; no decoding, no network. Best of {ROUNDS} rounds",
            f"of {DECISIONS}. Repeat with `python bench/micro/router.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            "",
            "| workers | policy | us per decision | decisions per second and core |",
            "|---:|---|---:|---:|",
            *(row for size in SIZES for row in rows(size)),
            "",
        ]
    )


def main() -> None:
    """Measure, print, write."""
    text = report()
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
