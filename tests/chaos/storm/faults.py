"""How each fault is done and undone. One coroutine per fault, from its beginning to its end.

It knows processes, rules and ways; which fault may happen when is `schedule`'s business. A node
under a fault is not `up`; it is again when it says so itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from tests.chaos.storm import schedule
from tests.chaos.storm.checker import Absence

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path
    from typing import Any

    from tests.chaos.storm.checker import Circumstances
    from tests.chaos.storm.nodes import Node
    from tests.chaos.storm.schedule import Fault, Standing
    from tests.chaos.storm.testbed import Testbed

FILL = 1 << 20
SETTLE = 1.0
"""Seconds after a fault before its node is asked whether it is well: it may not know yet."""
FINDING = 5.0
"""Seconds after that in which a frontend may learn that it was declared dead, and rejoin."""


@dataclass
class Done:
    """What became of one wish of the schedule; times are the monotonic clock's."""

    fault: Fault
    began: float
    skipped: str = ""
    ended: float = 0.0
    """The fault itself is over, its node perhaps still away."""
    healed: float = 0.0
    """All concerned are up again."""
    problem: str = ""
    """Something that no fault excuses."""

    def line(self, zero: float) -> str:
        """The fault as a line of text."""
        if self.skipped:
            return f"{self.fault}: left out, {self.skipped}"
        healed = f"well again {self.healed - self.began:.1f} s later" if self.healed else "not over"
        problem = f"; {self.problem}" if self.problem else ""
        return f"{self.fault} (done {self.began - zero:.2f}), {healed}{problem}"


