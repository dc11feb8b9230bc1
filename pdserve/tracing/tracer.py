"""Starts the records of requests, and makes and passes on the traces that are kept.

One tracer per frontend process. It holds the rules, the two allowances and the watches; the rule
itself is in `keep.py`, the tree in `tree.py`. It knows nothing of HTTP. Time, randomness and wall
time are arguments; wall time is read once for each trace that is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.tracing.context import parse_traceparent
from pdserve.tracing.keep import FOREIGN_RATE, Allowance, tail_reasons
from pdserve.tracing.phases import RequestPhases
from pdserve.tracing.tree import TraceRoot, build_trace
from pdserve.tracing.watches import TraceWatches

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.tracing.keep import RequestFacts
    from pdserve.tracing.rules import TraceRules
    from pdserve.tracing.sink import TraceSink

__all__ = ["Tracer"]


class Tracer:
    """Traces the requests of one frontend."""

    def __init__(
        self,
        rules: TraceRules,
        sink: TraceSink,
        *,
        time: Callable[[], Seconds],
        random: Random,
        wall: Callable[[], int],
        on_kept: Callable[[str], None] = lambda reason: None,
        on_limited: Callable[[str], None] = lambda limit: None,
    ) -> None:
        """Args: `time` is the clock of the requests' phases; `random` draws ids and lots; `wall`
        returns Unix time in nanoseconds; `on_kept` is called with each reason for which a trace is
        kept, `on_limited` with the limit for which one is not: `rate` or `parent`."""
        self.rules = rules
        self.watches = TraceWatches()
        self._sink = sink
        self.time = time
        self._random = random
        self._wall = wall
        self._on_kept = on_kept
        self._on_limited = on_limited
        self._all = Allowance(rules.rate)
        self._foreign = Allowance(FOREIGN_RATE)

    def begin(
        self, traceparent: str | None = None, tracestate: str | None = None
    ) -> RequestPhases | None:
        """The record of a request that arrives now; None if nothing is recorded."""
        rules = self.rules
        if rules.rate <= 0:
            return None
        now = self.time()
        phases = RequestPhases(now, self.time)
        if traceparent is not None:
            phases.context = parse_traceparent(traceparent, tracestate)
        drawn = self._random.random() < rules.sample
        wished = phases.context is not None and phases.context.sampled and self._heeds(now)
        if (drawn or wished) and self._allowed(now):
            phases.kept = ("parent",) * wished + ("head",) * drawn
            phases.traced = True
            phases.trace_id = self._trace_id(phases)
            phases.root_id = self._root_id()
        return phases

    def watch(self, phases: RequestPhases, model: str) -> None:
        """Called once the request's model is known: under a watch its workers are asked, too."""
        if self.watches and self.watches.watching(model, self.time()):
            phases.traced = True
            if not phases.trace_id:
                # So that the log can name the trace while the request runs.
                phases.trace_id, phases.root_id = self._trace_id(phases), self._root_id()

    def end(self, phases: RequestPhases, facts: RequestFacts, model: str) -> bool:
        """Whether the trace of a request that is over is kept; counts it then."""
        kept, tail = phases.kept, tail_reasons(facts)
        if self.watches and self.watches.take(model, self.time()):
            kept += ("watch",)
        if not kept and (not tail or not self._allowed(self.time())):
            return False
        phases.kept = kept = kept + tail
        for reason in kept:
            self._on_kept(reason)
        return True

    def emit(self, phases: RequestPhases, root: TraceRoot) -> None:
        """Builds the trace of a request that is kept, and passes it on. The tracer fills in the
        root's ids and its wall time."""
        began = self._wall() - round(1e9 * max(0.0, self.time() - phases.arrival))
        whole = replace(
            root,
            trace_id=phases.trace_id or self._trace_id(phases),
            root_id=phases.root_id or self._root_id(),
            began=began,
        )
        self._sink.add(build_trace(phases, whole, phases.kept))

    def _heeds(self, now: Seconds) -> bool:
        """Whether a caller's sampled bit counts now."""
        mode = self.rules.parent
        if mode != "limit":
            return mode == "trust"
        if self._foreign.take(now):
            return True
        self._on_limited("parent")
        return False

    def _allowed(self, now: Seconds) -> bool:
        if self._all.take(now):
            return True
        self._on_limited("rate")
        return False

    def _root_id(self) -> int:
        return self._random.getrandbits(63) + 1

    def _trace_id(self, phases: RequestPhases) -> bytes:
        if phases.context is not None:
            return phases.context.trace_id
        return (self._random.getrandbits(128) or 1).to_bytes(16, "big")
