"""Defines what a routing policy is and what it sees.

A policy is called with a request, a frozen snapshot and a source of randomness, and returns one of
the snapshot's workers. It keeps nothing between calls, so the same inputs give the same choice in
tests, simulation and production. The snapshot contains only workers that may be chosen. A policy
must cost no more than O(workers) and must not wait.

Write one as `def choose(request, state, random)`; or, with options, as a frozen dataclass with
`__call__`, whose fields are numbers, strings or booleans with defaults: `--policy-option
name=value` sets them. Name it `module:attribute`, or register it as an entry point in the group
`pdserve.policies`; `pdserve.testing.policy_conformance` tests it. If it has a method
`terms(request, state)`, `POST /route` shows what it weighed for each worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from pdserve.messages.routing import RouteRequest
from pdserve.perf_model.latency_model import LatencyModel

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.tiers import LaneName
    from pdserve.perf_model.remote_prefill import RemotePrefillEstimate
    from pdserve.router.kv_sources import KvHolder
    from pdserve.router.onboarding import Onboarding

__all__ = ["Explains", "Policy", "RoutingState", "Terms", "WorkerKv", "WorkerView", "after"]


@dataclass(frozen=True, slots=True)
class WorkerKv:
    """How a worker's KV moves: between its tiers, and to other workers."""

    host: str = ""
    """Its machine; empty: not said."""
    compat_hash: str = ""
    """Workers with equal ones can use each other's KV."""
    transfers: frozenset[str] = frozenset()
    """Backends by which it exchanges KV with other workers."""
    block_bytes: Bytes = 0
    """Bytes of a KV block; 0: not said."""
    lanes: Mapping[LaneName, LaneEstimate] = field(default_factory=dict)
    """Lanes of its tiers, with what was placed there since its report; empty: it has no tiers."""
    layers: int = 0
    """Its model's layers, if its engine loads KV from host memory in groups of them; 0: blocks come
    whole, or not said."""


_NO_KV = WorkerKv()
_UNLEARNT = LatencyModel()


class WorkerView(Struct, frozen=True):
    """One worker as a policy sees it at the moment of the decision. A Struct, because two are made
    for each request, and a frozen dataclass costs four times as much."""

    node: NodeId
    epoch: Epoch
    sequences: int
    """Running and waiting sequences in the worker's report, plus those placed there since."""
    max_sequences: int
    """Most sequences that it runs at once; at least 1."""
    occupancy: float
    """`sequences / max_sequences`; above 1, some sequences wait."""
    placed_tokens: int = 0
    """Prompt tokens of bookings that no report of the worker contains yet."""
    blocks_total: int = 0
    """KV blocks of its pool; 0: not reported yet."""
    blocks_used: int = 0
    blocks_cached: int = 0

    prefills: int = 0
    """Number of bookings without a first token."""
    prefill_tokens: int = 0
    """Uncached prompt tokens of bookings without a first token, each prompt counted in full until
    then.
    """
    work: Seconds = 0.0
    """Predicted prefill time of the bookings without a first token, as of `as_of`."""
    head: Seconds = 0.0
    """The oldest booking's part of `work`; it may have been computed in part since."""
    as_of: Seconds = 0.0
    """The time when `work` last changed, on the clock of `RoutingState.now`."""
    decodes: int = 0
    """Sequences past their first token."""
    kv_tokens: int = 0
    """KV tokens of running sequences, by the worker's report and what was placed since."""
    speed: float = 1.0
    """Learnt time factor relative to the shared latency model; 0.5 is twice as fast."""
    ttft: Seconds = 0.0
    """Its recent mean time to first token; 0: unknown."""
    itl: Seconds = 0.0
    """Its recent mean inter-token latency; 0: unknown."""
    known_blocks: int = 0
    """Blocks that the prefix index knows at this worker."""
    decode: bool = False
    """True if prefill workers may compute its prompts."""
    window_work: Seconds = 0.0
    """Prefill and decode time placed there in the last three minutes."""
    kv: WorkerKv = _NO_KV
    reported_at: Seconds = 0.0
    """When its load report arrived, on the clock of `RoutingState.now`."""

    def wait(self, now: Seconds) -> Seconds:
        """Predicted time until a prompt placed now starts: `work` less the time passed since
        `as_of`. The time passed is taken from the oldest booking only, up to nine tenths of it,
        because a late prefill still has something left to do.
        """
        return max(0.0, self.work - min(max(0.0, now - self.as_of), 0.9 * self.head))

    def is_open(self, now: Seconds, work: Seconds) -> bool:
        """True if it has less than this much predicted work, and room for a sequence."""
        return self.sequences < self.max_sequences and self.wait(now) < work


