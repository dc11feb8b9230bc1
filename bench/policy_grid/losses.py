"""Tells why tokens that an earlier prompt had were computed again, from what workers report.

Engines report what each tier of a worker stores and removes (`KvEvent`), as they do for routers;
`Ledger` keeps that with the time. When a request's prefill begins, each of its leading blocks that
an earlier prompt had too is one of these:

    found      the request did not compute it
    here       its worker had it in some tier, and computed it
    elsewhere  only another worker had all blocks up to it
    split      it was stored, but no worker had all blocks up to it
    dropped    it was last on a device, and no lower tier took it
    evicted    it was last on a lower tier
    unstored   no worker had stored it yet: the request that computed it was still running

They add up to all leading blocks that earlier prompts had, which is what one infinite cache finds
if requests take no time. `unstored` is negative where a later request was served first.

Where several workers had a block, the last removal of all decides between `dropped` and `evicted`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.atomic_tiers import Prompt
from pdserve.blocks.hashing import HASH_BYTES
from pdserve.kv.tiers.turns import TurnTracker
from pdserve.messages.kv_events import TIERS, BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bench.atomic_tiers import AtomicCluster
    from pdserve.ids import Seconds
    from pdserve.messages.kv_events import KvEvent
    from pdserve.sim.replay.cluster import ReplayWorker
    from pdserve.sim.replay.record import ReplayRecord

__all__ = ["CAUSES", "Change", "Ledger", "Look", "atomic_losses", "losses"]

CAUSES: Final = ("here", "elsewhere", "split", "dropped", "evicted", "unstored")
_BITS: Final = len(TIERS)
"""Bits of a worker in the mask of a block: one for each tier."""


class Look(NamedTuple):
    """A request at the time when its prefill begins."""

    at: Seconds
    worker: int
    names: Sequence[bytes]
    """The blocks of its prompt that could be reused."""
    seen: int
    """How many of them, from the first on, an earlier prompt had too."""
    found: int
    """How many of them were not computed."""


class Change(NamedTuple):
    """What a worker has reported."""

    at: Seconds
    worker: int
    event: KvEvent


class Ledger:
    """Notes what the workers of a replay report, and the prompts; see `replay.run.ReplayWatch`."""

    def __init__(self, block: int) -> None:
        """`block`: tokens of a block."""
        self.changes: list[Change] = []
        self.prompts: dict[int, tuple[bytes, ...]] = {}
        """The reusable blocks of each prompt, by the request's number, in order of arrival."""
        self.times: dict[int, Seconds] = {}
        """When each was sent."""
        self._block = block
        self._workers: dict[str, int] = {}
        self._now: Callable[[], Seconds] = lambda: 0.0

    def begin(self, workers: Sequence[ReplayWorker], now: Callable[[], Seconds]) -> None:
        """The replay begins. `now`: seconds since its beginning."""
        self._now = now
        for index, worker in enumerate(workers):
            self._workers[worker.node.id] = index
            worker.engine.subscribe_kv(self._listener(index))

    def _listener(self, worker: int) -> Callable[[Sequence[KvEvent]], None]:
        def note(events: Sequence[KvEvent]) -> None:
            at = self._now()
            self.changes.extend(Change(at, worker, event) for event in events)

        return note

    def asked(self, number: int, tokens: int, names: bytes) -> None:
        """A request with a prompt of so many tokens and these block hashes is sent."""
        self.times[number] = self._now()
        count = (tokens - 1) // self._block
        cut = range(0, count * HASH_BYTES, HASH_BYTES)
        self.prompts[number] = tuple(names[at : at + HASH_BYTES] for at in cut)

    def looks(self, records: Iterable[ReplayRecord]) -> list[Look]:
        """The completed requests, in order of their prefills."""
        seen = _seen(self.prompts)
        found = [
            Look(
                record.first - record.prefill_seconds,
                self._workers[record.worker],
                self.prompts[record.number],
                seen[record.number],
                record.cached_tokens // self._block,
            )
            for record in records
            if record.completed
        ]
        return sorted(found, key=lambda look: look.at)


