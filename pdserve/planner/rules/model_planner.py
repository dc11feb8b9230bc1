"""Decides for one model: goes through the rules in their order at each tick. Pure.

    pause, pin         the operator's word comes first; what only a pin ordered ends with it
    floor, leases      drains taken back, and starts, that do not depend on the load
    blind              nothing is known: hold, or add one if requests wait
    up                 the objective will be missed: the cheapest lever that is enough
    panic              the load has left the forecast: nothing is removed for a while
    slow tick          a better ratio, or fewer workers

It remembers votes, cool-downs and the forecast, none of which a restart has to bring back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.explain import Binding
from pdserve.planner.levers import raise_capacity, undo_steps
from pdserve.planner.outlook import Horizon, Load, PoolCandidate, PoolOutcome
from pdserve.planner.rules.obligations import (
    ending_soon,
    lacking,
    pin_steps,
    required_starts,
    required_undos,
    start_steps,
    unpinned_undos,
    wrong_stops,
)
from pdserve.planner.rules.sanity import Sanity
from pdserve.planner.rules.shrink import Loads, shrink, staying, surplus_start
from pdserve.planner.rules.surge import Surge
from pdserve.planner.rules.switches import FutileSwitches, LastSwitch, rebalance
from pdserve.planner.rules.votes import Votes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import NodeLife, Seconds
    from pdserve.planner.changes.book import Step
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.outlook import DemandView, Forecaster
    from pdserve.planner.pool import Mix
    from pdserve.planner.rules.sanity import Sight
    from pdserve.planner.rules.scene import Scene

__all__ = ["Decision", "ModelPlanner"]

_SETTLE: Final[Seconds] = 5.0
"""Added to a start-up: what is ordered now is decided by the load then."""
_FALLEN: Final = 0.8
"""Fewer workers than had to be started again are tried once the load is below this part of the one
that they were needed for."""
_WELL: Final = 0.5
"""A pool does well if at most this part of the misses that are allowed was observed."""
_GRID: Final[Seconds] = 60.0
"""Distance of the moments at which a forecast is read when its highest value is looked for."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is begun now, and why not more or less."""

    steps: tuple[Step, ...] = ()
    binding: Binding = field(default_factory=lambda: Binding("fast"))
    before: PoolOutcome | None = None
    after: PoolOutcome | None = None
    blind: str = ""
    alarm: str = ""
    forecast: Horizon | None = None
    unreachable: float = 0.0
    pin: Mix | None = None
    withdrawn: str = ""
    """Id of a start that is no longer wanted; empty: none."""


class _Removal(NamedTuple):
    """The last removals, of which each soon followed the one before."""

    at: Seconds
    """When the last one was ordered."""
    workers: int
    """Workers before the first one."""
    work: float
    """The load at the last one."""


class _Regret(NamedTuple):
    """A removal that had to be undone."""

    until: Seconds
    """When it is forgotten."""
    work: float
    """The load that the workers which were left could not bear."""
    workers: int
    """One more than were left: fewer are not enough for that load."""

    @property
    def below(self) -> float:
        """The load below which fewer may be enough."""
        return _FALLEN * self.work


