"""Chooses the workers in turn.

    choose the first worker after the last chosen one, by node id, and begin again at the end

The oldest dispatching rule; no load is looked at. Right for equal workers and equal requests, and
the baseline that every other policy must beat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.router.policies.base import after

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["choose"]


def choose(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
    """Chooses a worker. O(log workers)."""
    return after(state.workers, state.last)
