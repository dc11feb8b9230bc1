"""Makes the trace of a request from its recorded phases. Pure.

The root is the HTTP request at the frontend. Below it are tokenisation, routing decisions, attempts
at workers, and moves between them; an attempt has the worker's queue, prefill and decode. A worker
reports durations only, so its times are placed between the moment the request left for it and its
first token. All spans lie within their parents by construction: times are clamped into the parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.ids import Seconds
from pdserve.messages.request import MAX_WORKER_PHASES
from pdserve.messages.trace import Span, SpanEvent, Trace

if TYPE_CHECKING:
    from pdserve.messages.request import WorkerPhase
    from pdserve.messages.trace import AttributeValue, SpanKind
    from pdserve.tracing.phases import (
        AttemptPhase,
        MovePhase,
        PromptPhases,
        RequestPhases,
        RoutePhase,
    )

__all__ = ["MAX_ATTRIBUTE", "TraceRoot", "build_trace"]

MAX_ATTRIBUTE: Final = 256
"""Most characters of an attribute's text."""

_NAMESPACE: Final = "pdserve."
_HANDOFF: Final = "handoff_"
_PARTS: Final = {
    "chunk": "prefill.chunk",
    "preempted": "preempted",
    **{f"{_HANDOFF}{name}": f"handoff.{name}" for name in ("queue", "open", "fill", "activate")},
}
"""Names of spans by the names of a worker's phases."""
_MOST_PARTS: Final = 2 * MAX_WORKER_PHASES
_IDS: Final = 1 << 64

Attributes = dict[str, "AttributeValue"]


class TraceRoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says of the request as a whole."""

    trace_id: bytes = b""
    root_id: int = 0
    """Id of the root span, 64 bits; its children have the ids that follow."""
    began: int = 0
    """Unix time of the arrival in nanoseconds."""
    end: Seconds
    """When the request was over, in the time of its phases."""
    request_id: str
    model: str = ""
    name: str
    """The root span's name, such as `POST /v1/chat/completions`."""
    attributes: Attributes = {}
    error: str = ""
    """Why the request failed, if the server is to blame."""


def build_trace(phases: RequestPhases, root: TraceRoot, kept: tuple[str, ...]) -> Trace:
    """The trace of a request that is over."""
    tree = _Tree(phases.arrival, root)
    tree.request(phases)
    context = phases.context
    return Trace(
        trace_id=root.trace_id,
        tracestate="" if context is None else context.tracestate,
        began=root.began,
        request_id=_clip(root.request_id),
        model=_clip(root.model),
        kept=kept,
        spans=tuple(tree.spans),
    )


