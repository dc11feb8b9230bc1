"""Recomputes what binds a plan, from what its planner saw and did before.

Each limit that a plan can name has a rule here. A rule says why the limit is none; it counts
workers, instances and changes for itself, and asks the planner's judge about pools that it makes
itself. Where only a bound can be known from outside, the rule compares with that bound.

A limit that a slow tick finds is told until the next one. So it is judged when it is first told,
and must have been true at one of the ticks since it may have been found.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

from pdserve.ids import NodeId
from pdserve.planner.outlook import Load, PoolCandidate, Slot
from pdserve.planner.steady_load import Stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Change, Instance, ScalingPlan
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.planner.explain import Binding
    from pdserve.planner.outlook import DemandView, Judge, PoolOutcome
    from pdserve.planner.pool import Worker
    from pdserve.planner.tick import PlannerInput, PlannerOutput

__all__ = ["RULES", "Bindings"]

_SAME: Final = 1e-6
_NONE: Final = ("ended", "failed")
"""States of instances that are no worker any more."""
_TOLD: Final[Seconds] = 30.0
"""Length of the longest mean that begins a panic."""
_FALLEN: Final = 0.8
_UNSURE: Final = 0.15
"""Part of the allowed share of misses by which a prediction may exceed it: docs/planner.md."""


@dataclass(slots=True)
class _Past:
    """What one planner did before."""

    binding: Binding | None = None
    """The newest."""
    looks: deque[_Look] = field(default_factory=deque)
    removed: Seconds | None = None
    """When it last ordered a drain."""
    stops: set[str] = field(default_factory=set)
    """Drains that it has ordered, by change."""
    refused: bool = False
    """Some drain that it ordered did not happen."""
    troubled: set[str] = field(default_factory=set)
    """Kinds of which a start came to nothing."""
    rises: deque[Seconds] = field(default_factory=lambda: deque(maxlen=200))
    """When it saw a load far above the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One model at one tick."""

    now: Seconds
    config: PlannerConfig
    pool: PoolConfig
    seen: PlannerInput
    plan: ScalingPlan
    judge: Judge
    past: _Past

    @property
    def demand(self) -> DemandView | None:
        return self.seen.demand.get(self.pool.model)

    @property
    def mine(self) -> list[Worker]:
        return [one for one in self.seen.workers if one.model == self.pool.model]

    @property
    def ready(self) -> list[Worker]:
        return [one for one in self.mine if one.state == "ready"]

    @property
    def leased(self) -> bool:
        """Some worker has a time limit."""
        return any(one.hard_end is not None for one in self.mine)

    @property
    def alike(self) -> bool:
        """All workers do the same, and others are not wanted."""
        return not self.pool.modes and all(one.mode == "aggregated" for one in self.mine)

    def changes(self, action: str) -> list[Change]:
        return [one for one in self.plan.changes if one.action == action]

    def unjoined(self) -> list[Instance]:
        """Instances that no worker belongs to."""
        joined = {one.change for one in self.mine}
        listed = [one for one in self.seen.instances if one.state not in _NONE]
        return [one for one in listed if one.change not in joined]

    def most(self) -> int:
        """Workers and starts, at most."""
        known = {one.change for one in self.unjoined()}
        known |= {one.id for one in self.changes("start")}
        known -= {one.change for one in self.mine}
        return len(self.mine) + len(known)

    def outcome(self, count: int, load: Load) -> PoolOutcome:
        """What so many aggregated workers would make of a load."""
        objectives = (self.pool.ttft, self.pool.itl)
        candidate = PoolCandidate((Slot("aggregated"),) * count)
        (found,) = self.judge.judge(None, objectives, load, [candidate])
        return found


class Bindings:
    """Judges what all planners of a world name as their limits."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._past: dict[tuple[str, str], _Past] = {}

    def wrong(
        self, name: str, now: Seconds, judge: Judge, seen: PlannerInput, output: PlannerOutput
    ) -> Iterator[str]:
        """What is wrong with the limits of one planner's plans."""
        for plan in output.plans:
            pool = self._config.pool(plan.model)
            assert pool is not None
            past = self._past.setdefault((name, plan.model), _Past())
            look = _Look(
                now=now,
                config=self._config,
                pool=pool,
                seen=seen,
                plan=plan,
                judge=judge,
                past=past,
            )
            _remember(past, look, output)
            binding = output.bindings[plan.model]
            if binding is not past.binding and (why := self._untrue(past, binding)):
                yield f"{name} is bound: {binding.words}; but {why}"
            past.binding = binding

    def _untrue(self, past: _Past, binding: Binding) -> str:
        whys = [RULES[binding.name](look, binding) for look in past.looks]
        return whys[-1] if all(whys) else ""


