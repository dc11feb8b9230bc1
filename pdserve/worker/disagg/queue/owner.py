"""Chooses the router that owns a model's prefill queue, by rendezvous hashing of the model name.

Every decode worker computes it from its own view of the cluster. Views may differ for moments, and
then a model has two queues. That costs a little ordering and nothing else: prefill workers draw
from every router, and a decode worker accepts a claim only of the router that it queued with last.
Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from pdserve.runtime.rendezvous import key_of, score

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.runtime.registry import Member

__all__ = ["owner_candidates", "queue_owner"]


def owner_candidates(members: Iterable[Member]) -> list[Member]:
    """Routers that may own a queue: they have settled (their card is there) and do not drain; those
    in doubt only if nobody else is left."""
    settled = [
        member
        for member in members
        if member.role == "router" and member.card is not None and not member.card.draining
    ]
    return [m for m in settled if m.reachable and not m.suspect] or settled


def queue_owner(model: str, routers: Iterable[Member]) -> Member | None:
    """Who of these owns the model's queue; None: there is nobody. Its epoch is the fence: a claim
    of an earlier life is void."""
    key = _key(model)
    return max(routers, key=lambda member: (score(key, member.node), member.node), default=None)


@lru_cache(maxsize=256)
def _key(model: str) -> int:
    return key_of(model.encode())
