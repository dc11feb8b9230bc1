"""Lets a sequence run before all layers of its fetched blocks are on the device.

When all blocks of a fetch have their first layers and the others are being copied, its sequence may
leave early: it returns to the queue, is admitted with the blocks of the fetch, and the step in
which it runs waits before it reads each further group of layers (`StepGate`). The wait has an end.

Until the fetch has ended, its blocks have no hashes and the fetch holds them too. So they are not
shared, not told of, not stored, not evicted. After the step the core takes in what has come
(`settle`): only if that is all of it, the step's result for this sequence counts. Otherwise the
sequence returns to the queue and is computed again; nothing of what it computed is kept.

    WAITING or RUNNING, with `Sequence.early`
        over, whole       its blocks have their hashes; it goes on as any other
        over, not whole   it computes what has not come
        settle, not over  the copies are late: the same, and the fetch ends for itself

Prompts that are prefilled for another worker do not leave early: their blocks are sent at once.

The engine core owns it. It decides; it never waits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.engine_core.scheduler.sequence import SequenceStatus
from pdserve.engine_core.tiers.step_gate import StepGate
from pdserve.observe.logs import about

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import StepPlan
    from pdserve.engine_core.scheduler.scheduler import Scheduler
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.engine_core.tiers.onboarder import BlockFetch, Onboarder
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import LowerTiers
    from pdserve.kv.tiers.planner import PrefillCost
    from pdserve.messages.tiers import TierStats

__all__ = ["EarlyStarts"]

_log = logging.getLogger(__name__)

LONGEST_WAIT: Final[Seconds] = 1.0
"""Most seconds that a step waits for layers: other sequences wait with it."""

SHORTEST_WAIT: Final[Seconds] = 0.02
"""Seconds that a step may wait even if its fetch is late already."""


class EarlyStarts:
    """The sequences of one core that run before all layers of their blocks have come."""

    def __init__(
        self,
        scheduler: Scheduler,
        onboarder: Onboarder,
        lower: LowerTiers,
        cost: PrefillCost,
        clock: Clock,
    ) -> None:
        self.is_sent: Callable[[int], bool] = lambda handle: False
        """Whether the blocks of a submission are sent to another worker while it is computed."""
        self.started = 0
        """Sequences that have left early."""
        self.failed = 0
        """Those of them that had to compute what did not come."""
        self._scheduler = scheduler
        self._onboarder = onboarder
        self._lower = lower
        self._cost = cost
        self._clock = clock

    def add_stats(self, host: TierStats) -> TierStats:
        """The host tier's stats with those of early starts."""
        return replace(host, early_starts=self.started, early_failed=self.failed)

    # ------------------------------------------------------------------ before a step

    def may_leave(self, sequence: Sequence, fetch: BlockFetch) -> bool:
        """Return True if a sequence should begin now, while its last layers are still copied. If
        other sequences run, it begins only once the copies are predicted to end in time: a step
        that waits for them would hold up the others."""
        if self.is_sent(sequence.handle):
            return False
        leaves = not self._scheduler.running or self._copies() <= self._hidden(sequence, fetch)
        self.started += leaves
        return leaves

    def _copies(self) -> Seconds:
        """Predicted seconds until everything is copied."""
        return self._lower.lane_estimates()["h2d"].seconds(0)

    def _hidden(self, sequence: Sequence, fetch: BlockFetch) -> Seconds:
        """Predicted seconds of the sequence's first chunk before its last group of layers."""
        cached = len(fetch.hashes) * self._scheduler.block_size
        length = min(len(sequence.tokens), cached + self._scheduler.prefill_tokens)
        return self._cost.prefill(length, cached) * (fetch.groups - 1) / fetch.groups

    def guard(self, plan: StepPlan, now: Seconds) -> None:
        """Make a step wait for the layers that its sequences lack."""
        fetches = [each.sequence.early for each in plan.chunks if each.sequence.early is not None]
        if not fetches:
            return
        late = max(fetch.began + fetch.plan.deadline for fetch in fetches)
        until = min(max(late, now + SHORTEST_WAIT), now + LONGEST_WAIT)
        needs = [(fetch.number, fetch.groups) for fetch in fetches]
        gate = StepGate(self._lower, needs, until, self._clock)
        plan.gate, plan.gate_at = gate, gate.at

    # ------------------------------------------------------------------ after a step

    def settle(
        self, early: Collection[Sequence], gate: StepGate, take_in: Callable[[], None]
    ) -> set[Sequence]:
        """A step with these sequences, which had left early, has ended; `take_in` takes in what was
        copied. Returns those whose part of the step does not count."""
        self._give_up(early, lambda fetch: fetch.number in gate.late)
        take_in()
        self._give_up(early, lambda fetch: True)
        return {each for each in early if each.status is not SequenceStatus.RUNNING}

    def _give_up(self, early: Collection[Sequence], is_late: Callable[[BlockFetch], bool]) -> None:
        for sequence in early:
            fetch = sequence.early
            if fetch is not None and is_late(fetch):
                self._lower.came_late()
                self._onboarder.give_up(fetch)
                sequence.early = None
                self._fail(sequence, "late")

    def over(self, fetch: BlockFetch, *, whole: bool) -> None:
        """A fetch has ended, and its blocks have their hashes if it was whole; or what it brings is
        of no use."""
        sequence = fetch.asker
        if sequence is None or sequence.early is not fetch:
            return
        sequence.early = None
        sequence.sources = fetch.sources(self._scheduler.block_size)
        if whole:
            self._scheduler.keep_fetched(sequence)
        else:
            self._fail(sequence, "not copied")

    def _fail(self, sequence: Sequence, why: str) -> None:
        self.failed += 1
        _log.warning(
            "layers of a prefix were %s: it is computed instead",
            why,
            extra=about(sequence.request, handle=sequence.handle),
        )
        self._scheduler.recompute(sequence)
