"""Draws worlds for disaggregated prefill: few nodes, long prompts, slow KV transfers.

Clients hang up. Besides single faults, a world draws combinations of several, each made for a state
change of a handoff that rarely happens by chance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdserve.sim.rng_tree import RngTree
from tests.worlds.faults import Fault, draw_fault, with_finale
from tests.worlds.load_clients import LONG_PROMPTS
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["TROUBLES", "HostsByRole", "draw_handoffs"]

_BEGIN: Final[Seconds] = 3.0
_LASTS: Final[Seconds] = 20.0
_LONG: Final = 1_500.0
"""Factor of a KV write's usual duration: longer than a lease that is not renewed."""


class HostsByRole:
    """The hosts of each role."""

    def __init__(self, routers: int, prefills: int, decodes: int, frontends: int) -> None:
        self.routers = [f"r{i}" for i in range(routers)]
        self.decodes = [f"w{i}" for i in range(decodes)]
        self.prefills = [f"w{i}" for i in range(decodes, decodes + prefills)]
        self.frontends = [f"f{i}" for i in range(frontends)]

    @property
    def roles(self) -> dict[str, str]:
        workers = self.decodes + self.prefills
        return (
            dict.fromkeys(self.routers, "router")
            | dict.fromkeys(workers, "worker")
            | dict.fromkeys(self.frontends, "frontend")
        )


def draw_handoffs(seed: int) -> WorldPlan:
    """One such world."""
    random = RngTree(seed).fork("handoffs")
    choose = random.choice
    finale = RngTree(seed).fork("finale").choice(("", "wrong bytes", "long leases"))
    places = HostsByRole(choose((1, 2, 2, 3)), choose((1, 2, 2)), choose((1, 1, 2)), choose((1, 2)))
    paces = choose(((0.01, 0.05), (0.05, 0.1), (0.3, 0.6)))
    usual = NodeSettings(load_time=0.2, disagg=choose(("always", "always", "always", "predict")))
    settings = {
        name: replace(
            usual,
            mode="decode" if name in places.decodes else "aggregated",
            pace=choose(paces),
            restart_time=choose((0.2, 2.0)),
            router_wait=choose((1.0, 5.0)),
        )
        for name in places.roles
    }
    for name in places.prefills:
        settings[name] = replace(settings[name], mode="prefill")
    return WorldPlan(
        seed=seed,
        roles=places.roles,
        settings=settings,
        models=("model",),
        starts={name: random.random() for name in places.roles},
        rate=choose((2.0, 4.0)) if max(paces) < 0.3 else 1.0,  # what is asked must be served
        faults=with_finale(_faults(random, places), *_FINALES[finale](places)),
        faults_end=_BEGIN + _LASTS,
        habits=LONG_PROMPTS,
        kv_time=choose((1.0, 30.0, 200.0, 800.0)) if finale != "long leases" else _LONG,
        options=" --handoffs",
    )


def _faults(random: Random, places: HostsByRole) -> list[Fault]:
    """Draws some kinds of trouble, each as often as drawn, and single faults between them."""
    kinds = random.sample(sorted(TROUBLES), random.choice((1, 3, len(TROUBLES))))
    singly = random.sample(sorted(_SINGLY), random.choice((0, 1, 3)))
    rate = random.choice((0.3, 0.6, 1.2))
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


_SINGLY: Final = ("amnesia", "crash", "leave", "lose", "one-way", "pause", "reset-inside")


# ---------------------------------------------------------------------------- troubles


