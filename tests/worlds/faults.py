"""Injects faults into a simulated cluster: kinds, a plan drawn from the seed, each action.

Each run draws some of the kinds and their rates (swarm testing), so that a frequent fault does not
hide a rare one. `World.faults` counts a fault when it is injected, `World.effects` when a node
noticed it: a fault that no node notices tests nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from pdserve.messages.routing import BOOKINGS, SEQUENCES
from pdserve.runtime.topics.replicated_set import Delta
from pdserve.runtime.topics.subscription import LogFollower
from tests.worlds.planner.faults import PLANNER_FAULTS, SILENT
from tests.worlds.roles import Router, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.runtime.topics.replicated_set import SetView
    from tests.worlds.faulty_engine import FaultyEngine
    from tests.worlds.world import VirtualHost, World

__all__ = [
    "GENTLE",
    "KINDS",
    "PLANNER_KINDS",
    "TIER_KINDS",
    "Fault",
    "draw_fault",
    "draw_faults",
    "inject",
    "with_finale",
]


_TIME_ENOUGH: Final[Seconds] = 8.0
"""Time that suffices for a worker to hand over everything, if there is another worker."""
_NOTICED: Final[Seconds] = 14.0
"""Longest stall of a core with work before it is detected; most of it is `--stall-timeout`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kind` at `at` for `lasts` seconds."""

    kind: str
    at: Seconds
    lasts: Seconds
    a: str
    """The host it happens to."""
    b: str = ""
    """The other one, where it is between two."""
    amount: float = 0.0

    @property
    def disturbs(self) -> bool:
        """What one node says may be late at another, or not come, while this lasts."""
        return self.kind not in HARMLESS

    def __str__(self) -> str:
        between = f"{self.a} {self.b}".strip()
        return f"{self.kind} {between} for {self.lasts:.2f} s, {self.amount:.3g}"


# ---------------------------------------------------------------------------- how each is done


async def _delay(world: World, fault: Fault) -> bool:
    before = world.net.faults["delay"]
    for pair in _both(fault):
        world.net.set_conditions(*pair, delay_min=0.0, delay_max=fault.amount, split=True)
    await asyncio.sleep(fault.lasts)
    for pair in _both(fault):
        world.net.set_conditions(*pair, delay_max=0.0, split=False)
    return world.net.faults["delay"] > before


async def _slow(world: World, fault: Fault) -> bool:
    """A link, or a reader, that takes some kilobytes per second, and a full kernel behind it."""
    before = world.net.faults["slow"]
    for pair in _both(fault):
        world.net.set_conditions(*pair, bandwidth=fault.amount, capacity=4096, segment=512)
    await asyncio.sleep(fault.lasts)
    for pair in _both(fault):
        world.net.set_conditions(*pair, bandwidth=0.0, capacity=256 * 1024, segment=64 * 1024)
    return world.net.faults["slow"] > before


async def _partition(world: World, fault: Fault) -> bool:
    """A part of the hosts on one side, chosen by the amount; at least `a`, at most all but `b`."""
    side = {h for i, h in enumerate(world.hosts) if (i + 1) * 0.618 % 1 < fault.amount}
    side = (side | {fault.a}) - {fault.b}
    others = world.hosts.keys() - side
    pairs = [(a, b) for a in sorted(side) for b in sorted(others)]
    return await _silence(world, fault, pairs + [(b, a) for a, b in pairs])


async def _isolate(world: World, fault: Fault) -> bool:
    return await _silence(world, fault, world.around(fault.a))


async def _cut(world: World, fault: Fault) -> bool:
    return await _silence(world, fault, _both(fault))


async def _one_way(world: World, fault: Fault) -> bool:
    """To another host, or, with an amount over a half, to all of them."""
    if fault.amount > 0.5:
        return await _silence(world, fault, [p for p in world.around(fault.a) if p[0] == fault.a])
    return await _silence(world, fault, [(fault.a, fault.b)])


async def _silence(world: World, fault: Fault, pairs: list[tuple[str, str]]) -> bool:
    before = world.net.faults["silence"]
    number = world.cut(pairs)
    await asyncio.sleep(fault.lasts)
    world.mend(number)
    return world.net.faults["silence"] > before


async def _crash(world: World, fault: Fault) -> bool:
    """kill -9, and a new life after `lasts`."""
    host = world.hosts[fault.a]
    if not host.up:
        return False
    reset = world.kill(host)
    await asyncio.sleep(fault.lasts)
    _revive(world, host)
    return reset > 0


async def _lose(world: World, fault: Fault) -> bool:
    """The power goes: silence, not a reset; what comes back knows of no connection."""
    host = world.hosts[fault.a]
    if not host.up:
        return False
    host.busy = True
    before = world.net.faults["silence"]
    number = world.cut(world.around(host.name))
    world.kill(host)
    await asyncio.sleep(fault.lasts)
    felt = world.net.faults["silence"] > before
    world.mend(number)
    host.busy = False
    _revive(world, host)
    return felt


async def _leave(world: World, fault: Fault) -> bool:
    """Asked to end; it says goodbye, and comes back after `lasts`."""
    host = world.hosts[fault.a]
    if not host.up or not host.ready or _paused(host):
        return False
    await world.stop(host, leave=True)
    await asyncio.sleep(fault.lasts)
    _revive(world, host)
    return True


async def _kill(world: World, fault: Fault) -> bool:
    """kill -9 of a process that has been asked to end and has not ended."""
    host = world.hosts[fault.a]
    if not host.busy or host.process is None:
        return False
    world.kill(host)
    return True


async def _pause(world: World, fault: Fault) -> bool:
    """SIGSTOP and SIGCONT; also of one that has been asked to end."""
    host = world.hosts[fault.a]
    process = world.pause(host)
    if process is None:
        return False
    await asyncio.sleep(fault.lasts)
    return world.resume(host, process) > 0


async def _reset(world: World, fault: Fault) -> bool:
    before = world.net.faults["reset"]
    world.net.reset(fault.a, fault.b)
    return world.net.faults["reset"] > before


async def _reset_inside(world: World, fault: Fault) -> bool:
    """Resets a link, mostly in the middle of a frame."""
    before = world.net.faults["reset inside a stream"]
    world.net.reset_after(fault.a, fault.b, 1 + int(fault.amount))
    await asyncio.sleep(fault.lasts)
    world.net.reset_after(fault.a, fault.b, None)
    return world.net.faults["reset inside a stream"] > before


async def _engine(world: World, fault: Fault) -> bool:
    """A worker's engine core dies; its node lives on."""
    return world.hosts[fault.a].up and _break_engine(world, fault)


async def _engine_going(world: World, fault: Fault) -> bool:
    """The same, of a worker that has been asked to end."""
    return world.hosts[fault.a].busy and _break_engine(world, fault)


def _break_engine(world: World, fault: Fault) -> bool:
    host = world.hosts[fault.a]
    part, process = host.part, host.process
    if not host.ready or process is None or not isinstance(part, Worker):
        return False
    return process.context.copy().run(part.break_engine)


async def _stall(world: World, fault: Fault) -> bool:
    """Stalls an engine core until the time is over or its node kills it."""
    host = world.hosts[fault.a]
    engine = _engine_of(world, fault)
    if engine is None or engine.stuck:  # who frees it frees it from both
        return False
    engine.stuck = True
    core, idle = engine.core, world.loop.time()
    until = idle + fault.lasts
    while engine.core is core and world.loop.time() < until:
        await asyncio.sleep(0.5)
        if _paused(host) or (core is not None and not core.has_work):
            idle = world.loop.time()
        if world.loop.time() - idle > _NOTICED and engine.core is core:
            world.complain(f"{host.name} has stood still for {_NOTICED:g} s, and nobody noticed")
    engine.go_on()
    return engine.core is not core or (core is not None and core.has_work)


async def _step(world: World, fault: Fault) -> bool:
    """Lets some steps of an engine fail, one after the other."""
    engine = _engine_of(world, fault)
    if engine is None:
        return False
    engine.failing = int(fault.amount)
    await asyncio.sleep(fault.lasts)
    done, engine.failing = engine.failing < int(fault.amount), 0
    return done


async def _slow_worker(world: World, fault: Fault) -> bool:
    """An engine takes many times as long for each step."""
    engine = _engine_of(world, fault)
    if engine is None:
        return False
    before = engine.stats().steps
    engine.slow_down(fault.amount)
    await asyncio.sleep(fault.lasts)
    engine.slow_down(1.0)
    return engine.stats().steps != before


async def _crowd(world: World, fault: Fault) -> bool:
    """Many ask at once, and want much."""
    host = world.hosts[fault.a]
    if not host.up or host.callers is None or host.process is None or not host.callers.rate:
        return False
    for _ in range(int(fault.amount)):
        host.process.context.copy().run(host.callers.ask)
    return True


async def _drain(world: World, fault: Fault) -> bool:
    """Asked to end within some time; comes back after `lasts`."""
    host = world.hosts[fault.a]
    if not host.up or not host.ready or _paused(host):
        return False
    alone = len(world.active) == 1 and world.judge.others_fit(host)
    part = host.part
    await world.stop(host, leave=True, within=fault.amount)
    room = world.judge.others_have_room(host)
    asked = set(world.active) - {fault}
    late = fault.amount >= _TIME_ENOUGH and isinstance(part, Worker) and not part.handed_over
    if late and alone and not asked and room:
        within = f"{fault.amount:.1f} s"
        world.complain(f"{host.name} was to hand its requests over, and could not in {within}")
    await asyncio.sleep(fault.lasts)
    _revive(world, host)
    return True


def _engine_of(world: World, fault: Fault) -> FaultyEngine | None:
    host = world.hosts[fault.a]
    part = host.part
    if not host.up or not host.ready or not isinstance(part, Worker):
        return None
    engine = part.engine
    return None if engine.core is None else engine


async def _amnesia(world: World, fault: Fault) -> bool:
    """A router's copies of logs are not what they should be: nothing that a network does, but what
    a bug would do. Watermarks find out."""
    host = world.hosts[fault.a]
    if not host.up or not isinstance(host.part, Router):
        return False
    wrong = Delta(clear=False, puts={b"nonsense": b""})
    done = False
    for member in host.part.node.registry:
        for topic in (SEQUENCES, BOOKINGS):
            following = host.part.topics.following(topic, member.node)
            if isinstance(following, LogFollower) and following.reader.live:
                view = cast("SetView", following.reader.target)
                _ = view._set.change(wrong)
                done = True
    return done


async def _late(world: World, fault: Fault) -> bool:
    """Writes of KV land after their sender has given up."""
    return await _troubled(world, fault, "late", fault.amount)


async def _dropped(world: World, fault: Fault) -> bool:
    """Writes of KV never land."""
    return await _troubled(world, fault, "lost", fault.amount)


async def _garbled(world: World, fault: Fault) -> bool:
    """Writes of KV land with a byte that is another."""
    return await _troubled(world, fault, "wrong", fault.amount)


async def _troubled(world: World, fault: Fault, name: str, amount: float) -> bool:
    faults, counts = world.fabric.faults, world.fabric.counts
    before = counts[name]
    setattr(faults, name, amount)
    await asyncio.sleep(fault.lasts)
    setattr(faults, name, 0.0)
    return counts[name] > before


async def _sluggish(world: World, fault: Fault) -> bool:
    """Each write of KV takes its time."""
    counts = world.fabric.counts
    before = counts["landed"]
    world.fabric.faults.delay = (0.0, fault.amount)
    await asyncio.sleep(fault.lasts)
    world.fabric.faults.delay = (0.0, 0.0)
    return counts["landed"] > before


async def _reads_fail(world: World, fault: Fault) -> bool:
    """Reads from a worker's disk fail, or bring what was not written."""
    return await _of_tiers(world, fault, "reads")


async def _writes_fail(world: World, fault: Fault) -> bool:
    """Writes to a worker's disk fail."""
    return await _of_tiers(world, fault, "writes")


async def _disk_full(world: World, fault: Fault) -> bool:
    """A worker's disk has no room."""
    return await _of_tiers(world, fault, "full")


async def _disk_slow(world: World, fault: Fault) -> bool:
    """Each read from a worker's disk takes seconds."""
    return await _of_tiers(world, fault, "slow")


async def _copies_fail(world: World, fault: Fault) -> bool:
    """Copies between a worker's device and its host memory fail."""
    return await _of_tiers(world, fault, "copies")


async def _of_tiers(world: World, fault: Fault, name: str) -> bool:
    engine = _engine_of(world, fault)
    if engine is None:
        return False
    faults = engine.tier_faults
    before = faults.counts[name]
    setattr(faults, name, fault.amount)
    await asyncio.sleep(fault.lasts)
    setattr(faults, name, 0.0)
    return faults.counts[name] > before


def _revive(world: World, host: VirtualHost) -> None:
    if host.wanted and not host.busy:
        world.start(host)


def _paused(host: VirtualHost) -> bool:
    return host.process is not None and host.process.paused


def _both(fault: Fault) -> list[tuple[str, str]]:
    return [(fault.a, fault.b), (fault.b, fault.a)]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """How one kind of fault is done and drawn."""

    do: Callable[[World, Fault], Awaitable[bool]]
    """Returns whether anybody felt it."""
    lasts: tuple[Seconds, ...]
    """One of these times a number around 1."""
    amounts: tuple[float, ...] = (0.0,)
    roles: tuple[str, ...] = ("router", "worker", "frontend")
    """Roles that it happens to. Empty: it is only made on purpose, because it needs another
    fault."""


KINDS: Final = {
    "delay": FaultKind(_delay, (2.0, 10.0), (0.005, 0.05, 0.3)),
    "slow": FaultKind(_slow, (2.0, 8.0), (2_000.0, 20_000.0)),
    "partition": FaultKind(_partition, (0.3, 4.0, 15.0), (0.2, 0.5)),
    "isolate": FaultKind(_isolate, (0.3, 4.0, 20.0)),
    "cut": FaultKind(_cut, (0.3, 4.0, 20.0)),
    "one-way": FaultKind(_one_way, (0.3, 4.0, 15.0), (0.2, 0.8)),
    "crash": FaultKind(_crash, (0.01, 1.0, 10.0)),
    "lose": FaultKind(_lose, (0.1, 3.0, 15.0)),
    "leave": FaultKind(_leave, (0.01, 1.0, 5.0)),
    "pause": FaultKind(_pause, (0.2, 3.0, 12.0, 25.0)),
    "reset": FaultKind(_reset, (0.0,)),
    "reset-inside": FaultKind(_reset_inside, (5.0,), (1.0, 30.0, 500.0)),
    "engine": FaultKind(_engine, (0.0,), roles=("worker",)),
    "drain": FaultKind(_drain, (0.01, 1.0, 5.0), (0.3, 5.0, 20.0), roles=("worker",)),
    "step": FaultKind(_step, (1.0,), (1.0, 3.5), roles=("worker",)),
    "slow-worker": FaultKind(_slow_worker, (3.0, 10.0), (5.0, 20.0), roles=("worker",)),
    "crowd": FaultKind(_crowd, (0.0,), (20.0,), roles=("frontend",)),
    "stall": FaultKind(_stall, (3.0, 15.0, 40.0), roles=("worker",)),
    "kill": FaultKind(_kill, (0.0,), roles=()),
    "engine-going": FaultKind(_engine_going, (0.0,), roles=()),
    "amnesia": FaultKind(_amnesia, (0.0,), roles=("router",)),
    "kv-late": FaultKind(_late, (2.0, 8.0), (0.05, 0.3)),
    "kv-lost": FaultKind(_dropped, (2.0, 8.0), (0.05, 0.3)),
    "kv-wrong": FaultKind(_garbled, (2.0, 8.0), (0.05, 0.3)),
    "kv-slow": FaultKind(_sluggish, (2.0, 8.0), (0.02, 0.3)),
}


TIER_KINDS: Final = {
    "tier-reads": FaultKind(_reads_fail, (3.0, 10.0), (0.3, 1.0), roles=("worker",)),
    "tier-writes": FaultKind(_writes_fail, (3.0, 10.0), (0.3, 1.0), roles=("worker",)),
    "tier-full": FaultKind(_disk_full, (3.0, 10.0), (2.0,), roles=("worker",)),
    "tier-slow": FaultKind(_disk_slow, (3.0, 10.0), (0.5, 8.0), roles=("worker",)),
    "tier-copies": FaultKind(_copies_fail, (3.0, 10.0), (0.1, 0.5), roles=("worker",)),
}
"""Faults of workers with tiers; only worlds that have such draw them."""

PLANNER_KINDS: Final = {
    name: FaultKind(do, (0.0,), roles=()) for name, do in PLANNER_FAULTS.items()
}
"""Faults of worlds with planners; `planner.scenarios` draws them."""

_EVERY: Final = KINDS | TIER_KINDS | PLANNER_KINDS


GENTLE: Final = frozenset(
    (
        *("delay", "reset", "reset-inside", "engine", "amnesia"),
        *("step", "slow-worker", "crowd"),
        *("kv-late", "kv-lost", "kv-slow", "kv-wrong", *TIER_KINDS),
    )
)
"""Faults that make no node silent for long, so that no node may be declared dead."""


HARMLESS: Final = frozenset(
    (
        *("crash", "leave", "drain", "reset", "reset-inside", "amnesia"),
        *("engine", "engine-going", "kill", "stall", "step", "slow-worker", "crowd"),
        *("kv-late", "kv-lost", "kv-slow", "kv-wrong", *TIER_KINDS),
        *(PLANNER_KINDS.keys() - SILENT),
    )
)
"""Faults under which messages arrive at once, or the link ends, which both sides notice."""


_PEACE: Final[Seconds] = 12.0
"""Time after all other faults in which all nodes find each other again and serve."""


def with_finale(faults: list[Fault], *finale: Fault) -> tuple[Fault, ...]:
    """These faults, and `finale` when they are long over: some rules are judged only where nothing
    else is the matter. Moments of `finale` count from its beginning."""
    over = max([0.0, *(fault.at + fault.lasts for fault in faults)]) + _PEACE
    return (*faults, *(replace(fault, at=over + fault.at) for fault in finale))


async def inject(world: World, fault: Fault) -> None:
    """Do it when it is due, and note whether it was felt."""
    await asyncio.sleep(max(0.0, fault.at - world.loop.time()))
    world.faults[fault.kind] += 1
    world.active[fault] = None
    world.judge.causes.begins(fault, world.loop.time())
    world.happened("-", "FAULT", str(fault))
    if await _EVERY[fault.kind].do(world, fault):
        world.effects[fault.kind] += 1
        world.happened("-", "felt", fault.kind)
    world.trace.note("-", "over", str(fault))
    world.active.pop(fault)
    world.judge.causes.ends(fault, world.loop.time())


def draw_faults(
    random: Random, hosts: dict[str, str], begin: Seconds, end: Seconds, rate: float
) -> list[Fault]:
    """A plan: some kinds, each as often as drawn. `hosts`: roles by name; `rate`: faults per
    second, all kinds together."""
    alone = sorted(name for name, kind in KINDS.items() if kind.roles)
    kinds = random.sample(alone, random.choice((1, 2, 3, 5, len(alone))))
    weights = [random.expovariate(1.0) + 0.1 for _ in kinds]
    plan: list[Fault] = []
    now = begin
    while (now := now + random.expovariate(rate)) < end:
        plan.append(draw_fault(random, random.choices(kinds, weights)[0], hosts, now))
    return plan


def draw_fault(random: Random, name: str, hosts: dict[str, str], at: Seconds) -> Fault:
    """One of a kind."""
    kind = _EVERY[name]
    a = random.choice([host for host, role in hosts.items() if role in kind.roles])
    b = random.choice([host for host in hosts if host != a])
    lasts = random.choice(kind.lasts) * random.uniform(0.7, 1.4)
    return Fault(name, at, lasts, a, b, random.choice(kind.amounts) * random.uniform(0.7, 1.4))
