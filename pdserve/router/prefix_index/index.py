"""Finds how many leading blocks of a prompt each worker has cached. Called once per request.

The longest run over three sources counts:

    events      what workers report of their pools, one `WorkerEventFeed` each
    predicted   what was sent there in the last seconds: a choice counts at once
    routed      what was sent there in the last minutes, only for workers without KV events

It deals in nodes and short block hashes; tree slots stay inside. Workers are known by their lives:
when one ends, everything about it goes, in time proportional to its blocks. Pure: time is an
argument. Owned by `RouterCore`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.ids import NodeLife
from pdserve.router.prefix_index.radix_tree import Tree
from pdserve.router.prefix_index.recent_routes import RecentRoutes
from pdserve.router.prefix_index.worker_events import WorkerEventFeed
from pdserve.router.prefix_index.worker_slots import WorkerSlots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.router.config import RouterConfig
    from pdserve.runtime.registry import Member

__all__ = ["PrefixIndex", "PrefixMatches"]

_PREDICT_PARTS: Final = 2
_ROUTED_PARTS: Final = 4


class PrefixMatches(NamedTuple):
    """Result of one lookup; workers without a match are in neither map."""

    overlaps: Mapping[NodeId, int]
    """Leading blocks in the device tier, per worker."""
    lower: Mapping[NodeId, tuple[int, int]]
    """Leading blocks in device and host tiers, and in device, host and disk tiers; only workers
    where that exceeds `overlaps`.
    """

    def own_blocks(self, node: NodeId) -> int:
        """Leading blocks in all tiers of a worker."""
        lower = self.lower.get(node)
        return self.overlaps.get(node, 0) if lower is None else lower[1]


_NOTHING: Final = PrefixMatches({}, {})


@dataclass(slots=True)
class _Worker:
    """One life of a worker."""

    life: NodeLife
    feed: WorkerEventFeed | None = None
    events: bool | None = None
    """True if its engine publishes KV events; None: not known yet."""
    names_id: bytes = b""


class PrefixIndex:
    """The prefix index of one router: KV events, recent placements and remembered routes."""

    def __init__(self, config: RouterConfig, *, remember: bool = False) -> None:
        """Args: `remember` keeps what was sent to every worker, for a policy with
        `needs_routed`.
        """
        self._config = config
        self._remember = remember
        self._workers: dict[NodeId, _Worker] = {}
        self._tree, self._slots = Tree(config.index_max_blocks), WorkerSlots()
        self._predicted = RecentRoutes(
            self._tree,
            self._slots,
            ttl=config.predict_ttl,
            parts=_PREDICT_PARTS,
            most=max(1, config.index_max_blocks // 8),
        )
        self._routed_tree, self._routed_slots = Tree(config.approximate_blocks), WorkerSlots()
        self._routed = RecentRoutes(
            self._routed_tree,
            self._routed_slots,
            ttl=config.approximate_ttl,
            parts=_ROUTED_PARTS,
            most=config.approximate_blocks,
        )
        self._ids: Counter[bytes] = Counter()
        """Hash secret ids of the workers for which it is known."""
        self._lower_tiers = False
        """True once a worker has reported a lower tier; lookups then walk all tiers."""
        self._past: Counter[str] = Counter()  # counters of those that are gone
        self.approximate: set[NodeId] = set()
        """Workers without KV events: only what was sent there is known."""
        self.asked = 0
        """Number of lookups with block hashes."""
        self.mismatched = 0
        """Lookups whose hashes were made with another secret than some worker's."""

    # ------------------------------------------------------------------ members

    def worker_up(
        self, life: NodeLife, *, events: bool | None = None, names_id: bytes | None = None
    ) -> None:
        """Begins a worker's life, or adds what is now known: whether it publishes KV events, and
        its hash secret. None: nothing new. Idempotent.
        """
        worker = self._workers.get(life.node)
        if worker is not None and worker.life.epoch > life.epoch:
            return
        if worker is not None and worker.life != life:
            self.worker_gone(worker.life)
            worker = None
        if worker is None:
            worker = self._workers[life.node] = _Worker(life)
        if events is not None:
            worker.events = events
            (self.approximate.discard if events else self.approximate.add)(life.node)
        if names_id is not None and names_id != worker.names_id:
            self._renamed(worker, names_id)

    def _renamed(self, worker: _Worker, names_id: bytes) -> None:
        """Drops what was sent there under another hash secret."""
        self._count_id(worker.names_id, -1)
        self._count_id(names_id, 1)
        worker.names_id = names_id
        self._predicted.forget(worker.life)
        self._routed.forget(worker.life)

    def _count_id(self, names_id: bytes, change: int) -> None:
        if names_id:
            self._ids[names_id] += change
            if not self._ids[names_id]:
                del self._ids[names_id]

    def worker_gone(self, life: NodeLife) -> None:
        """Removes everything about a worker's life. Idempotent."""
        worker = self._workers.get(life.node)
        if worker is None or worker.life != life:
            return
        del self._workers[life.node]
        self._count_id(worker.names_id, -1)
        self._end_feed(worker)
        self._predicted.forget(life)
        self._routed.forget(life)
        self.approximate.discard(life.node)

    def target(self, member: Member) -> WorkerEventFeed:
        """The log target for `Topics.subscribe_log(KV, ...)`."""
        life = NodeLife(member.node, member.epoch)
        self.worker_up(life)
        feed = WorkerEventFeed(
            self._tree,
            self._slots,
            life,
            self._predicted,
            room=self._room,
            on_lower=self._tiers_in_use,
        )
        worker = self._workers[life.node]
        if worker.life != life:  # it has another life already
            feed.close()
            return feed
        self._end_feed(worker)
        worker.feed = feed
        return feed

    def _end_feed(self, worker: _Worker) -> None:
        feed, worker.feed = worker.feed, None
        if feed is not None:
            feed.close()
            self._past.update(_counted(feed))

    def _tiers_in_use(self) -> None:
        self._lower_tiers = True

    def _room(self) -> int:
        return self._config.index_max_blocks - len(self._tree)

    # ------------------------------------------------------------------ requests

    def find(self, now: Seconds, names: bytes, names_id: bytes = b"") -> PrefixMatches:
        """Looks up a prompt's block hashes at all workers, in one walk; lower tiers, if any, in a
        second.
        """
        if not names or not self._workers:
            return _NOTHING
        self.asked += 1
        self._predicted.expire(now)
        lower: dict[NodeId, tuple[int, int]] = {}
        overlaps = self._tree.match_as(names, self._slots.shown)
        if self._lower_tiers:
            lower = self._lower(self._tree.match_tiers(names), overlaps)
        if self.approximate:
            routed = self.routed(now, names)
            for node in self.approximate & routed.keys():
                overlaps[node] = max(routed[node], overlaps.get(node, 0))
        if names_id and self._ids and self._ids.keys() != {names_id}:
            self._take_out_foreign(names_id, overlaps, lower)
        return PrefixMatches(overlaps, lower)

    def holders(self, names: bytes, names_id: bytes = b"") -> dict[NodeLife, tuple[int, int]]:
        """Workers that have leading blocks by their own events: (on the device, in all tiers). What
        was only sent to a worker does not count."""
        if not names or not self._workers:
            return {}
        found: dict[NodeLife, tuple[int, int]] = {}
        tiers = self._tree.match_tiers(names)
        for worker in self._workers.values():
            feed = worker.feed
            depths = None if feed is None else tiers.get(feed.slot)
            if depths is not None and (not names_id or worker.names_id in (b"", names_id)):
                found[worker.life] = (depths[0], depths[2])
        return found

    def _lower(
        self, tiers: Mapping[int, tuple[int, int, int]], overlaps: Mapping[NodeId, int]
    ) -> dict[NodeId, tuple[int, int]]:
        found: dict[NodeId, tuple[int, int]] = {}
        for slot, (_, host, disk) in tiers.items():
            node = self._slots.node(slot)
            if node is None:
                continue
            best_host, best_disk = found.get(node, (overlaps.get(node, 0),) * 2)
            found[node] = (max(host, best_host), max(disk, best_disk))
        return {node: both for node, both in found.items() if both[1] > overlaps.get(node, 0)}

    def _take_out_foreign(
        self, names_id: bytes, overlaps: dict[NodeId, int], lower: dict[NodeId, tuple[int, int]]
    ) -> None:
        self.mismatched += 1
        for node in tuple(overlaps.keys() | lower.keys()):
            if self._workers[node].names_id not in (b"", names_id):
                overlaps.pop(node, None)
                lower.pop(node, None)

    def routed(self, now: Seconds, names: bytes) -> Mapping[NodeId, int]:
        """Leading blocks sent to each worker recently; covers all workers only with `remember`."""
        self._routed.expire(now)
        return self._routed_tree.match_as(names, self._routed_slots.shown)

    def routed_blocks(self) -> Mapping[NodeId, int]:
        """Number of remembered blocks, per worker."""
        return {node: self._routed.blocks(worker.life) for node, worker in self._workers.items()}

    def known_blocks(self, node: NodeId) -> int:
        """Number of blocks that a worker's events report, over all tiers."""
        worker = self._workers.get(node)
        feed = None if worker is None else worker.feed
        return 0 if feed is None else self._tree.blocks(feed.slot)

    def told(self, node: NodeId, names: bytes) -> int:
        """Leading blocks at a worker by its own events only; for audits."""
        worker = self._workers.get(node)
        feed = None if worker is None else worker.feed
        return 0 if feed is None else self._tree.match(names).get(feed.slot, 0)

    @property
    def lives(self) -> set[NodeLife]:
        """The known workers."""
        return {worker.life for worker in self._workers.values()}

    # ------------------------------------------------------------------ decisions

    def placed(self, now: Seconds, life: NodeLife, names: bytes, names_id: bytes = b"") -> None:
        """Notes that a prompt goes to this worker: its blocks count as cached there at once."""
        worker = self._workers.get(life.node)
        if not names or worker is None or worker.life != life:
            return
        if names_id and worker.names_id not in (b"", names_id):
            return
        if worker.events is not False:
            self._predicted.note(now, life, names)
        if self._remember or worker.events is False:
            self._routed.note(now, life, names)

    def sweep(self, now: Seconds) -> None:
        """Drops expired entries; call it about once a second."""
        for memory in (self._predicted, self._routed):
            memory.expire(now)
            memory.reclaim(_RECLAIM)

    # ------------------------------------------------------------------ looking

    @property
    def full(self) -> bool:
        """True if some worker's blocks are missing because the tree is full."""
        return any(w.feed is not None and w.feed.missing for w in self._workers.values())

    @property
    def counters(self) -> dict[str, int]:
        """Counters for status and metrics; totals never decrease."""
        total = Counter(self._past)
        for worker in self._workers.values():
            if worker.feed is not None:
                total.update(_counted(worker.feed))
        tree = self._tree.counters
        return {
            "workers": len(self._workers),
            "approximate_workers": len(self.approximate),
            "blocks": len(self._tree),
            "worker_blocks": tree.worker_blocks,
            "bytes": tree.bytes + self._routed_tree.counters.bytes,
            "routed_blocks": self._routed_tree.counters.worker_blocks,
            "refused_blocks": tree.dropped_full,
            "events": total["events"],
            "blocks_stored": total["stored"],
            "blocks_removed": total["removed"],
            "asked": self.asked,
            "mismatched": self.mismatched,
            "predicted": self._predicted.noted,
        }

    def check(self) -> None:
        """Raises `AssertionError` unless every slot has its owner. For tests and audits."""
        feeds = [w.feed for w in self._workers.values() if w.feed is not None]
        assert len(self._slots) == sum(feed.slots for feed in feeds) + self._predicted.slots
        assert len(self._routed_slots) == self._routed.slots
        shown = self._slots.shown.items()
        told = {feed.slot: feed.life.node for feed in feeds}.items()
        assert told <= shown
        assert len(shown) - len(told) <= self._predicted.slots
        assert {*self._slots.shown.values()} <= self._workers.keys()
        assert {*self._routed_slots.shown.values()} <= self._workers.keys()
        assert self.approximate <= self._workers.keys()
        assert self._ids == Counter(w.names_id for w in self._workers.values() if w.names_id)


_RECLAIM: Final = 64
"""Workers whose expired entries are freed in one sweep."""


def _counted(feed: WorkerEventFeed) -> dict[str, int]:
    return {"events": feed.events, "stored": feed.stored, "removed": feed.removed}