class _Tree:
    """Builds the spans of one trace, parents first."""

    def __init__(self, zero: Seconds, root: TraceRoot) -> None:
        self._zero = zero
        self._root = root
        self._next_id = root.root_id
        self.spans: list[Span] = []

    def request(self, phases: RequestPhases) -> None:
        root, context = self._root, phases.context
        attributes = {name: _bounded(value) for name, value in root.attributes.items()}
        if phases.prompts_left_out:
            attributes["pdserve.prompts_left_out"] = phases.prompts_left_out
        end = max(root.end - self._zero, 0.0)
        whole = self._add(
            None,
            root.name,
            0.0,
            end,
            attributes,
            error=root.error,
            kind="server",
            events=self._events(phases, end),
            parent_id=b"" if context is None else context.span_id,
        )
        if phases.planning:
            planned = phases.planned or root.end
            about: Attributes = {"prompt_tokens": phases.prompt_tokens}
            self._child(whole, "tokenize", phases.planning, planned, about)
        several = len(phases.prompts) > 1
        for index, prompt in enumerate(phases.prompts):
            self._prompt(self._around(whole, prompt, index) if several else whole, prompt)

    def _events(self, phases: RequestPhases, end: Seconds) -> tuple[SpanEvent, ...]:
        happened = (
            ("body_read", phases.body_read),
            ("first_token", phases.first_token),
            ("stop_string", phases.stop_string),
            ("client_slow", phases.client_slow),
            ("deadline", self._root.end if phases.error_type == "DeadlineExceeded" else 0.0),
        )
        events = [SpanEvent(name, self._within(at, 0.0, end)) for name, at in happened if at]
        events.sort(key=lambda event: event.at)
        return tuple(events)

    def _around(self, whole: Span, prompt: PromptPhases, index: int) -> Span:
        """The span of one of several prompts."""
        steps = [(step.start, step.end) for step in prompt.routes]
        steps += [(attempt.start, attempt.end) for attempt in prompt.attempts]
        start = min([step[0] for step in steps], default=self._zero)
        end = max([step[1] for step in steps], default=start)
        return self._child(whole, "prompt", start, end, {"index": index})

    def _prompt(self, parent: Span, prompt: PromptPhases) -> None:
        for route in prompt.routes:
            self._route(parent, route)
        for attempt in prompt.attempts:
            self._attempt(parent, attempt)
        for move in prompt.moves:
            self._move(parent, move)

    def _route(self, parent: Span, route: RoutePhase) -> None:
        about: Attributes = {"router": route.router, "reason": route.why}
        decision = route.decision
        if decision is not None:
            about["policy"] = decision.policy
            about["overlap_tokens"] = route.overlap_tokens
            about["held"] = decision.held
            if decision.predicted_ttft is not None:
                about["predicted_ttft"] = decision.predicted_ttft
        self._child(parent, "route", route.start, route.end, about, error=route.error)

    def _attempt(self, parent: Span, attempt: AttemptPhase) -> None:
        about: Attributes = {
            "worker": attempt.worker,
            "life": attempt.epoch,
            "number": attempt.number,
            "reason": attempt.why,
            "end": attempt.how or "open",
        }
        end = attempt.end if attempt.how else self._root.end
        if attempt.accepted:
            about["accepted_after"] = max(0.0, attempt.accepted - attempt.sent)
        span = self._child(parent, "attempt", attempt.start, end, about, error=attempt.error)
        if attempt.first:
            self._work(span, attempt, end)

    def _work(self, span: Span, attempt: AttemptPhase, end: Seconds) -> None:
        """The worker's part of an attempt that brought a token."""
        started, finish, first = attempt.started, attempt.finish, attempt.first
        known = started or finish
        arrived = attempt.sent
        if known is not None:
            queue, own = known.queue_seconds, known.queue_seconds + known.prefill_seconds
            phases = () if started is None else started.phases
            handoff = [phase.start for phase in phases if phase.name.startswith(_HANDOFF)]
            if handoff:
                queue = min(handoff)
            arrived = _arrival(attempt.sent, first, max([own, *(phase.end for phase in phases)]))
            begun = min(arrived + queue, first)
            self._child(span, "queue", arrived, begun, {})
            done = first if handoff else min(arrived + own, first)
            prefill = self._child(span, "prefill", begun, done, _prefill_attributes(attempt))
            self._parts(prefill, phases, arrived)
        about: Attributes = {}
        if finish is not None:
            tokens = max(0, finish.completion_tokens - attempt.tokens_before)
            about = {"tokens": tokens, "preemptions": attempt.preemptions}
            if tokens > 1:
                about["itl_mean"] = max(0.0, end - first) / (tokens - 1)
        decode = self._child(span, "decode", first, end, about)
        if finish is not None:
            self._parts(decode, finish.phases, arrived)

    def _parts(self, parent: Span, phases: tuple[WorkerPhase, ...], arrived: Seconds) -> None:
        """What the worker tells of itself, in its own time since the request's arrival there."""
        for phase in phases[:_MOST_PARTS]:
            about: Attributes = {
                name: value
                for name, value in (
                    ("tokens", phase.tokens),
                    ("node", phase.node),
                    ("backend", phase.backend),
                    ("attempt", phase.attempt),
                )
                if value
            }
            name = _PARTS.get(phase.name, f"worker.{_clip(phase.name)}")
            self._child(parent, name, arrived + phase.start, arrived + phase.end, about)

    def _move(self, parent: Span, move: MovePhase) -> None:
        about: Attributes = {
            "from": move.source,
            "to": move.target,
            "gap": max(0.0, move.end - move.start),
            "reason": move.reason,
            "outcome": move.outcome,
        }
        self._child(parent, "move", move.start, move.end, about)

    # ------------------------------------------------------------------ spans

    def _child(
        self,
        parent: Span,
        name: str,
        start: Seconds,
        end: Seconds,
        attributes: Attributes,
        error: str = "",
    ) -> Span:
        """A span between two times of the phases' clock."""
        start = self._within(start, parent.start, parent.end)
        end = self._within(end, start, parent.end)
        named = {f"{_NAMESPACE}{key}": _bounded(value) for key, value in attributes.items()}
        return self._add(parent, f"{_NAMESPACE}{name}", start, end, named, error=error)

    def _add(
        self,
        parent: Span | None,
        name: str,
        start: Seconds,
        end: Seconds,
        attributes: Attributes,
        *,
        error: str,
        kind: SpanKind = "internal",
        events: tuple[SpanEvent, ...] = (),
        parent_id: bytes = b"",
    ) -> Span:
        span = Span(
            span_id=self._new_id(),
            parent_id=parent_id if parent is None else parent.span_id,
            name=name,
            start=start,
            end=end,
            kind=kind,
            attributes=attributes,
            events=events,
            error=_clip(error),
        )
        self.spans.append(span)
        return span

    def _new_id(self) -> bytes:
        number = self._next_id % _IDS or 1
        self._next_id = number + 1
        return number.to_bytes(8, "big")

    def _within(self, at: Seconds, start: Seconds, end: Seconds) -> Seconds:
        """A time of the phases' clock as seconds since the arrival, between two of those."""
        return min(max(at - self._zero, start), end)


def _arrival(sent: Seconds, first: Seconds, own: Seconds) -> Seconds:
    """When the request arrived at the worker, by the frontend's clock: the time that the worker
    does not account for was spent on the way, half of it on the way there."""
    return min(sent + max(0.0, first - sent - own) / 2, first)


def _prefill_attributes(attempt: AttemptPhase) -> Attributes:
    started, finish = attempt.started, attempt.finish
    about: Attributes = {}
    if started is not None:
        about["cached_tokens"] = started.cached_tokens
        if started.prefill:
            about["where"] = started.prefill
        if started.received_tokens:
            about["received_tokens"] = started.received_tokens
    elif finish is not None:
        about["cached_tokens"] = finish.cached_tokens
    if finish is not None and finish.prompt_tokens:
        cached = about.get("cached_tokens", 0)
        assert isinstance(cached, int)
        about["computed_tokens"] = max(0, finish.prompt_tokens - cached)
    return about


def _bounded(value: AttributeValue) -> AttributeValue:
    return _clip(value) if isinstance(value, str) else value


def _clip(text: str) -> str:
    return text if len(text) <= MAX_ATTRIBUTE else f"{text[: MAX_ATTRIBUTE - 1]}…"