def _remember(past: _Past, look: _Look, output: PlannerOutput) -> None:
    config, now = look.config, look.now
    past.looks.append(look)
    while past.looks[0].now < now - config.slow_tick - config.tick:
        past.looks.popleft()
    for one in output.ended:
        if one.change.action == "start" and one.state.value != "done":
            past.troubled.add(one.change.kind)
        past.refused |= one.change.action == "stop" and one.state.value == "given_up"
    past.troubled |= {one.kind for one in look.changes("start") if one.state == "ending"}
    orders = [one for one in output.orders if one.verb == "begin" and one.model == look.pool.model]
    stops = {one.change.id for one in orders if one.change.action == "stop"}
    if stops - past.stops:
        past.stops |= stops
        past.removed = now
    if look.demand is not None and _rises(config, look.demand):
        past.rises.append(now)


# ---------------------------------------------------------------------- too small a pool


def _too_small(look: _Look, binding: Binding) -> str:
    """A smaller pool would break an objective."""
    figures, demand, pool, config = binding.figures, look.demand, look.pool, look.config
    workers, work = int(figures["workers"]), float(figures["work"])
    value, limit = float(figures["value"]), float(figures["limit"])
    limits = {
        "ttft": config.remove_ttft,
        "itl": config.remove_itl * (pool.itl or 0.0),
        "busy": 1 - config.donor_headroom,
        "miss": pool.allowed_miss,
    }
    if value <= limit or not _near(limit, limits[binding.name]):
        return f"{value:g} is not above {limits[binding.name]:g}"
    # Where modes differ, one worker may have to change its mode before another one goes.
    if not 0 < workers < len(look.ready) + (not look.alike):
        return f"{len(look.ready)} workers are ready"
    # How long ago a peak counts depends on start-ups that were measured: within these.
    least = 0.0 if demand is None else demand.peak(config.slow_tick)
    peak = 0.0 if demand is None else demand.peak(config.stable)
    if work < least - _SAME or (figures["load"] == "peak" and work > peak + _SAME):
        return f"the highest load was {least:g} to {peak:g} work/s"
    if not look.alike or look.leased:
        return ""
    waits = 0.0 if demand is None else demand.held_work + demand.queued_work
    found = look.outcome(workers, Load(work, waits, cached=workers / len(look.ready)))
    busy = max(found.utilisation.values(), default=0.0)
    values = {"ttft": found.wait_p95, "itl": found.itl_p95, "busy": busy, "miss": found.miss}
    return "" if _near(value, values[binding.name]) else f"it would be {values[binding.name]:g}"


def _floor(look: _Look, binding: Binding) -> str:
    floor, workers = int(binding.figures["floor"]), int(binding.figures["workers"])
    limited = sum(one.hard_end is not None for one in look.ready)
    if floor != look.pool.floor(look.seen.wall):  # no pool of a world has floors by time
        return f"the floor is {look.pool.floor(look.seen.wall)}"
    if not len(look.ready) - limited <= workers <= len(look.ready):
        return f"{len(look.ready)} workers are ready, and {limited} of them have a time limit"
    return "" if workers - 1 < floor else "one less would be enough"


def _lease(look: _Look, binding: Binding) -> str:
    limited = [one.node for one in look.mine if one.hard_end is not None]
    named = any(node in str(binding.figures["reason"]) for node in limited)
    return "" if named else f"only {limited} have a time limit"


# ---------------------------------------------------------------------- too few starts


def _max(look: _Look, binding: Binding) -> str:
    most = int(binding.figures["max"])
    if most != look.pool.max or look.most() < most:
        return f"there are {look.most()} workers and starts, and {look.pool.max} may be"
    return ""


def _budget(look: _Look, binding: Binding) -> str:
    figures, budget = binding.figures, look.config.budget
    spare, price = float(figures["spare"]), float(figures["price"])
    if not budget or not _near(float(figures["budget"]), budget):
        return f"it is {budget:g}"
    least = budget - look.most()  # in worlds each worker costs 1
    if spare < least - _SAME:
        return f"{least:g} is left at least"
    return "" if price > spare else "that is enough for one more"


def _slots(look: _Look, binding: Binding) -> str:
    name = binding.figures["kind"]
    kind = next((one for one in look.seen.kinds if one.name == name), None)
    if kind is None or kind.slots != int(binding.figures["slots"]):
        return f"the kinds are {look.seen.kinds}"
    used = {one.change for one in look.seen.instances if one.kind == name}
    used -= {one.change for one in look.seen.instances if one.state in _NONE}
    used |= {one.id for one in look.changes("start") if one.kind == name}
    return "" if len(used) >= kind.slots else f"only {len(used)} are"


