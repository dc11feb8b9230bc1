"""A sim core under a clock of its own: things are said to it at given times, and what it says is
noted with the time.

It is what a host is to a core, and a simulated node; it has no opinion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.clock import ManualClock
from pdserve.messages.engine import (
    Abort,
    EngineSpec,
    EngineStats,
    KvEvents,
    Rejected,
    Stats,
    StepOutput,
    Submit,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.output_checker import OutputChecker
from pdserve.token_ids import token_ids
from pdserve_engines.sim import SimExecutor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.messages.engine import Command, Event
    from pdserve.messages.kv_events import KvEvent

SECRET = bytes(range(32))


def spec(**changes: Any) -> EngineSpec:
    """A small worker; unknown names are engine options."""
    fields = EngineSpec.__struct_fields__
    options = {name: changes.pop(name) for name in list(changes) if name not in fields}
    defaults: dict[str, Any] = {
        "engine": "sim",
        "model": "",
        "block_size": 4,
        "max_batch_tokens": 32,
        "max_sequences": 8,
        "max_model_len": 96,
        "hash_secret": SECRET,
    }
    texts = {"vocab": "97", "blocks": "400"} | {name: str(v) for name, v in options.items()}
    return EngineSpec(**(defaults | changes), options=texts)


def request(prompt: Iterable[int] = (5, 6, 7), **changes: Any) -> GenerateRequest:
    """A greedy one of 8 tokens; keyword arguments go to it or to its sampling parameters."""
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(**(defaults | sampling)),
        **changes,
    )


@dataclass
class Story:
    """Everything a core has said, with times."""

    ledgers: dict[int, OutputChecker] = field(default_factory=dict)
    ended: dict[tuple[int, int], float] = field(default_factory=dict)
    """(handle, choice) -> when its end was said."""
    rejected: dict[int, tuple[float, str, str]] = field(default_factory=dict)
    kv: list[KvEvent] = field(default_factory=list)
    stats: list[tuple[float, EngineStats]] = field(default_factory=list)
    calls: int = 0


class Driver:
    """Owns core and clock. Use as a context manager."""

    def __init__(self, spec: EngineSpec) -> None:
        self.clock = ManualClock()
        self.executor = SimExecutor()
        self.core = self.executor.make_core(self.clock)
        self.capabilities = self.core.load(spec, lambda progress: None)
        self.story = Story()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        leaked = self.core.close()
        assert leaked == 0 or exc_info[0] is not None, f"{leaked} blocks leaked"

    # ------------------------------------------------------------------ saying things

    def submit(self, wanted: GenerateRequest) -> int:
        handle = len(self.story.ledgers) + 1
        self.story.ledgers[handle] = OutputChecker(wanted)
        self.tell(Submit(handle=handle, request=wanted))
        return handle

    def abort(self, handle: int) -> None:
        self.story.ledgers[handle].aborted = True
        self.tell(Abort(handle=handle))

    def tell(self, command: Command) -> None:
        self.core.handle(command)
        self.settle()

    # ------------------------------------------------------------------ time

    def settle(self) -> None:
        """Step as long as there is something to do at this moment."""
        while self.core.has_work:
            self.step()

    def step(self) -> list[Event]:
        self.story.calls += 1
        assert self.story.calls < 100_000, "no progress"
        events = self.core.step()
        for event in events:
            self._note(event)
        return events

    def run_until(self, time: float) -> None:
        """Let everything happen that is due before `time`, and be there then."""
        while (due := self.core.wake_at()) is not None and due < time:
            self.clock.advance(max(0.0, due - self.clock.now()))
            self._reach(due)
            self.step()
            self.settle()
        self._reach(time)

    def _reach(self, time: float) -> None:
        """Exactly: adding a difference need not give the sum."""
        self.clock._now = max(time, self.clock._now)

    def run(self) -> Story:
        """To the end."""
        while (due := self.core.wake_at()) is not None:
            self._reach(due)
            self.step()
            self.settle()
        return self.story

    # ------------------------------------------------------------------ what it says

    def _note(self, event: Event) -> None:
        now, story = self.clock.now(), self.story
        match event:
            case StepOutput():
                for delta in event.deltas:
                    story.ledgers[delta.handle].take(delta)
                    if delta.finish is not None:
                        story.ended[(delta.handle, delta.choice)] = now
            case Rejected():
                story.rejected[event.handle] = (now, event.kind, event.message)
            case KvEvents():
                story.kv += event.events
            case Stats():
                story.stats.append((now, event.stats))
            case _:
                raise AssertionError(event)
