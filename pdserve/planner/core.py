"""The core of the planner: what is there and what is wanted go in, plans and orders come out.

Pure and deterministic: no clock, no loop, no randomness of its own. `tick` is called by one owner,
one call at a time; it may be called in another thread, because a what-if takes milliseconds to
seconds. A core that begins anew needs nothing but cards and the actuators' lists.

Who decides: each model has one planner, by rendezvous hashing of the living ones. With a budget one
planner has all models, because a budget is one sum. If a partition makes two, a worker obeys the
greater term, actuators start a change id once, and workers refuse to leave as the last of their
mode.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.messages.planner import ScalingPlan
from pdserve.planner.changes.book import ChangeBook, Underway
from pdserve.planner.changes.ids import change_id
from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.changes.times import KindHealth, StartTimes
from pdserve.planner.explain import ended_line, plan_line
from pdserve.planner.forecast import Forecast
from pdserve.planner.pool import gather
from pdserve.planner.rules.model_planner import ModelPlanner
from pdserve.planner.rules.scene import Scene
from pdserve.planner.rules.tenure import Tenure
from pdserve.planner.tick import Order, PlannerOutput
from pdserve.runtime.rendezvous import key_of, score

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Change, Kind
    from pdserve.planner.changes.book import Ended, Step
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.planner.explain import Binding
    from pdserve.planner.outlook import Forecaster, Judge, Load, PoolCandidate, PoolOutcome
    from pdserve.planner.pool import Mix, Pool
    from pdserve.planner.rules.model_planner import Decision
    from pdserve.planner.tick import PlannerInput

__all__ = ["PlannerCore", "owner_of"]

_log = logging.getLogger(__name__)

_ALL_MODELS: Final = ""
"""Key of the one owner where a budget is shared."""
_HEAR: Final[Seconds] = 30.0
"""After this time a planner has heard of another one that decides for its models, if that one is in
its part of the cluster."""
_NOTHING: Final = (ChangeState.FAILED, ChangeState.GIVEN_UP)
_NO_START: Final[tuple[str, ...]] = ("failed", "ended")


def owner_of(model: str, planners: Collection[NodeId], *, budget: float) -> NodeId | None:
    """The planner that decides for a model; None: there is none."""
    key = key_of((_ALL_MODELS if budget else model).encode())
    return max(planners, key=lambda node: (score(key, node), node), default=None)


@dataclass(slots=True)
class _Spent:
    """What is charged, while plans are made one after the other."""

    spare: float
    used: Counter[str] = field(default_factory=Counter)


class PlannerCore:
    """The decisions of one planner process."""

    def __init__(
        self,
        config: PlannerConfig,
        *,
        me: NodeId,
        term: int,
        judge: Judge,
        forecaster: Callable[[], Forecaster] = Forecast,
    ) -> None:
        """Args: `term` is greater for a later life of a planner, for example its start in Unix
        milliseconds; terms that begin later are their own. `forecaster` makes one for each model.
        Errors: `ConfigError`."""
        config.validate()
        self._config = config
        self._me = me
        self._term = term
        self._judge = judge
        self._forecaster = forecaster
        self._times = StartTimes(config)
        self._health = KindHealth(config)
        self._book = ChangeBook(config, self._times, self._health)
        self._tenure = Tenure(config.hold)
        self._models: dict[str, ModelPlanner] = {}
        self._plans: dict[str, ScalingPlan] = {}
        self._bindings: dict[str, Binding] = {}
        self._said: dict[str, object] = {}
        self._number = 0
        self._ended: list[Ended] = []
        """Changes that this tick has found to be over."""
        self._obeyed = 0
        """Newest term that a worker has obeyed instead of this planner's."""
        self._renew_at: Seconds | None = None
        """When a new term begins, because a worker has obeyed a later planner; None: none has."""

    def enable(self, kind: str) -> None:
        """An operator has mended a kind that was disabled."""
        self._health.enable(kind)

    def tick(self, now: Seconds, seen: PlannerInput) -> PlannerOutput:
        """One round of decisions. `now`: monotonic seconds."""
        log: list[str] = []
        self._ended = []
        owned = [one for one in self._config.pools if self._owns(one.model, seen)]
        kept = {one.model for one in owned if one.model in self._models}
        others = {one.life for one in seen.workers if one.model not in kept}
        self._tenure.see(now, seen.workers, self._book.switching(now) | others)
        self._begin_term(now, {one.model for one in owned}, seen)
        self._drop({one.model for one in owned})
        degraded: dict[str, str] = {}
        prices = {one.name: self._config.price(one) for one in seen.kinds} | {**self._config.prices}
        pools: dict[str, Pool] = {}
        for pool in self._config.pools:
            with _alone(pool.model, degraded):
                if pool in owned:
                    log += self._advance(now, pool.model, seen)
                pools[pool.model] = self._gather(now, pool.model, seen, prices)
        spent = _Spent(self._spare(pools), self._used(seen))
        for pool in owned:
            with _alone(pool.model, degraded):
                if pool.model in pools:
                    scene = self._scene(now, pool, pools[pool.model], seen, spent)
                    log += self._plan(scene, seen, spent, degraded)
        for kind, reason in self._health.disabled().items():
            _add(degraded, "planner_kind_failing", f"kind {kind} is not started any more: {reason}")
        return PlannerOutput(
            tuple(self._plans[one.model] for one in owned if one.model in self._plans),
            tuple(self._orders()),
            tuple(log),
            degraded,
            self._config.tick,
            {one.model: self._bindings[one.model] for one in owned if one.model in self._bindings},
            tuple(self._ended),
        )

    # ------------------------------------------------------------------ whose model it is

    def _owns(self, model: str, seen: PlannerInput) -> bool:
        planners = {*seen.planners, self._me}
        return owner_of(model, planners, budget=self._config.budget) == self._me

    def _begin_term(self, now: Seconds, owned: Collection[str], seen: PlannerInput) -> None:
        """Begins a new term with each model that is taken over: its last owner may have begun its
        life later than this planner. So does an owner whose orders are stale all the same, since
        another one owned the model for a moment; but not before it must have heard of that one. The
        new term is above the one that is obeyed, also if that came from a clock ahead."""
        if any(model not in owned for model in self._models):
            self._renew_at = None
        stale = [one.newest for one in seen.refusals.values() if one.kind == "stale"]
        self._obeyed = max(self._obeyed, *stale, 0)
        if self._renew_at is None and stale:
            self._renew_at = now + _HEAR
        renew = self._renew_at is not None and now >= self._renew_at
        if renew or any(model not in self._models for model in owned):
            self._term = max(self._term + renew, int(seen.wall * 1000), self._obeyed + 1)
            self._renew_at = None

    def _drop(self, owned: Collection[str]) -> None:
        """Forgets models that another planner decides for now: it finds all in the lists."""
        for model in [one for one in self._models if one not in owned]:
            self._book.forget(model)
            del self._models[model]
            self._plans.pop(model, None)
            self._bindings.pop(model, None)
            self._said.pop(model, None)

    # ------------------------------------------------------------------ what is there

    def _advance(self, now: Seconds, model: str, seen: PlannerInput) -> list[str]:
        """Moves the model's changes on, and adopts what is under way."""
        if model not in self._models:
            self._models[model] = ModelPlanner(self._config, self._forecaster())
        ended = self._book.advance(now, model, seen)
        self._ended += ended
        self._book.adopt(now, model, seen)
        if any(one.change.action == "start" and one.state in _NOTHING for one in ended):
            self._models[model].start_failed()
        self._models[model].wrong |= {one.wrong for one in ended if one.wrong is not None}
        return [ended_line(one) for one in ended]

    def _gather(
        self, now: Seconds, model: str, seen: PlannerInput, prices: Mapping[str, float]
    ) -> Pool:
        return gather(
            model,
            seen.workers,
            seen.instances,
            self._book.asked(model, prices),
            prices=prices,
            ready_in=lambda change, kind: self._book.ready_in(now, change, kind),
            given_up=self._book.given_up(now, model),
        )

    def _spare(self, pools: Mapping[str, Pool]) -> float:
        """The part of the hourly budget that is free. The pools of all models count, those of other
        planners too. 0 if the cost of a pool is not known."""
        if not self._config.budget:
            return inf
        if len(pools) < len(self._config.pools):
            return 0.0
        return self._config.budget - sum(pool.cost for pool in pools.values())

    def _used(self, seen: PlannerInput) -> Counter[str]:
        """Instances of each kind, asked ones included."""
        listed = {one.change: one.kind for one in seen.instances if one.state not in _NO_START}
        gone = {one.change for one in seen.instances}
        asked = {
            one.id: one.step.kind
            for one in self._book
            if one.action is Action.START and one.id not in gone
        }
        return Counter((listed | asked).values())

    def _scene(
        self, now: Seconds, target: PoolConfig, pool: Pool, seen: PlannerInput, spent: _Spent
    ) -> Scene:
        kinds = self._config.kinds_of(target, seen.kinds)
        objectives = (target.ttft, target.itl)
        demand = seen.demand.get(target.model)

        def judge(load: Load, candidates: Sequence[PoolCandidate]) -> Sequence[PoolOutcome]:
            traffic = None if demand is None else demand.traffic
            return self._judge.judge(traffic, objectives, load, candidates)

        return Scene(
            now=now,
            wall=seen.wall,
            config=self._config,
            target=target,
            pool=pool,
            kinds=kinds,
            blocked=self._blocked(now, kinds, seen),
            used=spent.used,
            spare=spent.spare,
            demand=demand,
            book=self._book,
            times=self._times,
            tenure=self._tenure,
            reversal=self._models[target.model].reversal(now),
            judge=judge,
        )

    def _blocked(self, now: Seconds, kinds: Sequence[Kind], seen: PlannerInput) -> dict[str, str]:
        """Kinds that are not started now, and why."""
        found: dict[str, str] = {}
        for kind in kinds:
            down = seen.down.get(kind.actuator)
            why = self._health.blocked(kind.name, now)
            if down is not None:
                why = f"actuator {kind.actuator!r} does not answer: {down}"
            waiting = self._longest_pending(now, kind.name)
            if not why and waiting >= self._config.start_prior:
                why = f"a start of kind {kind.name!r} has been pending for {waiting:.0f} s"
            if why:
                found[kind.name] = why
        return found

    def _longest_pending(self, now: Seconds, kind: str) -> Seconds:
        return max(
            (
                now - one.began
                for one in self._book
                if one.step.kind == kind and one.state is ChangeState.PENDING
            ),
            default=0.0,
        )

    # ------------------------------------------------------------------ plans

    def _plan(
        self, scene: Scene, seen: PlannerInput, spent: _Spent, degraded: dict[str, str]
    ) -> list[str]:
        """Decides for one model, and begins what was decided. Returns lines for the log."""
        model = scene.pool.model
        decision = self._models[model].decide(
            scene, paused=seen.paused.get(model, ""), pin=seen.pins.get(model)
        )
        if decision.alarm:
            _add(degraded, "planner_blind", f"{model}: {decision.alarm}")
        if decision.binding.lack is not None:
            _add(degraded, "planner_floor", f"{model}: {decision.binding.words}")
        acts = bool(decision.steps or decision.withdrawn) and self._config.mode == "act"
        if acts and (unwanted := self._book.get(decision.withdrawn)) is not None:
            self._book.withdraw(scene.now, unwanted, decision.binding.words)
        binding = decision.binding
        waits = (binding.silent, tuple(binding.draining))
        told = (() if acts else decision.steps, binding.name, waits, decision.pin)
        new = acts or self._said.get(model) != told
        self._number += new
        begun = self._begin(scene, decision, spent)
        before = self._plans[model].target if model in self._plans else {}
        plan = self._record(scene, decision, begun)
        self._plans[model], self._said[model] = plan, told
        self._bindings[model] = decision.binding
        return [plan_line(plan, begun, before)] if new else []

    def _begin(self, scene: Scene, decision: Decision, spent: _Spent) -> tuple[Change, ...]:
        """The changes of a decision; with `act` they enter the book."""
        model, found = scene.pool.model, []
        for index, step in enumerate(decision.steps):
            name = change_id(model, step.mode, self._term, self._number, index)
            change = Underway.new(step, name, model, self._number, scene.now)
            if self._config.mode == "act":
                self._make_way(scene.now, model, step)
                self._book.enter(change)
            found.append(change.record)
            if step.action is Action.START:
                spent.spare -= scene.pool.price(step.kind)
                spent.used[step.kind] += 1
        return tuple(found)

    def _make_way(self, now: Seconds, model: str, step: Step) -> None:
        """An undone drain withdraws an order to drain that was not obeyed yet."""
        for one in self._book.of(model):
            same = step.life is not None and one.step.life == step.life
            if step.action is Action.UNDO and same and one.state is ChangeState.ORDERED:
                self._book.withdraw(now, one, step.reason)

    def _record(self, scene: Scene, decision: Decision, begun: tuple[Change, ...]) -> ScalingPlan:
        demand, forecast = scene.demand, decision.forecast
        target = decision.pin or _target(scene, decision.steps)
        known = {one.id for one in begun}
        under_way = tuple(one.record for one in scene.changes if one.id not in known)
        return ScalingPlan(
            term=self._term,
            number=self._number,
            model=scene.pool.model,
            target=target,
            present=dict(Counter(one.mode for one in scene.pool.serving)),
            changes=begun + under_way,
            binding=decision.binding.words,
            forecast={} if forecast is None else dict(zip(_QUANTILES, forecast, strict=True)),
            observed=0.0 if demand is None or decision.blind else demand.work,
            miss_before=decision.before.miss if decision.before else 0.0,
            miss_after=decision.after.miss if decision.after else 0.0,
            blind=decision.blind,
            unreachable=decision.unreachable,
            cost=max(0.0, scene.pool.cost + _added_cost(scene, decision.steps)),
        )

    # ------------------------------------------------------------------ orders

    def _orders(self) -> Iterator[Order]:
        """What the driver is to do, until the lists show it."""
        if self._config.mode != "act":
            return
        for one in self._book:
            if one.state in (ChangeState.ASKED, ChangeState.ORDERED):
                yield self._order("begin", one)
            elif one.state is ChangeState.ENDING:
                yield self._order("end", one, one.id)
            elif one.state is ChangeState.STOPPING:
                yield self._order("end", one, one.instance)

    def _order(self, verb: str, one: Underway, instance: str = "") -> Order:
        return Order(
            "begin" if verb == "begin" else "end",
            one.record,
            one.model,
            self._term,
            one.number,
            instance,
            last=one.step.last,
        )


