"""Judges the traces of a world's requests: what each is made of, which are kept, and what is left.

It knows each request from its client's side: which workers were asked, when, and how it ended.
Every record becomes a tree, kept or not, and the tree must agree with that. It then ends the record
as a frontend does, and works the rule out for itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from pdserve.errors import Cancelled
from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
from pdserve.tracing.keep import FOREIGN_RATE, RequestFacts
from pdserve.tracing.phases import MOST
from pdserve.tracing.tree import TraceRoot, build_trace
from tests.support.trace_checks import defects, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.trace import Span, Trace
    from pdserve.tracing.phases import PromptPhases, RequestPhases
    from tests.worlds.load_clients import TrackedRequest
    from tests.worlds.roles import Frontend

__all__ = ["TraceOracle"]

SLO: Final[Seconds] = 1.0
"""Clients of all worlds want their first token within this time."""


class TraceOracle:
    """Judges the traces of one world."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        """Reasons for which traces were kept, and phases that they had."""
        self._kept: dict[tuple[Frontend, str], list[Seconds]] = {}
        """When traces were kept, of all and of those that callers wished for."""

    def judge(self, account: TrackedRequest, end: Seconds) -> Iterator[str]:
        """What is wrong with the trace of a request that ended then."""
        phases, part = account.phases, account.frontend
        if phases is None or part is None:
            return
        (prompt,) = phases.prompts
        last = max([end, *(step[1] for step in _steps(prompt))])
        if account.error is not None and not isinstance(account.error, Cancelled):
            phases.fail(account.error)
        failed = account.error is not None and account.error.http_status >= 500
        root = TraceRoot(
            trace_id=b"t" * 16,
            root_id=1 << 40,
            end=last,
            request_id=account.name,
            model=account.request.model,
            name="request",
            error=phases.error if failed else "",
        )
        trace = build_trace(phases, root, ())
        for span in trace.spans:
            self.seen[span.name] += 1
        for wrong in (*defects(trace), *_clock(account, phases), *_agrees(account, prompt)):
            yield f"the trace of {account.name} ({account.outcome}): {wrong}"
        yield from self._decision(account, phases, part, trace, root)

    def rest(self, part: Frontend) -> Iterator[str]:
        """What is left of a frontend's traces at its end that should not be."""
        ring, queue = part.ring, part.queue
        if len(ring) > part.MOST_TRACES or ring.size > part.MOST_BYTES:
            yield f"{len(ring)} traces are remembered, of {ring.size} bytes"
        waiting = 0
        while (batch := queue.take()) is not None:
            waiting += batch.spans
        if queue.spans or queue.size:
            yield f"{queue.spans} spans of {queue.size} bytes wait in an empty queue"
        if part.emitted != waiting + part.taken + part.dropped:
            yield (
                f"{part.emitted} spans were kept; {part.taken} were exported, {waiting} wait and "
                f"{part.dropped} were dropped"
            )

    def _decision(
        self,
        account: TrackedRequest,
        phases: RequestPhases,
        part: Frontend,
        trace: Trace,
        root: TraceRoot,
    ) -> Iterator[str]:
        early, limited = phases.kept, part.limited.total()
        facts = _facts(account, phases)
        kept = part.tracer.end(phases, facts, account.request.model)
        tail = tuple(_reasons(account, trace))
        wished = phases.context is not None and phases.context.sampled
        if "parent" in early and not wished:
            yield f"{account.name} is kept for its caller, who did not wish it"
        if kept != bool(early or tail) and not (tail and part.limited.total() > limited):
            yield f"{account.name} is {'' if kept else 'not '}kept: {early}, {tail}"
        if not kept:
            return
        if phases.kept != early + tail:
            yield f"{account.name} is kept for {phases.kept}, not for {early + tail}"
        self.seen.update(phases.kept)
        rate = part.tracer.rules.rate
        yield from self._bounded(part, "all", account.began if early else phases.time(), rate)
        if "parent" in early:
            yield from self._bounded(part, "parent", account.began, FOREIGN_RATE)
        part.tracer.emit(phases, root)

    def _bounded(self, part: Frontend, which: str, at: Seconds, rate: float) -> Iterator[str]:
        """No more than the rate, and those of one second at once."""
        times = self._kept.setdefault((part, which), [])
        times.append(at)
        times.sort()
        for number, first in enumerate(times):
            count = len(times) - number
            if count > max(1.0, rate) + rate * (times[-1] - first) + 1e-6:
                yield f"{count} traces were kept in {times[-1] - first:.3f} s ({which}: {rate}/s)"
                return


def _clock(account: TrackedRequest, phases: RequestPhases) -> Iterator[str]:
    """All times are of the clock by which the client knows them, and none is yet to come."""
    now = phases.time()
    if phases.arrival != account.began:
        yield f"it began at {phases.arrival}, not at {account.began}"
    (prompt,) = phases.prompts
    for start, end in _steps(prompt):
        if not account.began <= start <= end <= now:
            yield f"something lasted from {start} to {end}; it began at {account.began}"


