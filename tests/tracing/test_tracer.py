"""A tracer: whose trace is kept, how many, and what is passed on."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.tracing.keep import FOREIGN_RATE, RequestFacts
from pdserve.tracing.rules import ParentMode, TraceRules
from pdserve.tracing.tracer import Tracer
from pdserve.tracing.tree import TraceRoot

if TYPE_CHECKING:
    from pdserve.messages.trace import Trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{PARENT[:-2]}00"
USUAL = RequestFacts(attempts=1)
FAILED = RequestFacts(failed=True)


class Made:
    """A tracer with all that it needs."""

    def __init__(self, *, sample: float = 0.0, rate: float = 50.0, parent: ParentMode = "limit"):
        self.clock = ManualClock()
        self.clock.advance(1000.0)
        self.traces: list[Trace] = []
        self.kept: Counter[str] = Counter()
        self.limited: Counter[str] = Counter()
        self.walls = 0
        self.tracer = Tracer(
            TraceRules(sample=sample, rate=rate, parent=parent),
            self,
            time=self.clock.now,
            random=random.Random(1),
            wall=self.wall,
            on_kept=lambda reason: self.kept.update((reason,)),
            on_limited=lambda limit: self.limited.update((limit,)),
        )

    def add(self, trace: Trace) -> None:
        self.traces.append(trace)

    def wall(self) -> int:
        self.walls += 1
        return 1_700_000_000 * 10**9 + round(1e9 * self.clock.now())

    def request(self, facts: RequestFacts = USUAL, parent: str | None = None) -> bool:
        """One whole request; returns True if its trace was kept."""
        phases = self.tracer.begin(parent)
        if phases is None:
            return False
        self.tracer.watch(phases, "m")
        if not self.tracer.end(phases, facts, "m"):
            return False
        root = TraceRoot(end=self.clock.now(), request_id="r", name="n")
        self.tracer.emit(phases, root)
        return True


def test_the_share_of_requests_that_lots_choose() -> None:
    made = Made(sample=0.1, rate=1e9)
    kept = sum(made.request() for _ in range(5000))
    assert 400 < kept < 600
    assert made.kept == {"head": kept}
    assert len({trace.trace_id for trace in made.traces}) == kept


def test_a_trace_that_is_made_later_begins_when_the_request_did() -> None:
    made = Made(sample=1.0)
    arrived = made.wall()
    phases = made.tracer.begin()
    assert phases is not None
    made.clock.advance(2.0)
    root = TraceRoot(end=made.clock.now(), request_id="r", name="n")
    made.clock.advance(0.5)  # other work of the event loop
    assert made.tracer.end(phases, USUAL, "m")
    made.tracer.emit(phases, root)
    (trace,) = made.traces
    assert trace.began == arrived
    assert trace.spans[0].end == 2.0


def test_what_happened_is_a_reason_too() -> None:
    made = Made()
    assert [made.request(), made.request(FAILED)] == [False, True]
    assert made.traces[0].kept == ("error",)
    both = Made(sample=1.0)
    assert both.request(FAILED)
    assert both.traces[0].kept == ("head", "error")


@pytest.mark.parametrize(
    ("mode", "kept"), [("trust", 50), ("limit", int(FOREIGN_RATE)), ("ignore", 0)]
)
def test_a_flood_of_sampled_bits_is_bounded(mode: ParentMode, kept: int) -> None:
    made = Made(parent=mode)
    assert sum(made.request(parent=PARENT) for _ in range(500)) == kept
    assert sum(made.limited.values()) == (0 if mode == "ignore" else 500 - kept)
    assert made.request(parent=UNSAMPLED) is False


def test_a_bit_that_is_trusted_without_a_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracer, "_heeds", lambda self, now: True)
    with pytest.raises(AssertionError):
        test_a_flood_of_sampled_bits_is_bounded("limit", int(FOREIGN_RATE))


def test_a_flood_of_failures_is_bounded() -> None:
    made = Made(rate=10.0)
    assert sum(made.request(FAILED) for _ in range(100)) == 10
    assert made.limited == {"rate": 90}
    made.clock.advance(0.5)
    assert sum(made.request(FAILED) for _ in range(100)) == 5


def test_what_was_promised_at_the_start_is_kept() -> None:
    made = Made(sample=1.0, rate=1.0)
    first = made.tracer.begin()
    assert first is not None
    assert first.trace_id
    second = made.tracer.begin()
    assert second is not None
    assert not second.trace_id
    assert made.tracer.end(second, FAILED, "m") is False
    assert made.tracer.end(first, USUAL, "m") is True


def test_only_requests_that_are_kept_from_the_start_ask_their_workers() -> None:
    for parent, traced in ((PARENT, True), (UNSAMPLED, False), (None, False)):
        phases = Made().tracer.begin(parent)
        assert phases is not None
        assert phases.traced is traced


def test_a_watch_keeps_and_asks_all_of_its_model() -> None:
    made = Made(rate=1.0)
    made.tracer.watches.begin("m", 60.0, made.clock.now())
    assert all(made.request() for _ in range(20))
    phases = made.tracer.begin()
    assert phases is not None
    made.tracer.watch(phases, "other")
    assert not phases.traced
    made.tracer.watch(phases, "m")
    assert phases.traced
    made.clock.advance(61.0)
    assert made.request() is False


def test_a_rate_of_0_records_nothing() -> None:
    assert Made(sample=1.0, rate=0.0).tracer.begin(PARENT) is None


def test_wall_time_is_read_once_and_only_for_traces() -> None:
    """However the wall clock is set while a request runs, its durations are right."""
    made = Made(sample=1.0)
    phases = made.tracer.begin()
    assert phases is not None
    made.clock.advance(2.5)
    assert made.walls == 0
    assert made.tracer.end(phases, USUAL, "m")
    made.tracer.emit(phases, TraceRoot(end=made.clock.now(), request_id="r", name="n"))
    (trace,) = made.traces
    assert made.walls == 1
    assert trace.began == (1_700_000_000 + 1000) * 10**9
    assert trace.spans[0].end == 2.5
