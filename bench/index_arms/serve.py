"""A process that measures one arm on command: it reads a command per line and writes JSON lines.

python -m bench.index_arms.serve NAME [PROCESSOR]; commands are `round` and `memory SHAPE`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from bench.index_arms import world

if TYPE_CHECKING:
    from collections.abc import Callable

ARMS = {"pdserve": "ours:Ours", "pure": "ours:Pure", "Dynamo": "dynamo:Dynamo"}
SINGLE_WORKERS = 50
"""Workers whose blocks also come one per event."""
PROMPTS = ((4096, 16), (65_536, 64), (131_072, 32))
"""Tokens and block size of the prompts that are hashed."""


def load(name: str) -> world.Arm:
    module, _, attribute = ARMS[name].partition(":")
    arm: world.Arm = getattr(import_module(f"bench.index_arms.{module}"), attribute)()
    return arm


def seconds(work: Callable[..., object], *given: object) -> float:
    start = time.perf_counter()
    work(*given)
    return time.perf_counter() - start


def percentiles(work: Callable[[Any], object], given: list[Any], calls: int) -> tuple[float, float]:
    """p50 and p99 of one call, in microseconds."""
    took = sorted(1e6 * seconds(work, given[i % len(given)]) for i in range(calls))
    return took[calls // 2], took[calls * 99 // 100]


class Rounds:
    """All measurements of a round, with arguments made beforehand."""

    def __init__(self, arm: world.Arm) -> None:
        self.arm = arm
        self.shared, self.unique, self.decision = world.shared(), world.unique(), world.decision()
        self.events = {
            "stored": self._packed(world.stored(self.shared)),
            "single": self._packed(world.stored(self.shared, 1, SINGLE_WORKERS)),
            "unique": self._packed(world.stored(self.unique)),
            "decision": self._packed(world.stored(self.decision)),
        }
        self.branching = world.branching()
        self.events["branching"] = self._packed(world.stored(self.branching))
        self.removed = [arm.pack_removed(e) for e in world.removed(self.shared, 200)]
        rng = Random(4)
        missing = [rng.getrandbits(64) for _ in range(1000)]
        chains = self.shared.chains
        self.asked = {
            "match 1000": [arm.pack_names(chain) for chain in chains],
            "match 500": [arm.pack_names(chains[0][:500])],
            "match 64": [arm.pack_names(chains[0][:64])],
            "miss": [arm.pack_names(missing)],
        }
        rng = Random(5)
        self.tokens = [rng.randrange(128_000) for _ in range(max(n for n, _ in PROMPTS))]

    def _packed(self, events: list[world.Event]) -> list[tuple[object, ...]]:
        return [self.arm.pack_stored(event) for event in events]

    def run(self) -> dict[str, float]:
        """Every figure by name: rates in blocks or tokens per second, times in microseconds."""
        gc.collect()
        gc.disable()
        figures = {**self._events(), **self._shared(), **self._decision()}
        figures |= {**self._branching(), **self._hashing()}
        gc.enable()
        return figures

    def _rate(self, name: str, blocks: int) -> float:
        self.arm.new()
        return blocks / seconds(self.arm.apply_stored, self.events[name])

    def _events(self) -> dict[str, float]:
        return {
            "unique events": self._rate("unique", 300_000),
            "single events": self._rate("single", SINGLE_WORKERS * 1000),
            "events": self._rate("stored", 1_000_000),
        }

    def _shared(self) -> dict[str, float]:
        """Measures hashes and look-ups on the tree that `events` has left."""
        arm, figures = self.arm, {}
        names = self.asked["match 1000"][3]
        found = [arm.depth(names, worker) for worker in (3, 4)]
        if found != [1000, 500]:
            raise RuntimeError(f"{arm.name} answers {found}")
        for name, asked in self.asked.items():
            figures[name], figures[f"{name} p99"] = percentiles(arm.find, asked, arm.calls)
        asked = self.asked["match 1000"]
        figures["dict"], figures["dict p99"] = percentiles(arm.find_dict, asked, arm.calls)
        figures["removed events"] = 200_000 / seconds(arm.apply_removed, self.removed)
        figures["remove worker"] = 1e6 * seconds(arm.remove_workers, range(300, 400)) / 100
        return figures

    def _decision(self) -> dict[str, float]:
        arm = self.arm
        arm.new()
        arm.apply_stored(self.events["decision"])
        asked = [arm.pack_names(chain) for chain in self.decision.chains]
        p50, p99 = percentiles(arm.find_dict, asked, arm.calls)
        return {"decision": p50, "decision p99": p99}

    def _branching(self) -> dict[str, float]:
        arm, shape = self.arm, self.branching
        blocks = sum(len(shape.chain(worker)) for worker in range(shape.workers))
        rate = self._rate("branching", blocks)
        if arm.depth(arm.pack_names(shape.chains[5]), 5) != len(shape.chain(5)):
            raise RuntimeError(f"{arm.name} has lost blocks")
        asked = [arm.pack_names(chain) for chain in shape.chains]
        p50, p99 = percentiles(arm.find, asked, arm.calls)
        figures = {"branching events": rate, "branching": p50, "branching p99": p99}
        p50, p99 = percentiles(arm.find_dict, asked, arm.calls)
        return figures | {"branching dict": p50, "branching dict p99": p99}

    def _hashing(self) -> dict[str, float]:
        if self.arm.hash([0] * 16, 16) is None:
            return {}
        figures = {}
        for count, block_size in PROMPTS:
            tokens = self.tokens[:count]
            took = [seconds(self.arm.hash, tokens, block_size) for _ in range(2**20 // count)]
            figures[f"hash {count}/{block_size}"] = count / sorted(took)[len(took) // 2]
        return figures


def memory(arm: world.Arm, kind: str) -> dict[str, float]:
    """Bytes per worker-block of a tree that is filled for the first time in this process."""
    shape: world.Shape = getattr(world, kind)()
    events = [arm.pack_stored(event) for event in world.stored(shape)]
    arm.new()
    gc.collect()
    before = _resident()
    arm.apply_stored(events)
    blocks = sum(len(shape.chain(worker)) for worker in range(shape.workers))
    figures = {"grown": (_resident() - before) / blocks}
    own = arm.own_bytes()
    return figures if own is None else {**figures, "counted": own / blocks}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    arm = load(sys.argv[1])
    rounds: Rounds | None = None
    for line in sys.stdin:
        command, _, kind = line.strip().partition(" ")
        if command == "memory":
            figures = memory(arm, kind)
        else:
            rounds = rounds or Rounds(arm)
            figures = rounds.run()
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
