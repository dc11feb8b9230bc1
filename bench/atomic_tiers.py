"""Replays requests through a worker's tiers, each at once, so that only decisions count.

A request is served in one go, from the look-up to the release of its blocks. It goes through the
`BlockPool`, the `HostIndex` and the `DiskIndex` of a worker; a prompt's last block counts as a full
one. `AtomicTiers` is one worker, `AtomicCluster` several. `bench/tier_trace.py` has the known
answers; other measurements compare real time with atomic requests.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parent.parent))

from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.format import record_bytes
from pdserve.kv.tiers.disk.index import DiskIndex, segment_size
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.turns import TurnTracker
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission

__all__ = [
    "BLOCK",
    "PAYLOAD",
    "PLAIN",
    "AtomicCluster",
    "AtomicTiers",
    "Placement",
    "Prompt",
    "Route",
    "anywhere",
    "belady_hits",
    "by_prefix",
    "read",
    "replay",
    "with_turns",
]

PLAIN: Final = EvictionOrder(turn_bonus=0.0)
PAYLOAD: Final = 1 << 20
"""Bytes of a block; only the disk's segments depend on it."""

Placement = Literal["exclusive", "mirror"]
"""Host memory has what left the device, or a copy of everything that is stored on the device."""


class Prompt(NamedTuple):
    """A request: when it came, its blocks, and the turn that its conversation is at."""

    at: float
    names: tuple[bytes, ...]
    turns: int = 1


class AtomicTiers:
    """Device, host memory and disk of one worker, for requests that take no time."""

    def __init__(
        self,
        device: int,
        host: int,
        disk: int = 0,
        *,
        order: EvictionOrder = PLAIN,
        placement: Placement = "exclusive",
        admission: HostAdmission | None = None,
        disk_admission: DiskAdmission | None = None,
    ) -> None:
        """Sizes are in blocks; 0: no such tier. Without an admission, a tier takes all. Host
        memory's concerns exclusive placement alone."""
        self.pool = BlockPool(device, BLOCK) if device else None
        self.host = HostIndex(host, order=order) if host else None
        self.disk = _disk_of(disk) if disk else None
        self.written = 0
        """Blocks that were copied to host memory."""
        self.spilled = 0
        """Blocks that were written to disk."""
        self._placement = placement
        self._admission = admission
        self._disk_admission = disk_admission
        self._turns: dict[bytes, int] = {}
        self._uses: Counter[bytes] = Counter()

    def found(self, names: Sequence[bytes]) -> int:
        """Number of leading blocks that some tier has."""
        device = len(self.pool.match(names)) if self.pool is not None else 0
        return device + self._lower_run(names[device:])

    def serve(self, prompt: Prompt) -> int:
        """Serves a request; returns the number of its leading blocks that were found."""
        hits = self.found(prompt.names)
        if self._fits(prompt):
            self._use_disk(prompt, hits)
            for index, name in enumerate(prompt.names):
                # A block that is computed again is a new one: its uses count from there.
                self._uses[name] = self._uses[name] + 1 if index < hits else 1
                self._turns[name] = max(prompt.turns, self._turns.get(name, 1))
            if self.pool is not None:
                self._use_device(self.pool, prompt)
            if self.host is not None and (self.pool is None or self._placement == "mirror"):
                self._use_host(self.host, prompt)
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.drain_events()
        return hits

    def check(self) -> None:
        """Raises AssertionError unless every tier is sound."""
        if self.pool is not None:
            self.pool.check()
        if self.host is not None:
            self.host.check()
            assert self.host.counts().claimed == self.host.counts().filling == 0
        if self.disk is not None:
            self.disk.check()

    def _fits(self, prompt: Prompt) -> bool:
        """A prompt that is longer than the tier that computes it is not cached."""
        room = (
            self.pool.num_blocks
            if self.pool
            else self.host.capacity
            if self.host is not None
            else 0
        )
        return len(prompt.names) <= room

    def _lower_run(self, names: Iterable[bytes]) -> int:
        count = 0
        for name in names:
            if not any(tier is not None and name in tier for tier in (self.host, self.disk)):
                break
            count += 1
        return count

    def _use_disk(self, prompt: Prompt, hits: int) -> None:
        """What was found stays on disk, too, and counts as used."""
        if self.disk is not None:
            for name in reversed(prompt.names[:hits]):
                self.disk.touch(name, prompt.at)

    def _use_device(self, pool: BlockPool, prompt: Prompt) -> None:
        """Brings host blocks up and what has to leave down, computes the rest, releases all."""
        names = prompt.names
        shared = pool.match(names)
        pool.acquire(shared)
        if self._placement == "exclusive":
            self._take_up(names[len(shared) :])
        missing = len(names) - len(shared)
        leaving = pool.oldest(max(0, missing - pool.counts().free))
        if self._placement == "exclusive":
            for block, name in leaving:
                self._put_down(TierBlock(name, pool.parent(block), self._turns[name]), prompt.at)
        fresh = pool.reserve(missing)
        assert fresh is not None
        parent = names[len(shared) - 1] if shared else b""
        blocks = shared + pool.commit_run(fresh, names[len(shared) :], parent)
        pool.release(blocks)
        pool.drain_events()

    def _take_up(self, names: Iterable[bytes]) -> None:
        """The device gets these blocks, from host memory or by computing them."""
        if self.host is not None:
            for name in names:
                self.host.drop(name)

    def _put_down(self, block: TierBlock, at: float) -> None:
        """A block leaves the device."""
        host, admission = self.host, self._admission
        if host is None:
            return
        if admission and not admission.admits(block, at, reused=self._uses[block.hash] > 1):
            return
        self._store(host, block, at)

    def _use_host(self, host: HostIndex, prompt: Prompt) -> None:
        """Host memory stores the whole prompt, the tail first."""
        present = [frame for name in prompt.names if (frame := host.frame(name)) is not None]
        for frame in present:
            host.claim(frame)
        for index in range(len(prompt.names) - 1, -1, -1):
            name = prompt.names[index]
            if name in host:
                host.touch(name, prompt.at, prompt.turns)
            else:
                parent = prompt.names[index - 1] if index else b""
                self._store(host, TierBlock(name, parent, prompt.turns), prompt.at)
        for frame in present:
            host.release(frame)

    def _store(self, host: HostIndex, block: TierBlock, at: float) -> None:
        if not host.free:
            for name in host.victims(1, at):
                if self._admission:
                    self._admission.evicted(name, host.age(name, at), at)
                victim = host.block(name)
                assert victim is not None
                host.evict(name)
                self._spill(victim, at)
        frame = host.reserve()
        if frame is not None:
            self.written += host.commit(frame, block, at)

    def _spill(self, block: TierBlock, at: float) -> None:
        """A block leaves host memory."""
        disk, admission = self.disk, self._disk_admission
        if disk is None or disk.knows(block.hash):
            return
        reused = self._uses[block.hash] > 1
        if admission and not admission.admits(block, record_bytes(PAYLOAD), at, reused=reused):
            return
        batch = disk.append([block], PAYLOAD, at)
        if batch is not None:
            self.spilled += 1
            disk.written(batch, at)
        while commands := disk.commands(at):
            for command in commands:
                disk.finished(command, at)