class ModelPlanner:
    """One model's decisions."""

    def __init__(self, config: PlannerConfig, forecaster: Forecaster) -> None:
        self._config = config
        self._forecaster = forecaster
        self._request: Seconds = 1.0
        """Mean work of a request, as last known."""
        self._sanity = Sanity(config)
        self._votes = Votes()
        self._last_switch = LastSwitch(config.stable, config.reversal_ticks, config.reversal_gain)
        self._futile = FutileSwitches()
        self._next_slow: Seconds | None = None
        self._surge = Surge(config.panic)
        self._removed: _Removal | None = None
        self._regret: _Regret | None = None
        """What the last removal that was too much tells; None: there was none of late."""
        self._patient: Seconds = -inf
        """Until when capacity is kept for `stable`: a load that has come back does so again."""
        self._slow: Binding | None = None
        """What bound the last slow tick."""
        self._succeeded: set[NodeLife] = set()
        """Workers with a time limit whose successors were ordered."""
        self.wrong: set[NodeLife] = set()
        """Workers that came in another mode than was asked for."""

    def start_failed(self) -> None:
        """A start came to nothing; it may have been a successor, and each is ordered anew."""
        self._succeeded.clear()

    def reversal(self, now: Seconds) -> tuple[str, str] | None:
        """Modes, from and to, of a switch that would take the last one back too soon."""
        return self._last_switch.forbidden(now)

    def decide(self, scene: Scene, *, paused: str, pin: Mapping[str, int] | None) -> Decision:
        """What to do at this tick."""
        sight = self._sanity.look(scene.now, scene.target, scene.demand)
        forecast = self._observe(scene, sight)
        if paused:
            decision = Decision((), Binding("paused", {"reason": paused}))
            return replace(_with_waits(scene, decision), forecast=forecast)
        decision = _with_waits(scene, self._by_rule(scene, sight, forecast, pin))
        self._note(scene, decision, forecast)
        return replace(decision, blind=sight.blind, alarm=sight.alarm, forecast=forecast)

    def _by_rule(
        self, scene: Scene, sight: Sight, forecast: Horizon | None, pin: Mapping[str, int] | None
    ) -> Decision:
        self.wrong = {life for life in self.wrong if scene.pool.worker(life) is not None}
        if steps := wrong_stops(scene, sorted(self.wrong)):
            reason = f"{steps[0].life} came in a mode that was not asked for"
            return Decision(tuple(steps), Binding("operator", {"reason": reason}))
        if pin is not None:
            fixed = {mode: count for mode, count in pin.items() if count}
            words = ", ".join(f"{mode}={count}" for mode, count in sorted(fixed.items()))
            binding = Binding("pinned", {"reason": words})
            return Decision(tuple(pin_steps(scene, fixed)), binding, pin=fixed)
        if steps := unpinned_undos(scene):
            nodes = ", ".join(step.life.node for step in steps if step.life is not None)
            reason = f"no pin holds any more, so the drain of {nodes} is taken back"
            return Decision(tuple(steps), Binding("operator", {"reason": reason}))
        if steps := required_undos(scene) or required_starts(scene, self._succeeded):
            return Decision(tuple(steps), _floor_or_lease(scene, steps[0]))
        if sight.blind or forecast is None or scene.demand is None:
            decision = self._blind(scene, sight)
        else:
            decision = self._by_load(scene, sight, scene.demand, forecast)
        return decision if decision.steps else _with_lack(scene, decision)

    # ------------------------------------------------------------------ what is known

    def _observe(self, scene: Scene, sight: Sight) -> Horizon | None:
        """Feeds the forecast; returns what it says of the time at which a start would serve. None:
        nothing is known."""
        demand = scene.demand
        if sight.blind or demand is None:
            return None
        self._watch(scene, demand)
        forecast = self._at(scene.start_p90 + _SETTLE)
        if self._surge.active(scene.now):
            level = self._surge.level
            return Horizon(level, level, level)
        return forecast

    def _watch(self, scene: Scene, demand: DemandView) -> None:
        """Compares the load with its forecast, and feeds the forecast."""
        if demand.rate > 0:
            self._request = demand.level / demand.rate or self._request
        self._surge.see(scene.now, demand, self._at(0.0).p50, self._window(scene))
        if self._surge.shifted(scene.now):
            self._forecaster.shifted()
        # Not the buckets of 5 s: they differ by chance far more than a pool should. And requests,
        # not their work: when prompts become longer, their number is what it was. Now the work of
        # both is the same, `level`.
        self._forecaster.observe(scene.now, demand.level / self._request)

    def _at(self, horizon: Seconds) -> Horizon:
        """The forecast of the work; nothing before the first observation."""
        found = self._forecaster.at(horizon)
        if found is None:
            return Horizon(0.0, 0.0, 0.0)
        return Horizon(*(one * self._request for one in (found.p50, found.p90, found.p95)))

    def _panic_binding(self, now: Seconds) -> Binding:
        surge = self._surge
        figures = {"seconds": surge.left(now), "ratio": surge.ratio, "since": surge.begun}
        return Binding("panic", figures)

    # ------------------------------------------------------------------ without knowledge

    def _blind(self, scene: Scene, sight: Sight) -> Decision:
        binding = Binding("blind", {"reason": sight.blind})
        if not sight.add or scene.starts():
            return Decision((), binding)
        reason = "requests wait in the routers, and the demand is not known"
        if undone := tuple(step for step, _ in undo_steps(scene, reason)):
            return Decision(undone, binding)
        mode = next((mode for mode in scene.modes if mode != "prefill"), "aggregated")
        return Decision(tuple(start_steps(scene, [mode], reason)), binding)

    # ------------------------------------------------------------------ by load

    def _by_load(
        self, scene: Scene, sight: Sight, demand: DemandView, forecast: Horizon
    ) -> Decision:
        if scene.target.ttft is None and scene.target.itl is None:
            return Decision((), Binding("objective"))
        if self._surge.active(scene.now) and (
            undone := tuple(undo_steps(scene, "the load has grown"))
        ):
            return Decision(tuple(step for step, _ in undone), self._panic_binding(scene.now))
        horizon = scene.start_p90 + _SETTLE
        waits = demand.held_work + demand.queued_work
        load, expected = Load(forecast.p90, waits), Load(forecast.p50, waits)
        stay = self._stay(scene, demand, load, horizon)
        decision = self._up(scene, demand, load, expected, stay)
        if self._slow_due(scene.now) and (decision is None or not decision.steps):
            borne = load if decision is None else expected
            slow = self._slower(scene, sight, demand, borne, stay, shrinks=decision is None)
            decision = slow or decision
        if decision is None:
            decision = Decision((), self._calm(scene, stay))
        after = decision.after or stay
        return replace(decision, before=stay, after=after, unreachable=stay.unreachable)

    def _stay(self, scene: Scene, demand: DemandView, load: Load, horizon: Seconds) -> PoolOutcome:
        """The outcome if nothing is changed. Where a drain can be taken back, workers that are only
        coming are no help for what waits now: a start takes minutes, and that worker is there."""
        stay = scene.predict(load, [PoolCandidate(scene.base(horizon))])[0]
        if not scene.pool.coming or not any(undo_steps(scene, "")):
            return stay
        now = Load(demand.level, demand.held_work + demand.queued_work)
        without = scene.predict(now, [PoolCandidate(scene.staying())])[0]
        return max(stay, without, key=lambda one: one.miss)

    def _calm(self, scene: Scene, stay: PoolOutcome) -> Binding:
        """What binds between two slow ticks."""
        if stay.unreachable > 0 and scene.target.ttft is not None:
            figures = {"share": stay.unreachable, "ttft": scene.target.ttft}
            return Binding("unreachable", figures)
        limit = scene.most_misses
        return self._slow or Binding("enough", {"value": stay.miss, "limit": limit})

    def _up(
        self, scene: Scene, demand: DemandView, load: Load, expected: Load, stay: PoolOutcome
    ) -> Decision | None:
        """More capacity; None: it is enough."""
        over = stay.miss > scene.most_misses
        agreed = self._votes.add(over)
        if not over:
            return None
        self._slow = None
        if not (agreed or self._sure(scene, demand, stay)):
            return Decision((), Binding("waiting", {"value": stay.miss}))
        self._votes.clear()  # what is ordered now must have been taken in before more is
        well = self._does_well(scene, demand, stay) and not scene.startable()
        horizon, judged = scene.start_p90 + _SETTLE, not (well or self._futile.hold(scene, load))
        raised = raise_capacity(scene, load, expected, stay, horizon, switches_too=judged)
        # While one change is under way no other begins, which does not make switches futile.
        if judged and not (raised.enough or raised.steps or scene.removing):
            self._futile.found(scene, load)
        if raised.enough:
            figures = {"value": raised.after.miss, "limit": scene.most_misses}
            return Decision(raised.steps, Binding("enough", figures), after=raised.after)
        return Decision(raised.steps, why_not_more(scene, raised.after), after=raised.after)

    def _does_well(self, scene: Scene, demand: DemandView, stay: PoolOutcome) -> bool:
        """True if requests keep the objective with room to spare, whatever a replay says of the
        next ones. Where it foretells a few points of misses its error is as large, and a pool
        would be switched to and fro."""
        if demand.miss_share is None or self._surge.active(scene.now):
            return False
        well = demand.miss_share <= _WELL * scene.target.allowed_miss
        return well and stay.miss <= self._config.fast_up

    def _sure(self, scene: Scene, demand: DemandView, stay: PoolOutcome) -> bool:
        """True if no second opinion is needed."""
        return (
            stay.miss > self._config.fast_up
            or self._surge.begins(scene.now)
            or self._backlogged(scene, demand)
        )

    def _backlogged(self, scene: Scene, demand: DemandView) -> bool:
        """True if much work waits."""
        if scene.target.ttft is None:
            return False
        workers = max(1, len(scene.pool.serving))
        waiting = demand.held_work + demand.queued_work
        return waiting > self._config.queued_limit * scene.target.ttft * workers

    # ------------------------------------------------------------------ slow tick

    def _slow_due(self, now: Seconds) -> bool:
        if self._next_slow is None:
            self._next_slow = now + self._config.slow_tick
        if now < self._next_slow:
            return False
        self._next_slow = now + self._config.slow_tick
        return True

    def _slower(
        self,
        scene: Scene,
        sight: Sight,
        demand: DemandView,
        load: Load,
        stay: PoolOutcome,
        *,
        shrinks: bool,
    ) -> Decision | None:
        """A better ratio or, if the pool may shrink, fewer workers; None: neither."""
        self._slow = self._held(scene, sight)
        if self._slow is not None:
            calm = shrinks and not sight.doubt and not self._surge.active(scene.now)
            return self._unwanted(scene, demand) if calm else None
        well = self._does_well(scene, demand, stay)
        found = None if well else rebalance(scene, load, back=True)
        if self._last_switch.allows(scene.now, found) and found is not None:
            return self._decided(scene, (found.step,), found.after)
        return self._smaller(scene, demand) if shrinks else None

    def _unwanted(self, scene: Scene, demand: DemandView) -> Decision | None:
        """Withdraws a start that has not begun and is no longer needed; None: there is none."""
        one = surplus_start(scene, self._loads(scene, demand))
        if one is None:
            return None
        figures = {"action": "start", "what": one.step.kind}
        return Decision((), Binding("unwanted", figures), withdrawn=one.id)

    def _smaller(self, scene: Scene, demand: DemandView) -> Decision | None:
        """Fewer workers; None: all are needed, or it is too soon."""
        self._slow = self._cooling(scene, demand)
        if self._slow is not None:
            return None
        loads = self._loads(scene, demand)
        shrunk = shrink(scene, loads)
        self._slow = shrunk.binding
        return self._decided(scene, shrunk.steps, shrunk.after) if shrunk.steps else None

    def _decided(
        self, scene: Scene, steps: tuple[Step, ...], after: PoolOutcome | None
    ) -> Decision:
        figures: dict[str, float | str] = {
            "value": after.miss if after else 0.0,
            "limit": scene.target.allowed_miss,
        }
        return Decision(steps, Binding("enough", figures), after=after)

    def _held(self, scene: Scene, sight: Sight) -> Binding | None:
        """What forbids every change of the slow tick."""
        if sight.doubt:
            return Binding("doubt", {"reason": sight.doubt})
        if self._surge.active(scene.now):
            return self._panic_binding(scene.now)
        busy = scene.removing or next(iter(scene.starts()), None)
        if busy is not None:
            what = busy.step.life.node if busy.step.life else busy.step.kind
            return Binding("changing", {"action": busy.action.value, "what": what})
        # What an operator has drained may stay so for hours.
        draining = scene.pool.in_state("draining")
        going = [one for one in draining if one.ordered or one.running]
        if going:
            return Binding("changing", {"action": "end", "what": going[0].node})
        return None

    def _cooling(self, scene: Scene, demand: DemandView) -> Binding | None:
        """What forbids a removal so soon after the last one, or after the planner's beginning: the
        highest load of the last minutes is not known before they have been seen."""
        if demand.seen < self._config.stable:
            return Binding("unseen", {"seconds": demand.seen, "limit": self._config.stable})
        now = scene.now
        since = None if self._removed is None else now - self._removed.at
        if since is not None and since < self._config.remove_interval:
            figures = {"seconds": since, "limit": self._config.remove_interval}
            return Binding("cooldown", figures)
        self._forget(scene, demand)
        regret, size = self._regret, len(staying(scene))
        if regret is None or size > regret.workers:
            return None
        work = demand.peak(self._window(scene))
        figures = {"before": regret.work, "work": work, "limit": regret.below, "workers": size}
        return Binding("regret", figures)

    def _window(self, scene: Scene) -> Seconds:
        """How long capacity is kept for a load that has been. A load that alternates costs a
        start-up, and late requests, each time that it comes back."""
        return self._config.stable if scene.now < self._patient else scene.stabilization

    def _forget(self, scene: Scene, demand: DemandView) -> None:
        """Forgets a removal that was too much, after a while or once the load is well below."""
        regret = self._regret
        if regret is not None and (
            scene.now >= regret.until or demand.peak(self._window(scene)) <= regret.below
        ):
            self._regret = None

    def _loads(self, scene: Scene, demand: DemandView) -> Loads:
        """What a smaller pool must bear: nine of ten loads until a new worker could serve, and the
        expected one later, since what exceeds it is met by a start. The forecast looks as far as
        the worker must be idle for its removal to pay: at most twice the cost of knowing the
        future."""
        pays = scene.break_even * _price_ratio(scene)
        quiet = max(scene.start_p90 + self._config.stable, pays)
        steps = range(int(quiet // _GRID) + 1)
        later = max(self._at(min(quiet, _GRID * (step + 1))).p50 for step in steps)
        ahead = max(self._at(scene.start_p90 + _SETTLE).p90, later)
        peak = demand.peak(self._window(scene))
        least = 0 if self._regret is None else self._regret.workers
        waits = demand.held_work + demand.queued_work
        return Loads(Load(peak, waits), Load(ahead, waits), quiet, len(staying(scene)), least)

    # ------------------------------------------------------------------ what was begun

    def _note(self, scene: Scene, decision: Decision, forecast: Horizon | None) -> None:
        """Remembers what cool-downs need. With `advise` nothing happens, so nothing is kept."""
        if self._config.mode != "act":
            return
        now = scene.now
        if decision.binding.name in ("lease", "floor") and decision.steps:
            started = sum(step.action is Action.START for step in decision.steps)
            new = [one.life for one in ending_soon(scene) if one.life not in self._succeeded]
            self._succeeded.update(new[:started])
        self._succeeded = {life for life in self._succeeded if scene.pool.worker(life)}
        work = 0.0 if scene.demand is None else scene.demand.level
        # What was judged: a load that has just begun is little in the mean of 30 s.
        work = work if forecast is None else max(work, forecast.p90)
        for step in decision.steps:
            if step.action is Action.UNDO and step.life is not None:
                self.wrong.discard(step.life)  # the load needs it as it is: no drain and back
            if step.action is Action.STOP:
                self._removed = self._removal(scene, work)
            elif step.action is Action.SWITCH and step.life is not None:
                worker = scene.pool.worker(step.life)
                if worker is not None:
                    self._last_switch.did(now, (worker.mode, step.mode))
            elif decision.before is not None:
                self._regrets(scene, work)

    def _removal(self, scene: Scene, work: float) -> _Removal:
        before, size = self._late_removal(scene.now), len(staying(scene))
        return _Removal(scene.now, max(size, before.workers) if before else size, work)

    def _regrets(self, scene: Scene, work: float) -> None:
        """Learns from an order of more capacity, if a removal is its cause. Once there are as many
        workers as before the removal, it is not."""
        removed, size = self._late_removal(scene.now), len(staying(scene))
        if removed is None or size >= removed.workers:
            return
        until = scene.now + self._config.hold
        self._regret = _Regret(until, work, size + 1)
        if removed.work < _FALLEN * work:  # not the same load, which was judged a little wrong
            self._patient = until

    def _late_removal(self, now: Seconds) -> _Removal | None:
        removed = self._removed
        return removed if removed and now - removed.at < self._config.stable else None


def _floor_or_lease(scene: Scene, step: Step) -> Binding:
    """What a change is for that does not depend on the load: the floor, or a worker that ends."""
    size = len(scene.pool.serving)
    if ending_soon(scene) and size >= scene.floor:
        return Binding("lease", {"reason": step.reason})
    return Binding("floor", {"floor": scene.floor, "workers": size})


def _with_lack(scene: Scene, decision: Decision) -> Decision:
    """Where fewer workers than the floor are there or coming and none can be started, that is what
    binds."""
    if lacking(scene) <= 0:
        return decision
    why = why_not_more(scene, decision.after or PoolOutcome(miss=0.0))
    lack = (scene.floor, len(scene.pool.serving))
    return replace(decision, binding=replace(why, lack=lack))


def _with_waits(scene: Scene, decision: Decision) -> Decision:
    """Says besides which workers do not answer, and which drain for longer than usual."""
    book, model = scene.book, scene.pool.model
    silent, draining = book.silent(model), book.draining(scene.now, model)
    return replace(decision, binding=replace(decision.binding, silent=silent, draining=draining))


def _price_ratio(scene: Scene) -> float:
    """Price of the kind that would be started again, over that of the dearest worker there is."""
    again = scene.pool.price(scene.kinds[0].name) if scene.kinds else 1.0
    there = max((scene.pool.price(one.kind) for one in scene.pool.serving), default=1.0)
    return again / there if there > 0 else 1.0


def why_not_more(scene: Scene, after: PoolOutcome) -> Binding:
    """What keeps the planner from adding enough."""
    size, most = scene.pool.size, scene.target.max
    if size >= most:
        return Binding("max", {"max": most, "workers": size})
    if not scene.kinds:
        return Binding("actuator", {"reason": scene.no_kind})
    reasons = [scene.blocked[one.name] for one in scene.kinds if one.name in scene.blocked]
    open_kinds = [one for one in scene.kinds if one.name not in scene.blocked]
    if not open_kinds:
        return Binding("kind", {"reason": reasons[0]})
    full = [one for one in open_kinds if scene.free_slots(one) <= 0]
    if len(full) == len(open_kinds):
        return Binding("slots", {"slots": full[0].slots, "kind": full[0].name})
    price = min(scene.pool.price(one.name) for one in open_kinds if one not in full)
    if price > scene.spare:
        budget = scene.config.budget
        return Binding("budget", {"budget": budget, "spare": scene.spare, "price": price})
    starts = [one for one in scene.starts() if one.state is not ChangeState.JOINED]
    if starts:
        return Binding("changing", {"action": "start", "what": starts[0].step.kind})
    return Binding("modes", {"value": after.miss, "workers": len(scene.startable())})
