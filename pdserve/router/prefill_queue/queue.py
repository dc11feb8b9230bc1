"""Assigns one model's waiting prefill items to prefill workers that have credits.

    enqueue ── waiting ── claimed ── ended
       │          │  ▲       │
       │          │  └───────┴── its worker was lost, or gave it back
       └──────────┴── refused, cancelled, replaced by a later round, its decode worker was lost

Order of items:

    bands       higher priority first, strictly
    items       of a band: least `uncached tokens - AGEING * waited`, so that short prompts overtake
                long ones, and no item is overtaken by one that came more than `uncached / AGEING`
                seconds later. An item whose worker was lost comes before all of its band

Choice of worker: of the workers with credits, the one that would be done first, counted in tokens:
its uncomputed tokens and the prompt's tokens missing there. If a busy worker would be done much
sooner because it has the prefix, the item waits for that one, at most `hold_most`.

Pure: time comes in, messages go out through `send`. It knows peers by their streams: when a stream
ends, its items are dropped and its claims return to the queue. Owned by `service`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace
from sortedcontainers import SortedDict

from pdserve.messages.handoff import (
    ClaimCancelled,
    ItemClaimed,
    ItemQueued,
    ItemRefused,
    QueueState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.messages.handoff import CreditOffer, FromQueue, PrefillItem

__all__ = ["PrefillQueue", "PrefillQueueConfig", "QueueStreamId"]

_LOOK: Final = 64
"""Items examined for a free worker: earlier ones may wait for another worker or exclude this one.
"""
_RECHECK: Final[Seconds] = 0.05
"""Interval at which an item that waits for a busy worker is reconsidered."""
_FRESH: Final[Seconds] = 0.2
"""Age from which an item's prefix overlaps are looked up again."""
_HEAD: Final = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillQueueConfig:
    """Settings of one prefill queue."""

    most_items: int = 4096
    """Most waiting items; one more is refused, or displaces one of lower priority."""
    most_bytes: Bytes = 64 << 20
    """Most bytes of block hashes of waiting items."""
    ageing: float = 4000.0
    """Tokens that one second of waiting outweighs: a third of what a slow GPU computes in it."""
    hold_most: Seconds = 1.0
    """Longest wait for a busy worker while a free worker could take the item."""
    pays: float = 0.8
    """An item waits for a busy worker if it would be done there in less than this share of the
    time.
    """
    no_worker_after: Seconds = 2.0
    """An item without a suitable worker is refused after this; workers whose stream was just lost
    reconnect within it.
    """
    most_losses: int = 3
    """An item whose workers were lost this often is refused: it may be the cause."""
    most_returns: int = 8
    """An item that workers gave back this often is refused."""


class QueueStreamId(NamedTuple):
    """Identifies one stream of one life of a node."""

    node: NodeId
    epoch: Epoch
    stream: int
    """The stream's number; a later stream has a higher one."""


ItemKey = tuple["NodeId", "Epoch", int]
"""Identifies an item: the decode worker, its epoch, its request."""


@dataclass(slots=True, eq=False)
class _Item:
    """One item, from its arrival to its end."""

    peer: QueueStreamId
    item: PrefillItem
    number: int
    arrived: Seconds
    deadline: Seconds | None
    uncached: int
    """Tokens missing at the prefill worker with the longest prefix."""
    rank: tuple[int, float, int]
    overlaps: Mapping[NodeId, int]
    """Leading blocks per worker, as of `looked`."""
    looked: Seconds
    """The time when `overlaps` was looked up."""
    claim: _Claim | None = None
    """The claim that holds it; None: it waits."""
    losses: int = 0
    returns: int = 0
    holder: _Worker | None = None
    """The busy worker that it waits for; None: it waits for any."""
    assigned: int = 0
    """Load that it adds at `holder`, in tokens."""
    held_since: Seconds | None = None
    """The time when it began to wait for `holder`."""
    recheck: Seconds = 0.0
    """The time when waiting for `holder` is reconsidered."""

    @property
    def key(self) -> ItemKey:
        return (self.peer.node, self.peer.epoch, self.item.request)

    def uncached_at(self, node: NodeId) -> int:
        """Tokens to compute at that worker; at least the last one."""
        item = self.item
        cached = self.overlaps.get(node, 0) * item.block_size
        return max(1, item.prompt_tokens - cached)