def _disk_of(blocks: int) -> DiskIndex:
    capacity = blocks * record_bytes(PAYLOAD)
    return DiskIndex(capacity, segment_size(capacity, PAYLOAD))


class Route(Protocol):
    """Chooses the worker of a prompt."""

    def __call__(self, prompt: Prompt, found: Sequence[int], load: Sequence[int]) -> int:
        """`found`: leading blocks that each worker has; `load`: all blocks of the prompts that it
        has served."""
        ...


def by_prefix(bound: float) -> Route:
    """The worker with most of the prompt, among those that have served at most `bound` times as
    much as the mean."""

    def choose(prompt: Prompt, found: Sequence[int], load: Sequence[int]) -> int:
        most = bound * sum(load) / len(load)
        allowed = [one for one in range(len(load)) if load[one] <= most]
        return max(allowed, key=lambda one: (found[one], -load[one]))

    return choose


def anywhere(seed: int = 1) -> Route:
    """Any worker, by chance."""
    random = Random(seed)

    def choose(prompt: Prompt, found: Sequence[int], load: Sequence[int]) -> int:
        return random.randrange(len(load))

    return choose


class AtomicCluster:
    """Workers with a route between them. With `pool`, a worker fetches what another one has more
    of; it keeps that, and so does the other."""

    def __init__(self, workers: Sequence[AtomicTiers], route: Route, *, pool: bool) -> None:
        self.workers = workers
        self.local = 0
        """Blocks that were found at the worker of their prompt."""
        self.fetched = 0
        """Blocks that came from another worker."""
        self.elsewhere = 0
        """Blocks that another worker had and that were not fetched."""
        self._route = route
        self._pool = pool
        self._load = [0] * len(workers)

    def serve(self, prompt: Prompt) -> None:
        """Serves a request."""
        found = [worker.found(prompt.names) for worker in self.workers]
        chosen = self._route(prompt, found, self._load)
        self._load[chosen] += len(prompt.names)
        self.local += self.workers[chosen].serve(prompt)
        more = max(found) - found[chosen]
        if self._pool:
            self.fetched += more
        else:
            self.elsewhere += more


def replay(prompts: Iterable[Prompt], tiers: AtomicTiers) -> list[int]:
    """Serves all requests; returns the hits of each, in blocks."""
    hits = [tiers.serve(prompt) for prompt in prompts]
    tiers.check()
    return hits


def with_turns(requests: Iterable[tuple[float, Sequence[int]]]) -> Iterator[Prompt]:
    """Prompts of these times and block ids. An id stands for its block and all blocks before it.

    The last id is a block that is not full, which the next turn of a conversation does not repeat.
    """
    tracker = TurnTracker()
    for at, contents in requests:
        names = tuple(content.to_bytes(16, "little") for content in contents)
        yield Prompt(at, names, tracker.turn(names[:-1]))


def read(path: Path) -> list[Prompt]:
    """The requests of a trace, with their turns."""
    trace = MooncakeTrace(path)
    return list(with_turns((one.at, [name for name, _ in one.pieces]) for one in trace))


def belady_hits(prompts: Sequence[Prompt], blocks: int) -> int:
    """Hits of a cache that knows the future: it keeps the blocks that are used again first, and
    need not store a block at all. No cache of as many blocks has more."""
    uses = [name for prompt in prompts for name in prompt.names]
    upcoming = _next_uses(uses)
    cached: dict[bytes, int] = {}
    latest: list[tuple[int, bytes]] = []
    hits = 0
    for now, name in enumerate(uses):
        hits += name in cached
        cached[name] = upcoming[now]
        heapq.heappush(latest, (-upcoming[now], name))
        while len(cached) > blocks:
            negated, victim = heapq.heappop(latest)
            if cached.get(victim) == -negated:
                del cached[victim]
    return hits


def _next_uses(uses: Sequence[bytes]) -> list[int]:
    """For each use, the number of the next one of the same name; past the end if there is none."""
    following: dict[bytes, int] = {}
    upcoming = [0] * len(uses)
    for now in range(len(uses) - 1, -1, -1):
        upcoming[now] = following.get(uses[now], len(uses) + now)
        following[uses[now]] = now
    return upcoming
