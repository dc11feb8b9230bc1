"""The lower tiers of one engine core, composed: arena, disk, cleaner, fetches.

An engine core opens them when its pool is allocated, lets them go on once between two steps
(`advance`, then `clean` and `follow`), and closes them before its executor frees the pool.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.clock import SystemClock
from pdserve.errors import ConfigError
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.admission import AdmissionMode, DiskAdmission, HostAdmission, WriteBudget
from pdserve.kv.tiers.cleaner import BlockUse, Cleaner
from pdserve.kv.tiers.disk.fingerprint import Fingerprint
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.job_runner import FrameBytes, JobRunner, MemoryCopier
from pdserve.kv.tiers.lower_tiers import LowerTiers
from pdserve.kv.tiers.measuring.first_rates import describe, measure_copies
from pdserve.kv.tiers.thread_io import ThreadTierIo
from pdserve.kv.tiers.turns import TurnTracker
from pdserve.limits.sizes import approximate_size
from pdserve.messages.kv_events import BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdserve.engine_core.executor import Executor, ModelInfo
    from pdserve.engine_core.scheduler.scheduler import Scheduler
    from pdserve.engine_core.scheduler.sequence import Sequence as EngineSequence
    from pdserve.engine_core.tiers.onboarder import Onboarder
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.cleaner import CleanedPool
    from pdserve.kv.tiers.disk.index import DiskIndex
    from pdserve.kv.tiers.jobs import BlockCopier, TierIo
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.kv.tiers.lower_tiers import FetchDone
    from pdserve.kv.tiers.measuring.first_rates import Rates
    from pdserve.messages.kv_events import KvEvent, Tier
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import LaneLoad, LaneName, TierSpec, TierStats
    from pdserve.transfer.base import Region

__all__ = [
    "CoreTiers",
    "DeviceTiers",
    "MakeTierIo",
    "TierStorage",
    "disk_fingerprint",
    "frames_of",
    "open_disk",
    "open_storage",
    "threads",
]

_log = logging.getLogger(__name__)

MakeTierIo = Callable[["JobRunner", "Bytes", bool], "TierIo"]
"""Makes what carries out the jobs: from a runner, a block's size, and whether there is a disk."""

EVENT_HASHES: Final = 16_384
"""Most hashes that one step tells of lower tiers."""

STAGING_FRAMES = 64
"""Frames of the arena if there is a disk tier and no host tier."""


@dataclass(slots=True)
class TierStorage:
    """What a core's tiers are made of; `close` gives it back."""

    frames: int
    block_bytes: Bytes
    io: TierIo
    disk: DiskTier | None = None
    runner: JobRunner | None = None
    """What carries out the jobs; None: nothing does, in a simulation without content."""
    free: Callable[[], None] = lambda: None
    """Gives the memory back."""
    rates: Rates = field(default_factory=dict)
    """How fast lanes are, as far as that was measured."""

    def close(self) -> None:
        """Close the disk and give the memory back."""
        if self.disk is not None:
            self.disk.close()
        self.free()

    def reopen(self, secret_id: bytes) -> DiskIndex | None:
        """Open the disk under another hash secret. Errors: `ConfigError`; then there is no disk."""
        tier, self.disk = self.disk, None
        if tier is None:
            return None
        self.disk = tier.renamed(secret_id)
        if self.runner is not None:
            self.runner.files, self.runner.shared = self.disk.files, self.disk.shared
        return self.disk.index


def threads(runner: JobRunner, block_bytes: Bytes, disk: bool) -> TierIo:
    """A `MakeTierIo`: threads of this process."""
    return ThreadTierIo(runner, disk=disk)


