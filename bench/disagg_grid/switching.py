"""The planner over a cell's workers: their number is fixed, and it switches their modes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.planner_arms.mode_watch import Watched
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.what_if.judge import WhatIfJudge
from pdserve.sim.replay.cluster import MODEL
from pdserve.sim.replay.planner_scaler import PlannerScaler
from pdserve.sim.replay.virtual_actuator import StartUp

if TYPE_CHECKING:
    from bench.disagg_grid.cells import Scale, World

__all__ = ["switching"]


def switching(world: World, scale: Scale) -> Watched:
    """The planner of a cell. It may make workers aggregated, too. How fast KV moves it learns as it
    does in a cluster: from routers."""
    kind = world.kind
    pool = PoolConfig(
        model=MODEL,
        ttft=kind.ttft,
        itl=kind.itl,
        modes=("aggregated", "prefill", "decode"),
        min=scale.workers,
        max=scale.workers,
    )
    config = PlannerConfig(mode="act", pools=(pool,))
    return Watched(PlannerScaler(config, WhatIfJudge(idle_factor=2.0), StartUp()))
