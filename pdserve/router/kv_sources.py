"""Chooses the workers from which another one may fetch the KV of a prompt's prefix.

A source is only a hint: the worker that gets it asks the source, which claims what it still has.
So this looks at what workers have said of their pools, and not at what was sent there a moment ago,
which is not computed yet.

What many prompts begin with spreads by being fetched. Once `most_copies` workers have it, a further
one uses what it fetches and lets go of it (`KvSource.retain`); for this count, what was sent to a
worker a moment ago is there. Pure; `RouterCore` passes the result on in `RouteDecision.kv_sources`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.messages.tiers import KvSource
from pdserve.router.policies.base import WorkerKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdserve.ids import NodeId, NodeLife
    from pdserve.router.policies.base import WorkerView

__all__ = [
    "MOST_SOURCES",
    "KvHolder",
    "count_copies",
    "kv_sources",
    "longest_first",
    "most_copies",
    "reachable",
]

MOST_SOURCES: Final = 3
"""Most sources of one request; another one is needed only when those before it fail."""
LEAST_COPIES: Final = 2
"""What `auto` allows at least: with one, every fetch would be in vain once its owner is gone."""


@dataclass(frozen=True, slots=True)
class KvHolder:
    """A worker that has leading blocks of a prompt and can send them."""

    life: NodeLife
    blocks: int
    """Leading blocks in all its tiers."""
    device_blocks: int = 0
    """Leading blocks on its device."""
    kv: WorkerKv = field(default_factory=WorkerKv)
    occupancy: float = 0.0
    """As `WorkerView.occupancy`."""


def longest_first(holders: Iterable[KvHolder]) -> tuple[KvHolder, ...]:
    """Orders holders by their number of blocks; of equal ones the least loaded comes first."""
    return tuple(sorted(holders, key=lambda one: (-one.blocks, one.occupancy, one.life.node)))


def reachable(worker: WorkerView, holder: KvHolder) -> bool:
    """True if the worker is another one than the holder, and can use and receive its KV."""
    one, other = worker.kv, holder.kv
    return (
        holder.life.node != worker.node
        and one.compat_hash == other.compat_hash
        and not one.transfers.isdisjoint(other.transfers)
    )


def most_copies(setting: int, workers: int) -> int:
    """Workers that may keep a prefix which is fetched; `setting` 0: half of them."""
    return setting or max(LEAST_COPIES, workers // 2)


def count_copies(
    blocks: int, overlaps: Mapping[NodeId, int], lower: Mapping[NodeId, tuple[int, int]]
) -> int:
    """Workers that have so many leading blocks of the prompt, on any tier. The maps are those of
    `RoutingState`."""
    found = sum(count >= blocks for node, count in overlaps.items() if node not in lower)
    return found + sum(with_disk >= blocks for _, with_disk in lower.values())


def kv_sources(
    worker: WorkerView,
    own_blocks: int,
    holders: Sequence[KvHolder],
    keeps: Callable[[int], bool] = lambda blocks: True,
) -> tuple[KvSource, ...]:
    """The sources for a worker that has `own_blocks` leading blocks itself: at most `MOST_SOURCES`
    holders of more, longest first. Of equal ones those on the worker's own machine come first, then
    the least loaded. `keeps` tells whether the worker may keep so many leading blocks."""
    found = [one for one in holders if one.blocks > own_blocks and reachable(worker, one)]
    found.sort(
        key=lambda one: (
            -one.blocks,
            not worker.kv.host or one.kv.host != worker.kv.host,
            one.occupancy,
            one.life.node,
        )
    )
    return tuple(
        KvSource(one.life.node, one.life.epoch, one.blocks, one.device_blocks, keeps(one.blocks))
        for one in found[:MOST_SOURCES]
    )
