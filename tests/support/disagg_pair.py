"""Connects a prefill core and a decode core in one process; the test plays their nodes.

`DisaggPair.generate` runs the normal course: admitted, opened, prefilled, activated. Tests of
failures send the commands themselves and choose when the `FakeNet` moves bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.messages.engine import (
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    EngineSpec,
    OpenAttemptBlocks,
    Prefilled,
    PrefillForPeer,
    PrefillSent,
    Rejected,
    SubmitRemote,
    TransferSpec,
)
from pdserve.testing.fake_mover import FakeMover, FakeNet, FreeGuard
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.output_checker import OutputChecker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from random import Random

    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kit import Core
    from pdserve.messages.engine import EngineStats, Event
    from pdserve.messages.request import GenerateRequest

__all__ = ["DisaggPair", "PairedCore", "make_pair"]

_PREFILLS = 1_000_000
"""Handles of prefills begin here, so that they are nobody else's."""


@dataclass
class PairedCore:
    """One of the two cores."""

    engine: InlineEngine
    mover: FakeMover
    guard: FreeGuard
    clock: ManualClock

    @property
    def core(self) -> EngineCore:
        assert isinstance(self.engine.core, EngineCore)
        return self.engine.core

    @property
    def stats(self) -> EngineStats:
        """The core's present stats."""
        return self.core.stats()

    def step(self) -> list[Event]:
        """Run one step, with all checks."""
        events = self.engine.step()
        self.core.pool.check()
        self.guard.check()
        return events

    def sleep(self) -> bool:
        """If nothing can happen now, advance the clock until something can. False: nothing ever
        will."""
        due = self.core.wake_at()
        if not self.core.has_work and due is not None and due > self.clock.now():
            self.clock.advance(due - self.clock.now())
        return self.core.has_work or due is not None


@dataclass
class DisaggPair:
    """Two cores: P prefills, D decodes."""

    net: FakeNet
    p: PairedCore
    d: PairedCore
    lost: list[AttemptLost] = field(default_factory=list)
    sent: list[PrefillSent] = field(default_factory=list)
    handoffs: dict[int, Prefilled] = field(default_factory=dict)
    """Handoffs, by D's handle."""
    admitted: dict[int, int] = field(default_factory=dict)
    """Cached tokens, by D's handle."""
    opened: dict[int, AttemptBlocksOpened] = field(default_factory=dict)
    """The newest ticket, by D's handle."""
    refused: list[Rejected] = field(default_factory=list)
    """Prefills that P refused or gave up."""
    attempts: dict[int, int] = field(default_factory=dict)
    _requests: dict[int, GenerateRequest] = field(default_factory=dict)
    _of: dict[int, tuple[int, int]] = field(default_factory=dict)
    """P's handle to D's handle and attempt."""

    # ------------------------------------------------------------------ what a node says

    def submit(self, request: GenerateRequest) -> tuple[int, OutputChecker]:
        """Submit a request to D; another core will prefill its prompt."""
        engine = self.d.engine
        handle = len(engine.ledgers) + 1
        ledger = engine.ledgers[handle] = OutputChecker(request)
        self._requests[handle] = request
        engine.core.handle(SubmitRemote(handle, request))
        return handle, ledger

    def open(self, handle: int) -> int:
        """Open the next attempt for P; returns its number."""
        attempt = self.attempts[handle] = self.attempts.get(handle, 0) + 1
        self.d.core.handle(OpenAttemptBlocks(handle, attempt, "p", 1))
        return attempt

    def prefill(self, opened: AttemptBlocksOpened) -> int:
        """Submit a prefill to P; returns its handle."""
        handle = _PREFILLS + len(self._of)
        self._of[handle] = (opened.handle, opened.attempt)
        request = self._requests[opened.handle]
        self.p.core.handle(PrefillForPeer(handle, request, opened.ticket, "d", 1))
        return handle

    def activate(self, prefilled: Prefilled) -> None:
        """Pass P's handoff to D."""
        handle, attempt = self._of[prefilled.handle]
        self.d.core.handle(Activate(handle, attempt, prefilled.handoff))

    # ------------------------------------------------------------------ what the cores say

    def step_d(self) -> list[Event]:
        """Step D and record its events."""
        events = self.d.step()
        for event in events:
            match event:
                case Admitted():
                    self.admitted[event.handle] = event.cached_tokens
                case AttemptBlocksOpened():
                    self.opened[event.handle] = event
                case AttemptLost():
                    self.lost.append(event)
        return events

    def step_p(self) -> list[Event]:
        """Step P and record its events."""
        events = self.p.step()
        for event in events:
            match event:
                case Prefilled():
                    self.handoffs[self._of[event.handle][0]] = event
                case PrefillSent():
                    self.sent.append(event)
                case Rejected() if event.handle in self._of:
                    self.refused.append(event)
        return events

    # ------------------------------------------------------------------ the plain course

    def turn(self, rng: Random | None = None) -> None:
        """Step each core, move some bytes, and act on every event."""
        for event in self.step_d():
            match event:
                case Admitted():
                    self.open(event.handle)
                case AttemptBlocksOpened():
                    self.prefill(event)
        self.net.step(rng)
        for event in self.step_p():
            if isinstance(event, Prefilled):
                self.activate(event)

    @property
    def busy(self) -> bool:
        """True if something can happen without a command."""
        return self.d.core.has_work or self.p.core.has_work or bool(self.net.under_way)

    def run(self, rng: Random | None = None) -> None:
        """Take turns until nothing happens any more."""
        for _ in range(100_000):
            if not self.busy and not any([self.d.sleep(), self.p.sleep()]):
                return
            self.turn(rng)
        raise AssertionError("the two make no progress")

    def generate(
        self, requests: Iterable[GenerateRequest], rng: Random | None = None
    ) -> list[OutputChecker]:
        """Run requests together, with all prompts prefilled by P."""
        ledgers = [self.submit(request)[1] for request in requests]
        self.run(rng)
        for ledger in ledgers:
            assert ledger.error is None, ledger.error
            assert ledger.done
        return ledgers

    def close(self) -> None:
        """Close both cores and assert that they hold nothing."""
        for end in (self.d, self.p):
            assert end.engine.close() == 0
            counts = end.core.pool.counts()
            assert counts.used == counts.quarantined == 0


def make_pair(
    executors: Sequence[Executor] | Callable[[], Executor],
    spec: EngineSpec,
    *,
    p: Mapping[str, object] | None = None,
    d: Mapping[str, object] | None = None,
    core: Callable[[Executor, ManualClock, FakeMover], Core] = EngineCore,
) -> DisaggPair:
    """Create two cores for `spec`, each with its own changes."""
    if callable(executors):
        executors = (executors(), executors())
    net = FakeNet()
    if spec.transfer is None:
        spec = msgspec.structs.replace(spec, transfer=TransferSpec())
    ends = [
        _make_end(net, executor, msgspec.structs.replace(spec, **(changes or {})), core)
        for executor, changes in zip(executors, (p, d), strict=True)
    ]
    return DisaggPair(net, ends[0], ends[1])


def _make_end(
    net: FakeNet,
    executor: Executor,
    spec: EngineSpec,
    make: Callable[[Executor, ManualClock, FakeMover], Core],
) -> PairedCore:
    mover, clock = FakeMover(net), ManualClock()
    engine = InlineEngine(make(executor, clock, mover), spec)
    assert isinstance(engine.core, EngineCore)
    return PairedCore(engine, mover, FreeGuard(engine.pool, mover), clock)