@contextmanager
def _alone(model: str, degraded: dict[str, str]) -> Iterator[None]:
    """A defect in one model's decisions leaves the others' as they are."""
    try:
        yield
    except Exception as error:
        _log.exception("a decision of the planner for %s", model)
        words = f"{model}: {type(error).__name__} in a decision, see the planner's log"
        _add(degraded, "planner_failed", words)


def _add(degraded: dict[str, str], name: str, text: str) -> None:
    """One more reason for a degradation; other models and kinds may have theirs."""
    degraded[name] = f"{degraded[name]}; {text}" if name in degraded else text


_QUANTILES: Final = ("0.5", "0.9", "0.95")


def _target(scene: Scene, steps: Sequence[Step]) -> Mix:
    """The workers by mode that there will be once all that was begun has happened."""
    mix = Counter(slot.mode for slot in scene.staying(steps=steps))
    mix.update(one.mode for one in scene.pool.coming)
    mix.update(step.mode for step in steps if step.action is Action.START)
    return {mode: count for mode, count in sorted(mix.items()) if count > 0}


def _added_cost(scene: Scene, steps: Sequence[Step]) -> float:
    """What the steps add to the cost of an hour, once they have happened."""
    signs = {Action.START: 1, Action.STOP: -1}
    return sum(signs.get(step.action, 0) * scene.pool.price(step.kind) for step in steps)
