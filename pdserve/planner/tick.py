"""What the core of the planner is given at each tick, and what it answers.

The driver fills a `PlannerInput` from cards, topics and the actuators' lists,
and carries out the orders of the `PlannerOutput`. Orders are repeated at each tick until the lists
show them, and carry ids, so neither a lost order nor a second one does harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Change, Instance, Kind, ScalingPlan
    from pdserve.planner.changes.book import Ended
    from pdserve.planner.explain import Binding
    from pdserve.planner.outlook import DemandView
    from pdserve.planner.pool import Mix, Worker

__all__ = ["Order", "PlannerInput", "PlannerOutput", "Refusal", "RefusalKind"]

RefusalKind = Literal["transient", "denied", "exhausted", "vetoed", "stale"]
"""`transient`: it is tried again at the next tick; `denied` and `exhausted`: what the actuator
said; `vetoed`: the worker's own reason; `stale`: it obeys a later planner."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an order was not carried out."""

    kind: RefusalKind
    reason: str
    """In the words of whoever refused."""
    retry_in: Seconds | None = None
    """With `exhausted`: seconds after which it may work; None: nobody knows."""
    newest: int = 0
    """With `stale`: the term that is obeyed; 0: it is not known."""
    silent: bool = False
    """With `transient`: no answer came from the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerInput:
    """What is known at one moment. Nothing of it is remembered by the driver for the core."""

    wall: float
    """Unix seconds, for floors by time of day only; all else is on the monotonic clock."""
    planners: tuple[NodeId, ...] = ()
    """Living planners of the same mode, this one included."""
    demand: Mapping[str, DemandView] = field(default_factory=dict)
    """By model. A model without an entry is not known, which is not the same as no demand."""
    workers: tuple[Worker, ...] = ()
    """Workers of all models, loading ones included."""
    instances: tuple[Instance, ...] = ()
    """All that actuators list."""
    kinds: tuple[Kind, ...] = ()
    """What actuators can start."""
    down: Mapping[str, str] = field(default_factory=dict)
    """Actuators that do not answer, with their own words. What is missing in their lists may still
    be there."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By id of a change: orders that were not carried out since the last tick."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """By model: who paused it. Nothing is changed there."""
    pins: Mapping[str, Mix] = field(default_factory=dict)
    """By model: the workers by mode that an operator has fixed."""


@dataclass(frozen=True, slots=True)
class Order:
    """One thing for the driver to do. It is repeated until the lists show it, so the driver drops
    one that is under way."""

    verb: Literal["begin", "end"]
    """`begin`: carry out the change (start, drain, set the mode, undo the drain). `end`: have the
    actuator end the instance `instance`, which is drained or never served."""
    change: Change
    model: str
    term: int
    """With `number` it orders all orders to one worker; a worker obeys only greater ones."""
    number: int
    instance: str = ""
    """With `end`: the id of the change that started it; empty: nobody can end it."""
    last: bool = False
    """Of a mode switch: also if no other worker would do what this one does now."""


@dataclass(frozen=True, slots=True)
class PlannerOutput:
    """What was decided."""

    plans: tuple[ScalingPlan, ...] = ()
    """The present plan of each model that this planner owns."""
    orders: tuple[Order, ...] = ()
    """Empty with `advise`."""
    log: tuple[str, ...] = ()
    """Lines for the decision log: one for each plan that differs from the one before, and for each
    change that ended."""
    degraded: Mapping[str, str] = field(default_factory=dict)
    """Degradations that hold now, by name."""
    next_tick: Seconds = 5.0
    """Seconds until the next tick is due."""
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    """By model: what keeps its plan from being cheaper or better, with the figures; the name is for
    metrics."""
    ended: tuple[Ended, ...] = ()
    """Changes that are over since the last tick."""
