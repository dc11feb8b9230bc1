"""Long lives in memory and in virtual time, where it is known who asked for each byte that lives.

The product's nodes and roles, and the engine's core, on the simulated network: no HTTP, no TCP, no
child process. Rounds of work follow each other; after each, when all is at rest, allocations are
counted by the line that made them. What has a bound has a low one here, so that it is full before
anything is counted: then memory does not grow by one object, or it grows for ever.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from pdserve.runtime.topics.config import LogConfig, TopicsConfig
from pdserve.runtime.topics.service import Topics
from pdserve.sim.callers import USUAL
from pdserve.sim.checks import at_rest
from pdserve.sim.roles import Settings
from pdserve.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve.ids import Bytes, Seconds

ROOT = Path(__file__).parents[2]
OURS = (
    *(str(ROOT / name) for name in ("tests", "pdserve/sim", "pdserve/testing")),
    tracemalloc.__file__,
)
"""What tests and worlds keep is not the product's."""
PLAIN = {"r0": Settings(), "w0": Settings(), "f0": Settings()}
ROLES = {"r": "router", "w": "worker", "f": "frontend"}
HABITS = replace(USUAL, lengths=(9, 30, 60), answers=(1, 2, 10), poison=0.0)
TOKENS_APART: Seconds = 0.001
RESTS = 240
"""Looks, half a second apart, until nothing is under way."""
SETTLES: Seconds = 30.0
"""Until all that is kept for seconds is gone: bookings, above all."""

Held = dict[tuple[str, int], tuple[int, int]]
"""Bytes and objects that live, by file and line."""


class Lives:
    """One world and its rounds. Use within `counted`."""

    def __init__(self, settings: dict[str, Settings], seed: int) -> None:
        self.world = world = World(seed)
        self._settings = settings
        world.rate, world.habits, world.seeds = 0.0, HABITS, ("r0:7000",)
        for name, chosen in settings.items():
            fast = replace(chosen, pace=TOKENS_APART, load_time=0.1)
            world.add(name, ROLES[name[0]], fast)

    def held_after(self, rounds: int, work: Callable[[], Awaitable[None]]) -> list[Held]:
        """What lives after each round."""
        return self.world.loop.run_until_complete(self._rounds(rounds, work))

    async def _rounds(self, rounds: int, work: Callable[[], Awaitable[None]]) -> list[Held]:
        for host in self.world.hosts.values():
            self.world.start(host)
        await asyncio.sleep(5.0)
        found = []
        for _ in range(rounds):
            await work()
            await self._rest()
            found.append(_held())
        return found

    async def _rest(self) -> None:
        for _ in range(RESTS):
            if next(at_rest(self.world), None) is None:
                break
            await asyncio.sleep(0.5)
        else:
            raise AssertionError([*at_rest(self.world)])
        await asyncio.sleep(SETTLES)
        world = self.world
        assert not world.loop.problems, world.loop.problems[:3]
        world.trace.lines.clear()

    async def requests(self, count: int) -> None:
        """Asked at the frontend, of which some turn away."""
        host = self.world.hosts["f0"]
        assert host.process is not None
        assert host.callers is not None
        ask = host.callers.ask
        for number in range(count):
            host.process.context.copy().run(ask)
            if number % 4 == 3:
                await asyncio.sleep(0.05)


@contextmanager
def counted(settings: dict[str, Settings], seed: int) -> Iterator[Lives]:
    """A world of these hosts, whose logs are short."""
    short = TopicsConfig(log=LogConfig(ring_events=32))
    with (
        patch("pdserve.sim.roles.Topics", partial(Topics, config=short)),
        patch("pdserve.testing.scripted.ScriptedExecutor.release", _note_nothing),
    ):
        tracemalloc.start()
        lives = Lives(settings, seed)
        try:
            yield lives
        finally:
            tracemalloc.stop()
            lives.world.close()


def _note_nothing(executor: object, sequences: object) -> None:
    """The scripted one notes whatever it hears of."""


def _held() -> Held:
    gc.collect()
    lines = tracemalloc.take_snapshot().statistics("lineno")
    return {
        (line.traceback[0].filename, line.traceback[0].lineno): (line.size, line.count)
        for line in lines
        if not line.traceback[0].filename.startswith(OURS)
    }


def growth(rounds: list[Held]) -> tuple[Bytes, str]:
    """By how many bytes each of the last two rounds has added at least, and the lines whose bytes
    or objects grew in both, in words. A table that doubles does so in one of them; a leak is in
    both."""
    first, second, third = rounds[-3:]
    least = min(_size(second) - _size(first), _size(third) - _size(second))
    words = []
    for place, (size, count) in third.items():
        before, between = first.get(place, (0, 0)), second.get(place, (0, 0))
        grown = min(between[0] - before[0], size - between[0])
        if grown > 0:
            words.append(f"{grown:+} bytes, now {count} objects: {place[0]}:{place[1]}")
    return least, "\n".join(sorted(words, key=lambda line: -int(line.split()[0]))[:12])


def _size(held: Held) -> Bytes:
    return sum(size for size, _ in held.values())
