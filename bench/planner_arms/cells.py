"""The arms, and one replay of one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bench.disagg_grid.cells import KINDS
from bench.planner_arms.aibrix import Apa, Kpa
from bench.planner_arms.clairvoyant import Clairvoyant, sizes
from bench.planner_arms.driver import RuleScaler, starts_asked
from bench.planner_arms.dynamo import DynamoLoad
from bench.planner_arms.fixed import Static
from bench.planner_arms.hpa import Hpa, Keda
from bench.planner_arms.llm_d import Saturation
from bench.planner_arms.loads import LOADS, made
from bench.planner_what_if import learnt
from pdserve.perf_model.step_time import preset_of
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.what_if.judge import WhatIfJudge
from pdserve.planner.what_if.records import LatencyObjective
from pdserve.sim.replay.cluster import MODEL
from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
from pdserve.sim.replay.planner_scaler import PlannerScaler
from pdserve.sim.replay.run import replay
from pdserve.sim.replay.virtual_actuator import StartUp

if TYPE_CHECKING:
    from bench.planner_arms.base import Rule
    from pdserve.ids import Seconds
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["ARMS", "KIND", "MOST", "SLOTS", "Cell", "run_one"]

KIND: Final = KINDS[1]
"""h100-70b-tp4: a first token within 1 s + twice the prompt's own time, tokens within 40 ms."""
MOST: Final = 8
"""Most workers."""
SLOTS: Final = 14
"""Requests that one worker has at load 1: two a second, each for about seven seconds. Rules over
utilisation or requests get it; an operator would have to measure it."""
_KV_TOKENS: Final = 400_000
_IDLE_ITL: Final[Seconds] = 0.016
ARMS: Final = (
    *("HPA 70%", "KEDA", "AIBrix KPA", "AIBrix APA", "llm-d", "Dynamo (rewritten)"),
    *("pdserve", "clairvoyant"),
)
"""Arms that scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm under one load."""

    load: str
    arm: str
    """One of `ARMS`, or `static N`."""
    start_up: Seconds = 60.0
    seed: int = 1
    limit: Seconds = 0.0
    """Requests until this time only; 0: all."""

    @property
    def static(self) -> int:
        """The size of a static arm; 0: it scales."""
        word, _, size = self.arm.partition(" ")
        return int(size) if word == "static" else 0

    def trace(self) -> list[TraceRequest]:
        """The requests, the same for all arms."""
        found = list(made(LOADS[self.load], self.seed))
        return [one for one in found if one.at < self.limit] if self.limit else found

    def start(self) -> StartUp:
        """The start-up of its workers: p90 is a third above the median."""
        median = self.start_up / LOADS[self.load].compressed
        return StartUp(median=median, p90=median * 4 / 3)


def _rule(cell: Cell, trace: list[TraceRequest]) -> Rule:
    target = 0.7 * SLOTS
    match cell.arm:
        case "HPA 70%":
            return Hpa(SLOTS)
        case "KEDA":
            return Keda()
        case "AIBrix KPA":
            return Kpa(target)
        case "AIBrix APA":
            return Apa(target)
        case "llm-d":
            return Saturation()
        case "clairvoyant":
            objective = LatencyObjective(KIND.ttft, KIND.itl, idle_factor=2.0)
            by_window = sizes(trace, learnt(KIND.preset), objective, _KV_TOKENS, MOST)
            return Clairvoyant(by_window, cell.start().p90)
        case "Dynamo (rewritten)":
            token = learnt(KIND.preset).per_token
            return DynamoLoad(queue_limit=KIND.ttft, itl=KIND.itl, idle_itl=_IDLE_ITL, token=token)
        case _:
            return Static(cell.static)


def _planner(cell: Cell) -> PlannerScaler:
    pool = PoolConfig(model=MODEL, ttft=KIND.ttft, itl=KIND.itl, modes=("aggregated",), max=MOST)
    config = PlannerConfig(mode="act", pools=(pool,))
    factor = LOADS[cell.load].compressed
    if factor > 1:
        config = replace(config, stable=config.stable / factor)
    return PlannerScaler(config, WhatIfJudge(idle_factor=2.0), cell.start())


def run_one(cell: Cell) -> dict[str, Any]:
    """Replays one cell and returns what the page shows."""
    trace = cell.trace()
    planner = _planner(cell) if cell.arm == "pdserve" else None
    scaler = planner or RuleScaler(_rule(cell, trace), cell.start(), MOST)
    load = LOADS[cell.load]
    config = ReplayConfig(
        workers=cell.static or load.initial,
        policy="ttft",
        seed=cell.seed,
        engine_options={"preset": KIND.preset},
        noise=0.1,
        block_size=256,
        kv_tokens=min(_KV_TOKENS, preset_of(KIND.preset).kv_tokens),
        slo=ReplaySlo(ttft=KIND.ttft, cold=2.0, itl=KIND.itl),
        scaling=True,
    )
    result = replay(config, iter(trace), scaler=scaler)
    numbers: dict[str, Any] = result.plain(requests=False)["summary"]
    asked = starts_asked(scaler.actuator, scaler.begun)
    after = [at - load.step for at in asked if at > load.step] if load.step else []
    return {
        "requests": numbers["requests"],
        "good": numbers["good"],
        "failed": numbers["requests"] - numbers["outcomes"]["completed"],
        "ttft": numbers["ttft"],
        "itl": numbers["itl"],
        "first": round(after[0], 1) if after else None,
        **numbers["scaling"],
    }
