"""Measures what a client sees in its stream when its worker ends, and how soon all is well again.

    python bench/recovery.py [--rounds N] [--streams N] [--write bench/results/recovery.md]

Real processes on one machine: two routers, two frontends, three workers that take requests with
`engine=sim`, and one that computes long prompts for two of them, under a constant number of
streams. One worker at a time is killed, stopped or told to leave, and restarted at once, as a
service manager does. Then all workers and routers are restarted, one after the other. Every answer
is compared with that of an undisturbed run, with the parts of tests/chaos/storm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from bench.machine import facts
from tests.chaos.storm import checker, load, storm_requests
from tests.chaos.storm.checker import Circumstances
from tests.chaos.storm.report import quantile
from tests.chaos.storm.testbed import Testbed, settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.chaos.storm.client_request import ClientRequest
    from tests.chaos.storm.nodes import Node
    from tests.chaos.storm.storm_requests import Expected

HERE = Path(__file__).parent
WORKERS = ("decode-1", "decode-2", "whole-1")
REST = 4.0
"""Seconds without a fault between two faults."""
SEED = "recovery"
AT_ONCE = 0.3
"""Seconds in which everything that was sent before a worker froze reaches a client."""
STOP = 15.0
"""Seconds of SIGSTOP; every timeout for a silent process is shorter."""


@dataclass
class Scene:
    """A fault that is made at each worker in turn, and its results."""

    title: str
    act: Callable[[Node], Awaitable[tuple[float, float]]]
    """Makes the fault. Returns the times, on the monotonic clock, between which it hit the streams.
    """
    gaps: list[float] = field(default_factory=list)
    """Gaps of the streams that the worker had, less the usual gap of each stream."""
    whole: list[float] = field(default_factory=list)
    """Times from the fault to the first token from the worker's next life."""
    outcomes: Counter[str] = field(default_factory=Counter)


async def kill(node: Node) -> tuple[float, float]:
    """Kills the node with SIGKILL and restarts it at once."""
    now = time.monotonic()
    node.kill()
    node.start()
    return now, now + AT_ONCE


async def kill_engine(node: Node) -> tuple[float, float]:
    """Kills the engine; its node restarts it."""
    engine = node.engine()
    assert engine is not None
    now = time.monotonic()
    engine.kill()
    return now, now + AT_ONCE


async def stop_both(node: Node) -> tuple[float, float]:
    """Sends SIGSTOP to node and engine, and SIGCONT much later."""
    return await _stopped(node, both=True)


async def stop_engine(node: Node) -> tuple[float, float]:
    """Sends SIGSTOP to the engine alone."""
    return await _stopped(node, both=False)


async def _stopped(node: Node, *, both: bool) -> tuple[float, float]:
    engine = node.engine()
    assert engine is not None
    processes = [*(node.processes()[:1] if both else []), engine]
    now = time.monotonic()
    for process in processes:
        process.suspend()
    await asyncio.sleep(STOP)
    for process in processes:
        with contextlib.suppress(psutil.Error):  # its node may have killed and replaced it
            process.resume()
    return now, now + AT_ONCE


async def leave(node: Node) -> tuple[float, float]:
    """Sends SIGTERM and restarts the node when it has left."""
    now = time.monotonic()
    await node.leave()
    left = time.monotonic()
    node.start()
    return now, left


