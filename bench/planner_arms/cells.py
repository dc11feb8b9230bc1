"""The arms, and one replay of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from bench.disagg_grid.cells import KINDS
from bench.planner_arms.aibrix import Apa, Kpa
from bench.planner_arms.clairvoyant import Clairvoyant, sizes
from bench.planner_arms.driver import RuleScaler, starts_asked
from bench.planner_arms.dynamo import DynamoLoad
from bench.planner_arms.fixed import Static
from bench.planner_arms.hpa import Hpa, Keda
from bench.planner_arms.llm_d import Saturation
from bench.planner_arms.loads import load_of, requests
from bench.planner_arms.mode_watch import Watched
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
    from collections.abc import Mapping
    from pathlib import Path

    from bench.planner_arms.base import Rule
    from bench.planner_arms.loads import Load
    from pdserve.ids import Seconds
    from pdserve.sim.replay.run import ReplayResult
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["ARMS", "KIND", "LOOSE", "MOST", "PLANNERS", "SHARE", "SLOTS", "Cell", "run_one"]

KIND: Final = KINDS[1]
"""h100-70b-tp4: a first token within 1 s + twice the prompt's own time, tokens within 40 ms."""
MOST: Final = 8
"""Most workers."""
SHARE: Final = 0.98
"""Share of the requests that is to keep the objective, of arms that take one: about what the best
fixed size keeps."""
LOOSE: Final = 0.9
"""The same for a planner that may miss more, as rules without such an objective do."""
PLANNERS: Final = {"pdserve": SHARE, f"pdserve {LOOSE:.0%}": LOOSE}
"""Arms with the product's planner, and the share that they are to keep."""
SLOTS: Final = 6
"""Requests that one worker bears: what each of four has on average at the highest constant load at
which 95% of the requests are good, as the page's table of constant loads shows. Rules over
utilisation or requests get it; an operator would have to measure it so."""
_KV_TOKENS: Final = 400_000
_SEQUENCES: Final = 256
_WARM: Final[Seconds] = 30.0
"""Samples of a constant load's first seconds do not count."""
_IDLE_ITL: Final[Seconds] = 0.016
ARMS: Final = (
    *("HPA 70%", "KEDA", "AIBrix KPA", "AIBrix APA", "llm-d", "Dynamo (rewritten)"),
    *(*PLANNERS, "clairvoyant"),
)
"""Arms that scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm under one load."""

    load: str
    arm: str
    """One of `ARMS`, `static N`, or `static P:D` of prefill and decode workers."""
    start_up: Seconds = 60.0
    seed: int = 1
    limit: Seconds = 0.0
    """Requests until this time only; 0: all."""

    @property
    def static(self) -> tuple[int, int, int]:
        """(aggregated, prefill, decode) workers of a static arm; all 0: it scales or switches."""
        word, _, size = self.arm.partition(" ")
        prefill, split, decode = size.partition(":")
        if word != "static":
            return 0, 0, 0
        return (0, int(prefill), int(decode)) if split else (int(size), 0, 0)

    @property
    def workers(self) -> tuple[int, int, int]:
        """The same at the beginning, for every arm."""
        load = load_of(self.load)
        if any(self.static):
            return self.static
        if load.split is None:
            return load.initial, 0, 0
        return 0, load.split.prefill, load.split.workers - load.split.prefill

    def trace(self, files: Mapping[str, Path]) -> list[TraceRequest]:
        """The requests, the same for all arms."""
        found = list(requests(load_of(self.load), self.seed, files))
        return [one for one in found if one.at < self.limit] if self.limit else found

    def start(self) -> StartUp:
        """The start-up of its workers: p90 is a third above the median."""
        median = self.start_up / load_of(self.load).compressed
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
            by_window = sizes(trace, learnt(KIND.preset), objective, _KV_TOKENS, MOST, 1 - SHARE)
            return Clairvoyant(by_window, cell.start().p90)
        case "Dynamo (rewritten)":
            token = learnt(KIND.preset).per_token
            return DynamoLoad(queue_limit=KIND.ttft, itl=KIND.itl, idle_itl=_IDLE_ITL, token=token)
        case _:
            return Static(sum(cell.static))


def _planner(cell: Cell) -> PlannerScaler:
    split = load_of(cell.load).split
    pool = PoolConfig(
        model=MODEL,
        ttft=KIND.ttft,
        itl=KIND.itl,
        share=PLANNERS[cell.arm],
        modes=("prefill", "decode") if split else ("aggregated",),
        min=split.workers if split else 1,
        max=split.workers if split else MOST,
    )
    config = PlannerConfig(mode="act", pools=(pool,))
    return PlannerScaler(config, WhatIfJudge(idle_factor=2.0), cell.start())


def _config(cell: Cell, load: Load) -> ReplayConfig:
    workers, prefill, decode = cell.workers
    return ReplayConfig(
        workers=workers,
        prefill=prefill,
        decode=decode,
        policy="ttft",
        seed=cell.seed,
        engine_options={"preset": KIND.preset},
        noise=0.1,
        block_size=256,
        kv_tokens=min(_KV_TOKENS, preset_of(KIND.preset).kv_tokens),
        max_sequences=load.split.sequences if load.split else _SEQUENCES,
        slo=ReplaySlo(ttft=KIND.ttft, cold=2.0, itl=KIND.itl),
        scaling=True,
    )


def run_one(cell: Cell, files: Mapping[str, Path] = MappingProxyType({})) -> dict[str, Any]:
    """Replays one cell and returns what the page shows. `files`: public traces by name."""
    trace, load = cell.trace(files), load_of(cell.load)
    planner = _planner(cell) if cell.arm in PLANNERS else None
    scaler = planner or RuleScaler(_rule(cell, trace), cell.start(), MOST)
    watched = Watched(scaler) if load.split else scaler
    result = replay(_config(cell, load), iter(trace), scaler=watched)
    asked = starts_asked(scaler.actuator, scaler.begun)
    after = [at - load.step for at in asked if at > load.step] if load.step else []
    return _numbers(result) | {"first": round(after[0], 1) if after else None}


def _numbers(result: ReplayResult) -> dict[str, Any]:
    numbers: dict[str, Any] = result.plain(requests=False)["summary"]
    seen = [fmean(counts) for at, counts in result.load if at > _WARM and counts]
    return {
        "requests": numbers["requests"],
        "good": numbers["good"],
        "failed": numbers["requests"] - numbers["outcomes"]["completed"],
        "ttft": numbers["ttft"],
        "itl": numbers["itl"],
        "in_flight": fmean(seen) if seen else 0.0,
        **numbers["scaling"],
    }
