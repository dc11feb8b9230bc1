"""Chooses the workers in turn, in proportion to their size.

    lay the workers side by side, each as wide as `max_sequences`; decision number k falls on
    frac(k * g) * (sum of widths),  g the fraction of the golden ratio

Multiples of the golden ratio fill a circle evenly however many there are (the three-gap theorem),
so that each worker's share of any run of decisions is its width but for one or two, and those of
one worker are spread out, as in smooth weighted round robin, without a count per worker: workers
that come and go upset nothing. No load is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["choose"]

_GOLDEN: Final = 0.6180339887498949


def choose(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
    """Chooses a worker. O(workers)."""
    workers = state.workers
    place = (state.count * _GOLDEN) % 1.0 * sum(worker.max_sequences for worker in workers)
    for worker in workers:
        place -= worker.max_sequences
        if place < 0:
            return worker
    return workers[-1]
