"""The lower tiers of one vLLM engine, composed: arena, disk, cleaner, loads.

vLLM's scheduler asks here, by the scheduler half of our connector, what a request can have loaded
and what a step copies. The core lets the tiers go on between steps. `pool_view` reads vLLM's
pool, `step_io` makes copies a part of vLLM's steps, `prefix_loads` follows requests that wait;
what is stored where is decided by `kv.tiers`, as for every engine.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.blocks.hashing import hash_secret_id
from pdserve.engine_core.staged_kv.pool import host_frames
from pdserve.engine_core.tiers.core_tiers import (
    DeviceTiers,
    TierStorage,
    disk_fingerprint,
    disk_runner,
    frames_of,
    open_disk,
)
from pdserve.engine_core.tiers.fetch_planner import FetchPlanner
from pdserve.engine_core.tiers.frames.frame_fetches import FrameFetches
from pdserve.engine_core.tiers.frames.frame_holds import FrameHolds
from pdserve.engine_core.tiers.prefill_cost import StepCost
from pdserve.kv.tiers.thread_io import ThreadTierIo
from pdserve.transfer.copy_plan import block_bytes
from pdserve_engines.renamed_blocks import root_of
from pdserve_engines.vllm.kv_tiers.pool_view import PoolView
from pdserve_engines.vllm.kv_tiers.prefix_loads import PrefixLoads
from pdserve_engines.vllm.kv_tiers.step_io import StepIo
from pdserve_engines.vllm.kv_transfer.disagg import core_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdserve.clock import Clock
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.staged_kv.pool import HostFrames
    from pdserve.engine_core.tiers.prefill_cost import Chunk
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.engine import EngineCapabilities, Event
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import LaneName, SourceName, TierSpec
    from pdserve.messages.transfer import RankKvLayout
    from pdserve_engines.vllm.block_names import BlockNames
    from pdserve_engines.vllm.kv_tiers.prefix_loads import LoadDone
    from pdserve_engines.vllm.kv_tiers.step_io import RankReport, TierCopies

__all__ = ["VllmTiers", "open_tiers"]

_LOG = logging.getLogger("pdserve.engines.vllm")


class VllmTiers(DeviceTiers):
    """The tiers below one vLLM engine. Owned by its core, used in its thread."""

    def __init__(
        self,
        spec: TierSpec,
        storage: TierStorage,
        io: StepIo,
        frames: HostFrames,
        view: PoolView,
        names: BlockNames,
        clock: Clock,
    ) -> None:
        super().__init__(spec, storage, view, clock.now())
        self.frames = frames
        self.io = io
        self.view = view
        self._names = names
        self._clock = clock
        self._size = view.block_size
        self._requests: dict[str, GenerateRequest] = {}
        """What vLLM does not know of the requests that it has."""
        self._cost = StepCost()
        self._mode = spec.fetch
        self._fetches: FrameFetches | None = None
        planner = FetchPlanner(
            self._cost,
            self.lane_estimates,
            block_tokens=self._size,
            block_bytes=storage.block_bytes,
            mode=spec.fetch,
        )
        self.loads = PrefixLoads(self.lower, planner, self._size)
        self.holds: FrameHolds | None = None
        """Holds frames for prompts of peers; None: staging blocks are in another memory."""
        if frames.shared:
            self.holds = FrameHolds(
                self.lower, lambda: self.loads.planner, self._size, frames.first
            )
        self._tell_of("host", *(("disk",) if spec.disk_path else ()))

    # ------------------------------------------------------------------ requests

    def expect(self, key: str, request: GenerateRequest) -> None:
        """A request goes to vLLM under this name."""
        self._requests[key] = request

    def forget(self, key: str) -> None:
        """vLLM has refused it."""
        self._requests.pop(key, None)

    # ------------------------------------------------------------------ while vLLM plans a step

    def matched(self, request: Any, local: int) -> int | None:
        """How many tokens of vLLM's request come from lower tiers, behind the `local` ones that
        vLLM has; None: ask again later."""
        key = request.request_id
        self.know(request, pulls=True)
        return self.loads.matched(key, local, request.num_tokens)

    def know(self, request: Any, *, pulls: bool = False) -> None:
        """Note a request's hashes, by which its blocks are stored when it ends. Without `pulls`, a
        peer has computed its prompt, and no other one is asked for it."""
        key = request.request_id
        if self.loads.knows(key):
            return
        hashes, root = self._hashes(request), root_of(request.cache_salt) or b""
        wanted = self._requests.get(key)
        # What is pulled is on the host, where blocks of a private request must not be.
        if not pulls or wanted is None or wanted.cache_scope == "never":
            self.loads.begin(key, hashes, root)
            return
        owner = self._names.owner_mark(wanted.cache_salt)
        self.loads.begin(key, hashes, root, wanted.kv_sources, owner)

    def _hashes(self, request: Any) -> Sequence[bytes]:
        return self._names.chain(
            request.all_token_ids, request.cache_salt, request.mm_features or ()
        )

    def allocated(self, request: Any, external: int, blocks: Sequence[int]) -> None:
        """vLLM has given a request its blocks, and counts on `external` tokens to be loaded."""
        self.loads.allocated(request.request_id, external, blocks, self._clock.now())

    def finished(self, request: Any, blocks: Sequence[int]) -> None:
        """vLLM is about to free the blocks of a request."""
        key, now = request.request_id, self._clock.now()
        wanted = self._requests.pop(key, None)
        if wanted is not None and self.loads.knows(key):
            hashes = self._left(request, blocks, int(request.num_computed_tokens))
            prompt = int(request.num_prompt_tokens) // self._size
            self._now = now
            if hashes:
                self.note_left(hashes, prompt, self._names.owner_mark(wanted.cache_salt), wanted)
        self.loads.finished(key, now)

    def preempted(self, request: Any, blocks: Sequence[int], computed: int) -> None:
        """vLLM has taken its blocks from a request, of which `computed` tokens were computed. The
        step that is being planned may overwrite them, so they are stored at once."""
        key = request.request_id
        wanted = self._requests.get(key)
        if wanted is None or not self.loads.knows(key):
            return
        self._now = self._clock.now()
        use = self.use_of(wanted, self._names.owner_mark(wanted.cache_salt))
        self.cleaner.left(self._left(request, blocks, computed), use, self._now)
        self.clean(len(blocks), self._now, busy=True)

    def _left(self, request: Any, blocks: Sequence[int], computed: int) -> Sequence[bytes]:
        """Note the blocks that a request leaves; returns the hashes of those that are cached."""
        hashes, root = self._whole_chain(request)
        full = min(computed // self._size, len(hashes))
        return hashes[: self.view.left(blocks[:full], hashes, root)]

    def _whole_chain(self, request: Any) -> tuple[Sequence[bytes], bytes]:
        """The hashes of a request with its output, and its root."""
        hashes, root = self.loads.chain(request.request_id)
        if request.mm_features:
            return self._hashes(request), root
        rest = list(request.all_token_ids[len(hashes) * self._size :])
        return [*hashes, *self._names.hashes(rest, hashes[-1] if hashes else root)], root

    @property
    def waits(self) -> bool:
        """Return whether copies wait for a step of vLLM."""
        return self.io.waits

    def copies(self, *, computes: bool) -> TierCopies | None:
        """What the step that was just planned copies."""
        return self.io.take(computes=computes)

    def reported(self, report: RankReport) -> None:
        """Ranks have done the copies of a step."""
        self.io.reported(report)

    # ------------------------------------------------------------------ other workers

    def fetch_by(self, mover: KvConnector, say: Callable[[Event], None]) -> FrameFetches:
        """Exchange blocks with other workers by this connector, which moves the memory of the
        frames. `say` sends an event to the node."""
        frames = self.frames
        self._fetches = fetches = FrameFetches(
            self, mover, frames.region, self._mode, say, frames.first
        )
        self.loads.pulls = fetches.pulls
        if fetches.pulls is not None:
            self._tell_of("peer")
        return fetches

    def _tell_of(self, *sources: SourceName) -> None:
        """Blocks may come from there: the counts of plans have it from now on."""
        for source in sources:
            self.loads.counts.plans.tell_of(source)

    def lane_estimates(self) -> dict[LaneName, LaneEstimate]:
        """What each lane is predicted to do, that from other workers included."""
        known = super().lane_estimates()
        pulls = self.loads.pulls
        return known if pulls is None else known | {"fetch": pulls.lane.estimate()}

    # ------------------------------------------------------------------ between steps

    def advance(self, now: Seconds) -> list[LoadDone]:
        """Take in what has been copied, read and written; returns the loads that have ended."""
        done = [self.loads.fetched(each, now) for each in self.take(now)]
        return [each for each in done if each is not None]

    def note_step(self, chunks: Collection[Chunk], took: Seconds) -> None:
        """A step that computed these parts of sequences has taken `took` seconds."""
        self._cost.note_chunks(chunks, sum(chunk.count for chunk in chunks), took)

    def clear(self) -> None:
        """Forget every block, those that are being copied or pulled included."""
        self._drop_pulls()
        self.view.clear()
        super().clear()

    def rename(self, secret_id: bytes) -> None:
        """The hash secret has changed: no block can be found by its old hash any more."""
        self._drop_pulls()
        super().rename(secret_id)
        self.loads.forget_names()
        self.view.clear()

    def _drop_pulls(self) -> None:
        if self._fetches is not None:
            self._fetches.drop(self._clock.now())

    def close(self) -> None:
        """End the threads and give the memory back; the files stay. vLLM must make no step any
        more."""
        self.end()
        super().close()


def open_tiers(
    spec: TierSpec,
    core: Any,
    capabilities: EngineCapabilities,
    names: BlockNames,
    secret: bytes,
    clock: Clock,
    frames: HostFrames | None = None,
) -> VllmTiers:
    """Open the disk for vLLM's `EngineCore`, and allocate the frames if they are not given. Raises
    `ConfigError` if this model's KV cannot leave it, or the machine lacks room."""
    connector = core.scheduler.connector
    layout = core_layout(core, capabilities)
    size = block_bytes(layout)
    view = PoolView(core.scheduler.kv_cache_manager.block_pool, layout.tokens)
    if frames is None:
        frames = host_frames(layout, frames_of(spec, size))
    try:
        disk = open_disk(spec, _fingerprint(layout, capabilities, secret))
    except BaseException:
        frames.close()
        raise
    runner = disk_runner(None, frames, disk)
    files = None if disk is None else ThreadTierIo(runner, disk=True)
    ranks = int(core.vllm_config.parallel_config.tensor_parallel_size)
    io = StepIo(files, ranks, size, view.holds, frames.first)
    # Copies are a part of vLLM's steps: how fast they are shows in steps only.
    rates = {} if disk is None else disk.measure()
    storage = TierStorage(frames.count, size, io, disk, runner, frames.close, rates)
    tiers = VllmTiers(spec, storage, io, frames, view, names, clock)
    connector.tiers = tiers
    where = f", and a disk in {Path(spec.disk_path)}" if disk is not None else ""
    _LOG.info("KV that vLLM evicts goes to %d blocks of %d bytes%s", frames.count, size, where)
    return tiers


def _fingerprint(layout: RankKvLayout, capabilities: EngineCapabilities, secret: bytes) -> Any:
    shape = (layout.layers, 2, layout.heads, layout.tokens, layout.dim)
    return disk_fingerprint(
        layout.content, hash_secret_id(secret), block_bytes(layout), shape, capabilities.dtype
    )