def _kind(look: _Look, binding: Binding) -> str:
    """No kind can be had now: each has failed, is pending, or its actuator does not answer."""
    pending = {one.kind for one in look.changes("start") if one.state == "pending"}
    trouble = pending | look.past.troubled
    for kind in look.config.kinds_of(look.pool, look.seen.kinds):
        if kind.name not in trouble and kind.actuator not in look.seen.down:
            return f"nothing is wrong with {kind.name}"
    return ""


def _actuator(look: _Look, binding: Binding) -> str:
    kinds = look.config.kinds_of(look.pool, look.seen.kinds)
    return f"there are {[one.name for one in kinds]}" if kinds else ""


def _modes(look: _Look, binding: Binding) -> str:
    """More workers do not help."""
    value, more = float(binding.figures["value"]), int(binding.figures["workers"])
    demand, allowed = look.demand, _most(look)
    if value <= allowed or demand is None:
        return f"{value:.1%} may miss"
    if not look.alike or look.leased or any(one.state == "draining" for one in look.mine):
        return ""
    load = Load(look.plan.forecast.get("0.9", 0.0), demand.held_work + demand.queued_work)
    miss = look.outcome(len(look.ready) + more, load).miss
    return "" if miss > allowed - _SAME else f"with {more} more only {miss:.1%} would"


def _most(look: _Look) -> float:
    """Share of misses up to which no capacity is added."""
    return (1 + _UNSURE) * look.pool.allowed_miss


def _waiting(look: _Look, binding: Binding) -> str:
    value, allowed = float(binding.figures["value"]), _most(look)
    return "" if value > allowed else f"{allowed:.1%} may"


def _enough(look: _Look, binding: Binding) -> str:
    value, limit = float(binding.figures["value"]), float(binding.figures["limit"])
    # A removal has to keep the objective itself.
    limits = (look.pool.allowed_miss, _most(look))
    if value > limit + _SAME or not any(_near(limit, one) for one in limits):
        return f"{limits[0]:.1%} may"
    after = look.plan.miss_after
    return "" if _near(value, after) else f"the plan says {after:.1%}"


def _unreachable(look: _Look, binding: Binding) -> str:
    share = float(binding.figures["share"])
    if share <= 0 or not _near(share, look.plan.unreachable):
        return f"the plan says {look.plan.unreachable:.1%}"
    return "" if look.pool.ttft == binding.figures["ttft"] else f"it is {look.pool.ttft}"


def _objective(look: _Look, binding: Binding) -> str:
    some = look.pool.ttft is not None or look.pool.itl is not None
    return "there is one" if some else ""


# ---------------------------------------------------------------------- what is not known


def _blind(look: _Look, binding: Binding) -> str:
    demand, reason = look.demand, binding.figures["reason"]
    if reason != look.plan.blind:
        return f"the plan says {look.plan.blind!r}"
    if demand is None or not demand.known:
        return ""
    if not all(map(isfinite, (demand.work, demand.level, demand.peak_300, demand.held_work))):
        return ""
    if demand.peak_300 <= 0 and not demand.held:
        return "no demand is known demand"
    few = demand.first_tokens < look.config.min_first_tokens
    return "" if demand.poor or few else "the demand is known"


def _doubt(look: _Look, binding: Binding) -> str:
    faults = "" if look.demand is None else look.demand.faults
    same = faults and faults == binding.figures["reason"]
    return "" if same else f"the demand says {faults!r}"


def _unseen(look: _Look, binding: Binding) -> str:
    seen = 0.0 if look.demand is None else look.demand.seen
    same = _near(float(binding.figures["seconds"]), seen)
    return "" if same and seen < look.config.stable else f"it was seen for {seen:g} s"


def _panic(look: _Look, binding: Binding) -> str:
    """It began when the load rose."""
    left, stable = float(binding.figures["seconds"]), look.config.stable
    began = float(binding.figures["since"])
    if not 0 < left <= stable + _SAME:
        return f"a panic lasts at most {stable:g} s"
    if look.now + left - began < look.config.slow_tick - _SAME:
        return "a panic lasts for a slow tick at least"
    rose = any(abs(at - began) < _SAME for at in look.past.rises)
    return "" if rose else f"the load did not rise at {began:.3f}"


def _rises(config: PlannerConfig, demand: DemandView) -> bool:
    """The load of some time until now is far above that of the last minutes."""
    total = Stretch(0.0, 0.0, 0.0)
    for one in reversed(demand.recent):
        total += one
        usual = config.panic * demand.work_300 * total.seconds
        number = usual / demand.request_work if demand.request_work > 0 else usual
        # After minutes without work, the first is one.
        if total.work > usual or total.arrivals > number:
            return True
        if total.seconds >= _TOLD:
            break
    return not demand.recent


