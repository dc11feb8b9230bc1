"""A conversation stays where it is.

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

    from pdserve.messages.routing import Route
    from pdserve.router.policies.base import State, WorkerView

__all__ = ["choose"]


def choose(question: Route, state: State, random: Random) -> WorkerView:
    """O(workers)."""
    if not question.session_id:
        return least_loaded.choose(question, state, random)
    return home(key_of(question.session_id.encode()), state.workers)
