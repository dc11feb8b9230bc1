"""Defines the records of the planner: what is there, what it changes, and its plan.

Kinds, states and actions travel as plain words, so that a later release may add one.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId

__all__ = [
    "START_MODES",
    "Change",
    "Instance",
    "Kind",
    "PlannerReport",
    "ScalingPlan",
]

START_MODES: Final = ("aggregated", "prefill", "decode")
"""Modes in which a worker can start. `both` is reached by a mode switch only."""

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]


class Kind(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One kind of worker that an actuator can start: a host's GPU, a Slurm partition."""

    name: str
    actuator: str = ""
    slots: Count = 0
    """Most instances at once; 0: the actuator knows no bound."""
    price: Amount = 1.0
    """Cost of an instance for an hour, in the operator's unit."""


class Instance(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A worker process that an actuator has started or was asked to start."""

    change: str
    """Id of the change that wanted it; it fits `ids.CHANGE_PATTERN`."""
    kind: str
    actuator: str = ""
    ref: str = ""
    """The actuator's own name for it: a process id, a job id, a unit."""
    state: str = "pending"
    """`pending` (no host runs it yet), `booting` (its process runs), `running` (its worker has
    joined), `ending`, `ended` or `failed`; `unknown`: its host does not answer, and it may run."""
    reason: str = ""
    """Why it waits or has failed, in the actuator's own words."""
    node: NodeId | None = None
    """The worker's name, once it is known."""
    expected: float | None = None
    """Seconds until it is expected to start; None: unknown."""
    hard_end: float | None = None
    """Seconds until it is ended from outside, by a time limit; None: it is not."""


class Change(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One thing that a plan changes. The id is a hash of term, number and index, so an order that
    is repeated does nothing twice."""

    id: str
    action: str
    """`start`, `stop`, `mode` or `undo_drain`."""
    kind: str = ""
    """Of `start`: which kind of worker."""
    mode: str = ""
    """Of `start` and `mode`: the mode it is to have."""
    node: NodeId | None = None
    epoch: int = 0
    """The life of the worker that is meant; an order for another life is stale."""
    share: float = 0.0
    """Of mode `both`: the share of a step for other workers' prompts."""
    state: str = ""
    """How far it is."""
    reason: str = ""
    """Why it was begun, or has failed, in words."""


class ScalingPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a planner has decided for one model at one time."""

    term: Count
    """Greater for a later owner of the model; with `number` it orders all orders."""
    number: Count
    model: str
    target: dict[str, Count] = {}
    """Workers by mode that it wants."""
    present: dict[str, Count] = {}
    """Ready workers by mode that there are."""
    changes: tuple[Change, ...] = ()
    binding: str = ""
    """What keeps the plan from being cheaper or better, in words that name the figure."""
    forecast: dict[str, float] = {}
    """Work per second by quantile (`0.5`, `0.9`), at the horizon."""
    observed: float = 0.0
    """Work per second of the last bucket."""
    miss_before: float = 0.0
    """Predicted share of requests that miss the objective if nothing changes."""
    miss_after: float = 0.0
    """The same with this plan."""
    blind: str = ""
    """Why no demand is known; empty: it is known."""
    cost: Amount = 0.0
    """Cost of an hour with the target."""
    unreachable: float = 0.0
    """Share of requests whose own prompt takes longer than the TTFT objective on an idle worker."""


class PlannerReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A planner's own account of itself, for status and for `pdserve planner`."""

    mode: str = "off"
    """`off`, `advise` or `act`."""
    owner: bool = False
    """True: it decides for at least one model."""
    plans: tuple[ScalingPlan, ...] = ()
    """Its newest plan for each model that it owns."""
    instances: tuple[Instance, ...] = ()
    paused: dict[str, str] = {}
    """By model: who paused it, and for how long."""
    pins: dict[str, dict[str, Count]] = {}
    """By model: the workers by mode that an operator has fixed."""
    log: tuple[str, ...] = ()
    """The newest lines of the decision log."""
    fixed: dict[str, tuple[NodeId, ...]] = {}
    """By model: workers whose mode cannot change, because their engines move no KV."""
