"""Implements the sim engine's core: pdserve's scheduler and pool, with steps that take simulated
time.

A step that is planned at time t is in flight until t plus the time of the timing model. Its results
are then taken in with exactly that time, and the next step begins. `step` never waits: the
`CoreLoop` sleeps until `wake_at`, a simulation sets its clock to it.

Submissions enter the queue at once. Everything else that comes during a flight (aborts, cleared
caches, transferred KV) takes effect at its end, as in a core whose executor is busy. Only control
messages of transports pass at once.

**Many steps as one flight.** With `steps_at_once` above 1, decode steps that nothing can change
(`Scheduler.steady`) are computed together: one delta per sequence with all its tokens, at the end
of the last step. A command that comes meanwhile ends the flight with the step under way, and so do
the next deadline and the next stats report. Tokens, times, counters and the pool are the same as
with single steps.

The `CoreLoop` owns it, like any `Core`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kit import STATS_INTERVAL
from pdserve.engine_core.tiers.step_gate import StepGate
from pdserve.messages.engine import (
    PeerGone,
    PrefillForPeer,
    QueryStats,
    SetNodeLife,
    Submit,
    SubmitRemote,
)
from pdserve_engines.sim.tier_storage import simulated_storage

if TYPE_CHECKING:
    from pdserve.clock import Clock
    from pdserve.engine_core.executor import ModelInfo, StepPlan
    from pdserve.engine_core.kv_transfer.connector import ConnectorEvent, KvConnector
    from pdserve.engine_core.tiers.core_tiers import TierStorage
    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import Command, Event
    from pdserve.messages.tiers import TierSpec
    from pdserve_engines.sim.executor import SimExecutor

__all__ = ["SimCore"]

_LATE: Seconds = 0.1
"""Seconds of delay above which the loop counts as stopped, and all times shift. After a smaller
delay the next step begins when the last one ended, so that the pace is kept although sleeps are not
exact."""


@dataclass(slots=True)
class _Flight:
    """Steps under way."""

    begin: Seconds
    ends: list[Seconds]
    """Time at which each step ends."""
    plan: StepPlan | None
    """None: plain decode steps of all running sequences."""

    @property
    def due(self) -> Seconds:
        return self.ends[-1]


class SimCore(EngineCore):
    """A `Core` in simulated time."""

    def __init__(
        self, executor: SimExecutor, clock: Clock, mover: KvConnector | None = None
    ) -> None:
        super().__init__(executor, clock, mover)
        self._sim = executor
        self._flight: _Flight | None = None
        self._later: list[Command] = []
        """Commands that wait for the end of the flight."""
        self._later_moved: list[ConnectorEvent] = []
        """Connector events that wait for the end of the flight."""

    # ------------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        now = self._clock.now()
        if self._flight is not None and self._flight.due <= now:
            self._land(self._flight)
        if isinstance(command, SetNodeLife | PeerGone):
            super().handle(command)
            return
        if self._flight is None or isinstance(
            command, Submit | SubmitRemote | PrefillForPeer | QueryStats
        ):
            super().handle(command)
        else:
            self._later.append(command)
        if self._flight is not None:
            self._cut(self._flight, now)

    @staticmethod
    def _cut(flight: _Flight, now: Seconds) -> None:
        """End the flight with the step under way at `now`."""
        if len(flight.ends) > 1:
            del flight.ends[bisect_left(flight.ends, now) + 1 :]

    # ------------------------------------------------------------------ tiers

    def _open_storage(self, spec: TierSpec, info: ModelInfo, secret_id: bytes) -> TierStorage:
        """With content on a real clock the tiers are real ones; else they are simulated."""
        if self._sim.options.content and isinstance(self._clock, SystemClock):
            return super()._open_storage(spec, info, secret_id)
        return simulated_storage(spec, info, self._sim, self._clock)

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether `step` has events to report or a step to plan."""
        if self._flight is not None:
            return bool(self._events or self._deltas) or self._moved
        return super().has_work or bool(self._later_moved)

    def wake_at(self) -> Seconds | None:
        """The end of the flight, or else the next deadline of a request."""
        return super().wake_at() if self._flight is None else self._flight.due

    def step(self) -> list[Event]:
        """Take in the steps that have ended and plan the next."""
        begin = self._clock.now()
        if self._moved:
            self._hear(begin)
        flight = self._flight
        if flight is not None and flight.due <= begin:
            self._land(flight)
            if begin - flight.due < _LATE:
                begin = flight.due
        if self._flight is None:
            self._take_later(begin)
            self._expire(begin)
            self._advance_moves(begin)
            self._release()
            self._report(begin)
            if self.scheduler.has_work and not self._broken:
                self._take_off(begin)
        self._say_deltas()
        events, self._events = self._events, []
        return events

    def _hear(self, now: Seconds) -> None:
        """Keep the connector's events for the end of the flight, which they cut short."""
        self._later_moved += self._poll()
        if self._flight is not None and self._later_moved:
            self._cut(self._flight, now)

    def _take_later(self, now: Seconds) -> None:
        events, self._later_moved = self._later_moved, []
        if events:
            self._take_moved(events, now)

    def _take_off(self, begin: Seconds) -> None:
        steps = self._foreseen_steps()
        if steps > 1:
            self._flight = _Flight(begin, self._ends(begin, steps), None)
            return
        plan = self._plan(begin)
        if plan.chunks:
            seconds = self._sim.seconds(plan, self._steps)
            if isinstance(plan.gate, StepGate):
                seconds = plan.gate.seconds(begin, seconds)
            self._flight = _Flight(begin, [begin + seconds], plan)

    def _foreseen_steps(self) -> int:
        """Number of next steps that can be computed in advance."""
        steps = self._sim.options.steps_at_once
        if steps > 1:
            steps = self.scheduler.steady(steps)
        for sequence in self.scheduler.running:
            if steps <= 1:
                break
            steps = len(self._sim.foresee(sequence, steps))
        return steps

    def _ends(self, begin: Seconds, steps: int) -> list[Seconds]:
        """End times of `steps` steps, or fewer if a deadline or a stats report comes first."""
        running = self.scheduler.running
        decodes, kv_tokens = len(running), sum(sequence.num_computed for sequence in running)
        deadline = super().wake_at()
        seconds = self._sim.decode_seconds
        at, ends = begin, []
        for number in range(self._steps, self._steps + steps):
            at += seconds(decodes, kv_tokens, number)
            ends.append(at)
            kv_tokens += decodes
            if at - self._stats_at >= STATS_INTERVAL or (deadline is not None and at >= deadline):
                break
        return ends

    def _land(self, flight: _Flight) -> None:
        self._flight = None
        if flight.plan is None:
            self._book(flight)
        else:
            result = self._execute(flight.plan)
            if result is not None:
                self._take(flight.plan, result, flight.due - flight.begin, flight.due)
        commands, self._later = self._later, []
        for command in commands:
            super().handle(command)

    def _book(self, flight: _Flight) -> None:
        """Take in all tokens of the flight's steps."""
        self._changed = True
        before = flight.begin
        for end in flight.ends:
            self._count(end - before, decodes=True)
            before = end
        steps = len(flight.ends)
        tokens: list[list[TokenId]] = [
            self._sim.foresee(sequence, steps) for sequence in self.scheduler.running
        ]
        self._deltas += self.scheduler.advance(tokens, flight.due)

    # ------------------------------------------------------------------ ending

    def close(self) -> int:
        """Drop the flight and free everything; returns leaked KV blocks."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.plan is not None:
            self.scheduler.fail(flight.plan)
        return super().close()
