"""Predicts how a worker would get the KV of a prompt's prefix, and when its first token comes.

A prefix that is reused may end at several points: where the device's blocks end, the host's, the
disk's, or those of another worker, which follow any of these. For a point with c tokens, of which
the lanes carry bytes:

    O = max over lanes of  latency + (backlog + bytes) / bandwidth         lanes work side by side
    P = speed * prefill(L, c)                                              the rest is computed
    time to first token = max( max(W, O_first) + P,  max(W, O) + P / G )

W is the wait until the worker's engine is free. The host's blocks come in G groups of layers, if no
block of the disk comes behind them and the engine can begin with the first group; O_first is when
that one is there. That is what the planner of the worker's own engine predicts
(`kv.tiers.planner`), which decides again, with what it knows then. The point with the soonest first
token is what it is expected to take.

Pure. `RouterCore` makes the plans for each decision; policies see them in their snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.kv.tiers.layer_groups import most_groups
from pdserve.router.kv_sources import count_copies, reachable

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

_MIN_GAIN: Final[Seconds] = 0.002
"""What each source has to gain, as in `kv.tiers.planner.PlannerConfig`."""


class BlocksBySource(NamedTuple):
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
        found: dict[LaneName, Bytes] = {}
        if self.host or self.disk:
            found["h2d"] = (self.host + self.disk) * block_bytes
        if self.disk:
            found["disk_read"] = self.disk * block_bytes
        if self.peer:
            found["fetch"] = self.peer * block_bytes
        return found


@dataclass(frozen=True, slots=True)
class Onboarding:
    """What a worker would bring to its device before it computes a prompt."""

    blocks: BlocksBySource
    tokens: int
    """Prompt tokens of `blocks`; never the last one, which is always computed."""
    block_bytes: Bytes
    seconds: Seconds
    """Time until all of it is there."""
    first: Seconds
    """Time until its first group of layers is there."""
    compute: Seconds
    """Prefill time of the tokens after it."""
    alone: Seconds = 0.0
    """Prefill time of these and of those that another worker would send."""
    delay: Seconds = 0.0
    """By how much its bytes delay those that wait in the same lanes."""
    peer: NodeId | None = None
    """The other worker, if there is one."""
    kept: bool = True
    """False: enough workers have what is fetched, so this one lets go of it after the request."""
    groups: int = 1
    """Groups of layers that the host's blocks come in."""

    @property
    def sizes(self) -> dict[LaneName, Bytes]:
        """Bytes by lane."""
        return self.blocks.sizes(self.block_bytes)

    def ttft(self, wait: Seconds) -> Seconds:
        """Time to first token if the engine is free after `wait`."""
        return _finish(wait, self.first, self.seconds, self.compute, self.groups)


def _finish(
    wait: Seconds, first: Seconds, whole: Seconds, compute: Seconds, groups: int
) -> Seconds:
    """The formula of the module docstring."""
    return max(max(wait, first) + compute, max(wait, whole) + compute / groups)


def onboarding_plans(
    request: RouteRequest,
    workers: Sequence[WorkerView],
    overlaps: Mapping[NodeId, int],
    lower: Mapping[NodeId, tuple[int, int]],
    holders: Sequence[KvHolder],
    model: LatencyModel,
    now: Seconds,
    most_copies: int = 1 << 30,
) -> dict[NodeId, Onboarding]:
    """The plans of the workers whose first token comes sooner with one. `holders`: longest first;
    `most_copies`: workers that may keep what is fetched. The other arguments are those of
    `RoutingState`."""
    if not lower and not holders:
        return {}
    plans: dict[NodeId, Onboarding] = {}
    kept: dict[int, bool] = {}
    for worker in workers:
        kv = worker.kv
        if not kv.lanes or not kv.block_bytes:
            continue
        device = overlaps.get(worker.node, 0)
        with_host, with_disk = lower.get(worker.node, (device, device))
        own = BlocksBySource(device, with_host - device, with_disk - with_host)
        peer = _peer_of(worker, with_disk, holders) if "fetch" in kv.lanes else None
        if with_disk > device or peer is not None:
            plan = _soonest(request, worker, own, peer, model, worker.wait(now))
            if plan is None:
                continue
            if plan.peer is not None and (depth := plan.blocks.total) not in kept:
                kept[depth] = count_copies(depth, overlaps, lower) < most_copies
            plans[worker.node] = (
                plan if plan.peer is None or kept[plan.blocks.total] else replace(plan, kept=False)
            )
    return plans