class RoutingState(Struct, frozen=True):
    """The snapshot on which a decision rests; a Struct as `WorkerView` is."""

    workers: tuple[WorkerView, ...]
    """Workers that may be chosen, at least one, by rising node id."""
    last: NodeId
    """The worker chosen last for this model; it may be absent from `workers`."""
    count: int = 0
    """Decisions made by this router so far."""
    now: Seconds = 0.0
    overlaps: Mapping[NodeId, int] = {}
    """Leading prompt blocks in each worker's device tier; a missing worker has none. May contain
    workers that may not be chosen.
    """
    lower: Mapping[NodeId, tuple[int, int]] = {}
    """Per worker, leading prompt blocks in device and host tiers, and in device, host and disk
    tiers; a missing worker has what `overlaps` says.
    """
    routed: Mapping[NodeId, int] = {}
    """Leading prompt blocks that this router sent to each worker recently, cached or not; filled
    only for policies with `needs_routed`.
    """
    routed_blocks: Mapping[NodeId, int] = {}
    """Blocks remembered as sent, per worker."""
    model: LatencyModel = _UNLEARNT
    """Learnt latency model of prefills and steps; the same for all workers, times their `speed`."""
    elsewhere: RemotePrefillEstimate | None = None
    """Learnt time of remote prefill, for `decode` workers; None: no prefill workers, or unknown."""
    held: int = 0
    """Other requests for this model that wait in the router."""
    open_work: Seconds = 0.0
    """Workers with less predicted work than this, and room, are open: while none is, requests wait
    in the router. 0: they never wait there."""
    holders: Sequence[KvHolder] = ()
    """Workers that can send leading blocks of the prompt, longest first; filled only if some worker
    has tiers."""
    onboarding: Mapping[NodeId, Onboarding] = {}
    """Per worker, how it would get a longer prefix from lower tiers or from another worker; a
    missing worker would use what its device has."""

    def cached_tokens(self, request: RouteRequest, worker: WorkerView) -> int:
        """Prompt tokens cached at that worker; never the last one, which is always computed."""
        blocks = self.overlaps.get(worker.node, 0)
        return min(blocks * request.block_size, max(0, request.prompt_tokens - 1))

    def own_blocks(self, node: NodeId) -> int:
        """Leading prompt blocks in all tiers of a worker."""
        lower = self.lower.get(node)
        return self.overlaps.get(node, 0) if lower is None else lower[1]

    def reused_tokens(self, request: RouteRequest, worker: WorkerView) -> int:
        """Prompt tokens that the worker would not compute: cached there, or brought to it."""
        plan = self.onboarding.get(worker.node)
        return self.cached_tokens(request, worker) if plan is None else plan.tokens

    def ttft(self, request: RouteRequest, worker: WorkerView) -> Seconds:
        """Predicted time to first token at that worker: the work before it and the prompt's own
        prefill, which lasts at least one decode step; or by remote prefill, if that is sooner.
        """
        here = self._here(request, worker)
        there = self.remote_ttft(request, worker)
        return here if there is None else min(here, there)

    def remote_ttft(self, request: RouteRequest, worker: WorkerView) -> Seconds | None:
        """Predicted time to first token with remote prefill; None: impossible or unknown."""
        if self.elsewhere is None or not worker.decode:
            return None
        return self.elsewhere.ttft(request.prompt_tokens, self.cached_tokens(request, worker))

    def goes_elsewhere(self, request: RouteRequest, worker: WorkerView) -> bool:
        """True if a prefill worker is predicted to compute the prompt."""
        there = self.remote_ttft(request, worker)
        return there is not None and there < self._here(request, worker)

    def _here(self, request: RouteRequest, worker: WorkerView) -> Seconds:
        wait, plan = worker.wait(self.now), self.onboarding.get(worker.node)
        step = self.model.step(worker.decodes + 1, worker.kv_tokens) if worker.decodes else 0.0
        if plan is not None:
            return max(plan.ttft(wait), wait + worker.speed * step)
        cached = self.cached_tokens(request, worker)
        work = self.model.prefill(request.prompt_tokens, cached)
        return wait + worker.speed * max(work, step)


Policy = Callable[[RouteRequest, RoutingState, Random], WorkerView]

Terms = Mapping[str, float]


@runtime_checkable
class Explains(Protocol):
    """A policy that can show the terms of its decision."""

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The weighed terms by name, for each worker of the snapshot; `cost` is what was
        compared.
        """
        ...


_node = attrgetter("node")


def after(workers: Sequence[WorkerView], last: NodeId) -> WorkerView:
    """The next of `workers` (by rising node id) in rotation. `last` may be absent: members that
    come and go do not disturb the rotation.
    """
    index = bisect_right(workers, last, key=_node)
    return workers[index if index < len(workers) else 0]