def _asks_again(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Answers between the two are slow, and the link is lost again and again."""
    p, d = random.choice(places.prefills), random.choice(places.decodes)
    resets = [Fault("reset", now + 0.4 + i * random.uniform(0.3, 1.0), 0.0, p, d) for i in range(4)]
    return [Fault("delay", now, 5.0, p, d, random.choice((0.05, 0.3, 0.8))), *resets]


def _passed_over(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Makes the queue lose a prefill worker without telling the decode worker; the next prefill
    worker then has a claim too."""
    p, d = random.choice(places.prefills), random.choice(places.decodes)
    lost = [
        Fault("reset", now + at, 0.0, router, p) for router in places.routers for at in (2.7, 3.5)
    ]
    return [Fault("cut", now, random.uniform(4.0, 7.0), p, d), *lost]


def _two_claims(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """The queue loses a prefill worker that goes on."""
    p, router = random.choice(places.prefills), random.choice(places.routers)
    return [Fault("reset", now + i * random.uniform(0.1, 0.7), 0.0, router, p) for i in range(4)]


def _owner_lost(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """The queue's router dies, or goes."""
    kind = random.choice(("crash", "leave", "pause"))
    return [Fault(kind, now, random.uniform(0.5, 4.0), random.choice(places.routers))]


def _frozen(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Pauses a worker for as long as a lease or longer."""
    who = random.choice(places.prefills + places.decodes)
    return [Fault("pause", now, random.choice((3.0, 6.5, 8.0, 14.0)), who)]


def _disowned(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Cuts off what a worker sends, but not what it receives: it learns that it was declared dead,
    with all its requests."""
    who = random.choice(places.prefills + 2 * places.decodes)
    return [Fault("one-way", now, random.uniform(8.0, 16.0), who, places.routers[0], 0.8)]


def _goes(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A prefill worker is asked to end while it has much in hand."""
    return [Fault("leave", now, random.uniform(0.1, 2.0), random.choice(places.prefills))]


def _unheard(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Cuts the link of the two, in one or both directions."""
    a, b = random.choice(places.prefills), random.choice(places.decodes)
    if random.random() < 0.5:
        a, b = b, a
    kind = random.choice(("one-way", "one-way", "cut"))
    return [Fault(kind, now, random.choice((0.7, 2.5, 5.5, 7.0, 12.0)), a, b, 0.2)]


def _unlinked(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """A link is lost and cannot be made again for a while, in which one of the two may go."""
    p, d = random.choice(places.prefills), random.choice(places.decodes)
    more = random.choice(((), (Fault("crash", now + 2.0, 1.0, d),), (Fault("leave", now, 1.0, p),)))
    return [
        Fault("cut", now, random.choice((3.0, 8.0)), p, d),
        Fault("reset", now + 0.1, 0.0, p, d),
        *more,
    ]


def _engines(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """Cores die."""
    hosts = places.prefills + places.decodes
    return [Fault("engine", now + i, 0.0, random.choice(hosts)) for i in range(3)]


def _bad_path(random: Random, places: HostsByRole, now: Seconds) -> list[Fault]:
    """KV comes late, wrong, slowly, or not."""
    kind = random.choice(("kv-late", "kv-lost", "kv-slow", "kv-wrong"))
    a, b = places.prefills[0], places.decodes[0]
    return [Fault(kind, now, random.uniform(1.0, 5.0), a, b, random.choice((0.05, 0.3)))]


_FINALES: Final[dict[str, Callable[[HostsByRole], list[Fault]]]] = {
    "": lambda places: [],
    "wrong bytes": lambda places: [
        Fault("kv-wrong", 0.0, 6.0, places.prefills[0], places.decodes[0], 0.4)
    ],
    "long leases": lambda places: [Fault("crowd", 0.0, 0.0, places.frontends[0], "", 3.0)],
}
"""What happens when all else is over; see `faults.with_finale`."""

TROUBLES: Final[dict[str, Callable[[Random, HostsByRole, Seconds], list[Fault]]]] = {
    "asks again": _asks_again,
    "passed over": _passed_over,
    "two claims": _two_claims,
    "owner lost": _owner_lost,
    "frozen": _frozen,
    "disowned": _disowned,
    "goes": _goes,
    "unheard": _unheard,
    "unlinked": _unlinked,
    "engines": _engines,
    "bad path": _bad_path,
}
"""What may go wrong between the two, each with the turns it is made for."""
