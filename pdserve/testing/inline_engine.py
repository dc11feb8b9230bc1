"""Runs an engine core by hand in the caller's thread: no socket, no event loop, any clock.

For tests of schedules and executors; a simulation drives a core in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.messages.engine import Abort, CoreFailed, KvEvents, Rejected, StepOutput, Submit
from pdserve.messages.engine_errors import error_of
from pdserve.testing.output_checker import OutputChecker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kit import Core
    from pdserve.errors import PdserveError
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import GenerateRequest

__all__ = ["InlineEngine"]

_STEP_LIMIT = 100_000


class InlineEngine:
    """A loaded core with a ledger per submission. Use as a context manager, or `close` it."""

    def __init__(self, core: Core, spec: EngineSpec) -> None:
        self.core = core
        self.stages: list[str] = []
        """What loading reported."""
        self.capabilities = core.load(spec, lambda progress: self.stages.append(progress.stage))
        self.ledgers: dict[int, OutputChecker] = {}
        self.kv_events: list[KvEvent] = []
        self.failure: PdserveError | None = None
        self.steps = 0

    @classmethod
    def of(cls, executor: Executor, spec: EngineSpec, clock: Clock | None = None) -> InlineEngine:
        """An `EngineCore` around `executor`, under a manual clock unless another is given."""
        return cls(EngineCore(executor, clock or ManualClock()), spec)

    @property
    def pool(self) -> BlockPool:
        """Of a core with pdserve's scheduler."""
        assert isinstance(self.core, EngineCore)
        return self.core.pool

    def submit(self, request: GenerateRequest) -> OutputChecker:
        """Post a request; its ledger fills as steps are made."""
        handle = len(self.ledgers) + 1
        ledger = self.ledgers[handle] = OutputChecker(request)
        self.core.handle(Submit(handle=handle, request=request))
        return ledger

    def abort(self, ledger: OutputChecker) -> None:
        """Drop a submission, ended or not."""
        ledger.aborted = True
        handle = next(h for h, known in self.ledgers.items() if known is ledger)
        self.core.handle(Abort(handle=handle))

    def step(self) -> list[Event]:
        """One step; books what it says."""
        self.steps += 1
        events = self.core.step()
        for event in events:
            self._book(event)
        return events

    def _book(self, event: Event) -> None:
        match event:
            case StepOutput():
                for delta in event.deltas:
                    self.ledgers[delta.handle].take(delta)
            case Rejected() if event.handle in self.ledgers:
                self.ledgers[event.handle].fail(error_of(event))
            case KvEvents():
                self.kv_events += event.events
            case CoreFailed():
                self.failure = error_of(event)

    def run(self) -> None:
        """Step until there is nothing to do. AssertionError if that takes unreasonably long."""
        until = self.steps + _STEP_LIMIT
        while self.core.has_work:
            self.step()
            assert self.failure is None, f"the core failed: {self.failure}"
            assert self.steps < until, "the core makes no progress"

    def generate(self, requests: Iterable[GenerateRequest]) -> list[list[list[int]]]:
        """Run requests together; per request and choice, the output tokens."""
        ledgers = [self.submit(request) for request in requests]
        self.run()
        for ledger in ledgers:
            assert ledger.error is None, ledger.error
            assert ledger.done
        return [ledger.tokens for ledger in ledgers]

    def close(self) -> int:
        """End the core; returns blocks that it could not account for."""
        return self.core.close()

    def __enter__(self) -> InlineEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        leaked = self.close()
        assert leaked == 0 or exc_info[0] is not None, f"{leaked} blocks leaked"