class Faults:
    """Performs a schedule; the storm owns it and awaits `run`."""

    def __init__(self, site: Testbed, standing: Standing, circumstances: Circumstances) -> None:
        self.site = site
        self.standing = standing
        self.circumstances = circumstances
        self.done: list[Done] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways = {
            "cut": self._cut,
            "delay": self._delay,
            "black hole": self._black_hole,
            "trickle": self._trickle,
        }

    async def run(self, faults: Sequence[Fault], zero: float, stopped: Callable[[], bool]) -> None:
        """All of them, each at its time; returns when all are over."""
        for fault in faults:
            while (rest := zero + fault.at - time.monotonic()) > 0 and not stopped():  # noqa: ASYNC110
                await asyncio.sleep(min(rest, 0.2))
            if stopped():
                break
            now = time.monotonic()
            done = Done(fault, now, schedule.refusal(fault, self.standing, now))
            self.done.append(done)
            if not done.skipped:
                task = asyncio.create_task(self._guarded(done, self._take_away(done)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _take_away(self, done: Done) -> list[str]:
        """Before the next fault is looked at: whom this one concerns."""
        fault = done.fault
        concerned = [name for name in (fault.target, fault.peer) if name in self.site.nodes]
        self.standing.up.difference_update(concerned)
        self.standing.disk_full |= fault.target == "disk"
        leaving = fault.kind == "terminate"
        for name in concerned:
            absence = Absence(done.began, math.inf, leaving)
            self.circumstances.away.setdefault(name, []).append(absence)
        return concerned

    async def _guarded(self, done: Done, concerned: list[str]) -> None:
        try:
            await self._act(done)
            done.ended = done.ended or time.monotonic()
            if concerned:
                await asyncio.sleep(SETTLE)
            for name in concerned:
                await self.site.nodes[name].wait_ready()
                self.standing.up.add(name)
                absences = self.circumstances.away[name]
                absences[-1] = replace(absences[-1], until=time.monotonic() + FINDING)
            done.healed = time.monotonic()
        except (RuntimeError, TimeoutError, OSError) as error:
            done.problem = f"{type(error).__name__}: {error}"

    def _act(self, done: Done) -> Coroutine[Any, Any, None]:
        fault = done.fault
        kind = schedule.BY_NAME[fault.kind]
        if kind.ends_engine:
            self.standing.note_engine_end(fault.target, done.began)
        if kind.needs == "disk":
            return self._fill_disk(fault)
        if kind.needs == "proxy":
            return self._ways[kind.name](fault)
        node = self.site.nodes[fault.target]
        if kind.needs == "network":
            return self._disturb(fault)
        acts = {
            "kill node": self._kill,
            "kill engine": self._kill_engine,
            "stop node": self._stop,
            "stop engine": self._stop,
            "stop both": self._stop,
            "terminate": self._terminate,
            "failing step": self._trouble,
            "hanging step": self._trouble,
        }
        return acts[kind.name](done, node)

    # ------------------------------------------------------------------ processes

    async def _kill(self, done: Done, node: Node) -> None:
        if node.part == "frontend":
            self.circumstances.deaths.setdefault(node.name, []).append(time.monotonic())
        node.kill()
        done.ended = time.monotonic()
        await self._start_again(done.fault, node)

    async def _start_again(self, fault: Fault, node: Node) -> None:
        await asyncio.sleep(fault.pause)
        node.start()

    async def _kill_engine(self, done: Done, node: Node) -> None:
        if (engine := node.engine()) is not None:
            with contextlib.suppress(psutil.Error):
                engine.kill()

    async def _stop(self, done: Done, node: Node) -> None:
        """SIGSTOP, and SIGCONT after a while; who has been killed meanwhile stays dead."""
        stopped = node.processes()[:1] if done.fault.kind != "stop engine" else []
        if done.fault.kind != "stop node":
            stopped += filter(None, [node.engine()])
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        try:
            await asyncio.sleep(done.fault.lasting)
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.Error):
                    process.resume()

    async def _terminate(self, done: Done, node: Node) -> None:
        status = await node.leave()
        done.ended = time.monotonic()
        if status:
            done.problem = f"{node.name} left with {status}:\n{node.last_words()}"
        await self._start_again(done.fault, node)

    async def _trouble(self, done: Done, node: Node) -> None:
        """The engine's next step; an idle one has none."""
        failing = done.fault.kind == "failing step"
        file = self.site.trouble(node.name)
        draft = file.with_suffix(".draft")
        draft.write_text("fail" if failing else f"hang {done.fault.lasting}")
        draft.rename(file)
        await asyncio.sleep(0.0 if failing else done.fault.lasting)
        file.unlink(missing_ok=True)

    # ------------------------------------------------------------------ network and disk

    async def _disturb(self, fault: Fault) -> None:
        hosts = self.site.hosts
        target = hosts[fault.target]
        try:
            if fault.kind == "loss":
                target.losing(random.Random(fault.draw).randint(1, 15))
            elif fault.kind == "silence":
                target.silent()
            else:
                peer = hosts[fault.peer]
                target.deaf_to(peer)
                peer.deaf_to(target)
            await asyncio.sleep(fault.lasting)
        finally:
            target.heal()
            if fault.peer:
                hosts[fault.peer].heal()

    async def _cut(self, fault: Fault) -> None:
        self.site.ways[fault.target].cut()

    async def _delay(self, fault: Fault) -> None:
        way = self.site.ways[fault.target]
        way.delay = random.Random(fault.draw).uniform(0.005, 0.05)
        await asyncio.sleep(fault.lasting)
        way.delay = 0.0

    async def _black_hole(self, fault: Fault) -> None:
        way = self.site.ways[fault.target]
        way.stall()
        await asyncio.sleep(fault.lasting)
        way.resume()

    async def _trickle(self, fault: Fault) -> None:
        way = self.site.ways[fault.target]
        whole, way.piece = way.piece, random.Random(fault.draw).randint(16, 256)
        await asyncio.sleep(fault.lasting)
        way.piece = whole

    async def _fill_disk(self, fault: Fault) -> None:
        """Fills the disk on which the logs are written."""
        filler = self.site.disk / "filler"
        try:
            _fill(filler)
            await asyncio.sleep(fault.lasting)
        finally:
            filler.unlink(missing_ok=True)
            self.standing.disk_full = False


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(FILL))
