"""One storm from its site to its verdict: start, learn the answers, storm, quiet, look, report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.storm import checker, load, reference, schedule, storm_requests
from tests.chaos.storm.checker import Circumstances
from tests.chaos.storm.faults import Faults
from tests.chaos.storm.report import Storm
from tests.chaos.storm.schedule import Standing
from tests.chaos.storm.testbed import HURRIED_TIMEOUT, Engine, Testbed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tests.chaos.storm.client_request import ClientRequest
    from tests.chaos.storm.nodes import Node
    from tests.chaos.storm.storm_requests import Expected

PATIENCE = 85.0
"""Seconds after which a request hangs: the longest answer takes ten, and a few faults may each hold
it up for fifteen. Less than what its frontend allows."""
QUIET = 45.0
"""Seconds after the last request in which everything has to be let go of."""
SLACK_DESCRIPTORS, SLACK_TASKS, SLACK_THREADS = 12, 8, 4
"""Descriptors, tasks and threads that a node may have more than at the beginning, because links to
others come and go. The report has the actual numbers."""
ENOUGH = 100
"""Requests gone wrong, after which a storm is not worth going on."""


@dataclass(frozen=True)
class Wishes:
    """The options of a storm."""

    seed: str
    seconds: float
    """Seconds of faults and load together, without start and quiet time."""
    engine: Engine = "sim"
    streams: int = 220
    every: float = 2.5
    """Seconds between two faults, on the average."""
    kinds: Collection[str] = ()
    """Kinds of faults; empty: all."""
    sizes: storm_requests.Sizes = field(default_factory=storm_requests.Sizes)
    say: Callable[[str], None] = print


def run(wishes: Wishes) -> Storm:
    """The storm. Blocks; nothing is left behind."""
    with Testbed(wishes.engine, wishes.seed) as site:
        return asyncio.run(_Run(wishes, site).whole())


class _Run:
    def __init__(self, wishes: Wishes, site: Testbed) -> None:
        self.filters = wishes
        self.site = site
        parts = {place.name: str(place.part) for place in site.places.values()}
        self.circumstances = Circumstances(parts=parts, patience=PATIENCE, hurry=HURRIED_TIMEOUT)
        roster = {node.name: node for node in site.roster}
        self.standing = Standing(roster, set(roster))
        self.faults = Faults(site, self.standing, self.circumstances)
        self.storm = Storm(wishes.seed, wishes.engine, wishes.streams, wishes.seconds, 0.0)
        self.storm.missing = site.missing
        self.pool = storm_requests.Pool()

    async def whole(self) -> Storm:
        """All of it."""
        say = self.filters.say
        for why in self.site.missing:
            say(f"left out: {why}")
        began = time.monotonic()
        try:
            await self._start()
            say(f"{len(self.site.nodes)} nodes are ready after {time.monotonic() - began:.0f} s")
            await self._learn()
            say(
                f"{len(self.pool.answers)} answers are known after {time.monotonic() - began:.0f} s"
            )
            before = await self._counts()
            await self._rage()
            say(f"the storm is over: {dict(self.storm.outcomes)}")
            self.storm.left += await self._look(before)
            self.storm.left += await self._end()
        finally:
            self.storm.done = self.faults.done
            self.storm.settle_gaps()
            if self.storm.problems:
                self.storm.last_words = [n.last_words() for n in self.site.nodes.values()]
        return self.storm

    # ------------------------------------------------------------------ before

    async def _start(self) -> None:
        for node in self.site.nodes.values():
            node.start()
        for node in self.site.nodes.values():
            await node.wait_ready()

    async def _learn(self) -> None:
        """Gets the right answers from an undisturbed cluster."""
        wishes, sizes = self.filters, self.filters.sizes
        plain = storm_requests.draw(wishes.seed, sizes)
        self.pool.answers += await self._answers(plain)
        stopped = storm_requests.with_stops(wishes.seed, self.pool.answers, sizes)
        self.pool.answers += await self._answers(stopped)
        if wishes.engine == "sim":
            wrong = [words for one in self.pool.answers if (words := reference.misled(*one))]
            assert not wrong, f"nothing disturbs, and yet: {wrong[:5]}"

    async def _answers(
        self, asked: list[storm_requests.StormRequest]
    ) -> list[tuple[storm_requests.StormRequest, Expected]]:
        at_once = max(8, self.filters.streams // 2)
        lives = await load.undisturbed(asked, self._patient, at_once, self.circumstances.patience)
        return [(life.question, storm_requests.expected_of(life)) for life in lives]

    @property
    def _patient(self) -> list[Node]:
        return [n for n in self.site.frontends if not self.site.places[n.name].hurried]

    @property
    def _hurried(self) -> list[Node]:
        return [n for n in self.site.frontends if self.site.places[n.name].hurried]

    # ------------------------------------------------------------------ the storm

    async def _rage(self) -> None:
        wishes, storm = self.filters, self.storm
        crowd = load.Crowd(
            self.pool,
            self._patient,
            self._hurried,
            wishes.seed,
            self.circumstances.patience,
            self._judge,
        )
        planned = schedule.draw(
            wishes.seed,
            wishes.seconds,
            self.site.roster,
            offers=self.site.offers,
            every=wishes.every,
            kinds=wishes.kinds,
        )
        storm.zero = time.monotonic()
        end = storm.zero + wishes.seconds

        def over() -> bool:
            return len(storm.wrong) >= ENOUGH

        clients = asyncio.create_task(crowd.run(wishes.streams))
        try:
            await self.faults.run(planned, storm.zero, over)
            while time.monotonic() < end and not over():  # noqa: ASYNC110  a clock
                await asyncio.sleep(0.2)
            crowd.stopping = True
            await clients
        finally:
            clients.cancel()
            storm.most_open, storm.not_asked = crowd.most_open, crowd.not_asked
            storm.lasted = time.monotonic() - storm.zero

    def _judge(self, life: ClientRequest, expected: Expected) -> None:
        verdict = checker.judge(life, expected, self.circumstances)
        self.storm.take(life, verdict)
        if not verdict.allowed and len(self.storm.wrong) <= 10:
            self.filters.say(f"{verdict.outcome}: {verdict.why}\n{life.story(self.storm.zero)}")

    # ------------------------------------------------------------------ after

    async def _counts(self) -> dict[str, dict[str, int]]:
        """Counts of each live node that may not grow."""
        found: dict[str, dict[str, int]] = {"descriptors": {}, "threads": {}, "tasks": {}}
        for name, node in self.site.nodes.items():
            if not node.alive:
                continue
            found["descriptors"][name] = node.descriptors()
            found["threads"][name] = node.threads()
            tasks = _sample(await node.page(), "pdserve_event_loop_tasks")
            if tasks is not None:
                found["tasks"][name] = int(tasks)
        return found

    async def _look(self, before: dict[str, dict[str, int]]) -> list[str]:
        """What is still held, for as long as it may be; empty: nothing."""
        end = time.monotonic() + QUIET
        while True:
            found = await self._held(before)
            if not found or time.monotonic() > end:
                break
            await asyncio.sleep(1.0)
        return found + await self._status() + self._logged()

    async def _held(self, before: dict[str, dict[str, int]]) -> list[str]:
        found: list[str] = []
        for name, node in self.site.nodes.items():
            try:
                gauges = checker.held(await node.page())
            except OSError as error:
                found.append(f"{name} does not answer: {error!r}")
                continue
            found += [f"{name} still has {gauge} {value:g}" for gauge, value in gauges.items()]
        slacks = (SLACK_DESCRIPTORS, SLACK_THREADS, SLACK_TASKS)
        with contextlib.suppress(OSError):
            now = await self._counts()
            for (what, counts), slack in zip(now.items(), slacks, strict=True):
                found += checker.grown(counts, before[what], slack, what)
                self.storm.growth[what] = checker.most_grown(counts, before[what])
        return found

    async def _status(self) -> list[str]:
        """What `pdserve status` finds amiss."""
        done = await asyncio.to_thread(self.site.status)
        if done.returncode:
            return [f"pdserve status ends with {done.returncode}: {done.stderr.strip()}"]
        members = {one["node"]: one for one in json.loads(done.stdout)["members"]}
        found = [
            f"pdserve status knows no {name}" for name in self.site.nodes if name not in members
        ]
        found += [
            f"pdserve status knows {name}, too" for name in members if name not in self.site.nodes
        ]
        for name, one in members.items():
            amiss = [one["reason"], one["silence"], "draining" if one["draining"] else ""]
            amiss.append("" if one["state"] == "alive" else one["state"])
            found += [f"pdserve status says of {name}: {why}" for why in amiss if why]
        return found

    def _logged(self) -> list[str]:
        return [
            line
            for node in self.site.nodes.values()
            for line in node.tracebacks()
            if not _wanted(line)
        ][:5]

    async def _end(self) -> list[str]:
        """All leave, and must do so in order."""
        found: list[str] = []
        nodes = [node for node in self.site.nodes.values() if node.alive]
        for node in nodes:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
        for node in nodes:
            assert node.process is not None
            end = time.monotonic() + 30.0
            while node.process.poll() is None and time.monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            if node.process.poll() != 0:
                found.append(f"{node.name} ends with {node.process.poll()}")
        return found + self._logged()


def _wanted(traceback: str) -> bool:
    """True if the log line is about a step that the storm made fail, even if the fault's end is
    not in the log."""
    torn = "pieces of log were dropped" in traceback
    return ".trouble was there" in traceback or (torn and "a step of " in traceback)


def _sample(page: str, name: str) -> float | None:
    for line in page.splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return None