def _peer_of(worker: WorkerView, own_blocks: int, holders: Sequence[KvHolder]) -> KvHolder | None:
    """The first holder that has more blocks than the worker and can send them."""
    for holder in holders:
        if holder.blocks <= own_blocks:
            return None
        if reachable(worker, holder):
            return holder
    return None


def _soonest(
    request: RouteRequest,
    worker: WorkerView,
    own: BlocksBySource,
    peer: KvHolder | None,
    model: LatencyModel,
    wait: Seconds,
) -> Onboarding | None:
    """The plan with the soonest first token; None: what is on the device is best. Makes no record
    of the other points, because it runs for each request over all workers."""
    lanes, speed, length = worker.kv.lanes, worker.speed, request.prompt_tokens
    size, each, layers = worker.kv.block_bytes, request.block_size, worker.kv.layers
    most = max(0, length - 1)
    least = wait + speed * model.prefill(length, min(own.device * each, most))
    best: tuple[BlocksBySource, int, Seconds, Seconds, Seconds, int] | None = None
    for blocks in _points(own, peer):
        groups = _groups(blocks, size, layers)
        times = _times(blocks, lanes, size, groups)
        if times is None:
            continue
        first, whole = times
        tokens = min(blocks.total * each, most)
        compute = speed * model.prefill(length, tokens)
        cost = _finish(wait, first, whole, compute, groups) + _MIN_GAIN * blocks.sources
        if cost < least:
            best, least = (blocks, tokens, whole, first, compute, groups), cost
    if best is None:
        return None
    blocks, tokens, whole, first, compute, groups = best
    source = peer.life.node if peer is not None and blocks.peer else None
    alone = compute
    if blocks.peer:
        alone = speed * model.prefill(length, min(blocks.own * each, most))
    delay = _delay(blocks, lanes, size)
    return Onboarding(
        blocks, tokens, size, whole, first, compute, alone, delay, source, groups=groups
    )


def _points(own: BlocksBySource, peer: KvHolder | None) -> Iterator[BlocksBySource]:
    """Prefixes longer than what is on the device. Another worker's blocks follow the device's, the
    host's or the disk's."""
    device, host, disk = own.device, own.host, own.disk
    if host:
        yield BlocksBySource(device, host)
    if disk:
        yield own
    if peer is None:
        return
    yield BlocksBySource(device, 0, 0, peer.blocks - device)
    if host:
        yield BlocksBySource(device, host, 0, peer.blocks - device - host)
    if disk:
        yield BlocksBySource(device, host, disk, peer.blocks - own.total)


def _groups(blocks: BlocksBySource, block_bytes: Bytes, layers: int) -> int:
    """How many groups of layers the host's blocks come in."""
    return 1 if blocks.disk else most_groups(blocks.host * block_bytes, block_bytes, layers)


def _times(
    blocks: BlocksBySource,
    lanes: Mapping[LaneName, LaneEstimate],
    block_bytes: Bytes,
    groups: int,
) -> tuple[Seconds, Seconds] | None:
    """When the first group of layers of these blocks is there, and when all; None: the worker has
    no lane for some of them."""
    first = whole = 0.0
    for name, size in blocks.sizes(block_bytes).items():
        lane = lanes.get(name)
        if lane is None:
            return None
        whole = max(whole, lane.seconds(size))
        first = max(first, lane.seconds(size // groups if name == "h2d" else size))
    return first, whole


def _delay(
    blocks: BlocksBySource, lanes: Mapping[LaneName, LaneEstimate], block_bytes: Bytes
) -> Seconds:
    """By how much these blocks delay what waits in their lanes."""
    total = 0.0
    for name, size in blocks.sizes(block_bytes).items():
        lane = lanes[name]
        if lane.backlog:
            total += size / lane.bandwidth * lane.backlog / (lane.backlog + size)
    return total
