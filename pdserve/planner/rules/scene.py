"""Everything that the rules see of one model at one tick."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.config import MODES
from pdserve.planner.outlook import Load, PoolCandidate, PoolOutcome, Slot
from pdserve.planner.pool import serves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Kind
    from pdserve.planner.changes.book import ChangeBook, Step, Underway
    from pdserve.planner.changes.times import StartTimes
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.planner.outlook import DemandView
    from pdserve.planner.pool import Mix, Pool, Worker
    from pdserve.planner.rules.tenure import Tenure

__all__ = ["STARTED_MODES", "Scene", "mix_of", "slot_of"]

STARTED_MODES: Final = ("aggregated", "decode", "prefill")
"""Modes that a worker may begin with; `both` is a mode that only a running worker takes."""
_UNSURE: Final = 0.15
"""Part of the allowed share of misses by which a prediction may exceed it before capacity is added:
the standard error of 2% in three replays of a thousand requests. Where more workers cure next to
nothing, chance would decide otherwise how many are started."""
_NOTHING: Final = PoolOutcome(miss=0.0)
_COST: Final = 1e-9
"""Sums of prices are not exact in binary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One model at one tick."""

    now: Seconds
    wall: float
    config: PlannerConfig
    target: PoolConfig
    """What the model must keep."""
    pool: Pool
    kinds: tuple[Kind, ...]
    blocked: Mapping[str, str]
    """Kinds that are not started now, and why."""
    used: Mapping[str, int]
    """Instances of each kind, of all models, asked ones included."""
    spare: float
    """What the budget leaves for an hour; infinite without one."""
    demand: DemandView | None
    book: ChangeBook
    times: StartTimes
    tenure: Tenure
    reversal: tuple[str, str] | None
    """Modes, from and to, of a switch that would take the model's last one back too soon."""
    judge: Callable[[Load, Sequence[PoolCandidate]], Sequence[PoolOutcome]]

    # ------------------------------------------------------------------ times

    @property
    def start_p90(self) -> Seconds:
        """Seconds within which nine of ten starts serve, of the kind that would be started."""
        open_kinds = [one for one in self.kinds if one.name not in self.blocked] or self.kinds
        return self.times.p90("start", open_kinds[0].name) if open_kinds else 0.0

    def drain_p90(self, kind: str = "") -> Seconds:
        """Seconds that a drain takes, nearly always."""
        return self.times.p90("drain", kind)

    @property
    def break_even(self) -> Seconds:
        """How long a worker must be idle for its removal to pay: twice its start-up and drain."""
        return self.config.break_even * (self.start_p90 + self.drain_p90())

    @property
    def stabilization(self) -> Seconds:
        """How long capacity is kept for a load that has been: until that has cost as much as two
        start-ups and drains, which is at most twice the cost of knowing the future. At least a
        slow tick, at most `stable`."""
        return min(self.config.stable, max(self.config.slow_tick, self.break_even))

    # ------------------------------------------------------------------ modes and changes

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that workers may be switched to and started in."""
        if self.target.modes:
            return self.target.modes
        there = {one.mode for one in self.pool.workers} | {one.mode for one in self.pool.coming}
        return tuple(mode for mode in MODES if mode in there) or ("aggregated",)

    @property
    def changes(self) -> tuple[Underway, ...]:
        """Changes of the model that are under way."""
        return self.book.of(self.pool.model)

    @property
    def removing(self) -> Underway | None:
        """The change that takes capacity away now; None: there is none, and there may be one."""
        return next((one for one in self.changes if one.removes), None)

    @property
    def told_to_stop(self) -> list[Worker]:
        """Workers that serve, and will not once they hear of their order."""
        undone = {one.step.life for one in self.changes if one.action is Action.UNDO}
        going = {one.step.life for one in self.changes if one.action is Action.STOP} - undone
        return [one for one in self.pool.serving if one.life in going]

    def starts(self) -> list[Underway]:
        """Starts that are still wanted."""
        return [
            one
            for one in self.changes
            if one.action is Action.START and one.state is not ChangeState.ENDING
        ]

    # ------------------------------------------------------------------ room

    @property
    def floor(self) -> int:
        """Fewest workers until one that is started now would serve."""
        ahead = self.wall + self.start_p90 + self.config.lease_slack
        return max(self.target.floor(self.wall), self.target.floor(ahead))

    def startable(self, *, replacing: int = 0) -> list[str]:
        """The kinds of the workers that may be started now, one after the other, the preferred kind
        first. `replacing`: workers that end soon, and do not count towards the most."""
        left, spare = self.target.max - self.pool.size + replacing, self.spare
        found: list[str] = []
        for kind in self.kinds:
            price, free = self.pool.price(kind.name), self.free_slots(kind)
            while free > 0 and len(found) < left and price <= spare + _COST:
                if kind.name in self.blocked:
                    break
                found.append(kind.name)
                free, spare = free - 1, spare - price
        return found

    @property
    def no_kind(self) -> str:
        """Why there is no kind to start."""
        if self.target.kinds:
            return f"no actuator offers a kind {' or '.join(self.target.kinds)}"
        if len(self.config.pools) > 1:
            return "its pool names no kinds, and with several pools each must"
        return "no actuator offers a kind for this model"

    def free_slots(self, kind: Kind) -> float:
        """Instances of the kind that its actuator can still start; infinite: it knows no bound."""
        return kind.slots - self.used.get(kind.name, 0) if kind.slots else inf

    # ------------------------------------------------------------------ candidates

    def base(self, horizon: Seconds) -> tuple[Slot, ...]:
        """The capacity at the horizon if nothing more is changed: what serves, less what is told to
        leave, and what will have come by then. What ends by then is left out."""
        coming = (
            Slot(one.mode or "aggregated")
            for one in self.pool.coming
            if one.ready_in is not None and one.ready_in <= horizon
        )
        return (*self.staying(horizon), *coming)

    def staying(self, horizon: Seconds = 0.0, steps: Iterable[Step] = ()) -> tuple[Slot, ...]:
        """The part of it that serves already. `steps` count as ordered."""
        orders = {one.step.life: one.step for one in self.changes if one.step.life is not None}
        orders |= {step.life: step for step in steps if step.life is not None}
        slots = []
        for worker in self.pool.workers:
            slot = _planned(worker, orders.get(worker.life))
            if slot is not None and (worker.hard_end is None or worker.hard_end > horizon):
                slots.append(slot)
        return tuple(slots)

    def predict(self, load: Load, candidates: Sequence[PoolCandidate]) -> list[PoolOutcome]:
        """The outcome of each candidate. Without load nothing is missed; a pool that cannot serve
        misses everything. Neither needs a replay."""
        asked = [one for one in candidates if load.work + load.backlog > 0 and _serves(one)]
        answers = iter(self.judge(load, asked)) if asked else iter(())
        return [
            _NOTHING
            if load.work + load.backlog <= 0
            else (next(answers) if _serves(one) else PoolOutcome(miss=1.0, causes={"held": 1.0}))
            for one in candidates
        ]

    @property
    def most_misses(self) -> float:
        """Predicted share of misses up to which no capacity need be added. A removal has to keep
        the objective itself: what lies between is left as it is."""
        return (1 + _UNSURE) * self.target.allowed_miss

    def switchable(self, mode: str) -> list[Worker]:
        """Workers of a mode that may be switched now, the one with the least to move first."""
        found = [
            one
            for one in self.pool.serving
            if one.mode == mode
            and one.can_switch
            and not self.tenure.may_switch(self.now, one)
            and self.book.may_order(self.now, Action.SWITCH, one.life)
            and self.tenure.dwell(self.now, one.life) >= self.config.dwell
            and self.tenure.switches(self.now, one.life) < self.config.switches_per_hour
        ]
        return sorted(found, key=lambda one: (one.live_tokens, one.running, one.life))


def slot_of(worker: Worker) -> Slot:
    """A worker as part of a candidate; one that changes its mode as what it becomes."""
    return Slot(
        mode=worker.target or worker.mode or "aggregated",
        speed=worker.speed,
        share=worker.share,
        kv_tokens=worker.kv_tokens,
        max_sequences=worker.max_sequences,
        streams=worker.running,
        stream_tokens=worker.live_tokens,
        waiting_tokens=worker.waiting_tokens,
        disagg=worker.disagg,
        transfer_token=worker.transfer_token,
        measured_token=worker.measured_token,
    )


def _planned(worker: Worker, order: Step | None) -> Slot | None:
    """What a worker will be once the newest order to it is obeyed; None: it does not serve."""
    action = None if order is None else order.action
    if worker.state == "loading" or action is Action.STOP:
        return None
    if worker.state == "draining" and action is not Action.UNDO:
        return None
    if order is not None and action is Action.SWITCH:
        return slot_of(worker)._replace(mode=order.mode)
    return slot_of(worker)


def mix_of(slots: Iterable[Slot]) -> Mix:
    """Workers by mode."""
    return dict(Counter(slot.mode for slot in slots))


def _serves(candidate: PoolCandidate) -> bool:
    return serves(mix_of(candidate.slots))
