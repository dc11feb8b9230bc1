"""Runs an engine core in the caller's thread, step by step: no socket, no event loop, any clock.

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
    """A loaded core with an `OutputChecker` for each submission. Use as a context manager, or
    `close` it."""

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
        """An `EngineCore` around `executor`, with a manual clock unless another is given."""
        return cls(EngineCore(executor, clock or ManualClock()), spec)

    @property
    def pool(self) -> BlockPool:
        """The block pool of a core with pdserve's scheduler."""
        assert isinstance(self.core, EngineCore)
        return self.core.pool

    def submit(self, request: GenerateRequest) -> OutputChecker:
        """Submit a request; its checker fills as steps run."""
        handle = len(self.ledgers) + 1
        ledger = self.ledgers[handle] = OutputChecker(request)
        self.core.handle(Submit(handle=handle, request=request))
        return ledger

    def abort(self, ledger: OutputChecker) -> None:
        """Abort a submission, ended or not."""
        ledger.aborted = True
        handle = next(h for h, known in reversed(self.ledgers.items()) if known is ledger)
        self.core.handle(Abort(handle=handle))

    def step(self) -> list[Event]:
        """Run one step and record its events."""
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
        """Step until nothing is left to do. Errors: AssertionError after unreasonably many
        steps."""
        until = self.steps + _STEP_LIMIT
        while self.core.has_work:
            self.step()
            assert self.failure is None, f"the core failed: {self.failure}"
            assert self.steps < until, "the core makes no progress"

    def generate(self, requests: Iterable[GenerateRequest]) -> list[list[list[int]]]:
        """Run requests together; returns the output tokens by request and choice."""
        ledgers = [self.submit(request) for request in requests]
        self.run()
        for ledger in ledgers:
            assert ledger.error is None, ledger.error
            assert ledger.done
        return [ledger.tokens for ledger in ledgers]

    def close(self) -> int:
        """Close the core; returns the number of leaked blocks."""
        return self.core.close()

    def __enter__(self) -> InlineEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        leaked = self.close()
        assert leaked == 0 or exc_info[0] is not None, f"{leaked} blocks leaked"
