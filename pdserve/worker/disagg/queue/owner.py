"""Chooses the router that owns a model's prefill queue, by rendezvous hashing of the model name.

Every decode worker computes the owner from its own view of the cluster. Views may differ for a
moment, and then a model has two queues. This costs a little ordering and nothing else: prefill
workers take claims from every router, and a decode worker accepts only claims of the router that it
queued with last. Pure.
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
    """Routers that may own a queue: those that have published a card and do not drain. Suspected or
    unreachable routers count only if there are no others."""
    settled = [
        member
        for member in members
        if member.role == "router" and member.card is not None and not member.card.draining
    ]
    return [m for m in settled if m.reachable and not m.suspect] or settled


def queue_owner(model: str, routers: Iterable[Member]) -> Member | None:
    """The router that owns the model's queue; None if there are no routers. The owner's epoch is
    part of the fence: claims of its earlier lives are void."""
    key = _key(model)
    return max(routers, key=lambda member: (score(key, member.node), member.node), default=None)


@lru_cache(maxsize=256)
def _key(model: str) -> int:
    return key_of(model.encode())