def _steps(prompt: PromptPhases) -> Iterator[tuple[Seconds, Seconds]]:
    """Start and end of all that was recorded."""
    for kind in (prompt.routes, prompt.attempts, prompt.moves):
        for step in kind:
            yield step.start, step.end


def _agrees(account: TrackedRequest, prompt: PromptPhases) -> Iterator[str]:
    """Its attempts are those that the client knows of."""
    if len(prompt.attempts) > MOST or len(prompt.routes) > MOST or len(prompt.moves) > MOST:
        yield "its record is not bounded"
    sent = [(attempt.worker, attempt.sent) for attempt in prompt.attempts if attempt.sent]
    placed = [(placed.worker, placed.at) for placed in account.placed]
    if sent != placed[: len(sent)] or (len(sent) < len(placed) and not prompt.attempts_left_out):
        yield f"attempts were sent to {sent}, the client knows of {placed}"
    ends = [attempt.how for attempt in prompt.attempts]
    whole = account.outcome == "completed" and not prompt.attempts_left_out
    if whole and account.tokens and not any(attempt.first for attempt in prompt.attempts):
        yield "it has tokens, and none of its attempts has"
    finished = [attempt for attempt in prompt.attempts if attempt.how == "finished"]
    if whole and account.enough is None and len(finished) != 1:
        yield f"its attempts ended so: {ends}"
    yield from _one_after_another(prompt)
    for route in prompt.routes:
        if route.decision is not None and bool(route.decision.candidates) != prompt.traced:
            yield f"it is traced: {prompt.traced}; its router tells {route.decision}"
    for attempt in prompt.attempts:
        if attempt.started is not None and bool(attempt.started.phases) != prompt.traced:
            yield f"it is traced: {prompt.traced}; its worker tells {attempt.started.phases}"
    begun = [attempt for attempt in prompt.attempts if attempt.first]
    if len(finished) > 1 or finished not in ([], begun[-1:]) or (finished and account.error):
        yield f"an attempt of it has finished: {ends}"
    stream = account.stream
    moved = stream._migrations.completed if isinstance(stream, DispatchedRequest) else 0
    completed = sum(move.outcome == "completed" for move in prompt.moves)
    if completed != moved and not prompt.moves_left_out:
        yield f"{completed} moves are recorded of {moved}"


def _one_after_another(prompt: PromptPhases) -> Iterator[str]:
    """One worker has a request at a time."""
    sent = [attempt for attempt in prompt.attempts if attempt.sent]
    for before, after in itertools.pairwise(sent):
        if before.end > after.sent:
            yield (
                f"worker {after.worker} got it at {after.sent}, while {before.worker} had it until "
                f"{before.end}"
            )


def _facts(account: TrackedRequest, phases: RequestPhases) -> RequestFacts:
    """As `frontend.request_traces` works them out."""
    (prompt,) = phases.prompts
    first = account.first_token
    return RequestFacts(
        failed=account.error is not None and account.error.http_status >= 500,
        ttft=None if first is None else first - account.began,
        slo_ttft=SLO,
        moves=len(prompt.moves),
        preemptions=prompt.preemptions,
        attempts=len(prompt.attempts),
        prefill_failed=prompt.prefill_failed,
    )


def _reasons(account: TrackedRequest, trace: Trace) -> Iterator[str]:
    """The rule, from the trace itself and from what the client knows."""
    root = trace.spans[0]
    attempts = named(trace, "pdserve.attempt")
    if root.error or (account.error is not None and account.error.http_status >= 500):
        yield "error"
    if account.first_token is not None and account.first_token - account.began > SLO:
        yield "slo_ttft"
    if named(trace, "pdserve.move"):
        yield "moved"
    if any(span.attributes.get("pdserve.preemptions") for span in named(trace, "pdserve.decode")):
        yield "preempted"
    if len(attempts) > 1:
        yield "retried"
    if any(_fell_back(span) for span in named(trace, "pdserve.prefill")):
        yield "prefill_failed"


def _fell_back(prefill: Span) -> bool:
    where = str(prefill.attributes.get("pdserve.where", ""))
    by_setting = ("always", "rule", "never", "short_prompt", "predicted_local", "queue_full")
    cannot = ("no_prefill_worker", "no_router", "router_unreachable", "no_worker", "no_way")
    never = ("not_possible", "migrated_choices", "too_long", "embedding", "images", "source")
    source = ("source_gone", "source_unready", "source_misfit", "source_busy", "source_short")
    if not where.startswith("local"):
        return False
    reason = where.rpartition("reason=")[2]
    return reason not in (*by_setting, "mode_change", *cannot, *never, *source)
