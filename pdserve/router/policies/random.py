"""Anybody, by the throw of a die.

    draw one worker, all alike

The baseline below round robin: with many requests on equal workers each gets its share, and the
longest queue grows like log n / log log n (see `power_of_two`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import Route
    from pdserve.router.policies.base import State, WorkerView

__all__ = ["choose"]


def choose(question: Route, state: State, random: Random) -> WorkerView:
    """O(1)."""
    return state.workers[random.randrange(len(state.workers))]
