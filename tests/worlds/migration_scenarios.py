"""Draws worlds for migrations of requests between workers: few nodes, long answers.

A request has many choices. Clients hang up, and some prompts are poison. Combined faults hit a
running migration: the worker that drains dies, its target dies or stands still, the router leaves,
or all workers are replaced one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdserve.sim.rng_tree import RngTree
from tests.worlds.faults import Fault, draw_fault, with_finale
from tests.worlds.handoff_scenarios import HostsByRole
from tests.worlds.load_clients import ClientProfile
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["LONG_ANSWERS", "TROUBLES", "draw_migrations"]

_BEGIN: Final[Seconds] = 3.0
_LASTS: Final[Seconds] = 24.0

LONG_ANSWERS: Final = ClientProfile(
    lengths=(1, 9, 30, 60),
    answers=(10, 40, 90, 120),
    choices=(1, 1, 2, 3),
    alike=0.2,
    hurried=0.15,
    deadlines=(0.3, 8.0),
    fickle=0.2,
    patience=(0.5, 2.0, 5.0),
    enough=0.2,
)
"""Much is under way whenever something happens."""


def draw_migrations(seed: int) -> WorldPlan:
    """One such world."""
    random = RngTree(seed).fork("migrations")
    choose = random.choice
    finale = RngTree(seed).fork("finale").choice(("", "drain", "drain", "stall"))
    prefills = choose((0, 0, 0, 1))
    places = HostsByRole(choose((1, 2, 2)), prefills, choose((2, 2, 3, 4)), choose((1, 1, 2)))
    paces = choose(((0.01, 0.02), (0.02, 0.05), (0.1, 0.2)))
    if finale == "drain":
        paces = (0.1, 0.2)  # what runs would not end by itself in time
    usual = NodeSettings(
        load_time=0.2, moves_kv=random.random() < 0.8, disagg=choose(("always", "rule"))
    )
    settings = {
        name: replace(
            usual,
            mode="decode" if prefills and name in places.decodes else "aggregated",
            pace=choose(paces),
            restart_time=choose((0.2, 2.0)),
            router_wait=choose((1.0, 5.0)),
        )
        for name in places.roles
    }
    for name in places.prefills:
        settings[name] = replace(settings[name], mode="prefill")
    poison = choose((0.0, 0.0, 0.0, 0.01, 0.03))
    return WorldPlan(
        seed=seed,
        roles=places.roles,
        settings=settings,
        models=("model",),
        starts={name: random.random() for name in places.roles},
        rate=_rate(random, max(paces), finale),
        faults=with_finale(_faults(random, places), *_FINALES[finale](places)),
        faults_end=_BEGIN + _LASTS,
        habits=replace(LONG_ANSWERS, poison=poison),
        kv_time=choose((1.0, 1.0, 30.0, 200.0)),
        options=" --migrations",
    )


def _rate(random: Random, pace: Seconds, finale: str) -> float:
    """What is asked must be served; where a worker hands all over, others have room for it."""
    if finale == "drain":
        return 0.35
    return random.choice((1.0, 3.0)) if pace < 0.1 else 0.7


def _faults(random: Random, places: HostsByRole) -> list[Fault]:
    """Some kinds of trouble, each as often as drawn, and single faults between them."""
    kinds = random.sample(sorted(TROUBLES), random.choice((1, 3, len(TROUBLES))))
    singly = random.sample(_SINGLY, random.choice((0, 1, 3)))
    rate = random.choice((0.15, 0.3, 0.6))
    hosts = {name: role for name, role in places.roles.items() if role != "frontend"}
    faults: list[Fault] = []
    now = _BEGIN
    while (now := now + random.expovariate(rate)) < _BEGIN + _LASTS:
        name = random.choice(kinds + singly)
        if name in TROUBLES:
            faults += TROUBLES[name](random, places, now)
        else:
            faults.append(draw_fault(random, name, hosts, now))
    return faults


_SINGLY: Final = ("crash", "leave", "lose", "pause", "reset", "reset-inside", "one-way", "delay")


# ---------------------------------------------------------------------------- troubles


def _drained(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A worker is asked to go, with more time than it needs, or less."""
    worker = random.choice(places.decodes)
    return [Fault("drain", now, random.uniform(0.1, 2.0), worker, "", _limit(random))]


