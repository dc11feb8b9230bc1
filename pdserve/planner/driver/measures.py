"""Counts a planner's decisions and what they cost, for metrics. Owned by the service."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.ids import model_tag, read_change_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Change, ScalingPlan
    from pdserve.observe.instruments import Family, Gauge
    from pdserve.observe.metrics import Metrics
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.tick import Order, PlannerInput, PlannerOutput, Refusal

    _Labels = tuple[str, ...]

__all__ = ["Measures"]

_LONGEST: Final[Seconds] = 60.0
"""Longest time between two ticks that is counted; beyond it the process stood still."""
_COMING: Final = ("pending", "booting")
_ACTIONS: Final = ("start", "stop", "mode", "undo_drain")
_RESULTS: Final = ("done", "failed", "given_up")
_QUANTILES: Final = {"0.5": "p50", "0.9": "p90", "0.95": "p95"}


class Measures:
    """What one planner has done, and what it sees."""

    def __init__(self, metrics: Metrics, config: PlannerConfig) -> None:
        self._metrics = metrics
        self._config = config
        self._last: Seconds | None = None
        self._changes: dict[str, tuple[Seconds, str]] = {}
        """When each change that is under way was first seen, and its action."""
        self._present = (
            *(metrics.planner_workers, metrics.planner_target_workers, metrics.planner_work),
            *(metrics.planner_miss_share, metrics.planner_blind, metrics.planner_changes),
            *(metrics.planner_owner, metrics.planner_binding, metrics.planner_least_workers),
            metrics.planner_oldest_change_seconds,
        )
        """All gauges of the present state."""

    def ordered(self, order: Order, refusal: Refusal | None) -> None:
        """An order was carried out or not."""
        action = order.change.action if order.verb == "begin" else "end"
        outcome = "done" if refusal is None else refusal.kind
        self._metrics.planner_orders.labels(action, outcome).inc()

    def ticked(self, seconds: Seconds) -> None:
        """A decision took so long."""
        self._metrics.planner_tick_seconds.labels().observe(seconds)

    def note(self, now: Seconds, seen: PlannerInput, output: PlannerOutput) -> None:
        """What was seen and decided at a tick. Models that another planner owns are left out, so
        the planners of a cluster add up."""
        plans = output.plans
        models = {plan.model for plan in plans}
        states: Counter[_Labels] = Counter(_states(seen, models))
        _set_all(self._metrics.planner_workers, states)
        targets: dict[_Labels, float] = {
            (plan.model, mode): number for plan in plans for mode, number in plan.target.items()
        }
        _set_all(self._metrics.planner_target_workers, targets)
        _set_all(self._metrics.planner_work, dict(_work(plans)))
        _set_all(self._metrics.planner_miss_share, dict(_shares(plans)))
        _set_all(self._metrics.planner_blind, {(p.model,): bool(p.blind) for p in plans})
        self._owns({plan.model for plan in plans}, seen.wall)
        binding: dict[_Labels, float] = {
            (model, one.name): 1.0 for model, one in output.bindings.items()
        }
        _set_all(self._metrics.planner_binding, binding)
        self._count(output)
        self._time(now, states, plans)
        self._follow(now, plans)

    def stopped(self) -> None:
        """It decides for no model any more: what it saw last is no longer true."""
        for family in self._present:
            _set_all(family, {})
        self._last = None

    def _count(self, output: PlannerOutput) -> None:
        """Counts changes that are over. Prometheus sees no increase of a counter that begins at 1,
        so those of a model begin with its first plan."""
        family = self._metrics.planner_changes_ended
        for model, action, result in product(output.bindings, _ACTIONS, _RESULTS):
            family.labels(model, action, result)
        for one in output.ended:
            family.labels(one.model, one.change.action, one.state.value).inc()

    def _owns(self, owned: set[str], wall: float) -> None:
        """Which of the configured models are this planner's, and how few workers may serve them."""
        pools = self._config.pools
        owner: dict[_Labels, float] = {(pool.model,): float(pool.model in owned) for pool in pools}
        _set_all(self._metrics.planner_owner, owner)
        acts = self._config.mode == "act"
        least: dict[_Labels, float] = {
            (p.model,): p.floor(wall) for p in pools if acts and p.model in owned
        }
        _set_all(self._metrics.planner_least_workers, least)

    def _time(self, now: Seconds, states: Counter[_Labels], plans: Sequence[ScalingPlan]) -> None:
        """Adds up the time of workers, and their cost."""
        passed = 0.0 if self._last is None else min(_LONGEST, now - self._last)
        self._last = now
        for (model, _, state), number in states.items():
            self._metrics.planner_worker_seconds.labels(model, state).inc(number * passed)
        for plan in plans:
            self._metrics.planner_cost.labels(plan.model).inc(plan.cost * passed / 3600.0)

    def _follow(self, now: Seconds, plans: Sequence[ScalingPlan]) -> None:
        """Changes that are over have left the plans."""
        changes = [(plan.model, one) for plan in plans for one in plan.changes if one.state]
        there = {one.id: one for _, one in changes}
        counts: Counter[_Labels] = Counter((one.action, one.state) for one in there.values())
        _set_all(self._metrics.planner_changes, counts)
        for name in [name for name in self._changes if name not in there]:
            began, action = self._changes.pop(name)
            self._metrics.planner_change_seconds.labels(action).observe(now - began)
        for name, one in there.items():
            self._changes.setdefault(name, (now, one.action))
        self._tell_ages(now, {plan.model for plan in plans}, changes)

    def _tell_ages(
        self, now: Seconds, models: set[str], changes: Iterable[tuple[str, Change]]
    ) -> None:
        ages: dict[_Labels, Seconds] = {pair: 0.0 for pair in product(models, _ACTIONS)}
        for model, one in changes:
            age = now - self._changes[one.id][0]
            ages[model, one.action] = max(age, ages.get((model, one.action), 0.0))
        _set_all(self._metrics.planner_oldest_change_seconds, ages)


def _states(seen: PlannerInput, models: set[str]) -> Iterator[_Labels]:
    joined = {one.change for one in seen.workers if one.change}
    tags = {model_tag(model): model for model in models}
    for worker in seen.workers:
        if worker.model in models:
            yield worker.model, worker.mode, worker.state
    for instance in seen.instances:
        name = read_change_id(instance.change)
        if name is None or name.tag not in tags or instance.change in joined:
            continue
        if instance.state in _COMING:
            yield tags[name.tag], name.mode, instance.state


def _work(plans: Iterable[ScalingPlan]) -> Iterator[tuple[_Labels, float]]:
    for plan in plans:
        yield (plan.model, "observed"), plan.observed
        for quantile, value in plan.forecast.items():
            yield (plan.model, _QUANTILES.get(quantile, quantile)), value


def _shares(plans: Iterable[ScalingPlan]) -> Iterator[tuple[_Labels, float]]:
    for plan in plans:
        yield (plan.model, "before"), plan.miss_before
        yield (plan.model, "after"), plan.miss_after
        yield (plan.model, "unreachable"), plan.unreachable


def _set_all(family: Family[Gauge], values: Mapping[_Labels, float]) -> None:
    """Sets these values; others that the family has are gone."""
    for labels, _ in family:
        if labels not in values:
            family.remove(*labels)
    for labels, value in values.items():
        family.labels(*labels).value = value
