"""Chooses the worker with the least load for its size.

    choose the least  (running + waiting + placed) / max_sequences,  ties in rotation

"Join the shortest queue", which is optimal for equal servers and exponential service (Winston,
"Optimality of the shortest line discipline", Journal of Applied Probability 14, 1977), with queues
weighted by the servers' size as in weighted least-connection scheduling. Requests count alike,
however long: it knows neither prompts nor caches.

Several routers with the same view choose alike. They know of each other's bookings within
milliseconds, and their rotations start at different workers.
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
    """Chooses a worker. O(workers)."""
    occupancies = [worker.occupancy for worker in state.workers]
    least = min(occupancies)
    tied = [
        w for w, occupancy in zip(state.workers, occupancies, strict=True) if occupancy == least
    ]
    return after(tied, state.last)
