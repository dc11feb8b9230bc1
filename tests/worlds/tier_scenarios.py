"""Draws worlds whose workers have tiers and fetch prefixes from each other.

Prompts are long and alike, pools are small, KV moves slowly. Disks fail to read or are full; the
owner of what is being fetched dies, is cut off or leaves meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdserve.sim.rng_tree import RngTree
from tests.worlds.faults import Fault, draw_fault
from tests.worlds.load_clients import LONG_PROMPTS
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan, give_tiers

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["ALIKE", "draw_tiers"]

_BEGIN: Final[Seconds] = 5.0
_LASTS: Final[Seconds] = 20.0
ALIKE: Final = replace(
    LONG_PROMPTS,
    lengths=(60, 100, 150),
    answers=(1, 2, 10),
    alike=0.9,
    beginnings=8,
    hurried=0.05,
    fickle=0.15,
)
"""Prompts that others have computed, mostly; more of them than a device holds."""
_OF_TIERS: Final = ("tier-reads", "tier-writes", "tier-full", "tier-slow", "tier-copies")
_OF_WORKERS: Final = (
    *_OF_TIERS,
    *("crash", "drain", "leave", "engine", "stall", "step", "slow-worker"),
    *("cut", "reset", "lose", "kv-late", "kv-lost", "kv-slow", "kv-wrong", "pause"),
)


def draw_tiers(seed: int) -> WorldPlan:
    """One such world."""
    random = RngTree(seed).fork("tiers")
    workers = [f"w{i}" for i in range(random.choice((2, 3)))]
    roles = {"r0": "router", "r1": "router"} | dict.fromkeys(workers, "worker")
    roles |= {"f0": "frontend"}
    usual = NodeSettings(
        load_time=0.2, policy=random.choice(("ttft", "least_loaded")), pace=0.05, router_wait=5.0
    )
    settings = {name: give_tiers(random, usual) for name in roles}
    return WorldPlan(
        seed=seed,
        roles=roles,
        settings=settings,
        models=("model",),
        starts={name: random.random() for name in roles},
        rate=random.choice((1.5, 3.0)),
        faults=tuple(_faults(random, workers)),
        faults_end=_BEGIN + _LASTS,
        habits=ALIKE,
        kv_time=random.choice((1.0, 50.0, 200.0)),
        options=" --tiers",
    )


def _faults(random: Random, workers: list[str]) -> list[Fault]:
    """Faults of the workers, one after the other, at least one kind of them of the tiers."""
    hosts = dict.fromkeys(workers, "worker")
    kinds = random.sample(_OF_WORKERS, random.choice((2, 4, len(_OF_WORKERS))))
    kinds.append(random.choice(_OF_TIERS))
    rate = random.choice((0.2, 0.5))
    faults: list[Fault] = []
    now = _BEGIN
    while (now := now + random.expovariate(rate)) < _BEGIN + _LASTS:
        faults.append(draw_fault(random, random.choice(kinds), hosts, now))
    return faults
