"""Judges planners: what they decide against what they see, and what they see against the truth.

    minimum     no removal that leaves fewer ready workers than the floor, as the planner sees it
    removals    one removing change per model at a time
    budget      what runs, boots and is pending costs no more, at each start
    present     workers that a plan counts as ready serve, but for a moment
    binding     what a plan names as its limit is one

It asks the product nothing but its inputs and outputs. Where faults keep words from arriving, a
planner may be wrong: then only what it sees counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.worlds.planner.roles import OrderedWorker

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.tick import PlannerInput, PlannerOutput
    from tests.worlds.planner.roles import Planner
    from tests.worlds.world import VirtualHost, World

__all__ = ["PlannerOracle", "serving"]

_ENDS: Final = ("done", "given_up", "failed")
_QUIET: Final[Seconds] = 40.0
"""After a fault that silences nodes, what a planner sees may be wrong for so long."""
_LAG: Final[Seconds] = 10.0
"""What a planner counts may be out of date for so long, without such a fault: a node that was
killed is suspected first, and a card takes a moment."""


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
        self._wrong_since: dict[str, Seconds] = {}
        """Since when what a planner counts differs from the truth."""
        self._alive: dict[str, Seconds] = {}
        """Processes of workers, since when."""
        self.decisions: Counter[str] = Counter()

    # ------------------------------------------------------------------ decisions

    def decided(self, planner: Planner, seen: PlannerInput, output: PlannerOutput) -> None:
        """One tick of a planner."""
        name, world = planner.node.id, self._world
        for line in output.log:
            world.happened(name, "plan", line)
        for plan in output.plans:
            going = [
                one.id
                for one in plan.changes
                if one.action in ("stop", "mode") and one.state not in _ENDS
            ]
            if len(going) > 1:
                world.complain(f"{name} removes twice at a time: {', '.join(going)}")
        for order in output.orders:
            change = order.change
            if order.verb == "begin" and change.id not in self.begun:
                self.begun[change.id] = (world.loop.time(), change.action)
                self.decisions[change.action] += 1
                if change.action == "stop":
                    self._keeps_minimum(name, order.model, seen)
        self._knows_what_serves(name, output)
        self._binds(name, seen, output)

    def _keeps_minimum(self, name: str, model: str, seen: PlannerInput) -> None:
        pool = self._config.pool(model)
        assert pool is not None
        ready = sum(one.state == "ready" and one.model == model for one in seen.workers)
        floor = pool.floor(seen.wall)
        if ready - 1 < floor:
            self._world.complain(f"{name} leaves {ready - 1} workers of {model}, not {floor}")

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

    def _disturbed(self) -> bool:
        now = self._world.loop.time()
        return self._world.judge.causes.any_since(now - _QUIET, disturbing=True)

    def _binds(self, name: str, seen: PlannerInput, output: PlannerOutput) -> None:
        """Recomputes the limit that a plan names."""
        for model, binding in output.bindings.items():
            why = self._untrue(model, binding.name, seen)
            if why:
                self._world.complain(f"{name} is bound by {binding.words}, but {why}")

    def _untrue(self, model: str, bound: str, seen: PlannerInput) -> str:
        pool = self._config.pool(model)
        assert pool is not None
        mine = [one for one in seen.workers if one.model == model]
        ready = sum(one.state == "ready" for one in mine)
        if bound == "paused" and model not in seen.paused:
            return "nobody has paused it"
        if bound == "pinned" and model not in seen.pins:
            return "nobody has pinned it"
        if bound == "max" and len(mine) + len(seen.instances) + len(self.begun) < pool.max:
            return f"there are {len(mine)} workers, and {pool.max} may be"
        if bound == "budget" and not self._config.budget:
            return "there is none"
        demand = seen.demand.get(model)
        if bound == "blind" and demand is not None and demand.known and not demand.peak_300:
            return "no demand is known demand"
        if bound == "floor" and ready > pool.floor(seen.wall) + 1 and len(mine) == ready:
            return f"{ready} workers are ready"
        return ""

    # ------------------------------------------------------------------ the truth

    def look(self) -> None:
        """Notes which processes of workers there are, and judges those that were started."""
        world, now = self._world, self._world.loop.time()
        alive = {
            f"{host.name}#{host.lives}": host
            for host in world.of_role("worker")
            if host.process is not None
        }
        started = [key for key, host in alive.items() if key not in self._alive and not host.wanted]
        self._alive = {key: self._alive.get(key, now) for key in alive}
        if started and not self._disturbed():
            self._keeps_budget([key for key in alive if self._counts(key, alive[key], now)])

    def _counts(self, key: str, host: VirtualHost, now: Seconds) -> bool:
        """Whether a planner must have known it: one that was just started by hand it did not."""
        return not host.wanted or now - self._alive[key] > _LAG

    def _keeps_budget(self, alive: list[str]) -> None:
        budget, most = self._config.budget, sum(pool.max for pool in self._config.pools)
        if budget and len(alive) > budget:
            self._world.complain(f"{len(alive)} workers are more than the budget of {budget:g}")
        if len(alive) > most + self._ending():
            self._world.complain(f"{len(alive)} workers, {', '.join(alive)}, are more than {most}")

    def _ending(self) -> int:
        """Workers that drain or are told to end: they cost, and are none that stay."""
        hosts = [host for host in self._world.of_role("worker") if host.process is not None]
        return sum(
            host.busy
            or not host.ready
            or (isinstance(host.part, OrderedWorker) and host.part.orders.begun)
            for host in hosts
        )
