"""Brings leading blocks of prompts to the device pool: from lower tiers, and from other workers.

A sequence that would find more blocks there than on the device waits here. When the blocks have
come they are ordinary cached blocks, and the sequence returns to the queue, in its old place. So
admission, preemption, choices and handoffs need no further case: they find a longer prefix.

A sequence may leave early, before all layers of its blocks are there (`early_starts`); the blocks
get their hashes when the fetch ends even so.

    begin     decides how many blocks are fetched (`FetchPlanner`), reserves device blocks, starts
    layers    a layer group has come: the sequence may leave early
    fetched   a fetch has ended: its blocks get their hashes, or were never there
    cancel    the sequence has ended; its blocks are free when nothing writes to them any more

Several sequences that want the same block wait for one fetch. A fetch for which no sequence waits
is for a prompt that another worker prefills meanwhile, or for what a peer asks of this worker.

The engine core owns it. It decides; it never waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.engine_core.tiers.ended_lives import EndedLives
from pdserve.engine_core.tiers.plan_tally import PlanTally
from pdserve.kv.tiers.lower_tiers import FetchDone
from pdserve.messages.tiers import CachedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.kv_fetch.puller import KvPuller
    from pdserve.engine_core.scheduler.sequence import Sequence as EngineSequence
    from pdserve.engine_core.tiers.early_starts import EarlyStarts
    from pdserve.engine_core.tiers.fetch_lane import FetchLane
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.kv.tiers.lower_tiers import LayersCome, LowerTiers
    from pdserve.messages.engine import EngineStats
    from pdserve.messages.tiers import KvSource, SourceName

__all__ = ["BlockFetch", "FetchPlan", "Onboarder"]
SHARE: Final = 0.25
"""Most of the pool that fetches fill at once, as a share; a single one may take more."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """How many blocks behind those on the device are fetched, and from where."""

    local: int
    """Leading blocks of them that come from this worker's lower tiers."""
    peer: int = 0
    """Blocks behind those, from another worker."""
    source: KvSource | None = None
    seconds: Seconds = 0.0
    """Predicted time until they are there."""
    deadline: Seconds = 1.0
    """Seconds after which what has not come is computed."""
    last: SourceName = "host"
    """The source whose blocks are predicted to come last."""
    saves: Seconds = 0.0
    """Predicted time to compute the blocks."""

    @property
    def count(self) -> int:
        return self.local + self.peer


@dataclass(slots=True, eq=False)
class BlockFetch:
    """Blocks of one chain that are coming to the device."""

    number: int
    hashes: Sequence[bytes]
    """All hashes of the chain up to the last fetched block."""
    parent: bytes
    """Hash before the first fetched block."""
    shared: list[int]
    """Device blocks before the fetched ones; held, so that they stay."""
    blocks: list[int]
    plan: FetchPlan
    began: Seconds
    asker: EngineSequence | None = None
    """The sequence for which it began."""
    waiting: list[EngineSequence] = field(default_factory=list)
    done: Callable[[int], None] | None = None
    """Called with the number of leading blocks that have come."""
    local_done: FetchDone | None = None
    pulled: int | None = None
    pull_error: str = ""
    quarantined: list[int] = field(default_factory=list)
    """Blocks that a peer may still write to, after the end."""
    unfenced: bool = False
    """Whether the peer may still write to the blocks that were to come from it."""
    cancelled: bool = False
    groups: int = 1
    """Layer groups that it comes in."""
    ended: bool = False
    """Whether its blocks were given hashes or given back; some may be in quarantine still."""
    stale: bool = False
    """Whether the hash secret has changed since: its hashes name nothing any more."""

    @property
    def first(self) -> int:
        """Place of the first fetched block in the chain."""
        return len(self.shared)

    @property
    def lent(self) -> list[int]:
        """Device blocks up to the last fetched one."""
        return [*self.shared, *self.blocks]

    @property
    def over(self) -> bool:
        """Return whether both fetches have ended."""
        local = not self.plan.local or self.local_done is not None
        return local and (not self.plan.peer or self.pulled is not None)

    @property
    def borrowed(self) -> range:
        """Blocks of the chain that came from a peer, and need not stay after their use."""
        source = self.plan.source
        if source is None or source.retain or not self.pulled:
            return range(0)
        first = self.first + self.plan.local
        return range(first, first + self.pulled)

    @property
    def trouble(self) -> str:
        """Why not all blocks have come."""
        if self.stale:
            return "stale"
        local = "" if self.local_done is None else self.local_done.reason
        return local or self.pull_error or ("cancelled" if self.cancelled else "absent")

    def sources(self, block_size: int) -> tuple[CachedSource, ...]:
        """Tokens that have come, by source."""
        counts = Counter(self.arrived())
        peer = "" if self.plan.source is None else self.plan.source.node
        return tuple(
            CachedSource(name, count * block_size, peer if name == "peer" else "")
            for name, count in counts.items()
        )

    def arrived(self) -> list[SourceName]:
        """Where each of the leading blocks that have come and can be used is from."""
        if self.stale:
            return []
        found: list[SourceName] = [] if self.local_done is None else [*self.local_done.sources]
        if len(found) == self.plan.local and self.pulled:
            found += ["peer"] * self.pulled
        return found


