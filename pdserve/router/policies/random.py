"""Chooses a worker at random.

    draw one worker, all alike

The baseline below round robin: with many requests on equal workers each gets its share, and the
longest queue grows like log n / log log n (see `power_of_two`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["choose"]


def choose(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
    """Chooses a worker. O(1)."""
    return state.workers[random.randrange(len(state.workers))]
