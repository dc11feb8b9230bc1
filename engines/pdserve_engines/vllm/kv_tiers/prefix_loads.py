"""Requests whose next blocks come from lower tiers. Pure, imports no vLLM.

vLLM asks for each request how many tokens it can have loaded behind those that it has cached
(`matched`), gives it blocks (`allocated`), and leaves it waiting. When the fetch has ended
(`fetched`), the request goes on behind what has come; vLLM computes the rest. A request that has
ended meanwhile keeps its blocks until the fetch has ended, too.

A request whose first missing block is already coming for another one waits for that one's, which
vLLM then has cached.

What another worker has is pulled to the host before vLLM gives the request blocks: vLLM asks again
until the pull has ended, and what has come is loaded as any other block of the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.messages.tiers import CachedSource
from pdserve_engines.vllm.kv_tiers.load_counts import LoadCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.tiers.frames.frame_pulls import FramePulls
    from pdserve.engine_core.tiers.onboarder import FetchChooser, FetchPlan
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import FetchDone, LowerTiers
    from pdserve.messages.tiers import KvSource, SourceName

__all__ = ["LoadDone", "PrefixLoads"]

PATIENCE: Final[Seconds] = 2.0
"""Seconds that a fetch has at least: its copies wait for vLLM's steps."""


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended: nothing writes to its blocks any more."""

    key: str
    local: int
    """Tokens that vLLM had itself."""
    loaded: int
    """Tokens behind those that have come."""
    whole: bool
    """Whether all have come that were to come."""
    sources: tuple[CachedSource, ...]


@dataclass(slots=True, eq=False)
class _Chain:
    """A request that vLLM has."""

    hashes: Sequence[bytes]
    root: bytes
    local: int = 0
    """Blocks that vLLM had itself, when it asked last."""
    count: int = 0
    """Blocks behind those that were offered to it."""
    wait: Seconds = 0.0
    """How long the offered blocks may take."""
    refused: bool = False
    """True once a load has brought less than planned; the rest is computed, not loaded."""
    peers: Sequence[KvSource] = ()
    """Workers that may have more of it; each request pulls once."""
    owner: bytes = b""
    """Mark of the owner of its blocks."""
    pull: int = 0
    """The pull that it waits for; 0: none."""
    pulled: dict[bytes, str] = field(default_factory=dict)
    """The worker from which a block was pulled for it, by hash."""
    plan: FetchPlan | None = None
    """What is to come; the plan of its pull, if there was one."""
    pull_began: Seconds | None = None
    """When that pull began; None: there was none."""
    passed_over: int = 0
    """Blocks of lower tiers that are computed: that is sooner."""


@dataclass(frozen=True, slots=True)
class _Load:
    key: str
    first: bytes
    """Hash of its first block."""
    local: int
    count: int
    plan: FetchPlan
    began: Seconds


@dataclass(slots=True)
class _Numbers:
    last: int = 0
    loads: dict[int, _Load] = field(default_factory=dict)


class PrefixLoads:
    """The loads of one vLLM engine."""

    def __init__(self, lower: LowerTiers, planner: FetchChooser, block_size: int) -> None:
        self.planner = planner
        self.pulls: FramePulls | None = None
        """Pulls blocks from other workers; None: nothing does."""
        self.counts = LoadCounts()
        self._lower = lower
        self._size = block_size
        self._chains: dict[str, _Chain] = {}
        self._numbers = _Numbers()
        self._coming: Counter[bytes] = Counter()
        """First hashes of the loads under way."""
        self._loading: set[str] = set()
        """Requests of the loads under way."""

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._numbers.loads)

    def loading(self, key: str) -> bool:
        """Return whether a load for a request is under way."""
        return key in self._loading

    def knows(self, key: str) -> bool:
        """Return whether a request has told its hashes."""
        return key in self._chains

    def begin(
        self,
        key: str,
        hashes: Sequence[bytes],
        root: bytes,
        peers: Sequence[KvSource] = (),
        owner: bytes = b"",
    ) -> None:
        """A request comes, whose full blocks have these hashes. `peers` may have more of them than
        this worker; `owner` is the mark of their owner."""
        self._chains[key] = _Chain(hashes, root, peers=peers, owner=owner)

    def chain(self, key: str) -> tuple[Sequence[bytes], bytes]:
        """The hashes that a request came with, and its root."""
        chain = self._chains.get(key)
        return ((), b"") if chain is None else (chain.hashes, chain.root)

    def cached(self, key: str) -> int:
        """Leading blocks of a request that vLLM had, or that were loaded."""
        chain = self._chains.get(key)
        return 0 if chain is None else chain.local + chain.count

    # ------------------------------------------------------------------ while vLLM plans a step

    def matched(self, key: str, local: int, tokens: int) -> int | None:
        """How many tokens behind the `local` ones come from lower tiers, of a request with
        `tokens` tokens; the last one is always computed. None: ask again later."""
        chain = self._chains.get(key)
        if chain is None or chain.refused or local % self._size:
            return 0
        chain.local, chain.count, chain.passed_over = local // self._size, 0, 0
        if chain.pull_began is None:
            chain.plan = None
        usable = min(len(chain.hashes), (tokens - 1) // self._size)
        if chain.local >= usable:
            return 0
        if self._coming[chain.hashes[chain.local]]:
            return None
        if chain.pull:
            return None
        hashes = chain.hashes[:usable]
        found = self._lower.run(hashes, chain.local)
        if self._is_pulled(hashes[chain.local + len(found) :]) or self._pull(chain, found, usable):
            return None
        plan = self.planner.choose(chain.local, found, (), usable, 0.0) if found else None
        chain.count = 0 if plan is None else plan.local
        chain.passed_over = len(found) - chain.count
        if plan is None or not plan.local:
            return 0
        chain.plan = chain.plan or plan
        chain.wait = max(plan.deadline, PATIENCE)
        return chain.count * self._size

    def _is_pulled(self, missing: Sequence[bytes]) -> bool:
        """Return whether the first of these blocks is being pulled for another request."""
        return bool(missing) and self.pulls is not None and self.pulls.coming(missing[0])

    def _pull(self, chain: _Chain, found: Sequence[SourceName], usable: int) -> bool:
        """Begin to pull blocks behind those that are here, if that is worth it."""
        pulls = self.pulls
        if pulls is None or not chain.peers:
            return False
        peers = [each for each in chain.peers if pulls.may_pull(each)]
        chain.peers = ()
        if not peers:
            return False
        plan = self.planner.choose(chain.local, found, peers, usable, 0.0)
        known = max(min(each.blocks, usable) for each in peers) - chain.local
        planned = 0 if plan is None else plan.count
        self.counts.missed(known - max(planned, len(found)), "computed")
        if plan is None or plan.source is None:
            return False
        chain.pull = self._pull_as_planned(pulls, chain, plan, plan.source)
        if not chain.pull:
            self.counts.missed(plan.peer, "room")
        return bool(chain.pull)

    def _pull_as_planned(
        self, pulls: FramePulls, chain: _Chain, plan: FetchPlan, source: KvSource
    ) -> int:
        first = chain.local + plan.local

        def ended(hashes: Sequence[bytes], error: str) -> None:
            chain.pull = 0
            chain.pulled = dict.fromkeys(hashes, source.node)
            self.counts.missed(plan.peer - len(hashes), error or "absent")

        number = pulls.begin(
            source,
            chain.hashes[first : first + plan.peer],
            first,
            chain.hashes[first - 1] if first else chain.root,
            chain.owner,
            plan.deadline,
            chain.hashes[chain.local : first],
            ended,
        )
        if number:
            chain.plan, chain.pull_began = plan, pulls.now
        return number

    def allocated(self, key: str, external: int, blocks: Sequence[int], now: Seconds) -> None:
        """vLLM has given a request all of its blocks, and counts on `external` tokens to be
        loaded."""
        chain = self._chains.get(key)
        if chain is None:
            return
        plan, began = self._take_plan(chain, now)
        if plan is None:
            return
        if not external:
            self.counts.plans.ended(plan, 0, now - began)
            return
        first, end = chain.local, chain.local + external // self._size
        numbers = self._numbers
        numbers.last += 1
        load = _Load(key, chain.hashes[first], first, end - first, plan, began)
        numbers.loads[numbers.last] = load
        self._loading.add(key)
        self._coming[load.first] += 1
        self._lower.fetch(
            numbers.last,
            chain.hashes[first:end],
            chain.hashes[first - 1] if first else chain.root,
            blocks[first:end],
            now,
            now + chain.wait,
        )

    def _take_plan(self, chain: _Chain, now: Seconds) -> tuple[FetchPlan | None, Seconds]:
        """What a request waits for from now on, or was pulled for it; and since when."""
        self.counts.missed(chain.passed_over, "computed")
        plan, began = chain.plan, now if chain.pull_began is None else chain.pull_began
        chain.plan, chain.pull_began, chain.passed_over = None, None, 0
        return plan, began

    # ------------------------------------------------------------------ after that

    def fetched(self, done: FetchDone, now: Seconds) -> LoadDone | None:
        """A fetch has ended; None: it was not for a request."""
        load = self._numbers.loads.pop(done.number, None)
        if load is None:
            return None
        self._loading.discard(load.key)
        self._coming[load.first] -= 1
        if not self._coming[load.first]:
            del self._coming[load.first]
        self.counts.missed(load.count - done.blocks, done.reason or "absent")
        chain = self._chains.get(load.key)
        if chain is not None:
            chain.count = done.blocks
            chain.refused = done.blocks < load.count
            self.counts.plans.ended(load.plan, min(done.blocks, load.plan.count), now - load.began)
        return LoadDone(
            load.key,
            load.local * self._size,
            done.blocks * self._size,
            done.blocks == load.count,
            self._sources(done, () if chain is None else chain.hashes[load.local :], chain),
        )

    def _sources(
        self, done: FetchDone, hashes: Sequence[bytes], chain: _Chain | None
    ) -> tuple[CachedSource, ...]:
        """Where the loaded blocks came from; those that were pulled for this request, from the
        worker that had them."""
        counts: Counter[tuple[SourceName, str]] = Counter()
        for place, name in enumerate(done.sources):
            known = chain is not None and place < len(hashes)
            node = chain.pulled.get(hashes[place], "") if chain is not None and known else ""
            counts["peer" if node else name, node] += 1
        return tuple(
            CachedSource(name, count * self._size, node) for (name, node), count in counts.items()
        )

    def finished(self, key: str, now: Seconds) -> None:
        """vLLM has ended a request, in any way."""
        chain = self._chains.pop(key, None)
        if chain is not None and chain.pull and self.pulls is not None:
            self.counts.missed(0 if chain.plan is None else chain.plan.peer, "cancelled")
            self.pulls.cancel(chain.pull)
        if key not in self._loading:
            return
        for number, load in list(self._numbers.loads.items()):
            if load.key == key:
                self._lower.cancel(number, now)

    def forget_names(self) -> None:
        """The hashes are void: nothing more is loaded for the requests that are here."""
        for chain in self._chains.values():
            chain.hashes, chain.count, chain.refused = (), 0, True
            chain.peers, chain.plan, chain.pull_began = (), None, None