@dataclass(slots=True, eq=False)
class _Claim:
    """A worker's claim on an item."""

    number: int
    worker: _Worker
    item: _Item
    since: Seconds


@dataclass(slots=True, eq=False)
class _Worker:
    """A prefill worker's stream."""

    peer: QueueStreamId
    compat_hash: str
    credits: int = 0
    uncomputed: int = 0
    """Uncomputed tokens in its last offer."""
    sent: int = 0
    """Claims ever sent on this stream."""
    unheard: deque[tuple[int, int]] = field(default_factory=deque)
    """Claims that its last offer does not count yet, with their tokens."""
    load: int = 0
    """Tokens before a new item: those in its last offer and those in `unheard`."""
    claims: dict[int, _Claim] = field(default_factory=dict)
    generation: int = 0
    """Its mode generation in its last offer."""
    leaving: bool = False
    """True once it drains; it gets no more claims."""
    left: int = 0
    """Items that it would take now; kept by `_settle`."""

    def weigh(self) -> None:
        """Recomputes the load after its inputs changed."""
        self.load = self.uncomputed + sum(tokens for _, tokens in self.unheard)


@dataclass(slots=True, eq=False)
class _Group:
    """Items and workers of one compatibility hash."""

    order: SortedDict[tuple[int, float, int], _Item] = field(default_factory=SortedDict)
    """Waiting items in order."""
    workers: dict[QueueStreamId, _Worker] = field(default_factory=dict)
    free: dict[QueueStreamId, _Worker] = field(default_factory=dict)
    """Workers with credits."""
    by_node: dict[NodeId, _Worker] = field(default_factory=dict)
    """The newest stream of each node."""


