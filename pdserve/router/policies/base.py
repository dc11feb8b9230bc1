"""What a policy is, and what it sees.

A policy is called with a question, a frozen snapshot and a source of randomness, and returns one of
the snapshot's workers. It keeps nothing between calls and asks nobody, so the same inputs give the
same choice, in tests, in simulation and in production. It need not know who may be chosen at all:
only workers that may are in the snapshot. It must cost no more than O(workers), and must not wait.

Write one as `def choose(question, state, random)`; or, if it has options, as a frozen dataclass
whose instances are called so and whose fields are numbers, strings or booleans with defaults: those
are what `--policy-option name=value` sets. Name it `module:attribute`, or register it as an entry
point in the group `pdserve.policies`; `pdserve.testing.policy_conformance` tests it. If it has a
method `terms(question, state)`, `POST /route` shows what it weighed for each worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pdserve.messages.routing import Route
from pdserve.router.predict.model import TimeModel

if TYPE_CHECKING:
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.router.predict.moves import Elsewhere

__all__ = ["Explains", "Policy", "State", "Terms", "WorkerView", "after"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the moment of the decision."""

    node: NodeId
    epoch: Epoch
    sequences: int
    """Running and waiting there by its own report, and placed there since."""
    max_sequences: int
    """It runs so many at once; at least 1."""
    occupancy: float
    """`sequences / max_sequences`; above 1, some wait."""
    placed_tokens: int = 0
    """Prompt tokens of the bookings that no report of the worker contains yet."""
    blocks_total: int = 0
    """0: it has not reported its pool."""
    blocks_used: int = 0
    blocks_cached: int = 0

    prefills: int = 0
    """Bookings whose first token has not come."""
    prefill_tokens: int = 0
    """Their prompt tokens that were not believed to be cached there, each counted in full until its
    first token."""
    work: Seconds = 0.0
    """Predicted time to compute those, as of `as_of`."""
    head: Seconds = 0.0
    """Of `work`, the part of the one that came first: it may have been computed in part since."""
    as_of: Seconds = 0.0
    """When `work` last changed, on the clock of `State.now`."""
    decodes: int = 0
    """Sequences past their first token."""
    kv_tokens: int = 0
    """Tokens of running sequences, by the worker's report and what was placed since."""
    speed: float = 1.0
    """Times that the worker takes longer than the model of all says, learnt; 0.5 is twice as
    fast."""
    ttft: Seconds = 0.0
    """Its mean time to first token, lately; 0: unknown."""
    itl: Seconds = 0.0
    """Its mean time between tokens, lately; 0: unknown."""
    known_blocks: int = 0
    """Blocks that the index knows there."""
    decode: bool = False
    """It may have prompts computed by prefill workers."""
    window_work: Seconds = 0.0
    """Prefill and decode time that was placed there in the last three minutes."""

    def wait(self, now: Seconds) -> Seconds:
        """Predicted time until a prompt placed now is begun: `work` less what has passed since,
        which is taken from the first item only, and not beyond nine tenths of it: who is late
        has still something to do."""
        return max(0.0, self.work - min(max(0.0, now - self.as_of), 0.9 * self.head))


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision rests on."""

    workers: tuple[WorkerView, ...]
    """Whoever may be chosen; at least one; by rising node id."""
    last: NodeId
    """Who was chosen last for this model; need not be among the workers."""
    count: int = 0
    """Decisions that this router has made so far."""
    now: Seconds = 0.0
    overlaps: Mapping[NodeId, int] = field(default_factory=dict)
    """Leading blocks of the question's prompt in each worker's device tier; absent: none. Workers
    that may not be chosen may be in it."""
    lower: Mapping[NodeId, tuple[int, int]] = field(default_factory=dict)
    """Leading blocks when the host tier counts too, and when the disk tier counts besides; absent:
    as in `overlaps`."""
    routed: Mapping[NodeId, int] = field(default_factory=dict)
    """Leading blocks that this router has sent each worker lately, whether or not they are there;
    only for policies with `needs_routed`."""
    routed_blocks: Mapping[NodeId, int] = field(default_factory=dict)
    """Size of that memory, by worker."""
    model: TimeModel = field(default_factory=TimeModel)
    """How long prompts and steps take, learnt; the same for all workers, times their `speed`."""
    elsewhere: Elsewhere | None = None
    """How long prompts take that prefill workers compute, for `decode` workers; None: they compute
    all themselves, or it is unknown."""
    held: int = 0
    """Questions for this model that wait in the router besides this one."""

    def cached_tokens(self, question: Route, worker: WorkerView) -> int:
        """Prompt tokens that need not be computed there; the last one always is."""
        blocks = self.overlaps.get(worker.node, 0)
        return min(blocks * question.block_size, max(0, question.prompt_tokens - 1))

    def ttft(self, question: Route, worker: WorkerView) -> Seconds:
        """Predicted time to first token there: what waits before it, then its own prefill, which
        ends no sooner than the step that it shares with those that decode; or from elsewhere, if
        that is sooner."""
        here = self._here(question, worker)
        there = self.remote_ttft(question, worker)
        return here if there is None else min(here, there)

    def remote_ttft(self, question: Route, worker: WorkerView) -> Seconds | None:
        """The same if a prefill worker computes the prompt; None: that cannot be, or is unknown."""
        if self.elsewhere is None or not worker.decode:
            return None
        return self.elsewhere.ttft(question.prompt_tokens, self.cached_tokens(question, worker))

    def goes_elsewhere(self, question: Route, worker: WorkerView) -> bool:
        """Its prompt is predicted to be computed by a prefill worker."""
        there = self.remote_ttft(question, worker)
        return there is not None and there < self._here(question, worker)

    def _here(self, question: Route, worker: WorkerView) -> Seconds:
        cached = self.cached_tokens(question, worker)
        work = self.model.prefill(question.prompt_tokens, cached)
        step = self.model.step(worker.decodes + 1, worker.kv_tokens) if worker.decodes else 0.0
        return worker.wait(self.now) + worker.speed * max(work, step)


Policy = Callable[[Route, State, Random], WorkerView]

Terms = Mapping[str, float]


@runtime_checkable
class Explains(Protocol):
    """A policy that can say what it weighed."""

    def terms(self, question: Route, state: State) -> Mapping[NodeId, Terms]:
        """Per worker of the snapshot, what was weighed, by name; `cost` is what was compared."""
        ...


_node = attrgetter("node")


def after(workers: Sequence[WorkerView], last: NodeId) -> WorkerView:
    """The next of `workers` (by rising node id) in rotation, whether or not `last` is among them:
    members that come and go do not upset whose turn it is."""
    index = bisect_right(workers, last, key=_node)
    return workers[index if index < len(workers) else 0]