class Bench:
    """A cluster under a constant number of clients."""

    def __init__(self, site: Testbed, streams: int) -> None:
        self.site = site
        self.streams = streams
        self.circumstances = Circumstances()
        self.lives: list[ClientRequest] = []
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.pool = storm_requests.Pool()

    async def begin(self) -> load.Crowd:
        """Waits until all nodes are up and all answers are known."""
        for node in self.site.nodes.values():
            node.start()
        for node in self.site.nodes.values():
            await node.wait_ready()
        sizes = storm_requests.Sizes(count=120, stops=0, longest_prompt=300, outputs=(60, 160))
        asked = storm_requests.draw(SEED, sizes)
        fronts = [node for node in self.site.frontends if node.name != "hurried"]
        lives = await load.undisturbed(asked, fronts, 40, self.circumstances.patience)
        self.pool.answers += [(life.question, storm_requests.expected_of(life)) for life in lives]
        habits = load.Habits(streamed=1.0, hang_up=0.0, hurried=0.0)
        patience = self.circumstances.patience
        return load.Crowd(self.pool, fronts, fronts, SEED, patience, self.take, habits)

    def take(self, life: ClientRequest, expected: Expected) -> None:
        """Judges a stream that has ended."""
        verdict = checker.judge(life, expected, self.circumstances)
        self.outcomes[verdict.outcome] += 1
        self.lives.append(life)
        if not verdict.allowed:
            self.wrong.append(f"{verdict.outcome}: {verdict.why}\n{life.story()}")

    async def play(self, scene: Scene, rounds: int) -> None:
        """Makes the scene's fault `rounds` times, one worker after the other."""
        for number in range(rounds):
            node = self.site.nodes[WORKERS[number % len(WORKERS)]]
            await asyncio.sleep(REST)
            self.lives.clear()
            self.outcomes.clear()
            began, until = await scene.act(node)
            gone = time.monotonic()
            await node.wait_ready()
            again = await self._serves(node, gone)
            scene.whole.append(again - began)
            await asyncio.sleep(REST)
            found = [gap_within(life, node.name, began, until) for life in self.lives]
            gaps = [gap for gap in found if gap is not None]
            scene.gaps += gaps
            scene.outcomes += self.outcomes
            worst = max(gaps, default=0.0)
            print(
                f"{scene.title:<44} {node.name:<9} {len(gaps):3} streams, worst gap {worst:6.2f} s,"
                f" serves again after {again - began:5.1f} s",
                flush=True,
            )

    async def _serves(self, node: Node, since: float) -> float:
        """Returns when a stream that was requested after `since` first had a token of this node."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = [
                life.first
                for life in self.lives
                if life.asked > since and life.first and node.name in life.workers
            ]
            if found:
                return min(found)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{node.name} gets no requests")


def gap_within(life: ClientRequest, worker: str, since: float, until: float) -> float | None:
    """Returns the longest gap of a stream in this time, less its usual gap. None: the stream did
    not run on this worker at the beginning."""
    gaps = life.gaps
    if worker != life.headers.get("x-pdserve-worker") or not gaps:
        return None
    if not life.first < since < life.times[-1]:
        return None
    usual = statistics.median([length for _, length in gaps])
    hit = [length for at, length in gaps if at <= until and at + length >= since]
    return max(0.0, max(hit) - usual)


async def rolling(bench: Bench) -> tuple[Counter[str], float, int]:
    """Restarts every worker and router, each when the previous one is ready again."""
    bench.outcomes.clear()
    bench.lives.clear()
    began = time.monotonic()
    names = [*WORKERS, "prefill-1", "router-1", "router-2"]
    for name in names:
        node = bench.site.nodes[name]
        await leave(node)
        await node.wait_ready()
        print(f"rolling restart: {name} is back after {time.monotonic() - began:.1f} s", flush=True)
    await asyncio.sleep(REST)
    return Counter(bench.outcomes), time.monotonic() - began, len(names)


async def measure(rounds: int, streams: int) -> str:
    """Runs everything and returns the result file."""
    scenes = [
        Scene("kill -9 of a worker", kill),
        Scene("kill -9 of its engine process alone", kill_engine),
        Scene("SIGTERM of a worker", leave),
        Scene(f"SIGSTOP of a worker for {STOP:.0f} s", stop_both),
        Scene(f"SIGSTOP of its engine alone for {STOP:.0f} s", stop_engine),
    ]
    with Testbed("sim", SEED, plain=True) as site:
        bench = Bench(site, streams)
        crowd = await bench.begin()
        clients = asyncio.create_task(crowd.run(streams))
        try:
            for scene in scenes:
                few = "SIGSTOP" in scene.title
                await bench.play(scene, max(2, rounds // 3) if few else rounds)
            rolled = await rolling(bench)
            crowd.stopping = True
            await clients
        finally:
            clients.cancel()
    for story in bench.wrong[:10]:
        print(story, flush=True)
    return page(scenes, rolled, streams, bench.wrong)


def page(
    scenes: list[Scene], rolled: tuple[Counter[str], float, int], streams: int, wrong: list[str]
) -> str:
    """Returns the result file."""
    machine = "\n".join(f"- {fact}" for fact in facts())
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    outcomes, seconds, nodes = rolled
    rows = "\n".join(map(row, scenes))
    failed = sum(count for word, count in outcomes.items() if word != checker.COMPLETED)
    return f"""# How soon all is well again

What clients see in their streams when a worker goes, and when it is back. Repeat with
`python bench/recovery.py`. Real processes with `--engine=sim` on one machine: two routers, two
frontends, three workers that take requests and a prefill worker, {streams} streams at once.
{settings("sim")}
A stopped engine is found that much later with the default. Who is killed or leaves is started again
at once.

{machine}
- Load averages at the end: {loads} (other work ran on the machine)

The gap of a stream that the worker had is the longest time without a token from the moment on (for
SIGTERM: until the worker has left), less what is usual for the stream. Whole again: until the
worker's next life has brought a first token; starting an interpreter and loading is part of it.
Failed: of all requests meanwhile, those that did not end with exactly
the tokens of an undisturbed run.

| what | streams hit | gap p50 | p99 | worst | whole again, median | requests | failed |
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

Rolling restart of all {nodes} workers and routers by SIGTERM, one after the other, under the same
load: {seconds:.0f} s, {sum(outcomes.values()):,} requests, {failed} failed.
"""


def row(scene: Scene) -> str:
    """A row of the table, in seconds."""
    failed = sum(count for word, count in scene.outcomes.items() if word != checker.COMPLETED)
    cells = [quantile(scene.gaps, share) for share in (0.5, 0.99, 1.0)]
    cells.append(statistics.median(scene.whole))
    numbers = " | ".join(f"{value:.2f} s" for value in cells)
    total = sum(scene.outcomes.values())
    return f"| {scene.title} | {len(scene.gaps)} | {numbers} | {total:,} | {failed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "recovery.md")
    options = parser.parse_args()
    text = asyncio.run(measure(options.rounds, options.streams))
    print(text)
    options.write.write_text(text)


if __name__ == "__main__":
    main()