class DeviceTiers:
    """The tiers below one device pool, of any engine. Owned by its core, used in its thread."""

    def __init__(
        self, spec: TierSpec, storage: TierStorage, pool: CleanedPool, now: Seconds
    ) -> None:
        self._storage = storage
        self._now = self._since = now
        self._secret: bytes | None = None
        """Id of the hash secret under which the disk has to be opened anew."""
        self._events: deque[KvEvent] = deque()
        self._turns = TurnTracker()
        order = EvictionOrder(turn_bonus=spec.turn_bonus)
        self.lower = LowerTiers(
            HostIndex(storage.frames, order=order),
            HostAdmission(_host_admission(spec), storage.frames),
            storage.io,
            None if storage.disk is None else storage.disk.index,
            None if storage.disk is None else _disk_admission(spec, storage, now),
            block_bytes=storage.block_bytes,
            block_size=pool.block_size,
            device=pool,
            rates=storage.rates,
            shared=None if storage.disk is None else storage.disk.shared,
        )
        self.cleaner = Cleaner(pool, self.lower)

    def start(self, wake: Callable[[], None]) -> None:
        """Begin; `wake` is called from any thread when `advance` has something to take in."""
        self._storage.io.start(wake)

    # ------------------------------------------------------------------ between steps

    def take(self, now: Seconds) -> list[FetchDone]:
        """Take in what has been copied and read, and end what is late; returns the fetches that
        have ended."""
        self._now = now
        done = self.lower.advance(now)
        if self._secret is not None and self.lower.disk_idle:
            self._reopen(self._secret)
        return done

    def _reopen(self, secret_id: bytes) -> None:
        """Open the disk under another hash secret. This may take as long as at the start, but a
        cluster agrees on its secret once."""
        self._secret = None
        try:
            index, trouble = self._storage.reopen(secret_id), ""
        except ConfigError as error:
            index, trouble = None, error.message
            _log.warning("there is no disk tier any more: %s", error.message)
        disk = self._storage.disk
        shared = None if disk is None else disk.shared
        self._events += self.lower.reopen_disk(index, trouble, shared)

    def clean(self, soon: int, now: Seconds, *, busy: bool) -> None:
        """Store what is evicted soon, and more while the core is not busy. `soon`: blocks that the
        next steps may allocate."""
        self._now = now
        self.cleaner.clean(soon, now, busy=busy)

    def follow(self, events: Sequence[KvEvent], now: Seconds) -> list[KvEvent]:
        """Take note of the device's events; returns those of the lower tiers."""
        if events:
            self.lower.follow(events, now)
            self.cleaner.follow(events)
        self._events.extend(self.lower.drain_events())
        return self._next_events()

    @property
    def has_events(self) -> bool:
        """Return whether `follow` has more to tell."""
        return bool(self._events)

    def _next_events(self) -> list[KvEvent]:
        """The next events, of at most `EVENT_HASHES` hashes together. A disk that was opened may
        tell of millions of blocks, and no message takes them all."""
        told: list[KvEvent] = []
        room = EVENT_HASHES
        while self._events and room > 0:
            event = self._events.popleft()
            if isinstance(event, BlockStored) and len(event.hashes) > room:
                event, rest = _divided(event, room)
                self._events.appendleft(rest)
            room -= 1 if isinstance(event, PoolCleared) else len(event.hashes)
            told.append(event)
        return told

    def use_of(self, request: GenerateRequest, owner: bytes, turns: int = 1) -> BlockUse:
        """What a request says about the blocks that it uses. `owner` is the mark of its tenant."""
        return BlockUse(
            turns=turns,
            root=owner,
            pin_until=self._now + request.cache_ttl if request.cache_ttl else 0.0,
            private=request.cache_scope == "never",
        )

    def note_left(
        self,
        hashes: Sequence[bytes],
        prompt: int,
        owner: bytes,
        request: GenerateRequest,
        kept: int | None = None,
    ) -> None:
        """A request gives back the blocks of a chain, the first `prompt` of which are full of its
        prompt. Of those behind the first `kept` no copy is stored; None: all are kept."""
        turns = self._turns.turn(hashes[:prompt])
        use = self.use_of(request, owner, turns)
        if kept is not None:
            self.cleaner.left(hashes[kept:], replace(use, private=True), self._now)
        self.cleaner.left(hashes[:kept], use, self._now)

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        return self.lower.next_deadline()

    # ------------------------------------------------------------------ reading and ending

    def stats(self, now: Seconds) -> tuple[TierStats, ...]:
        """A record for each tier."""
        return self.lower.stats(now)

    def lanes(self) -> tuple[LaneLoad, ...]:
        """What each lane does now."""
        return self.lower.lanes()

    def lane_estimates(self) -> dict[LaneName, LaneEstimate]:
        """What each lane is predicted to do."""
        return self.lower.lane_estimates()

    def clear(self) -> None:
        """Forget every block."""
        self.lower.clear()

    def blocks(self) -> Iterable[TierBlock]:
        """Every block on every tier below the device. O(all)."""
        return self.lower.blocks()

    def drop(
        self, hashes: Collection[bytes] | None, older: Seconds, now: Seconds
    ) -> dict[Tier, int]:
        """Forget these blocks, or all; with `older`, only old ones."""
        return self.lower.drop(hashes, older, now, self._since)

    def rename(self, secret_id: bytes) -> None:
        """The hash secret has changed: no block can be found by its old hash any more."""
        self.lower.rename()
        if self.lower.disk is not None:
            self._secret = secret_id

    def end(self) -> None:
        """End the threads: nothing is copied after this returns."""
        self.lower.close()

    def close(self) -> None:
        """Give the memory back. The files stay."""
        self._storage.close()


