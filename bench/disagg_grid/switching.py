"""The planner over a cell's workers: their number is fixed, and it switches their modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.planner_arms.mode_watch import Watched
from pdserve.perf_model.step_time import preset_of
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.what_if.judge import WhatIfJudge
from pdserve.planner.what_if.records import Handoffs
from pdserve.sim.replay.cluster import MODEL
from pdserve.sim.replay.planner_scaler import PlannerScaler
from pdserve.sim.replay.virtual_actuator import StartUp

if TYPE_CHECKING:
    from bench.disagg_grid.cells import Arm, Scale, World
    from pdserve.ids import Seconds

__all__ = ["switching"]

_LATENCY: Final[Seconds] = 0.002
"""Seconds of messages around a transfer, in the simulated network."""


def switching(world: World, arm: Arm, scale: Scale) -> Watched:
    """The planner of a cell. It may make workers aggregated, too."""
    kind = world.kind
    pool = PoolConfig(
        model=MODEL,
        ttft=kind.ttft,
        itl=kind.itl,
        modes=("aggregated", "prefill", "decode"),
        min=scale.workers,
        max=scale.workers,
    )
    token = preset_of(kind.preset).shape.token_bytes / world.bandwidth
    judge = WhatIfJudge(Handoffs(arm.disagg, latency=_LATENCY, token=token), idle_factor=2.0)
    config = PlannerConfig(mode="act", pools=(pool,))
    return Watched(PlannerScaler(config, judge, StartUp()))
