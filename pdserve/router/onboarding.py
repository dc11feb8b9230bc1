"""Predicts how a worker would get the KV of a prompt's prefix, and when its first token comes.

A prefix that is reused may end at several points: where the device's blocks end, the host's, the
disk's, or those of another worker, which follow any of these. For a point with c tokens, of which
the lanes carry bytes:

    O = max over lanes of  latency + (backlog + bytes) / bandwidth         lanes work side by side
    P = speed * prefill(L, c)                                              the rest is computed
    time to first token = max( max(W, O_first) + P,  max(W, O) + P / G )

W is the wait until the worker's engine is free. The host's blocks come in G groups of layers, and
O_first is when the first group of all blocks is there. That is what the planner of the worker's own
engine predicts (`kv.tiers.planner`), which decides again, with what it knows then. The point with
the soonest first token is what it is expected to take.

Pure. `RouterCore` makes the plans for each decision; policies see them in their snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.router.kv_sources import reachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.ids import Bytes, NodeId, Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.routing import RouteRequest
    from pdserve.messages.tiers import LaneName
    from pdserve.perf_model.latency_model import LatencyModel
    from pdserve.router.kv_sources import KvHolder
    from pdserve.router.policies.base import WorkerView

__all__ = ["BlocksBySource", "Onboarding", "onboarding_plans"]

_GROUPS: Final = 1
"""Groups of layers that the host's blocks come in, as in `kv.tiers.planner.PlannerConfig`."""
_MIN_GAIN: Final[Seconds] = 0.002
"""What each source has to gain, as there."""


@dataclass(frozen=True, slots=True)
class BlocksBySource:
    """Leading blocks of a prompt by where they are taken from, in this order."""

    device: int = 0
    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def own(self) -> int:
        """Those that need no other worker."""
        return self.device + self.host + self.disk

    @property
    def total(self) -> int:
        return self.own + self.peer

    @property
    def sources(self) -> int:
        """Number of sources besides the device."""
        return bool(self.host) + bool(self.disk) + bool(self.peer)

    def sizes(self, block_bytes: Bytes) -> dict[LaneName, Bytes]:
        """Bytes by lane. What comes from disk goes through the host; what another worker sends is
        written to the device at once."""
        found: dict[LaneName, Bytes] = {
            "h2d": (self.host + self.disk) * block_bytes,
            "disk_read": self.disk * block_bytes,
            "fetch": self.peer * block_bytes,
        }
        return {lane: size for lane, size in found.items() if size}


@dataclass(frozen=True, slots=True)
class Onboarding:
    """What a worker would bring to its device before it computes a prompt."""

    blocks: BlocksBySource
    tokens: int
    """Prompt tokens of `blocks`; never the last one, which is always computed."""
    sizes: Mapping[LaneName, Bytes]
    seconds: Seconds
    """Time until all of it is there."""
    first: Seconds
    """Time until its first group of layers is there."""
    compute: Seconds
    """Prefill time of the tokens after it."""
    peer: NodeId | None = None
    """The other worker, if there is one."""
    groups: int = _GROUPS

    def ttft(self, wait: Seconds) -> Seconds:
        """Time to first token if the engine is free after `wait`."""
        compute = self.compute
        return max(max(wait, self.first) + compute, max(wait, self.seconds) + compute / self.groups)


def onboarding_plans(
    request: RouteRequest,
    workers: Sequence[WorkerView],
    overlaps: Mapping[NodeId, int],
    lower: Mapping[NodeId, tuple[int, int]],
    holders: Sequence[KvHolder],
    model: LatencyModel,
    now: Seconds,
) -> dict[NodeId, Onboarding]:
    """The plans of the workers whose first token comes sooner with one. `holders`: longest first.
    The other arguments are those of `RoutingState`."""
    if not lower and not holders:
        return {}
    plans = {}
    for worker in workers:
        if not worker.kv.lanes or not worker.kv.block_bytes:
            continue
        device = overlaps.get(worker.node, 0)
        with_host, with_disk = lower.get(worker.node, (device, device))
        own = BlocksBySource(device, with_host - device, with_disk - with_host)
        peer = _peer_of(worker, own, holders)
        plan = _best(request, worker, own, peer, model, now) if peer or own.total > device else None
        if plan is not None:
            plans[worker.node] = plan
    return plans


def _peer_of(
    worker: WorkerView, own: BlocksBySource, holders: Sequence[KvHolder]
) -> KvHolder | None:
    """The first holder that has more blocks than the worker and can send them."""
    if "fetch" not in worker.kv.lanes:
        return None
    for holder in holders:
        if holder.blocks <= own.total:
            return None
        if reachable(worker, holder):
            return holder
    return None


def _best(
    request: RouteRequest,
    worker: WorkerView,
    own: BlocksBySource,
    peer: KvHolder | None,
    model: LatencyModel,
    now: Seconds,
) -> Onboarding | None:
    """The plan with the soonest first token; None: what is on the device is best."""
    wait, lanes = worker.wait(now), worker.kv.lanes
    best: Onboarding | None = None
    least = wait + worker.speed * model.prefill(request.prompt_tokens, _tokens(request, own.device))
    for blocks in _points(own, peer):
        plan = _plan(request, worker, blocks, lanes, model, peer)
        if plan is not None and (cost := plan.ttft(wait) + _MIN_GAIN * blocks.sources) < least:
            best, least = plan, cost
    return best


def _points(own: BlocksBySource, peer: KvHolder | None) -> Iterator[BlocksBySource]:
    """Prefixes longer than what is on the device. Another worker's blocks follow the device's, the
    host's or the disk's."""
    starts = [BlocksBySource(own.device)]
    if own.host:
        starts.append(BlocksBySource(own.device, own.host))
    if own.disk:
        starts.append(own)
    yield from starts[1:]
    if peer is not None:
        for start in starts:
            rest = peer.blocks - start.total
            yield BlocksBySource(start.device, start.host, start.disk, rest)


def _plan(
    request: RouteRequest,
    worker: WorkerView,
    blocks: BlocksBySource,
    lanes: Mapping[LaneName, LaneEstimate],
    model: LatencyModel,
    peer: KvHolder | None,
) -> Onboarding | None:
    """None: the worker has no lane for some of the blocks."""
    sizes = blocks.sizes(worker.kv.block_bytes)
    if not sizes.keys() <= lanes.keys():
        return None
    tokens = _tokens(request, blocks.total)
    return Onboarding(
        blocks,
        tokens,
        sizes,
        max([lanes[lane].seconds(size) for lane, size in sizes.items()]),
        max(
            [
                lanes[lane].seconds(size // _GROUPS if lane == "h2d" else size)
                for lane, size in sizes.items()
            ]
        ),
        worker.speed * model.prefill(request.prompt_tokens, tokens),
        peer.life.node if peer is not None and blocks.peer else None,
    )


def _tokens(request: RouteRequest, blocks: int) -> int:
    return min(blocks * request.block_size, max(0, request.prompt_tokens - 1))