class CoreTiers(DeviceTiers):
    """The tiers below the pool of an engine core with pdserve's scheduler."""

    def __init__(
        self,
        spec: TierSpec,
        storage: TierStorage,
        pool: BlockPool,
        scheduler: Scheduler,
        now: Seconds,
    ) -> None:
        super().__init__(spec, storage, pool, now)
        self._pool = pool
        self._scheduler = scheduler
        scheduler.left = self._left

    def advance(self, now: Seconds, onboarder: Onboarder) -> None:
        """Take in what has been copied and read, and end what is late."""
        for done in self.take(now):
            onboarder.fetched(done, now)
        for come in self.lower.take_layers():
            onboarder.layers(come, now)

    def _left(self, sequence: EngineSequence) -> None:
        """A sequence is about to give back its blocks."""
        names = self._scheduler.names
        hashes = sequence.hashes[: sequence.num_committed]
        if names is None or not hashes:
            return
        prompt = sequence.prompt_len // self._pool.block_size
        owner = self._scheduler.owner_mark(sequence.request.cache_salt)
        self.note_left(hashes, prompt, owner, sequence.request, sequence.kept_blocks)

    def came(self, sequence: EngineSequence, hashes: Sequence[bytes]) -> None:
        """Blocks have come for a sequence; it may end without having used them."""
        owner = self._scheduler.owner_mark(sequence.request.cache_salt)
        self.cleaner.came(hashes, self.use_of(sequence.request, owner))

    def use(self, block_hash: bytes) -> BlockUse:
        """The last use of a block on the device."""
        return self.cleaner.use(block_hash)

    def absorbed(self, hashes: Sequence[bytes], use: BlockUse) -> None:
        """These blocks have come to the device from another worker, where they were used like
        this."""
        self.cleaner.left(hashes, use, self._now)


