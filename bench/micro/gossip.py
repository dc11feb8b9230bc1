"""Measures the cost of membership: CPU per node and second in clusters at rest, and of a join.

    python bench/micro/gossip.py

The real state machines run under virtual time, and every message is encoded and decoded. The
simulated network's own work is counted too, so the figures are upper bounds. They are CPU time, so
they hold on a busy machine. Writes bench/results/gossip.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.machine import facts
from pdserve.gossip import events as ev
from pdserve.gossip.messages import MemberRecord
from pdserve.ids import NodeId
from tests.gossip.world import World

SIZES = (3, 10, 100, 300)
SECONDS = 10.0
RESULT = Path(__file__).parent.parent / "results" / "gossip.md"


def settled(n: int) -> World:
    """Makes a cluster of `n` nodes that has been up for a while."""
    world = World(n)
    known = tuple(
        MemberRecord(NodeId(f"n{i}"), 1, address=f"n{i}:1", role="worker") for i in range(n)
    )
    for record in known:
        world.add(record.node, start=ev.StartGossip((), known))
    world.run(3.0)
    assert world.converged(), world.describe()
    return world


def measure(n: int) -> str:
    """Measures one row: a node's share of a core and messages at rest, and a join."""
    world = settled(n)
    before, start = world.messages, time.process_time()
    world.run(SECONDS)
    share = (time.process_time() - start) / SECONDS / n
    messages = (world.messages - before) / SECONDS / n
    start = time.process_time()
    world.add("new", ["n1"])
    took = world.until(world.converged, 3.0)
    work = (time.process_time() - start) / n
    return f"| {n} | {share:.3%} | {messages:.0f} | {took:.2f} | {work * 1e3:.2f} |"


def main() -> None:
    """Measure, print, write."""
    lines = [
        "# Membership at rest",
        "",
        f"Share of one core, {SECONDS:.0f} virtual seconds, encoding and the simulated network",
        "included. Repeat with `python bench/micro/gossip.py`.",
        "",
        *[f"- {fact}" for fact in facts()],
        "",
        "| nodes | core per node | messages per node, s | join known, s | its work, ms per node |",
        "|---:|---:|---:|---:|---:|",
        *[measure(n) for n in SIZES],
        "",
        "A node watches at most eight others, so the cost at rest does not grow with the cluster.",
    ]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