# ---------------------------------------------------------------------- what waits


def _cooldown(look: _Look, binding: Binding) -> str:
    seconds, limit = float(binding.figures["seconds"]), float(binding.figures["limit"])
    if look.past.removed is None:
        return "it has removed none"
    since = look.now - look.past.removed
    if not _near(seconds, since):
        return f"that was {since:g} s ago"
    return "" if seconds < limit == look.config.remove_interval else "that is long enough"


def _regret(look: _Look, binding: Binding) -> str:
    before, work, limit = (float(binding.figures[name]) for name in ("before", "work", "limit"))
    demand = look.demand
    # How long ago a load counts depends on start-ups that were measured: within these.
    least = 0.0 if demand is None else demand.peak(look.config.slow_tick)
    load = 0.0 if demand is None else demand.peak(look.config.stable)
    if look.past.removed is None:
        return "it has removed none"
    if not least - _SAME <= work <= load + _SAME or not _near(limit, _FALLEN * before):
        return f"the load is {load:g} work/s"
    if int(binding.figures["workers"]) > len(look.ready):
        return f"{len(look.ready)} workers are ready"
    return "" if work > limit else "that is little"


def _changing(look: _Look, binding: Binding) -> str:
    action, what = binding.figures["action"], binding.figures["what"]
    if action == "end":
        wanted = {one.id for one in look.changes("start") if one.state != "ending"}
        given_up = [one for one in look.mine if one.state == "loading" and one.change not in wanted]
        found = [one.node for one in look.mine if one.state == "draining" or one in given_up]
    else:
        found = [one.node or NodeId(one.kind) for one in look.changes(str(action))]
    return "" if what in found else f"only {found} are under way"


def _paired(look: _Look, binding: Binding) -> str:
    modes = sorted(one.mode for one in look.ready if one.hard_end is None)
    if modes != ["decode", "prefill"]:
        return f"workers that stay are {modes}"
    wanted = {*look.pool.modes} & {"aggregated", "both"}
    return f"one could become {min(wanted)}" if wanted else ""


def _unwanted(look: _Look, binding: Binding) -> str:
    kinds = [one.kind for one in look.changes("start") if one.state == "ending"]
    return "" if binding.figures["what"] in kinds else f"only starts of {kinds} end"


# ---------------------------------------------------------------------- an operator's hand


def _operator(look: _Look, binding: Binding) -> str:
    reason = str(binding.figures["reason"])
    named = [one for one in look.mine if one.node in reason or str(one.life) in reason]
    if "not asked for" in reason:
        return "" if named else "there is no such worker"
    if "by hand" in reason:
        return "" if any(not one.change for one in named) else "a planner has started it"
    if "is pinned" in reason:
        return "" if any(one.pinned for one in named) else "it is not"
    if "no pin holds" in reason:
        held = look.seen.pins.get(look.pool.model)
        return "it is pinned" if held else "" if named else "there is no such worker"
    if "has refused" in reason:
        return "" if named and look.past.refused else "it has not"
    if "must serve" in reason:
        return "" if len(look.ready) - 1 < look.pool.floor(look.seen.wall) else "more do"
    return "one may go" if look.alike else ""


def _paused(look: _Look, binding: Binding) -> str:
    why = look.seen.paused.get(look.pool.model)
    return "" if why == binding.figures["reason"] else f"that is {why!r}"


def _pinned(look: _Look, binding: Binding) -> str:
    pin = look.seen.pins.get(look.pool.model, {})
    words = ", ".join(f"{mode}={count}" for mode, count in sorted(pin.items()) if count)
    return "" if words == binding.figures["reason"] else f"it is pinned to {words or 'nothing'}"


def _never(look: _Look, binding: Binding) -> str:
    return "each tick finds a limit of its own"


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(1.0, abs(one), abs(other))


RULES: Final[dict[str, Callable[[_Look, Binding], str]]] = {
    "ttft": _too_small,
    "itl": _too_small,
    "miss": _too_small,
    "busy": _too_small,
    "floor": _floor,
    "lease": _lease,
    "max": _max,
    "budget": _budget,
    "slots": _slots,
    "kind": _kind,
    "actuator": _actuator,
    "unreachable": _unreachable,
    "modes": _modes,
    "blind": _blind,
    "doubt": _doubt,
    "panic": _panic,
    "cooldown": _cooldown,
    "unseen": _unseen,
    "regret": _regret,
    "changing": _changing,
    "paired": _paired,
    "unwanted": _unwanted,
    "operator": _operator,
    "paused": _paused,
    "pinned": _pinned,
    "waiting": _waiting,
    "objective": _objective,
    "enough": _enough,
    "fast": _never,
}
"""By the name of a limit: why it is none; empty: it is one."""