def _replaced(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Each worker in turn is asked to go, and comes back."""
    gap = random.choice((2.0, 4.0))
    return [
        Fault("drain", now + i * gap, 0.5, worker, "", random.choice((1.0, 10.0)))
        for i, worker in enumerate(places.decodes + places.prefills)
    ]


def _killed(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A worker dies, and perhaps where its requests went, too."""
    one, other = random.sample(places.decodes, 2)
    faults = [Fault("crash", now, random.choice((0.5, 3.0)), one)]
    if random.random() < 0.5:
        faults.append(Fault("crash", now + random.choice((0.01, 0.1, 0.5)), 0.5, other))
    return faults


def _nobody_left(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """For longer than a request waits for a worker."""
    return [Fault("crash", now, 34.0, worker) for worker in places.decodes]


def _cores_die(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """One after the other, of the same worker or of all."""
    hosts = random.choice(([random.choice(places.decodes)] * 3, places.decodes))
    gap = random.choice((0.05, 0.5, 1.5))
    return [Fault("engine", now + i * gap, 0.0, host) for i, host in enumerate(hosts)]


def _steps_fail(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Some, here and there; so many that the core gives up."""
    hosts = random.sample(places.decodes, random.choice((1, 2)))
    return [Fault("step", now, 1.0, host, "", random.choice((1.0, 2.0, 3.5))) for host in hosts]


def _stands_still(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A core makes no progress, whatever it has to do."""
    worker = random.choice(places.decodes + places.prefills)
    return [Fault("stall", now, random.choice((3.0, 30.0)), worker)]


def _dies_going(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A worker that hands its requests over dies of something else."""
    worker = random.choice(places.decodes)
    cut = random.choice((0.01, 0.1, 0.4, 1.0))
    kind = random.choice(("kill", "kill", "engine-going", "pause"))
    return [
        Fault("drain", now, 1.0, worker, "", 20.0),
        Fault(kind, now + cut, random.choice((0.5, 3.0, 12.0)), worker),
        *_sluggish(random, places, now),
    ]


def _nowhere_to_go(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A worker is to go, and where its requests are moved something happens as well."""
    one, other = random.sample(places.decodes, 2)
    kind = random.choice(
        ("crash", "engine", "pause", "drain", "step", "cut", "reset", "slow-worker")
    )
    after = random.choice((0.0, 0.05, 0.2, 1.0))
    frontend = random.choice(places.frontends)
    return [
        Fault("drain", now, 1.0, one, "", _limit(random)),
        Fault(kind, now + after, random.choice((0.3, 2.0, 6.0)), other, frontend, 5.0),
        *_sluggish(random, places, now),
    ]


def _nobody_to_ask(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Routers go or die while workers do."""
    router, worker = random.choice(places.routers), random.choice(places.decodes)
    kind = random.choice(("leave", "crash", "pause"))
    return [
        Fault(kind, now, random.choice((0.3, 1.0, 4.0)), router),
        Fault(random.choice(("drain", "crash")), now + 0.1, 1.0, worker, "", 5.0),
    ]


def _crowded(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Many come at once, and one worker is slow: others would begin sooner what waits there."""
    worker, frontend = random.choice(places.decodes), random.choice(places.frontends)
    return [
        Fault(
            "slow-worker", now, random.choice((3.0, 8.0)), worker, "", random.choice((5.0, 20.0))
        ),
        Fault("crowd", now + random.choice((0.0, 0.5)), 0.0, frontend, "", random.choice((12, 25))),
    ]


def _out_of_sight(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A worker cannot be heard, by a frontend or by anybody, for longer than they are patient; or
    is, before that."""
    worker, frontend = random.choice(places.decodes), random.choice(places.frontends)
    kind = random.choice(("cut", "one-way", "isolate", "pause", "lose"))
    return [Fault(kind, now, random.choice((0.5, 4.0, 20.0)), worker, frontend, 0.2)]


def _sluggish(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """KV takes its time, or does not arrive."""
    kind = random.choice(("", "", "kv-slow", "kv-lost", "kv-wrong"))
    return [Fault(kind, now, 3.0, places.decodes[0], places.decodes[1], 0.3)] if kind else []


def _limit(random: Random) -> Seconds:
    return random.choice((0.05, 0.5, 5.0, 20.0))


_FINALES: Final[dict[str, Callable[[HostsByRole], list[Fault]]]] = {
    "": lambda places: [],
    "drain": lambda places: [Fault("drain", 0.0, 0.5, places.decodes[0], "", 8.5)],
    "stall": lambda places: [Fault("stall", 0.0, 25.0, places.decodes[0])],
}
"""What happens when all else is over; see `faults.with_finale`."""

TROUBLES: Final[dict[str, Callable[[Random, HostsByRole, Seconds], list[Fault]]]] = {
    "drained": _drained,
    "replaced": _replaced,
    "killed": _killed,
    "nobody left": _nobody_left,
    "cores die": _cores_die,
    "steps fail": _steps_fail,
    "stands still": _stands_still,
    "dies going": _dies_going,
    "nowhere to go": _nowhere_to_go,
    "nobody to ask": _nobody_to_ask,
    "crowded": _crowded,
    "out of sight": _out_of_sight,
}
"""What may go wrong with a worker, and while that is made good."""
