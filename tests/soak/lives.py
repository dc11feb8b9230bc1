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
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from pdserve.runtime.topics.config import LogConfig, TopicsConfig
from pdserve.runtime.topics.service import Topics
from tests.worlds.load_clients import DEFAULT_PROFILE
from tests.worlds.oracle.checks import at_rest
from tests.worlds.roles import NodeSettings
from tests.worlds.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve.ids import Bytes, Seconds

ROOT = Path(__file__).parents[2]
OURS = (
    *(str(ROOT / name) for name in ("tests", "pdserve/sim", "pdserve/testing")),
    tracemalloc.__file__,
)
"""What tests and worlds keep is not the product's."""
PLAIN = {"r0": NodeSettings(), "w0": NodeSettings(), "f0": NodeSettings()}
ROLES = {"r": "router", "w": "worker", "f": "frontend"}
HABITS = replace(DEFAULT_PROFILE, lengths=(9, 30, 60), answers=(1, 2, 10), poison=0.0)
TOKENS_APART: Seconds = 0.001
RESTS = 240
"""Looks, half a second apart, until nothing is under way."""
SETTLES: Seconds = 30.0
"""Until all that is kept for seconds is gone: bookings, above all."""

Look = TypeVar("Look")
Sizes = dict[int, int]
"""Entries of each list, dict, set and deque, by its id."""
Held = dict[tuple[str, int], tuple[int, int]]
"""Bytes and objects that live, by file and line."""


class Lives:
    """One world and its rounds. Use within `counted`."""

    def __init__(self, settings: dict[str, NodeSettings], seed: int) -> None:
        self.world = world = World(seed)
        self._settings = settings
        world.rate, world.habits, world.seeds = 0.0, HABITS, ("r0:7000",)
        for name, chosen in settings.items():
            fast = replace(chosen, pace=TOKENS_APART, load_time=0.1)
            world.add(name, ROLES[name[0]], fast)

    def held_after(self, rounds: int, work: Callable[[], Awaitable[None]]) -> list[Held]:
        """What lives after each round."""
        return self.world.loop.run_until_complete(self._rounds(rounds, work, _held))

    def sizes_after(self, rounds: int, work: Callable[[], Awaitable[None]]) -> list[Sizes]:
        """How many entries each container has after each round."""
        return self.world.loop.run_until_complete(self._rounds(rounds, work, sizes))

    async def _rounds(
        self, rounds: int, work: Callable[[], Awaitable[None]], look: Callable[[], Look]
    ) -> list[Look]:
        for host in self.world.hosts.values():
            self.world.start(host)
        await asyncio.sleep(5.0)
        found = []
        for _ in range(rounds):
            await work()
            await self._rest()
            found.append(look())
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

    async def changes(self, names: list[str], count: int) -> None:
        """`count` times one of these hosts, in turn, goes, and comes back; a request or two mean
        that others get to know it. Half of them say goodbye."""
        world = self.world
        for number in range(count):
            host = world.hosts[names[number % len(names)]]
            host.wanted = False
            await world.stop(host, leave=number % 2 == 0)
            await asyncio.sleep(2.0)
            host.wanted = True
            world.start(host)
            await asyncio.sleep(3.0)
            await self.requests(2)

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
def counted(
    settings: dict[str, NodeSettings], seed: int, *, traced: bool = True
) -> Iterator[Lives]:
    """A world of these hosts, whose logs are short, and who remember few that are gone. `traced`:
    it is known who asked for each byte, which takes its time. What the run has frozen is looked
    at, too."""
    short = TopicsConfig(log=LogConfig(ring_events=32))
    with (
        patch("pdserve.router.node.Topics", partial(Topics, config=short)),
        patch("pdserve.worker.node.Topics", partial(Topics, config=short)),
        patch("pdserve.testing.scripted.ScriptedExecutor.release", _note_nothing),
        patch("pdserve.worker.transfer_rpc._REMEMBERED", 4),
        patch("pdserve.frontend.dispatch.cluster_members._REMEMBERED", 4),
        patch("pdserve.net.timers._FEW", 4),
        patch("pdserve.router.demand.RECENT_LIMIT", 4),
    ):
        if traced:
            tracemalloc.start()
        gc.unfreeze()
        lives = Lives(settings, seed)
        try:
            yield lives
        finally:
            tracemalloc.stop()
            lives.world.close()
            gc.collect()
            gc.freeze()


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


# ---------------------------------------------------------------------- entry by entry


def sizes() -> Sizes:
    """Of all that live."""
    gc.collect()
    kinds = (list, dict, set, deque)
    # By type: `isinstance` would ask lazy objects of other libraries what they pretend to be.
    held = [found for found in gc.get_objects() if issubclass(type(found), kinds)]
    return {id(found): len(found) for found in held}


def growing(rounds: list[Sizes], least: int) -> list[str]:
    """Containers of the product that have got `least` entries more in each round but the first, in
    words. One entry for each piece of work is the smallest leak that there can be."""
    alive = {id(found): found for found in gc.get_objects()}
    words = []
    for name in rounds[-1]:
        lengths = [one[name] for one in rounds if name in one]
        steps = [after - before for before, after in pairwise(lengths[1:])]
        if len(lengths) < len(rounds) or min(steps) < least or name not in alive:
            continue
        owner = _owner(alive[name], alive)
        if not owner.startswith(("pdserve.sim.", "pdserve.testing.", "tests.")):
            words.append(f"{owner} has a {type(alive[name]).__name__} of {lengths} entries: ")
            words[-1] += repr(list(alive[name])[-1])[:100]
    return words


def _owner(found: Any, alive: dict[int, Any], depth: int = 4) -> str:
    """The class of the object that it belongs to; its own type, if there is none."""
    level = [found]
    for _ in range(depth):
        above = [one for here in level for one in gc.get_referrers(here) if one is not level]
        for one in above:
            kind = one if issubclass(type(one), type) else type(one)
            if kind.__module__.startswith(("pdserve", "tests")):
                return f"{kind.__module__}.{kind.__qualname__}"
        plain = (dict, list, tuple)
        level = [one for one in above if issubclass(type(one), plain) and one is not alive]
    return type(found).__qualname__
