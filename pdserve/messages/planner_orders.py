"""Defines what operators tell planners, and what planners tell each other.

An operator's wishes are few and must outlive the planner that heard them. So each planner publishes
all that it knows as the latest value of the topic `PLANNERS`, and takes over what others know: for
each model the newest wish of each sort holds, by the clock of the planner that heard it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.messages.planner import ScalingPlan

__all__ = ["PLANNERS", "PlannerAnswer", "PlannerOrder", "PlannerState", "PlannerWish"]

PLANNERS: Final = "planners"
"""Topic of a planner, a value: `PlannerState`."""

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=512)]


class PlannerWish(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an operator wants for one model, until a moment."""

    model: Text
    sort: str
    """`pause` or `pin`."""
    at: Amount
    """When it was said, in Unix seconds; the newest wish of a sort holds."""
    until: Amount = 0.0
    """When it ends, in Unix seconds; 0: it ended the wish before it."""
    by: Text = ""
    """Who said it."""
    mix: dict[str, Count] = {}
    """Of `pin`: the workers by mode."""


class PlannerState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one planner tells the others."""

    mode: str = "off"
    """`off`, `advise` or `act`. Only planners that act share models among them."""
    wishes: tuple[PlannerWish, ...] = ()


class PlannerOrder(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An operator asks or tells a planner something."""

    verb: str
    """`explain`, `pause`, `resume`, `pin`, `unpin` or `enable`."""
    model: Text = ""
    """The model that is meant; empty: all."""
    mix: dict[str, Count] = {}
    """Of `pin`: the workers by mode."""
    seconds: Amount = 3600.0
    """Of `pause` and `pin`: how long they hold."""
    number: Count = 0
    """Of `explain`: the plan's number; 0: the newest of each model."""
    kind: Text = ""
    """Of `enable`: the kind of worker that may be started again."""
    by: Text = ""
    """Who says it, for the log and for `pdserve planner`."""


class PlannerAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a planner answers."""

    refused: str = ""
    """Why it is not obeyed; empty: it is."""
    plans: tuple[ScalingPlan, ...] = ()
    """Of `explain`: the plans that are meant."""
    log: tuple[str, ...] = ()
    """Of `explain`: lines of the decision log about them."""
    wishes: tuple[PlannerWish, ...] = ()
    """What holds now."""