def _seen(prompts: dict[int, tuple[bytes, ...]]) -> dict[int, int]:
    """Leading blocks of each prompt that an earlier one had."""
    before: set[bytes] = set()
    seen = {}
    for number, names in prompts.items():
        seen[number] = next((n for n, name in enumerate(names) if name not in before), len(names))
        before.update(names)
    return seen


# ---------------------------------------------------------------------- the split


def losses(changes: Iterable[Change], looks: Iterable[Look]) -> Counter[str]:
    """Blocks by cause, with `seen` and `found`. Both arguments are in order of time."""
    holdings, total = _Holdings(), Counter[str]()
    coming = iter(changes)
    change = next(coming, None)
    for look in looks:
        while change is not None and change.at <= look.at:
            holdings.apply(change)
            change = next(coming, None)
        total["seen"] += look.seen
        total["found"] += look.found
        _count(look, holdings, total)
    return total


def _count(look: Look, holdings: _Holdings, total: Counter[str]) -> None:
    """Add what was seen and not found. Each cause begins where the one before it ends."""
    here, anywhere, stored = holdings.runs(look.names, look.worker)
    end = look.found
    for cause, run in (("here", here), ("elsewhere", anywhere)):
        total[cause] += max(0, run - end)
        end = max(end, run)
    if stored > end:
        total[holdings.fate(look.names[end])] += stored - end
        end = stored
    total["unstored"] += look.seen - end


class _Holdings:
    """Which worker has which block in which tier."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        """A bit for each worker and tier; 0: the block is nowhere any more."""
        self._last: dict[bytes, str] = {}
        """The last tier of each block that is nowhere any more."""

    def apply(self, change: Change) -> None:
        """A worker has stored or removed blocks."""
        event = change.event
        bit = 1 << (change.worker * _BITS + TIERS.index(event.tier))
        match event:
            case BlockStored():
                for name in event.hashes:
                    self._masks[name] = self._masks.get(name, 0) | bit
            case BlockRemoved():
                self._remove(event.hashes, bit, event.tier)
            case PoolCleared():
                self._remove([name for name, mask in self._masks.items() if mask & bit], bit, "")

    def _remove(self, names: Iterable[bytes], bit: int, tier: str) -> None:
        for name in names:
            mask = self._masks[name] = self._masks.get(name, 0) & ~bit
            if not mask:
                self._last[name] = tier

    def runs(self, names: Sequence[bytes], worker: int) -> tuple[int, int, int]:
        """Leading blocks that this worker has, that any one worker has, and that were stored."""
        here = anywhere = stored = 0
        alive, own = -1, ((1 << _BITS) - 1) << worker * _BITS
        for name in names:
            mask = self._masks.get(name)
            if mask is None:
                break
            stored += 1
            alive &= _workers(mask)
            anywhere += alive != 0
            here += alive & own != 0
        return here, anywhere, stored

    def fate(self, name: bytes) -> str:
        """Why no worker has all blocks up to this one, which was stored."""
        if self._masks[name]:
            return "split"
        return "dropped" if self._last[name] == "device" else "evicted"


def _workers(mask: int) -> int:
    """All bits of each worker that has one of `mask`."""
    found, worker = 0, (1 << _BITS) - 1
    while mask:
        low = (mask & -mask).bit_length() - 1
        bits = worker << low // _BITS * _BITS
        found |= bits
        mask &= ~bits
    return found


# ---------------------------------------------------------------------- requests without time


def atomic_losses(ledger: Ledger, cluster: AtomicCluster) -> Counter[str]:
    """The same for requests that take no time, one after the other; `evicted` is all that no worker
    has any more."""
    tracker = TurnTracker()
    total = Counter[str](seen=sum(_seen(ledger.prompts).values()))
    for number, names in ledger.prompts.items():
        cluster.serve(Prompt(ledger.times[number], names, tracker.turn(names)))
    total["found"] = cluster.local + cluster.fetched
    total["elsewhere"] = cluster.elsewhere
    total["evicted"] = total["seen"] - total["found"] - total["elsewhere"]
    return total
