"""Draws two workers at random and chooses the less busy one.

    draw two different workers, choose the lesser  (running + waiting + placed) / max_sequences;
    the first drawn on a tie

Of n requests placed on n workers, two choices instead of one bring the longest queue from about
log n / log log n down to about log log n (Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing", IEEE Transactions on Parallel and Distributed Systems 12, 2001). Routers that know
little of each other do not crowd on the same worker, and the cost does not grow with the cluster.
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
    workers = state.workers
    if len(workers) == 1:
        return workers[0]
    first = random.randrange(len(workers))
    second = random.randrange(len(workers) - 1)
    second += second >= first
    a, b = workers[first], workers[second]
    return a if a.occupancy <= b.occupancy else b
