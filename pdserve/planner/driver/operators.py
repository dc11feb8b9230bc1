"""Answers operators: they pause and pin models, and ask why a plan is as it is.

Any planner can be asked; what it is told reaches the others by its topic, so the owner of the model
knows it at its next tick. Owned by the service.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.messages.planner_orders import PlannerAnswer
from pdserve.planner.config import MODES
from pdserve.planner.driver.wishes import LONGEST, PAUSE, PIN, Wishes
from pdserve.planner.pool import valid_mix
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import PLANNER

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.planner import ScalingPlan
    from pdserve.messages.planner_orders import PlannerOrder
    from pdserve.net.base import IncomingCall
    from pdserve.planner.config import PlannerConfig
    from pdserve.runtime.node import Node

__all__ = ["Operators", "OperatorsParts"]

_log = logging.getLogger(__name__)

_PLANS: Final = 200
"""Plans that are kept for `explain`."""


class OperatorsParts(Protocol):
    """What is needed of the service."""

    config: PlannerConfig

    @property
    def lines(self) -> tuple[str, ...]: ...

    @property
    def kinds(self) -> frozenset[str] | None: ...

    def tell(self) -> None: ...

    def enable(self, kind: str) -> None: ...


class Operators:
    """What operators have said to this planner, and to others."""

    def __init__(self, node: Node, parts: OperatorsParts, wall: Callable[[], float]) -> None:
        self.wishes = Wishes()
        self._parts = parts
        self._wall = wall
        self._plans: deque[ScalingPlan] = deque(maxlen=_PLANS)
        node.host(self)

    def note(self, plans: tuple[ScalingPlan, ...]) -> None:
        """Keeps plans for `explain`, each number once."""
        for plan in plans:
            same = [one for one in self._plans if (one.model, one.number) == _key(plan)]
            for one in same:
                self._plans.remove(one)
            self._plans.append(plan)

    @answers(PLANNER)
    def _asked(self, order: PlannerOrder, call: IncomingCall) -> PlannerAnswer:
        if order.verb == "explain":
            return self._explain(order)
        refused = self._refusal(order)
        if refused:
            return PlannerAnswer(refused=refused)
        by = order.by or str(call.life.node)
        _log.info("%s says: %s %s", by, order.verb, order.model or order.kind or "all models")
        if order.verb == "enable":
            self._parts.enable(order.kind)
        else:
            self._wish(order, by)
        return PlannerAnswer(wishes=self.wishes.holding(self._wall()))

    def _refusal(self, order: PlannerOrder) -> str:
        """Why an order makes no sense; empty: it does."""
        models = [pool.model for pool in self._parts.config.pools]
        if order.verb not in ("pause", "resume", "pin", "unpin", "enable"):
            return f"this release knows no {order.verb!r}"
        if order.verb in ("pin", "unpin") and not order.model:
            return "name the model"
        if order.model and order.model not in models:
            return f"no pool has model {order.model!r}; there are {', '.join(models)}"
        if order.verb in ("pause", "pin") and not 0 < order.seconds <= LONGEST:
            return (
                f"it must hold for more than 0 s, and for {LONGEST:.0f} s at most: what must last "
                "stands in the planner file"
            )
        if order.verb in ("pause", "pin") and self.wishes.full(order.model, order.verb):
            return (
                "as many pauses and pins are remembered as there can be: those that have ended are "
                "forgotten after an hour"
            )
        if order.verb == "enable":
            return self._kind_problem(order.kind)
        return self._pin_problem(order) if order.verb == "pin" else ""

    def _kind_problem(self, kind: str) -> str:
        kinds = self._parts.kinds
        if kinds is None or kind in kinds:
            return ""
        return f"nothing starts a kind {kind!r}; there are {', '.join(sorted(kinds)) or 'none'}"

    def _pin_problem(self, order: PlannerOrder) -> str:
        if any(mode not in MODES or number < 0 for mode, number in order.mix.items()):
            return f"a pin has a number of workers for each of {', '.join(MODES)}"
        mix = {mode: number for mode, number in order.mix.items() if number}
        if not valid_mix(mix):
            return (
                "such workers cannot serve: some must take requests, prefill needs decode, and "
                "decode needs prefill or both"
            )
        pool = self._parts.config.pool(order.model)
        if pool is not None and sum(mix.values()) > pool.max:
            return f"the pool's max is {pool.max}: raise it in the planner file"
        return ""

    def _wish(self, order: PlannerOrder, by: str) -> None:
        """Enters a wish, or the end of one, and tells the other planners."""
        wall = self._wall()
        self.wishes.enter(
            wall,
            model=order.model,
            sort=PAUSE if order.verb in ("pause", "resume") else PIN,
            by=by,
            seconds=order.seconds if order.verb in ("pause", "pin") else 0.0,
            mix=order.mix if order.verb == "pin" else {},
        )
        if order.verb == "resume" and not order.model:
            self._resume_all(wall, by)
        self._parts.tell()

    def _resume_all(self, wall: float, by: str) -> None:
        """Ends the pauses of single models, too."""
        for model in self.wishes.paused(wall):
            self.wishes.enter(wall, model=model, sort=PAUSE, by=by)

    def _explain(self, order: PlannerOrder) -> PlannerAnswer:
        """The plans that are meant, the newest of each model without a number."""
        newest = {plan.model: plan for plan in self._plans}
        plans = [one for one in self._plans if one.number == order.number]
        if not order.number:
            plans = [one for one in newest.values()]
        plans = [one for one in plans if order.model in ("", one.model)]
        if order.number and not plans:
            numbers = [one.number for one in self._plans]
            kept = f"{min(numbers)} to {max(numbers)}" if numbers else "none yet"
            return PlannerAnswer(refused=f"plan {order.number} is not kept here; there are: {kept}")
        marks = [f"{one.model} #{one.number}:" for one in plans]
        lines = [line for line in self._parts.lines if any(mark in line for mark in marks)]
        return PlannerAnswer(plans=tuple(plans), log=tuple(lines))


def _key(plan: ScalingPlan) -> tuple[str, int]:
    return (plan.model, plan.number)
