"""Judges each removal and switch that a planner begins, by what it sees at that tick.

minimum     fewer ready workers than the floor are not left, however many go at once
demand      nothing is removed while a router's demand is not known
room        those that stay can bear the load
victim      the worker whose cache costs least to compute again goes first
dwell       a worker keeps its mode for a while
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Change, ScalingPlan
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.pool import Worker
    from pdserve.planner.tick import PlannerInput

__all__ = ["FULL", "wrong_removal", "wrong_switch"]

FULL = 0.97
"""Share of what workers can do above which requests are late for certain."""
_MOVED = 0.1
"""Cost of moving a token, as a part of computing it; see `planner.rules.shrink`."""
_NOT_BY_LOAD = ("was not asked for", "an operator has pinned")


def wrong_removal(
    config: PlannerConfig,
    seen: PlannerInput,
    plan: ScalingPlan,
    change: Change,
    leaving: Collection[NodeId | None],
    served: float,
) -> Iterator[str]:
    """What is wrong with a drain. `leaving`: all that drain by the plan; `served`: work that a
    worker does in a second."""
    model = plan.model
    pool = config.pool(model)
    assert pool is not None
    ready = [one for one in seen.workers if one.model == model and one.state == "ready"]
    floor = pool.floor(seen.wall)
    left = [one for one in ready if one.node not in leaving]
    if len(left) < floor:
        yield f"it leaves {len(left)} workers, not {floor}"
    if any(words in change.reason for words in _NOT_BY_LOAD):
        return
    demand = seen.demand.get(model)
    if demand is None or not demand.known or demand.faults:
        yield f"the demand is not known: {'' if demand is None else demand.faults}"
        return
    alike = {one.mode for one in ready} == {"aggregated"}
    work = max(demand.peak(config.slow_tick), plan.forecast.get("0.9", 0.0))
    if alike and work > FULL * served * len(left):
        yield f"{len(left)} workers cannot bear {work:.2f} work/s"
    victim = next((one for one in ready if one.node == change.node), None)
    if victim is not None and victim.hard_end is None:
        yield from _cheaper(victim, left)


def _cheaper(victim: Worker, left: list[Worker]) -> Iterator[str]:
    """A worker that planners have started, that stays, and whose loss costs less."""
    for one in left:
        alike = one.mode == victim.mode and one.change and one.hard_end is None
        if alike and _loss(one) < _loss(victim):
            yield f"{victim.node} has more to lose than {one.node}"


def _loss(worker: Worker) -> float:
    return worker.hot_tokens + _MOVED * worker.live_tokens


def wrong_switch(
    config: PlannerConfig, change: Change, since: dict[NodeId, Seconds], now: Seconds
) -> Iterator[str]:
    """What is wrong with a switch. `since`: when each worker came into its mode."""
    if change.node is None or any(words in change.reason for words in _NOT_BY_LOAD):
        return
    dwelt = now - since.get(change.node, -1e9)
    if dwelt < config.dwell - config.tick:
        yield f"{change.node} has had its mode for {dwelt:.1f} s"
