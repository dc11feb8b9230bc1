"""Plans made by hand, for tests that need a certain world and not a drawn one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.sim.roles import Settings
from pdserve.sim.run import Plan

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.sim.faults import Fault

ROLES = {
    "r0": "router",
    "r1": "router",
    "w0": "worker",
    "w1": "worker",
    "f0": "frontend",
    "f1": "frontend",
}


def plan(seed: int, faults: list[Fault], *, until: Seconds, rate: float = 2.0) -> Plan:
    """Six hosts that start together, and these faults."""
    return Plan(
        seed=seed,
        roles=ROLES,
        settings={name: Settings() for name in ROLES},
        models=("model",),
        starts=dict.fromkeys(ROLES, 0.0),
        rate=rate,
        faults=tuple(faults),
        faults_end=until,
    )


def one_after_another(*faults: Fault, begin: Seconds, gap: Seconds) -> list[Fault]:
    """Each begins `gap` after the end of the one before."""
    placed, now = [], begin
    for fault in faults:
        placed.append(replace(fault, at=now))
        now += fault.lasts + gap
    return placed
