"""Planners' worlds made by hand: one machine, one planner, and what a test brings about."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdserve.planner.config import PoolConfig
from tests.worlds.planner.scenarios import HABITS, QUICK
from tests.worlds.planner.stage import PlannerSetup
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode
    from tests.worlds.faults import Fault

__all__ = ["planned"]

WORKER = NodeSettings(pace=0.2, load_time=1.0, disagg="rule", router_wait=5.0)


def planned(
    seed: int,
    faults: list[Fault],
    *,
    until: Seconds,
    rate: float = 0.4,
    planners: int = 1,
    workers: tuple[WorkerMode, ...] = ("aggregated",),
    machines: int = 1,
    batch: int = 0,
    pending: Seconds = 0.0,
    budget: float = 0.0,
    out_of_reach: bool = False,
    **pool: Any,
) -> WorldPlan:
    """A router, a frontend, so many planners, workers started by hand, and these faults."""
    roles = {"r0": "router", "f0": "frontend"}
    roles |= {f"p{number}": "planner" for number in range(planners)}
    roles |= {f"w{number}": "worker" for number in range(len(workers))}
    roles |= {f"a{number}": "agent" for number in range(machines)}
    settings = dict.fromkeys(roles, WORKER)
    for number, mode in enumerate(workers):
        settings[f"w{number}"] = replace(WORKER, mode=mode)
    made = PoolConfig(**{"model": "model", "ttft": 1.0, "max": 5, **pool})
    return WorldPlan(
        seed=seed,
        roles=roles,
        settings=settings,
        models=("model",),
        starts=dict.fromkeys(roles, 0.0),
        rate=rate,
        faults=tuple(faults),
        faults_end=until,
        habits=HABITS,
        setup=PlannerSetup(
            config=replace(QUICK, pools=(made,), budget=budget),
            worker=WORKER,
            machines={f"a{number}": 2 for number in range(machines)},
            batch=batch,
            pending=pending,
            out_of_reach=out_of_reach,
        ),
    )