class FetchChooser(Protocol):
    """Decides what is fetched; `fetch_planner.FetchPlanner` does."""

    def choose(
        self,
        device: int,
        local: Sequence[SourceName],
        peers: Sequence[KvSource],
        blocks: int,
        wait: Seconds,
        *,
        early: bool = False,
    ) -> FetchPlan | None:
        """What to fetch of a prompt's `blocks` behind the first `device` ones; None: nothing.
        `early`: the prompt may begin before all layers of its blocks have come."""
        ...


class Onboarder:
    """The fetches of one engine core."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: LowerTiers | None,
        planner: FetchChooser,
        ended: Callable[[EngineSequence, BlockFetch], None],
    ) -> None:
        """`tiers` None: there are none, and blocks come from other workers only. `ended` gives a
        sequence back to its queue."""
        self.puller: KvPuller | None = None
        """Fetches from other workers; None: this core cannot."""
        self.early: EarlyStarts | None = None
        """Lets sequences leave early; None: none does."""
        self.lane: FetchLane | None = None
        """Learns how fast those are."""
        self.came: Callable[[EngineSequence, Sequence[bytes]], None] = lambda sequence, hashes: None
        """Told of blocks that have come for a sequence, by their hashes."""
        self.now: Seconds = 0.0
        """The present time; its owner keeps it."""
        self.in_flight = 0
        """Blocks that fetches fill now."""
        self.outcomes: Counter[str] = Counter()
        """Blocks that were known below the device or at another worker, by what became of them:
        `came`, `computed` (that is sooner), `bound` and `room` (too much is fetched already, or the
        device has no room), or why a fetch did not bring them."""
        self.plans = PlanTally()
        """What the fetches came to, against what was predicted."""
        self._pool = pool
        self._tiers = tiers
        self._planner = planner
        self._ended = ended
        self._onboardings: dict[int, BlockFetch] = {}
        self._coming: dict[bytes, BlockFetch] = {}
        """First fetched hash, and every later one, of each fetch."""
        self._ended_lives = EndedLives()
        self._numbers = 0
        self._most = max(1, int(SHARE * pool.num_blocks))

    def __len__(self) -> int:
        """Number of fetches under way."""
        return len(self._onboardings)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a fetch."""
        return sum(len(onboarding.waiting) for onboarding in self._onboardings.values())

    def uncomputed(self, block_size: int) -> int:
        """Tokens that those sequences must compute if the fetches bring all blocks."""
        return sum(
            len(sequence.tokens) - len(onboarding.hashes) * block_size
            for onboarding in self._onboardings.values()
            for sequence in onboarding.waiting
        )

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """The stats with those of fetches."""
        plans = self.plans.stats()
        missed = {why: count for why, count in self.outcomes.items() if count and why != "came"}
        if plans:
            missed.setdefault("computed", 0)
        return replace(stats, plans=plans, missed_blocks=missed)

    def rename(self) -> None:
        """The hash secret has changed: what the fetches bring has no name."""
        for onboarding in self._onboardings.values():
            onboarding.stale = True
            if self.early is not None:
                self.early.over(onboarding, whole=False)
        self._coming.clear()

    # ------------------------------------------------------------------ sequences

    def may_take(self, sequence: EngineSequence) -> bool:
        """Return whether `takes` could be True: it costs a look at the sequence's hashes."""
        if sequence.early is not None:
            return False
        if self._tiers is None and not sequence.request.kv_sources:
            return bool(self._coming)
        return not sequence.fetched or bool(self._coming)

    def takes(
        self,
        sequence: EngineSequence,
        hashes: Sequence[bytes],
        shared: list[int],
        now: Seconds,
        spare: int,
    ) -> bool:
        """Take a sequence out of its queue if more of its blocks are worth waiting for. `hashes`:
        those of the blocks that it may reuse, `shared`: the blocks of them that are on the device,
        which nobody holds for it yet."""
        if len(shared) >= len(hashes):
            return False
        coming = self._coming.get(hashes[len(shared)])
        if coming is not None and not coming.cancelled:
            coming.waiting.append(sequence)
            return True
        if sequence.fetched:
            return False
        sequence.fetched = True
        sources = sequence.request.kv_sources
        early = self.early is not None and not self.early.is_sent(sequence.handle)
        began = self.begin(hashes, shared, now, spare, sources, root=sequence.root, early=early)
        if began is not None:
            began.asker = sequence
            began.waiting.append(sequence)
        return began is not None

    def begin(
        self,
        hashes: Sequence[bytes],
        shared: list[int],
        now: Seconds,
        spare: int,
        sources: Sequence[KvSource] = (),
        *,
        root: bytes,
        done: Callable[[int], None] | None = None,
        all_local: bool = False,
        early: bool = False,
    ) -> BlockFetch | None:
        """Fetch blocks behind the `shared` ones; None if none is worth it or there is no room.
        `root`: parent hash of the chain's first block. `done` is called at the end, while the
        blocks that have come are still held. `all_local`: all that lower tiers have, whether it is
        sooner than to compute it or not. `early`: as in `FetchChooser.choose`."""
        first = len(shared)
        local = [] if self._tiers is None else self._tiers.run(hashes, first)
        peers = [one for one in sources if self._may_pull(one)]
        if not local and not peers:
            return None
        if all_local:
            plan: FetchPlan | None = FetchPlan(len(local))
        else:
            plan = self._planner.choose(first, local, peers, len(hashes), 0.0, early=early)
        planned = 0 if plan is None else plan.count
        known = max([len(local), *(min(one.blocks, len(hashes)) - first for one in peers)])
        self.outcomes["computed"] += max(0, known - planned)
        if plan is None or not planned:
            return None
        if self.in_flight and self.in_flight + planned > self._most:
            self.outcomes["bound"] += planned
            return None
        blocks = self._pool.reserve(planned, shared=shared, spare=spare)
        if blocks is None:
            self.outcomes["room"] += planned
            return None
        onboarding = self._note(hashes, shared, blocks, plan, now, root)
        onboarding.done = done
        self._start(onboarding, now)
        return onboarding

    def _may_pull(self, source: KvSource) -> bool:
        return self.puller is not None and not self._ended_lives.has(source.node, source.epoch)

    def peer_gone(self, node: str, epoch: int) -> None:
        """This life of a node has ended: it is not asked any more."""
        self._ended_lives.add(node, epoch)

    def _note(
        self,
        hashes: Sequence[bytes],
        shared: list[int],
        blocks: list[int],
        plan: FetchPlan,
        now: Seconds,
        root: bytes,
    ) -> BlockFetch:
        self._numbers += 1
        first = len(shared)
        wanted = hashes[first : first + plan.count]
        onboarding = BlockFetch(
            number=self._numbers,
            hashes=list(hashes[: first + plan.count]),
            parent=hashes[first - 1] if first else root,
            shared=list(shared),
            blocks=blocks,
            plan=plan,
            began=now,
        )
        self._onboardings[onboarding.number] = onboarding
        self.in_flight += plan.count
        for block_hash in wanted:
            self._coming[block_hash] = onboarding
        return onboarding

    def _start(self, onboarding: BlockFetch, now: Seconds) -> None:
        plan, blocks = onboarding.plan, onboarding.blocks
        wanted = onboarding.hashes[onboarding.first :]
        if plan.local:
            assert self._tiers is not None
            self._tiers.fetch(
                onboarding.number,
                wanted[: plan.local],
                onboarding.parent,
                blocks[: plan.local],
                now,
                now + plan.deadline,
            )
        if plan.peer:
            assert self.puller is not None
            assert plan.source is not None
            onboarding.unfenced = True
            if self.lane is not None:
                self.lane.begin(onboarding.number, plan.peer, now)
            self.puller.pull(
                onboarding.number,
                plan.source,
                wanted[plan.local :],
                blocks[plan.local :],
                (onboarding.first + plan.local) * self._pool.block_size,
                now + plan.deadline,
                now=now,
                listener=self,
            )

    # ------------------------------------------------------------------ the ends of fetches

    def layers(self, come: LayersCome, now: Seconds) -> None:
        """Every block from lower tiers has one more layer group."""
        onboarding = self._onboardings.get(come.number)
        if onboarding is None or onboarding.ended or self.early is None:
            return
        onboarding.groups = come.groups
        asker = onboarding.asker
        if asker is None or asker not in onboarding.waiting or onboarding.stale:
            return
        if onboarding.plan.peer and onboarding.pulled != onboarding.plan.peer:
            return
        if self.early.may_leave(asker, onboarding):
            onboarding.waiting.remove(asker)
            asker.early = onboarding
            self._ended(asker, onboarding)

    def give_up(self, onboarding: BlockFetch) -> None:
        """A fetch is late, and no other sequence begins to wait for it."""
        self._uncome(onboarding)

    def fetched(self, done: FetchDone, now: Seconds) -> None:
        """The lower tiers have ended a fetch."""
        onboarding = self._onboardings.get(done.number)
        if onboarding is None:
            return
        onboarding.local_done = done
        if done.blocks < onboarding.plan.local:
            # What comes behind a gap is of no use.
            self._cancel_pull(onboarding, now)
        self._try_end(onboarding, now)

    def _cancel_pull(self, onboarding: BlockFetch, now: Seconds) -> None:
        if onboarding.plan.peer and onboarding.pulled is None:
            assert self.puller is not None
            onboarding.pulled = 0
            if self.lane is not None:
                self.lane.end(onboarding.number, 0, "cancelled", now)
            self.puller.cancel(onboarding.number, now)

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        """A fetch from a peer has ended; its first `blocks_ok` blocks are verified."""
        if self.lane is not None:
            self.lane.end(number, blocks_ok, error, self.now)
        onboarding = self._onboardings.get(number)
        if onboarding is None:
            return
        onboarding.pulled, onboarding.pull_error = blocks_ok, error
        onboarding.unfenced = blocks_ok < onboarding.plan.peer
        self._try_end(onboarding, self.now)

    def on_fenced(self, number: int) -> None:
        """The peer cannot write to any block of this fetch any more."""
        onboarding = self._onboardings.get(number)
        if onboarding is None:
            return
        onboarding.unfenced = False
        if onboarding.ended:
            self._forget(onboarding)

    def _try_end(self, onboarding: BlockFetch, now: Seconds) -> None:
        if not onboarding.over or onboarding.ended:
            return
        onboarding.ended = True
        arrived = onboarding.arrived()
        first, count, blocks = onboarding.first, len(arrived), onboarding.blocks
        self.outcomes["came"] += count
        if not onboarding.cancelled and not onboarding.stale:
            self.plans.ended(onboarding.plan, count, now - onboarding.began)
        if count < len(blocks):
            self.outcomes[onboarding.trouble] += len(blocks) - count
        if count:
            names = onboarding.hashes[first : first + count]
            kept = self._pool.commit_run(blocks[:count], names, onboarding.parent)
            if onboarding.asker is not None:
                self.came(onboarding.asker, names)
        else:
            kept = []
        if self.early is not None:
            self.early.over(onboarding, whole=count == onboarding.plan.count)
        # A peer that may still write keeps its blocks from being used.
        safe = onboarding.plan.local if onboarding.unfenced else len(blocks)
        if onboarding.done is not None:
            onboarding.done(count)
        self._pool.release([*onboarding.shared, *kept])
        rest = blocks[count : max(count, safe)]
        if rest:
            self._pool.release(rest)
        onboarding.quarantined = blocks[max(count, safe) :]
        if onboarding.quarantined:
            self._pool.quarantine(onboarding.quarantined)
        self._give_back(onboarding)
        if not onboarding.unfenced:
            self._forget(onboarding)

    def _give_back(self, onboarding: BlockFetch) -> None:
        """Let everything that waits for the fetch go on."""
        self._uncome(onboarding)
        waiting, onboarding.waiting = onboarding.waiting, []
        for sequence in waiting:
            sequence.borrowed = onboarding.borrowed
            self._ended(sequence, onboarding)

    def _uncome(self, onboarding: BlockFetch) -> None:
        for block_hash in onboarding.hashes[onboarding.first :]:
            if self._coming.get(block_hash) is onboarding:
                del self._coming[block_hash]

    def _forget(self, onboarding: BlockFetch) -> None:
        if onboarding.quarantined:
            self._pool.unquarantine(onboarding.quarantined)
        self.in_flight -= onboarding.plan.count
        del self._onboardings[onboarding.number]

    def cancel(self, sequence: EngineSequence, now: Seconds) -> None:
        """The sequence has ended: it waits for nothing any more. A fetch for which nothing else
        waits is ended too."""
        for onboarding in self._onboardings.values():
            if sequence in onboarding.waiting:
                onboarding.waiting.remove(sequence)
                if not onboarding.waiting and onboarding.done is None:
                    self._stop(onboarding, now)
                return

    def drop(self, number: int) -> None:
        """Nobody waits for this fetch any more: its `done` is not called."""
        onboarding = self._onboardings.get(number)
        if onboarding is not None and not onboarding.ended:
            onboarding.done = None
            if not onboarding.waiting:
                self._stop(onboarding, self.now)

    def _stop(self, onboarding: BlockFetch, now: Seconds) -> None:
        onboarding.cancelled = True
        if onboarding.plan.local and self._tiers is not None:
            self._tiers.cancel(onboarding.number, now)
        self._cancel_pull(onboarding, now)
        self._try_end(onboarding, now)

    def close(self, now: Seconds) -> None:
        """Nothing writes to device blocks any more: give everything back."""
        for onboarding in list(self._onboardings.values()):
            onboarding.unfenced = False
            if onboarding.plan.local and onboarding.local_done is None:
                onboarding.local_done = _NOTHING
            if onboarding.pulled is None:
                onboarding.pulled, onboarding.pull_error = 0, "closed"
            self._try_end(onboarding, now)
            if onboarding.number in self._onboardings:
                self._forget(onboarding)


_NOTHING: Final = FetchDone(0, 0, (), "closed")
