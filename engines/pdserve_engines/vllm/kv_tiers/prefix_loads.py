"""Requests whose next blocks come from lower tiers. Pure, imports no vLLM.

vLLM asks for each request how many tokens it can have loaded behind those that it has cached
(`matched`), gives it blocks (`allocated`), and leaves it waiting. When the fetch has ended
(`fetched`), the request goes on behind what has come; vLLM computes the rest. A request that has
ended meanwhile keeps its blocks until the fetch has ended, too.

A request whose first missing block is already coming for another one waits for that one's, which
vLLM then has cached.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.messages.tiers import CachedSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.tiers.onboarder import FetchChooser
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import FetchDone, LowerTiers

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


@dataclass(frozen=True, slots=True)
class _Load:
    key: str
    first: bytes
    """Hash of its first block."""
    local: int
    count: int


@dataclass(slots=True)
class _Numbers:
    last: int = 0
    loads: dict[int, _Load] = field(default_factory=dict)


class PrefixLoads:
    """The loads of one vLLM engine."""

    def __init__(self, lower: LowerTiers, planner: FetchChooser, block_size: int) -> None:
        self.planner = planner
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

    def begin(self, key: str, hashes: Sequence[bytes], root: bytes) -> None:
        """A request comes, whose full blocks have these hashes."""
        self._chains[key] = _Chain(hashes, root)

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
        chain.local, chain.count = local // self._size, 0
        usable = min(len(chain.hashes), (tokens - 1) // self._size)
        if chain.local >= usable:
            return 0
        if self._coming[chain.hashes[chain.local]]:
            return None
        found = self._lower.run(chain.hashes[:usable], chain.local)
        if not found:
            return 0
        plan = self.planner.choose(chain.local, found, (), usable, 0.0)
        if plan is None or not plan.local:
            return 0
        chain.count, chain.wait = plan.local, max(plan.deadline, PATIENCE)
        return chain.count * self._size

    def allocated(self, key: str, external: int, blocks: Sequence[int], now: Seconds) -> None:
        """vLLM has given a request all of its blocks, and counts on `external` tokens to be
        loaded."""
        chain = self._chains.get(key)
        if chain is None:
            return
        if not external:
            return
        first, end = chain.local, chain.local + external // self._size
        numbers = self._numbers
        numbers.last += 1
        load = _Load(key, chain.hashes[first], first, end - first)
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

    # ------------------------------------------------------------------ after that

    def fetched(self, done: FetchDone) -> LoadDone | None:
        """A fetch has ended; None: it was not for a request."""
        load = self._numbers.loads.pop(done.number, None)
        if load is None:
            return None
        self._loading.discard(load.key)
        self._coming[load.first] -= 1
        if not self._coming[load.first]:
            del self._coming[load.first]
        chain = self._chains.get(load.key)
        if chain is not None:
            chain.count = done.blocks
            chain.refused = done.blocks < load.count
        counts = Counter(done.sources)
        return LoadDone(
            load.key,
            load.local * self._size,
            done.blocks * self._size,
            done.blocks == load.count,
            tuple(CachedSource(name, count * self._size) for name, count in counts.items()),
        )

    def finished(self, key: str, now: Seconds) -> None:
        """vLLM has ended a request, in any way."""
        self._chains.pop(key, None)
        if key not in self._loading:
            return
        for number, load in list(self._numbers.loads.items()):
            if load.key == key:
                self._lower.cancel(number, now)

    def forget_names(self) -> None:
        """The hashes are void: nothing more is loaded for the requests that are here."""
        for chain in self._chains.values():
            chain.hashes, chain.count, chain.refused = (), 0, True