class PrefillQueue:
    """The prefill queue of one model: a synchronous state machine."""

    def __init__(
        self,
        model: str,
        send: Callable[[QueueStreamId, FromQueue], None],
        numbers: Iterator[int],
        *,
        overlap: Callable[[Seconds, PrefillItem], Mapping[NodeId, int]] = lambda now, item: {},
        claimed: Callable[[Seconds, PrefillItem, QueueStreamId], None] = lambda now, item, worker: (
            None
        ),
        config: PrefillQueueConfig | None = None,
    ) -> None:
        """Args: `send` sends a message and must not call back. `overlap` gives leading blocks per
        worker. `claimed` is called with each claim. `numbers` yields claim numbers, each once.
        """
        self.model = model
        self.config = config or PrefillQueueConfig()
        self.counters: Counter[str] = Counter()
        """Counts of `enqueued`, `claimed`, `redelivered`, `returned`, `held`, and of each end of an
        item: `ended_OUTCOME`, `refused_REASON`, `cancelled`, `replaced`, `abandoned`.
        """
        self._send = send
        self._numbers = numbers
        self._overlap = overlap
        self._on_claimed = claimed
        self._items: dict[ItemKey, _Item] = {}
        self._claims: dict[int, _Claim] = {}
        self._groups: dict[str, _Group] = {}
        self._workers: dict[QueueStreamId, _Worker] = {}
        self._deadlines: SortedDict[tuple[Seconds, int], _Item] = SortedDict()
        """Deadlines of waiting items."""
        self._unservable: dict[_Item, Seconds] = {}
        """Waiting items without a suitable worker, and since when; oldest first."""
        self._arrivals = 0
        self._tokens = 0
        self._bytes: Bytes = 0
        self._recheck: Seconds | None = None
        """The time when items that wait for a busy worker are reconsidered."""

    # ------------------------------------------------------------------ looking

    def __len__(self) -> int:
        """Number of waiting items."""
        return len(self._items) - len(self._claims)

    @property
    def idle(self) -> bool:
        """True if it has no items and no workers."""
        return not self._items and not self._workers

    def state(self) -> QueueState:
        """The queue's state for its report. O(workers)."""
        workers = [worker for worker in self._workers.values() if not worker.leaving]
        return QueueState(
            waiting=len(self),
            waiting_tokens=self._tokens,
            claimed=len(self._claims),
            workers=len(workers),
            uncomputed_tokens=sum(worker.load for worker in self._workers.values()),
            credits=sum(worker.left for worker in workers),
        )

    def next_look(self) -> Seconds | None:
        """The time at which `look` may have work without a new event; None: never."""
        moments = [] if self._recheck is None or not len(self) else [self._recheck]
        if self._deadlines:
            moments.append(self._deadlines.peekitem(0)[0][0])
        if self._unservable:
            moments.append(next(iter(self._unservable.values())) + self.config.no_worker_after)
        return min(moments, default=None)

    # ------------------------------------------------------------------ decode workers

    def enqueue(self, now: Seconds, peer: QueueStreamId, item: PrefillItem) -> None:
        """Takes an item. Answers with `ItemQueued` or `ItemRefused`, or not at all if a later round
        of it is here.
        """
        old = self._items.get((peer.node, peer.epoch, item.request))
        if old is not None and not self._replaced(peer, old, item):
            return
        self.counters["enqueued"] += 1
        if not self._make_room(peer, item):
            return
        entry = self._entry(now, peer, item)
        self._items[entry.key] = entry
        self._wait(now, entry)
        self._send(peer, ItemQueued(item.request, item.round))
        group = self._groups[item.compat_hash]
        if group.free:
            self._match(now, group)

    def _replaced(self, peer: QueueStreamId, old: _Item, item: PrefillItem) -> bool:
        """Replaces an earlier round of the item; False for a late or repeated message."""
        if item.round > old.item.round:
            self._end(old, "replaced")
            return True
        if item.round == old.item.round and peer == old.peer:
            self._send(peer, ItemQueued(item.request, item.round))
        return False

    def _entry(self, now: Seconds, peer: QueueStreamId, item: PrefillItem) -> _Item:
        self._arrivals += 1
        overlaps = self._overlap(now, item)
        uncached = max(1, item.prompt_tokens - self._cached(item, overlaps))
        arrived = now - item.waited
        key = uncached + self.config.ageing * arrived
        deadline = None if item.deadline is None else now + item.deadline
        return _Item(
            peer,
            item,
            self._arrivals,
            arrived,
            deadline,
            uncached,
            (-item.priority, key, self._arrivals),
            overlaps,
            now,
        )

    def _cached(self, item: PrefillItem, overlaps: Mapping[NodeId, int]) -> int:
        """Most tokens of the prompt that a worker of the queue has. What others have is not asked
        for: the decode worker itself counts as having what the router expects it to have soon."""
        group = self._groups.get(item.compat_hash)
        if group is None:
            return 0
        known = (blocks for node, blocks in overlaps.items() if node in group.by_node)
        return max(known, default=0) * item.block_size

    def _make_room(self, peer: QueueStreamId, item: PrefillItem) -> bool:
        """Displaces an item of lower priority if the queue is full; False if there is none."""
        config = self.config
        size = len(item.names)
        while len(self) >= config.most_items or self._bytes + size > config.most_bytes:
            last = self._last()
            if last is None or last.item.priority >= item.priority:
                self._tell_refused(peer, item, "queue_full")
                return False
            self._refuse(last, "displaced")
        return True

    def _last(self) -> _Item | None:
        """The waiting item that would be assigned last."""
        lasts = [group.order.peekitem(-1)[1] for group in self._groups.values() if group.order]
        return max(lasts, key=lambda entry: entry.rank, default=None)

    def cancel(self, peer: QueueStreamId, request: int, round: int) -> bool:
        """Drops an item that its decode worker no longer wants; False if that round is not here."""
        entry = self._items.get((peer.node, peer.epoch, request))
        if entry is None or entry.item.round != round:
            return False
        self._end(entry, "cancelled")
        return True

    # ------------------------------------------------------------------ prefill workers

    def offer(self, now: Seconds, peer: QueueStreamId, offer: CreditOffer) -> None:
        """Notes how many items a worker would take."""
        worker = self._workers.get(peer)
        if worker is not None and worker.compat_hash != offer.compat_hash:
            self.peer_gone(now, peer)  # its engine has another model now: nothing else is left
            worker = self._worker_up(now, peer, offer.compat_hash, worker.sent)
        elif worker is None:
            worker = self._worker_up(now, peer, offer.compat_hash, 0)
        worker.credits, worker.uncomputed = offer.credits, offer.uncomputed_tokens
        worker.generation = offer.generation
        while len(worker.unheard) > max(0, worker.sent - offer.claims):
            worker.unheard.popleft()
        worker.weigh()
        group = self._groups[worker.compat_hash]
        self._settle(group, worker)
        if group.free:
            self._match(now, group)

    def _worker_up(self, now: Seconds, peer: QueueStreamId, compat_hash: str, sent: int) -> _Worker:
        for old in [p for p in self._workers if p[:2] == peer[:2] and p.stream < peer.stream]:
            self.peer_gone(now, old)  # whose end was not seen yet
        worker = self._workers[peer] = _Worker(peer, compat_hash, sent=sent)
        group = self._group(compat_hash)
        group.workers[peer] = group.by_node[peer.node] = worker
        self._judge_all(now, group)
        return worker

    def leaving(self, now: Seconds, node: NodeId, epoch: Epoch) -> None:
        """Notes that a worker drains: it gets no more claims and keeps those it has."""
        self._mark(now, node, epoch, leaving=True)

    def staying(self, now: Seconds, node: NodeId, epoch: Epoch) -> None:
        """Notes that a worker drains no more: it gets claims again."""
        self._mark(now, node, epoch, leaving=False)

    def _mark(self, now: Seconds, node: NodeId, epoch: Epoch, *, leaving: bool) -> None:
        for worker in tuple(self._workers.values()):
            if worker.peer[:2] == (node, epoch) and worker.leaving is not leaving:
                worker.leaving = leaving
                group = self._groups[worker.compat_hash]
                self._settle(group, worker)
                self._judge_all(now, group)
                if group.free:
                    self._match(now, group)

    def ended(self, now: Seconds, peer: QueueStreamId, number: int, outcome: str) -> bool:
        """Ends a claim; False if it is unknown or over."""
        claim = self._claims.get(number)
        if claim is None or claim.worker.peer != peer:
            return False
        if outcome != "returned":
            self._end(claim.item, f"ended_{outcome}")
            return True
        entry, worker = claim.item, claim.worker
        self._unclaim(claim)
        worker.credits = 0  # it had fewer than it had said; its next offer follows
        worker.unheard = deque((n, 0 if n == number else tokens) for n, tokens in worker.unheard)
        worker.weigh()
        self._settle(self._groups[worker.compat_hash], worker)
        entry.returns += 1
        self.counters["returned"] += 1
        self._again(now, entry, "returned" if entry.returns > self.config.most_returns else "")
        return True

    # ------------------------------------------------------------------ who is gone

    def peer_gone(self, now: Seconds, peer: QueueStreamId) -> None:
        """Ends a stream: its items are dropped, its claims go to other workers. Idempotent."""
        for entry in [entry for entry in self._items.values() if entry.peer == peer]:
            self._end(entry, "abandoned")
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        worker.leaving, worker.left = True, 0
        group = self._groups[worker.compat_hash]
        del group.workers[peer]
        group.free.pop(peer, None)
        if group.by_node.get(peer.node) is worker:
            del group.by_node[peer.node]
        claims, worker.claims = tuple(worker.claims.values()), {}
        for claim in claims:
            entry = claim.item
            self._unclaim(claim)
            entry.losses += 1
            self._again(now, entry, "lost" if entry.losses >= self.config.most_losses else "")
        self._judge_all(now, group)
        self._forget_empty(worker.compat_hash)
        if group.free:
            self._match(now, group)

    def _again(self, now: Seconds, entry: _Item, refused: str) -> None:
        """Returns an item to the head of its band, or refuses it if it has returned too often."""
        entry.rank = (entry.rank[0], _HEAD, entry.number)
        entry.holder = entry.held_since = None
        self._wait(now, entry)
        if refused:
            self._refuse(entry, refused)
            return
        self.counters["redelivered"] += 1
        group = self._groups[entry.item.compat_hash]
        if group.free:
            self._match(now, group)

    def refuse_all(self, reason: str) -> None:
        """Refuses all waiting items."""
        for entry in [entry for entry in self._items.values() if entry.claim is None]:
            self._refuse(entry, reason)

    # ------------------------------------------------------------------ time

    def look(self, now: Seconds) -> None:
        """Refuses items that waited too long, and reconsiders items that wait for a busy worker."""
        while self._deadlines:
            (deadline, _), entry = self._deadlines.peekitem(0)
            if deadline > now:
                break
            self._refuse(entry, "deadline")
        patience = self.config.no_worker_after
        while self._unservable:
            entry, since = next(iter(self._unservable.items()))
            if since + patience > now:
                break
            self._refuse(entry, "no_worker")
        if self._recheck is not None and self._recheck <= now:
            self._recheck = None
            for group in tuple(self._groups.values()):
                if group.free:
                    self._match(now, group)

    # ------------------------------------------------------------------ who gets what

    def _match(self, now: Seconds, group: _Group) -> None:
        """Assigns items in order while workers are free."""
        order, given = group.order, True
        while group.free and given:
            given = False
            assigned: dict[_Worker, int] = {}
            for rank in tuple(order.islice(stop=_LOOK)):
                entry: _Item = order[rank]
                if entry.recheck > now and self._still_holds(entry, assigned):
                    continue
                worker = self._choose(now, group, entry, assigned)
                if worker is not None:
                    given = True
                    self._claim(now, group, entry, worker)
                    if not group.free:
                        return

    def _choose(
        self, now: Seconds, group: _Group, entry: _Item, assigned: dict[_Worker, int]
    ) -> _Worker | None:
        """The worker that gets the item now; None: it keeps waiting."""
        if now - entry.looked > _FRESH:
            entry.overlaps, entry.looked = self._overlap(now, entry.item), now
        best, cost = self._best(group, entry, assigned)
        if best is None:
            return None
        holder, there = self._best_holder(group, entry, assigned, best)
        if holder is not None and self._waits(now, entry, there, cost):
            self._hold(entry, holder, assigned)
            return None
        return best

    def _hold(self, entry: _Item, holder: _Worker, assigned: dict[_Worker, int]) -> None:
        """Lets the item wait for a busy worker and charges the worker for it."""
        entry.holder, entry.assigned = holder, entry.uncached_at(holder.peer.node)
        assigned[holder] = assigned.get(holder, 0) + entry.assigned
        if self._recheck is None or entry.recheck < self._recheck:
            self._recheck = entry.recheck

    def _still_holds(self, entry: _Item, assigned: dict[_Worker, int]) -> bool:
        """True if the recent decision to wait still applies."""
        holder = entry.holder
        if holder is None or holder.left or holder.leaving:
            return False
        assigned[holder] = assigned.get(holder, 0) + entry.assigned
        if self._recheck is None or entry.recheck < self._recheck:
            self._recheck = entry.recheck
        return True

    def _best(
        self, group: _Group, entry: _Item, assigned: Mapping[_Worker, int]
    ) -> tuple[_Worker | None, int]:
        """The free worker that would be done first, and the tokens until then."""
        best: _Worker | None = None
        least = 0
        overlaps, excluded = entry.overlaps, entry.item.excluded
        tokens, size = entry.item.prompt_tokens, entry.item.block_size
        for worker in group.free.values():
            node = worker.peer.node
            cost = worker.load + tokens
            if overlaps and node in overlaps:
                cost -= min(tokens - 1, overlaps[node] * size)
            if assigned:
                cost += assigned.get(worker, 0)
            if (best is None or cost < least) and node not in excluded:
                best, least = worker, cost
        return best, least

    def _best_holder(
        self, group: _Group, entry: _Item, assigned: Mapping[_Worker, int], best: _Worker
    ) -> tuple[_Worker | None, int]:
        """The worker without credits that would be done first, of those with a longer prefix than
        `best`, and the tokens until then.
        """
        holder: _Worker | None = None
        least = 0
        overlaps, excluded = entry.overlaps, entry.item.excluded
        known = overlaps.get(best.peer.node, 0)
        for node, blocks in overlaps.items():
            worker = group.by_node.get(node) if blocks > known else None
            if worker is None or worker.leaving or worker.left or node in excluded:
                continue
            cost = worker.load + assigned.get(worker, 0)
            if not cost:
                continue  # it is not busy: it wants nothing
            cost += entry.uncached_at(node)
            if holder is None or cost < least:
                holder, least = worker, cost
        return holder, least

    def _waits(self, now: Seconds, entry: _Item, there: int, here: int) -> bool:
        """True if waiting for a busy worker pays. Notes until when it waits."""
        if there >= self.config.pays * here:
            return False
        if entry.held_since is None:
            entry.held_since = now
            self.counters["held"] += 1
        end = entry.held_since + self.config.hold_most
        entry.recheck = min(now + _RECHECK, end)
        return now < end

    def _claim(self, now: Seconds, group: _Group, entry: _Item, worker: _Worker) -> None:
        number = next(self._numbers)
        self._stop_waiting(entry)
        claim = entry.claim = _Claim(number, worker, entry, now)
        self._claims[number] = worker.claims[number] = claim
        worker.sent += 1
        cost = entry.uncached_at(worker.peer.node)
        worker.unheard.append((number, cost))
        worker.load += cost
        self._settle(group, worker)
        self.counters["claimed"] += 1
        item = entry.item
        left = None if entry.deadline is None else max(0.0, entry.deadline - now)
        waited = max(0.0, now - entry.arrived)
        self._send(
            worker.peer,
            ItemClaimed(
                claim=number,
                decode=entry.peer.node,
                decode_epoch=entry.peer.epoch,
                item=replace(item, names=b"", deadline=left, waited=waited),
                generation=worker.generation,
            ),
        )
        self._on_claimed(now, item, worker.peer)

    # ------------------------------------------------------------------ books

    def _group(self, compat_hash: str) -> _Group:
        group = self._groups.get(compat_hash)
        if group is None:
            group = self._groups[compat_hash] = _Group()
        return group

    def _forget_empty(self, compat_hash: str) -> None:
        group = self._groups.get(compat_hash)
        if group is not None and not group.order and not group.workers:
            del self._groups[compat_hash]

    def _settle(self, group: _Group, worker: _Worker) -> None:
        """Updates whether a worker is free."""
        worker.left = 0 if worker.leaving else max(0, worker.credits - len(worker.unheard))
        if worker.left:
            group.free[worker.peer] = worker
        else:
            group.free.pop(worker.peer, None)

    def _wait(self, now: Seconds, entry: _Item) -> None:
        """Enters an item among the waiting ones."""
        group = self._group(entry.item.compat_hash)
        group.order[entry.rank] = entry
        self._tokens += entry.uncached
        self._bytes += len(entry.item.names)
        if entry.deadline is not None:
            self._deadlines[entry.deadline, entry.number] = entry
        self._judge(now, group, entry)

    def _stop_waiting(self, entry: _Item) -> None:
        compat_hash = entry.item.compat_hash
        del self._groups[compat_hash].order[entry.rank]
        self._forget_empty(compat_hash)
        self._tokens -= entry.uncached
        self._bytes -= len(entry.item.names)
        if entry.deadline is not None:
            del self._deadlines[entry.deadline, entry.number]
        self._unservable.pop(entry, None)
        entry.holder = entry.held_since = None

    def _judge(self, now: Seconds, group: _Group, entry: _Item) -> None:
        """Updates whether any worker here may take the item, with or without credits."""
        excluded = entry.item.excluded
        takers = (worker for worker in group.workers.values() if not worker.leaving)
        if any(worker.peer.node not in excluded for worker in takers):
            self._unservable.pop(entry, None)
        else:
            self._unservable.setdefault(entry, now)

    def _judge_all(self, now: Seconds, group: _Group) -> None:
        for entry in group.order.values():
            self._judge(now, group, entry)

    def _unclaim(self, claim: _Claim) -> None:
        del self._claims[claim.number]
        claim.worker.claims.pop(claim.number, None)
        claim.item.claim = None

    def _end(self, entry: _Item, why: str) -> None:
        """Removes an item, and informs a worker that still holds it."""
        del self._items[entry.key]
        self.counters[why] += 1
        claim = entry.claim
        if claim is None:
            self._stop_waiting(entry)
            return
        self._unclaim(claim)
        if not why.startswith("ended_"):
            self._send(claim.worker.peer, ClaimCancelled(claim.number))

    def _refuse(self, entry: _Item, reason: str) -> None:
        self._end(entry, f"refused_{reason}")
        self._send(entry.peer, ItemRefused(entry.item.request, entry.item.round, reason))

    def _tell_refused(self, peer: QueueStreamId, item: PrefillItem, reason: str) -> None:
        self.counters[f"refused_{reason}"] += 1
        self._send(peer, ItemRefused(item.request, item.round, reason))

    # ------------------------------------------------------------------ for tests

    def check(self) -> None:
        """Raises `AssertionError` unless all sums equal those of their parts. O(all)."""
        waiting = {id(entry) for entry in self._items.values() if entry.claim is None}
        ordered = [entry for group in self._groups.values() for entry in group.order.values()]
        assert {id(entry) for entry in ordered} == waiting
        assert len(ordered) == len(waiting) == len(self)
        assert self._tokens == sum(entry.uncached for entry in ordered)
        assert self._bytes == sum(len(entry.item.names) for entry in ordered)
        timed = {id(entry) for entry in ordered if entry.deadline is not None}
        assert {id(entry) for entry in self._deadlines.values()} == timed
        assert {id(entry) for entry in self._unservable} <= waiting
        claims = {entry.claim.number for entry in self._items.values() if entry.claim is not None}
        assert claims == set(self._claims)
        assert claims == {n for worker in self._workers.values() for n in worker.claims}
        grouped = {peer for group in self._groups.values() for peer in group.workers}
        assert grouped == set(self._workers)
        for worker in self._workers.values():
            assert worker.load == worker.uncomputed + sum(tokens for _, tokens in worker.unheard)
        for group in self._groups.values():
            assert group.order or group.workers
            assert set(group.by_node) == {peer.node for peer in group.workers}
            assert set(group.free) == {p for p, w in group.workers.items() if w.left}
        ends = sum(self.counters[why] for why in self.counters if why in _ENDS)
        ends += sum(n for why, n in self.counters.items() if why.startswith(("ended_", "refused_")))
        assert self.counters["enqueued"] == ends + len(self._items)


_ENDS: Final = frozenset(("cancelled", "replaced", "abandoned"))
