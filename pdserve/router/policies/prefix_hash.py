"""Sends prompts with the same beginning to the same worker, unless it is overloaded.

    key      the first `prefix_tokens` tokens (256), as the name of the last full block among them
    allowed  workers with  occupancy <= load_factor (1.25) * mean occupancy
    choose   the key's home among those, by rendezvous hashing;
             without a full block, or if none is allowed, the least occupancy

`prefix_hash` of SGLang's gateway (SMG), which walks a ring past crowded workers; to take the
highest score among those that are not crowded is the same walk. A bounded load keeps one popular
prefix from drowning its home (Mirrokni et al., "Consistent hashing with bounded loads", SODA 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.blocks.hashing import SHORT_HASH_BYTES
from pdserve.router.policies import least_loaded
from pdserve.router.policies.hashing import home, key_of

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["PrefixHash"]


@dataclass(frozen=True, slots=True)
class PrefixHash:
    """Prefix hashing with bounded loads; the module docstring has the rule."""

    prefix_tokens: int = 256
    """Leading prompt tokens that form the key."""
    load_factor: float = 1.25
    """Largest ratio of a worker's occupancy to the mean; at least 1."""

    def __post_init__(self) -> None:
        if self.prefix_tokens < 1 or self.load_factor < 1:
            raise ValueError("prefix-tokens and load-factor must be at least 1")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        blocks = len(request.names) // SHORT_HASH_BYTES
        if not blocks or not request.block_size:
            return least_loaded.choose(request, state, random)
        last = min(blocks, max(1, self.prefix_tokens // request.block_size)) * SHORT_HASH_BYTES
        workers = state.workers
        most = self.load_factor * sum(worker.occupancy for worker in workers) / len(workers)
        allowed = [worker for worker in workers if worker.occupancy <= most]
        if not allowed:
            return least_loaded.choose(request, state, random)
        return home(key_of(request.names[last - SHORT_HASH_BYTES : last]), allowed)
