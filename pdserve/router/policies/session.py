"""Keeps a session on one worker, by its session id.

    the home of `session_id` by rendezvous hashing;
    without one, the least  (running + waiting + placed) / max_sequences

The session routing of the vLLM production stack (hash ring, and the lowest rate without an id),
with rendezvous instead of a ring. The home does not depend on load: a busy one keeps its
conversations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.router.policies import least_loaded
from pdserve.router.policies.hashing import home, key_of

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["choose"]


def choose(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
    """Chooses a worker. O(workers)."""
    if not request.session_id:
        return least_loaded.choose(request, state, random)
    return home(key_of(request.session_id.encode()), state.workers)
