"""Judges planners: what they decide against what they see, and what they see against the truth.

    removals    one removing change per model at a time, or stops that one plan has ordered at once;
                each for a good reason (`removals`)
    response    too much load is answered: a drain is taken back, or a worker is started
    change      one process for each change, ever
    term        no worker obeys an order that is older than one that it has obeyed
    cache       a change of a worker's mode leaves its prefix cache as it is (`switch_watch`)
    last        the last worker that serves does not drain; one with a time limit has a successor
    budget      what runs, boots and is pending costs no more, at each start
    present     workers that a plan counts as ready serve, but for a moment
    binding     what a plan names as its limit is one (`bindings`)

It asks the product nothing but its inputs and outputs. Where faults keep words from arriving, a
planner may be wrong: then only what it sees counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pdserve.planner.outlook import Load, PoolCandidate, Slot
from tests.worlds.planner.bindings import Bindings
from tests.worlds.planner.removals import FULL, wrong_removal, wrong_switch
from tests.worlds.planner.roles import HASTE, SERVED, OrderedWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Change, Kind, ScalingPlan
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.planner.tick import PlannerInput, PlannerOutput
    from tests.worlds.planner.roles import Planner
    from tests.worlds.world import VirtualHost, World

__all__ = ["PlannerOracle", "serving"]

_ENDS: Final = ("done", "given_up", "failed")
_JUDGED: Final = ("enough", "waiting", "max", "slots", "budget", "kind", "modes", "ttft", "miss")
"""Limits of plans that were made by the load."""
_BEGUN: Final = ("booting", "running")
_QUIET: Final[Seconds] = 40.0
"""After a fault that silences nodes, what a planner sees may be wrong for so long."""
_UNDOES: Final[Seconds] = 1.5
"""A drain is taken back within this, once the load needs the worker."""
_LAST: Final[Seconds] = 2.0
"""A worker that others have left alone knows it after this, and stays."""
_LAG: Final[Seconds] = 10.0
"""What a planner counts may be out of date for so long, without such a fault: a node that was
killed is suspected first, and a card takes a moment."""


_RESPONDS: Final[Seconds] = 10.0
"""Too much load is answered within this: a start may fail, and its kind is left alone for some
seconds."""


def serving(world: World) -> list[VirtualHost]:
    """Workers that serve."""
    return [host for host in world.of_role("worker") if _serves(host)]


def _serves(host: VirtualHost) -> bool:
    part = host.part
    return (
        host.up
        and host.ready
        and isinstance(part, OrderedWorker)
        and part.service.unready_reason() is None
    )


class PlannerOracle:
    """Judges all planners of one world."""

    def __init__(self, world: World, config: PlannerConfig) -> None:
        self._world = world
        self._config = config
        self.begun: dict[str, tuple[Seconds, str]] = {}
        """Changes that planners have begun: when, and the action."""
        self._plan_of: dict[str, str] = {}
        """The plan that has ordered a change."""
        self.decisions: Counter[str] = Counter()
        self.switches = 0
        """Changes of workers' modes that are over."""
        self._wrong_since: dict[str, Seconds] = {}
        """Since when what a planner counts differs from the truth."""
        self._full_since: dict[str, Seconds] = {}
        """Since when a planner has seen too much load and done nothing about it."""
        self._alive: dict[str, Seconds] = {}
        """Processes of workers, since when."""
        self._modes: dict[NodeId, tuple[str, Seconds]] = {}
        """Modes of the workers, since when."""
        self._launched: dict[str, str] = {}
        """Hosts of the workers that were started, by change."""
        self._serving: dict[str, Seconds] = {}
        """Workers that serve, since when."""
        self._bindings = Bindings(config)

    # ------------------------------------------------------------------ decisions

    def decided(self, planner: Planner, seen: PlannerInput, output: PlannerOutput) -> None:
        """One tick of a planner."""
        name, world = planner.node.id, self._world
        for line in output.log:
            world.happened(name, "plan", line)
        for order in output.orders:
            self._plan_of.setdefault(order.change.id, f"{name} {order.term}.{order.number}")
        for plan in output.plans:
            if len(going := self._removals(plan)) > 1:
                world.complain(f"{name} removes twice at a time: {', '.join(sorted(going))}")
            self._responds(name, plan, seen, output)
            self._takes_back(name, plan, seen)
            if output.bindings[plan.model].name in _JUDGED:
                self._counts_capacity(planner, plan, seen)
        for order in output.orders:
            change = order.change
            if order.verb == "begin" and change.id not in self.begun:
                self.begun[change.id] = (world.loop.time(), change.action)
                self.decisions[change.action] += 1
                for wrong in self._wrong(order.model, change, seen, output):
                    world.complain(f"{name} orders {change.action} of {change.node}: {wrong}")
        self._knows_what_serves(name, output)
        now = world.loop.time()
        for wrong in self._bindings.wrong(name, now, planner.judge, seen, output):
            world.complain(wrong)

    def _wrong(
        self, model: str, change: Change, seen: PlannerInput, output: PlannerOutput
    ) -> Iterator[str]:
        if change.action == "stop":
            plan = next(one for one in output.plans if one.model == model)
            leaving = {one.node for one in plan.changes if one.action == "stop"}
            yield from wrong_removal(self._config, seen, plan, change, leaving, SERVED)
        elif change.action == "mode":
            since = {node: at for node, (_, at) in self._modes.items()}
            yield from wrong_switch(self._config, change, since, self._world.loop.time())

    def _removals(self, plan: ScalingPlan) -> set[str]:
        """What takes capacity away: the plans that have ordered stops, and each switch. Those that
        a planner found when it began count as of one plan."""
        going = [one for one in plan.changes if one.state not in _ENDS]
        stops = {self._plan_of.get(one.id, "found") for one in going if one.action == "stop"}
        return stops | {one.id for one in going if one.action == "mode"}

    def _responds(
        self, name: str, plan: ScalingPlan, seen: PlannerInput, output: PlannerOutput
    ) -> None:
        """Too much load is answered, if it may be."""
        key, now = f"{name} {plan.model}", self._world.loop.time()
        why = self._unanswered(plan, seen, output)
        if not why:
            self._full_since.pop(key, None)
        elif now - self._full_since.setdefault(key, now) > _RESPONDS:
            self._world.complain(
                f"{name} has seen too much load for {_RESPONDS:g} s: {why}; {plan.binding}"
            )

    def _unanswered(self, plan: ScalingPlan, seen: PlannerInput, output: PlannerOutput) -> str:
        """What could be done and is not; empty: nothing."""
        pool, demand = self._config.pool(plan.model), seen.demand.get(plan.model)
        assert pool is not None
        mine = [one for one in seen.workers if one.model == plan.model]
        ready = [one for one in mine if one.state == "ready"]
        if demand is None or not self._by_load(plan, seen) or not self._can_be_kept(pool):
            return ""
        most = FULL * SERVED * max(1, len(ready))
        if seen.down or demand.level <= most or demand.work < 0.7 * most:
            return ""
        coming = [one for one in plan.changes if one.action == "start" and one.state != "pending"]
        limits = (pool.max, self._config.budget or pool.max)
        room = len(mine) + len(coming) + len(_waiting(plan)) < min(limits)
        trouble = output.degraded.keys() & {"planner_kind_failing", "planner_actuator_down"}
        free = [] if trouble else [one.name for one in seen.kinds if self._is_free(one, seen, plan)]
        return f"a {free[0]} could be started" if room and free and not coming else ""

    def _counts_capacity(self, planner: Planner, plan: ScalingPlan, seen: PlannerInput) -> None:
        """What is counted as capacity is no more than what serves or is about to."""
        pool, demand = self._config.pool(plan.model), seen.demand.get(plan.model)
        assert pool is not None
        if demand is None or not self._by_load(plan, seen):
            return
        mine = [one for one in seen.workers if one.model == plan.model]
        joined = {one.change for one in mine}
        # One that is pending counts if its actuator says when it begins.
        begun = [one for one in seen.instances if one.state in _BEGUN or one.expected is not None]
        booting = [one for one in begun if one.change not in joined]
        load = Load(plan.forecast.get("0.9", 0.0), demand.held_work + demand.queued_work)
        if load.work + load.backlog <= 0:
            return
        most = PoolCandidate((Slot("aggregated"),) * (len(mine) + len(booting)))
        (bound,) = planner.judge.judge(None, (pool.ttft, pool.itl), load, [most])
        if most.slots and plan.miss_before < bound.miss - 0.01:
            self._world.complain(
                f"{planner.node.id} expects {plan.miss_before:.1%} to miss; with {len(mine)} "
                f"workers and {len(booting)} that boot {bound.miss:.1%} would"
            )

    def _by_load(self, plan: ScalingPlan, seen: PlannerInput) -> bool:
        """The load alone decides, and each worker does the same."""
        alike = all(one.mode == "aggregated" for one in seen.workers if one.model == plan.model)
        by_hand = plan.model in {*seen.paused, *seen.pins}
        return alike and not by_hand and not plan.blind

    def _can_be_kept(self, pool: PoolConfig) -> bool:
        """True if more workers would serve an objective."""
        setup = self._world.stage.setup if self._world.stage is not None else None
        some = pool.ttft is not None or pool.itl is not None
        return some and not (setup is not None and setup.out_of_reach)

    def _takes_back(self, name: str, plan: ScalingPlan, seen: PlannerInput) -> None:
        """A drain is taken back as soon as far too much waits."""
        world, now = self._world, self._world.loop.time()
        undone = {one.node for one in plan.changes if one.action == "undo_drain"}
        ordered = {one.node for one in plan.changes if one.action == "stop"}
        for one in seen.workers:
            key = f"{name} {one.life}"
            going = one.state == "draining" and one.node in ordered - undone
            stays = going and one.hard_end is None and not self._is_ending(one.node)
            if not stays or not self._by_load(plan, seen) or not _overrun(plan, seen):
                self._full_since.pop(key, None)
            elif now - self._full_since.setdefault(key, now) > _UNDOES:
                world.complain(f"{name} does not take back the drain of {one.node}: {plan.binding}")

    def _is_free(self, kind: Kind, seen: PlannerInput, plan: ScalingPlan) -> bool:
        """Another worker of the kind could be started: none is pending, and all that were started
        have begun."""
        listed = [one for one in seen.instances if one.kind == kind.name]
        taken = [one for one in listed if one.state not in ("ended", "failed")]
        bad = any(one.state in ("failed", "unknown", "pending") for one in listed)
        bad |= any(one.change not in self._launched for one in listed)
        pending = any(one.kind == kind.name for one in _waiting(plan))
        return not bad and not pending and len(taken) < (kind.slots or 100)

    def _is_ending(self, node: NodeId | None) -> bool:
        """Its process has begun to end, which cannot be taken back."""
        host = self._world.hosts.get(node or "")
        return host is None or host.busy or host.process is None

    def _knows_what_serves(self, name: str, output: PlannerOutput) -> None:
        world, now = self._world, self._world.loop.time()
        there = Counter(host.settings.model for host in serving(world))
        for plan in output.plans:
            key, counted = f"{name} {plan.model}", sum(plan.present.values())
            if counted == there[plan.model] or self._disturbed():
                self._wrong_since.pop(key, None)
            elif now - self._wrong_since.setdefault(key, now) > _LAG:
                world.complain(
                    f"{name} counts {counted} workers of {plan.model} that serve, there have been "
                    f"others for {_LAG:g} s, now {there[plan.model]}"
                )

    # ------------------------------------------------------------------ what happens

    def launched(self, change: str, host: VirtualHost) -> None:
        """A worker's process begins."""
        other = self._launched.setdefault(change, host.name)
        if other != host.name or host.settings.change == change:
            self._world.complain(f"{change} is started twice: as {other} and as {host.name}")

    def obeyed(self, host: VirtualHost, order: tuple[int, int], last: tuple[int, int]) -> None:
        """A worker obeys an order of a planner; `last` is the newest that it has obeyed."""
        if order[0] and order < last:
            self._world.complain(f"{host.name} obeys {order} after {last}")

    def switched(self, host: VirtualHost, wrong: list[str]) -> None:
        """A change of a worker's mode is over, in whatever mode it serves now."""
        self.switches += 1
        for why in wrong:
            self._world.complain(f"{host.name} has changed its mode: {why}")

    def drained(self, host: VirtualHost, term: int) -> None:
        """A worker has drained by an order, and its process ends."""
        now, others = self._world.loop.time(), [h for h in serving(self._world) if h is not host]
        lost = now - max(
            [at for name, at in self._serving.items() if name != host.name], default=0.0
        )
        if term and not others and lost > _LAST and not self._disturbed():
            self._world.complain(f"{host.name} was the last that served, and drained")

    def time_over(self, host: VirtualHost) -> None:
        """A job's time limit is over."""
        others = sum(one is not host for one in serving(self._world))
        floor = min(pool.min for pool in self._config.pools)
        if others < floor and not self._excused():
            self._world.complain(f"{host.name} ends by its time limit, and has no successor")

    def _excused(self) -> bool:
        """Something else than time limits and the load has gone wrong not long ago."""
        return self._world.judge.causes.any_but(("load", "lease"), self._world.loop.time() - _QUIET)

    def _disturbed(self) -> bool:
        now = self._world.loop.time()
        return self._world.judge.causes.any_since(now - _QUIET, disturbing=True)

    # ------------------------------------------------------------------ the truth

    def look(self) -> None:
        """Notes which processes of workers there are, and judges those that were started."""
        world, now = self._world, self._world.loop.time()
        alive = {
            f"{host.name}#{host.lives}": host
            for host in world.of_role("worker")
            if host.process is not None
        }
        for host in world.of_role("worker"):
            self._note_mode(host, now)
        there = {host.name for host in serving(world)}
        # The last moment at which each has served; those that serve, now.
        self._serving |= dict.fromkeys(there, now)
        started = [key for key, host in alive.items() if key not in self._alive and not host.wanted]
        self._alive = {key: self._alive.get(key, now) for key in alive}
        if started and not self._disturbed():
            self._keeps_budget([key for key in alive if self._counts(key, alive[key], now)])

    def _note_mode(self, host: VirtualHost, now: Seconds) -> None:
        part = host.part
        if isinstance(part, OrderedWorker) and host.ready:
            mode = f"{host.lives} {part.service.mode}"
            before = self._modes.get(part.node.id, ("", now))
            self._modes[part.node.id] = before if before[0] == mode else (mode, now)

    def _counts(self, key: str, host: VirtualHost, now: Seconds) -> bool:
        """Whether a planner must have known it: of those that were started by hand it knows neither
        one that was started just now, nor one that has left the cluster and is about to end."""
        by_hand = not host.settings.change
        return not by_hand or (now - self._alive[key] > _LAG and not host.busy)

    def _keeps_budget(self, alive: list[str]) -> None:
        budget, most = self._config.budget, sum(pool.max for pool in self._config.pools)
        if budget and len(alive) > budget:
            self._world.complain(f"{len(alive)} workers are more than the budget of {budget:g}")
        if len(alive) > most + self._ending():
            self._world.complain(f"{len(alive)} workers, {', '.join(alive)}, are more than {most}")

    def _ending(self) -> int:
        """Workers that drain, are told to end or have a time limit: they cost, and are none that
        stay."""
        hosts = [host for host in self._world.of_role("worker") if host.process is not None]
        batch = None if self._world.stage is None else self._world.stage.batch
        limited = set() if batch is None else batch.limited()
        return sum(
            host.busy
            or host.name in limited
            or not host.ready
            or (isinstance(host.part, OrderedWorker) and host.part.orders.begun)
            for host in hosts
        )


def _overrun(plan: ScalingPlan, seen: PlannerInput) -> bool:
    demand = seen.demand.get(plan.model)
    ready = sum(one.state == "ready" and one.model == plan.model for one in seen.workers)
    if demand is None:
        return False
    waits = HASTE * (demand.held_work + demand.queued_work) / 60.0
    return demand.level + waits > 1.2 * SERVED * max(1, ready)


def _waiting(plan: ScalingPlan) -> list[Change]:
    return [one for one in plan.changes if one.action == "start" and one.state == "pending"]
