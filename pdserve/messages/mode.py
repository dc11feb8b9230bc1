"""Defines how a worker is told to change its mode, and how it reports the change.

Modes travel as plain words, so that a later release may add one: a worker refuses a word that it
does not know.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["ModeReport", "SetMode"]

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class SetMode(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An operator wants a worker to change its mode. The present mode cancels a change that has not
    happened yet."""

    mode: Annotated[str, Meta(max_length=64)]
    last: bool = False
    """True: also if no other worker would do what this one does now."""
    generation: Count = 0
    """The generation that the operator saw; another one makes the order stale. 0: any."""
    share: Share = 0.5
    """With `both`: the share of a step's tokens that other workers' prompts may fill."""
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """Seconds to hand over what cannot stay; after them the worker keeps its mode."""
    term: Count = 0
    """Term of the planner that orders it, greater for a later owner; 0: an operator orders it."""
    number: Count = 0
    """Number of the planner's plan in that term. An order older than the last one is refused."""


class ModeReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A worker's mode, and how far a change of it is."""

    mode: str = ""
    generation: Count = 0
    """Number of the present mode in this life, from 1; 0: an older release does not count."""
    state: str = ""
    """`serving`, `leaving` or `proving`, as `worker.mode.state_table` explains them. Its other
    states last no time, so no report has them."""
    target: str = ""
    """The mode that it changes to; empty: none."""
    left: Count = 0
    """Requests, and prompts of other workers, that the change waits for or, without one, that a
    drain would wait for."""
    remaining: float = 0.0
    """Seconds until it gives up and keeps its mode."""
    share: Share = 0.0
    """With `both`: the share of a step's tokens for other workers' prompts."""
    failed: str = ""
    """Why the last change did not happen; empty: it did, or there was none."""
    refused: str = ""
    """Why this order is not obeyed; empty: it is."""
    newest: Count = 0
    """Newest term of which an order was obeyed; 0: no planner's was."""
