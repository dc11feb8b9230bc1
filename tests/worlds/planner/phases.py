"""What planners must come to once nothing goes wrong any more.

steady   the same load all the time: after a while nothing changes any more
idle     no load: the pool shrinks to its minimum, and no instance is left that no plan knows; a
         prefill and a decode worker stay where no other mode is wanted, and all where none can be
         started
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from tests.worlds.planner.oracle import serving
from tests.worlds.planner.roles import OrderedWorker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve.ids import Seconds
    from pdserve.planner.config import PoolConfig
    from tests.worlds.planner.stage import Stage
    from tests.worlds.world import VirtualHost

    Until = Callable[..., Awaitable[None]]

__all__ = ["judge_in_calm"]

_STEADY: Final[Seconds] = 20.0
_HUNTS: Final = 2
"""Most changes of direction under a steady load."""
_SLACK: Final[Seconds] = 60.0
_FORGETS: Final[Seconds] = 300.0
"""A forecast forgets a load within this, whatever the planner's own times are."""


async def judge_in_calm(stage: Stage, until: Until) -> None:
    """See the module. Afterwards all planners have ended, so that workers stay as they are."""
    world = stage.world
    for planner in stage.planners():
        for kind in ("gpu", "batch"):
            planner.service.enable(kind)
    await _steady(stage, until)
    world.happened("-", "IDLE")
    for host in world.of_role("frontend"):
        if host.callers is not None:
            host.callers.rate = 0.0
    config, pool = stage.setup.config, stage.setup.config.pools[0]
    most = config.stable + config.hold + (config.remove_interval + 10.0) * pool.max + _FORGETS
    await until("the pool is at its minimum", lambda: _too_many(stage), most)
    await until("planners are at rest", lambda: _unrest(stage), _SLACK)
    for host in world.of_role("planner"):
        host.wanted = False
        await world.stop(host, leave=True)


async def _steady(stage: Stage, until: Until) -> None:
    await until("a planner decides", lambda: _undecided(stage), _SLACK)
    config = stage.setup.config
    # First the planners put right what faults have left: what waits, and workers that are missing.
    await asyncio.sleep(config.stable + config.slow_tick)
    begun = len(stage.oracle.begun)
    await asyncio.sleep(_STEADY)
    later = [action for _, action in list(stage.oracle.begun.values())[begun:]]
    signs = [{"start": 1, "undo_drain": 1, "stop": -1}.get(action, 0) for action in later]
    turns = [sign for sign in signs if sign]
    hunts = sum(a * b < 0 for a, b in pairwise(turns))
    if hunts > _HUNTS:
        stage.world.complain(f"under a steady load planners change their mind: {later}")


def _undecided(stage: Stage) -> Iterator[str]:
    for model in (pool.model for pool in stage.setup.config.pools):
        owners = [one for one in stage.planners() if any(p.model == model for p in one.plans)]
        if len(owners) != 1:
            yield f"{len(owners)} planners decide for {model}"


def _too_many(stage: Stage) -> Iterator[str]:
    for pool in stage.setup.config.pools:
        if pool.ttft is None and pool.itl is None:
            continue  # without an objective only floors and limits count
        if not stage.setup.machines and not stage.setup.batch:
            continue  # what is removed could not come back
        ready = [host for host in serving(stage.world) if host.settings.model == pool.model]
        least = _least(pool, [_mode(host) for host in ready])
        if len(ready) != least:
            names, words = [h.name for h in ready], [p.words(pool.model) for p in stage.planners()]
            yield f"{least} workers of {pool.model} are enough: {names}; {words}"


def _least(pool: PoolConfig, modes: list[str]) -> int:
    """Fewest workers of a pool whose workers have these modes. Where no worker may do both jobs, as
    after an operator's pin, a prefill and a decode worker need each other."""
    wanted = {*(pool.modes or modes)}
    return max(pool.min, 1 if wanted & {"aggregated", "both"} else len({*modes}))


def _mode(host: VirtualHost) -> str:
    assert isinstance(host.part, OrderedWorker)
    return host.part.service.mode


def _unrest(stage: Stage) -> Iterator[str]:
    """What is left of changes: in books, in lists, and as processes."""
    world = stage.world
    for planner in stage.planners():
        for plan in planner.plans:
            for one in plan.changes:
                yield f"{planner.node.id} has {one.action} {one.id} {one.state}"
        listed = {one.change for one in planner.service.report().instances if _lives(one.state)}
        for host in world.of_role("worker"):
            change = host.settings.change
            if host.process is not None and change and change not in listed:
                yield f"{planner.node.id} sees no instance {change}, which is {host.name}"
        running = {h.settings.change for h in world.of_role("worker") if h.process is not None}
        for change in sorted(listed - running):
            yield f"{planner.node.id} sees an instance {change}, of which there is no process"
    for host in world.of_role("worker"):
        if isinstance(host.part, OrderedWorker) and host not in serving(world):
            yield f"{host.name} runs and does not serve"


def _lives(state: str) -> bool:
    return state not in ("ended", "failed")