def open_storage(
    spec: TierSpec, info: ModelInfo, executor: Executor, secret_id: bytes, make_io: MakeTierIo
) -> TierStorage:
    """Allocate the arena and open the disk. Raises `ConfigError` if one of them is impossible."""
    region = executor.region() if hasattr(executor, "region") else None
    if region is None:
        raise ConfigError("this engine has no KV that tiers could hold: leave out the tiers")
    block_bytes = region.size // region.blocks
    frames = frames_of(spec, block_bytes)
    layout = info.layout
    shape = (layout.num_layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
    disk = open_disk(
        spec, disk_fingerprint(info.compat_hash, secret_id, block_bytes, shape, info.dtype)
    )
    try:
        arena = _arena(frames, block_bytes)
        copier = _copier(executor, region, arena, block_bytes)
    except ConfigError:
        if disk is not None:
            disk.close()
        raise
    runner = disk_runner(copier, arena, disk)
    io = make_io(runner, block_bytes, disk is not None)

    def free() -> None:
        copier.close()
        if region.view is not None:
            region.view.release()
        arena.close()

    # What takes simulated time does not have this machine's speed.
    rates = {} if make_io is not threads else _measured(copier, disk, block_bytes, frames, region)
    return TierStorage(frames, block_bytes, io, disk, runner, free, rates)


def _measured(
    copier: BlockCopier, disk: DiskTier | None, block_bytes: Bytes, frames: int, region: Region
) -> Rates:
    rates = measure_copies(copier, min(frames, region.blocks), block_bytes)
    if disk is not None:
        rates |= disk.measure()
    _log.info("KV tiers were measured: %s", describe(rates))
    return rates


def disk_runner(copier: BlockCopier | None, arena: FrameBytes, disk: DiskTier | None) -> JobRunner:
    """What carries out the jobs. `copier` None: copies are not its task."""
    if disk is None:
        return JobRunner(copier, arena, None)
    return JobRunner(copier, arena, disk.files, disk.shared)


def _arena(frames: int, block_bytes: Bytes) -> BlockMemory:
    try:
        return BlockMemory(frames, (block_bytes,))
    except ConfigError as error:
        raise ConfigError(
            f"{frames * block_bytes} bytes of host memory for KV cannot be allocated: "
            "lower --host-kv"
        ) from error


def _divided(event: BlockStored, count: int) -> tuple[BlockStored, BlockStored]:
    """The first `count` blocks of an event, and the others, which follow them."""
    first, rest = event.hashes[:count], event.hashes[count:]
    return BlockStored(first, event.parent, event.tier), BlockStored(rest, first[-1], event.tier)


def _copier(
    executor: Executor, region: Region, arena: BlockMemory, block_bytes: Bytes
) -> BlockCopier:
    own = executor.tier_copier(arena) if hasattr(executor, "tier_copier") else None
    if own is not None:
        copier: BlockCopier = own
        return copier
    if region.view is None:
        raise ConfigError("this engine cannot copy KV from its device: leave out the tiers")
    return MemoryCopier(region.view[:], arena.view(), block_bytes)


def _host_admission(spec: TierSpec) -> AdmissionMode:
    """With a disk, the host is also the buffer of what is written, so it takes everything."""
    return "all" if spec.disk_path and spec.host_admission == "auto" else spec.host_admission


def _disk_admission(spec: TierSpec, storage: TierStorage, now: Seconds) -> DiskAdmission:
    budget = WriteBudget(spec.disk_write_budget or spec.disk_bytes, now)
    blocks = max(1, spec.disk_bytes // storage.block_bytes)
    return DiskAdmission(spec.disk_admission, blocks, budget)


def frames_of(spec: TierSpec, block_bytes: Bytes) -> int:
    """Frames of the arena. Raises `ConfigError` if it holds no block."""
    if not spec.host_bytes:
        return STAGING_FRAMES
    frames = spec.host_bytes // block_bytes
    if not frames:
        raise ConfigError(
            f"--host-kv is too small: this worker's part of it is "
            f"{approximate_size(spec.host_bytes)}, a block takes {approximate_size(block_bytes)}"
        )
    return frames


def disk_fingerprint(
    content: str, secret_id: bytes, block_bytes: Bytes, shape: Sequence[int], dtype: str
) -> Fingerprint:
    """What records must agree on. `shape`: layers, k and v, heads, tokens and numbers of a head."""
    return Fingerprint(
        content=content,
        secret_id=secret_id,
        block_bytes=block_bytes,
        layout="layer,kv,head,token,dim " + "x".join(map(str, shape)),
        dtype=dtype,
    )


def open_disk(spec: TierSpec, fingerprint: Fingerprint) -> DiskTier | None:
    """Open the disk tier; None: there is none. Raises `ConfigError`."""
    if not spec.disk_path:
        return None
    return DiskTier.open(
        Path(spec.disk_path),
        spec.disk_bytes,
        fingerprint,
        clock=SystemClock(),
        owner=spec.disk_owner,
    )
