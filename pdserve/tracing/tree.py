"""Makes the trace of a request from its recorded phases. Pure.

The root is the HTTP request at the frontend. Below it are tokenisation, routing decisions, attempts
at workers, and moves between them; an attempt has the worker's queue, prefill and decode. A worker
reports durations only, so its times are placed between the moment the request left for it and its
first token. All spans lie within their parents by construction: times are clamped into the parent.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.ids import Seconds
from pdserve.messages.request import MAX_WORKER_PHASES
from pdserve.messages.trace import Span, SpanEvent, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.messages.request import WorkerPhase
    from pdserve.messages.tiers import CachedSource
    from pdserve.messages.trace import AttributeValue
    from pdserve.tracing.phases import (
        AttemptPhase,
        MovePhase,
        PromptPhases,
        RequestPhases,
        RoutePhase,
    )

__all__ = ["MAX_ATTRIBUTE", "MOST_SPANS", "TraceRoot", "build_trace"]

MAX_ATTRIBUTE: Final = 256
"""Most characters of an attribute's text."""
MOST_SPANS: Final = 1024
"""Most spans of a trace, which take a millisecond to build; later ones are counted. Sixteen
prompts, each prefilled in many steps, have about 600."""

_HANDOFF: Final = "handoff_"
_PARTS: Final = {
    "chunk": "pdserve.prefill.chunk",
    "preempted": "pdserve.preempted",
    **{
        f"{_HANDOFF}{name}": f"pdserve.handoff.{name}"
        for name in ("queue", "open", "fill", "activate")
    },
}
"""Names of spans by the names of a worker's phases."""
_MOST_PARTS: Final = 2 * MAX_WORKER_PHASES
Attributes = dict[str, "AttributeValue"]


class TraceRoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says of the request as a whole."""

    trace_id: bytes = b""
    root_id: int = 1
    """Id of the root span, from 1 to 2**63; its children have the ids that follow."""
    began: int = 0
    """Unix time of the arrival in nanoseconds."""
    end: Seconds
    """When the request was over, in the time of its phases."""
    request_id: str
    model: str = ""
    name: str
    """The root span's name, such as `POST /v1/chat/completions`."""
    attributes: Attributes = {}
    """Texts are of at most `MAX_ATTRIBUTE` characters."""
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
    """Builds the spans of one trace, parents first. Attributes are written out with their whole
    names: a trace is built on the event loop that serves tokens."""

    def __init__(self, zero: Seconds, root: TraceRoot) -> None:
        self._zero = zero
        self._root = root
        self._next_id = root.root_id
        self._left_out = 0
        """Spans for which there was no room; those below them are not counted."""
        self.spans: list[Span] = []

    def request(self, phases: RequestPhases) -> None:
        root, context = self._root, phases.context
        attributes = dict(root.attributes)
        end = max(root.end - self._zero, 0.0)
        whole = Span(
            span_id=self._new_id(),
            parent_id=b"" if context is None else context.span_id,
            name=root.name,
            start=0.0,
            end=end,
            kind="server",
            attributes=attributes,
            events=self._events(phases, end),
            error=_clip(root.error),
        )
        self.spans.append(whole)
        if phases.planning:
            planned = phases.planned or root.end
            about: Attributes = {"pdserve.prompt_tokens": phases.prompt_tokens}
            self._child(whole, "pdserve.tokenize", phases.planning, planned, about)
        several = len(phases.prompts) > 1
        for index, prompt in enumerate(phases.prompts):
            if self._full:
                self._left_out += several + _steps(prompt)
            else:
                self._prompt(self._around(whole, prompt, index) if several else whole, prompt)
        if left_out := phases.left_out + self._left_out:
            attributes["pdserve.left_out"] = left_out

    def _events(self, phases: RequestPhases, end: Seconds) -> tuple[SpanEvent, ...]:
        happened = [
            (at, name)
            for at, name in (
                (phases.body_read, "body_read"),
                (phases.first_token, "first_token"),
                (phases.stop_string, "stop_string"),
                (phases.client_slow, "client_slow"),
                (self._root.end if phases.error_type == "DeadlineExceeded" else 0.0, "deadline"),
            )
            if at
        ]
        happened.sort()
        zero = self._zero
        return tuple([SpanEvent(name, min(max(at - zero, 0.0), end)) for at, name in happened])

    def _around(self, whole: Span, prompt: PromptPhases, index: int) -> Span:
        """The span of one of several prompts."""
        steps = [(step.start, step.end) for step in prompt.routes]
        steps += [(attempt.start, attempt.end) for attempt in prompt.attempts]
        start = min([step[0] for step in steps], default=self._zero)
        end = max([step[1] for step in steps], default=start)
        return self._child(whole, "pdserve.prompt", start, end, {"pdserve.index": index})

    def _prompt(self, parent: Span, prompt: PromptPhases) -> None:
        for route in prompt.routes:
            self._route(parent, route)
        for attempt in prompt.attempts:
            if self._full:
                self._left_out += 1
            else:
                self._attempt(parent, attempt)
        for move in prompt.moves:
            self._move(parent, move)

    def _route(self, parent: Span, route: RoutePhase) -> None:
        about: Attributes = {
            "pdserve.router": route.router[:MAX_ATTRIBUTE],
            "pdserve.reason": route.why,
        }
        decision = route.decision
        if decision is not None:
            about["pdserve.policy"] = decision.policy[:MAX_ATTRIBUTE]
            about["pdserve.overlap_tokens"] = route.overlap_tokens
            about["pdserve.held"] = decision.held
            if decision.predicted_ttft is not None:
                about["pdserve.predicted_ttft"] = decision.predicted_ttft
            if decision.candidates:
                about["pdserve.candidates"] = decision.candidates
                about["pdserve.waiting"] = decision.waiting
                about["pdserve.sequences"] = decision.sequences
            if decision.kv_sources:
                named = ", ".join(f"{one.node}: {one.blocks}" for one in decision.kv_sources)
                about["pdserve.kv_sources"] = named[:MAX_ATTRIBUTE]
        self._child(parent, "pdserve.route", route.start, route.end, about, route.error)

    def _attempt(self, parent: Span, attempt: AttemptPhase) -> None:
        end = attempt.end if attempt.how else self._root.end
        about: Attributes = {
            "pdserve.worker": attempt.worker[:MAX_ATTRIBUTE],
            "pdserve.life": attempt.epoch,
            "pdserve.number": attempt.number,
            "pdserve.reason": attempt.why,
            "pdserve.end": attempt.how or "open",
        }
        if attempt.accepted:
            about["pdserve.accepted_after"] = max(0.0, attempt.accepted - attempt.sent)
        span = self._child(parent, "pdserve.attempt", attempt.start, end, about, attempt.error)
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
            remote = False
            if phases:
                handoff = [phase.start for phase in phases if phase.name.startswith(_HANDOFF)]
                remote = bool(handoff)
                queue = min(handoff, default=queue)
                own = max(own, *[phase.end for phase in phases])
            arrived = _arrival(attempt.sent, first, own)
            begun = min(arrived + queue, first)
            self._child(span, "pdserve.queue", arrived, begun, {})
            done = first if remote else min(arrived + own, first)
            about = _prefill_attributes(attempt)
            prefill = self._child(span, "pdserve.prefill", begun, done, about)
            if phases:
                self._parts(prefill, phases, arrived)
        decode = self._child(span, "pdserve.decode", first, end, _decode_attributes(attempt, end))
        if finish is not None and finish.phases:
            self._parts(decode, finish.phases, arrived)

    def _parts(self, parent: Span, phases: tuple[WorkerPhase, ...], arrived: Seconds) -> None:
        """What the worker tells of itself, in its own time since the request's arrival there."""
        for phase in phases[:_MOST_PARTS]:
            about: Attributes = {}
            if phase.tokens:
                about["pdserve.tokens"] = phase.tokens
            if phase.node:
                about["pdserve.node"] = phase.node[:MAX_ATTRIBUTE]
            if phase.backend:
                about["pdserve.backend"] = phase.backend[:MAX_ATTRIBUTE]
            if phase.attempt:
                about["pdserve.attempt"] = phase.attempt
            name = _PARTS.get(phase.name) or f"pdserve.worker.{phase.name[:MAX_ATTRIBUTE]}"
            self._child(parent, name, arrived + phase.start, arrived + phase.end, about)

    def _move(self, parent: Span, move: MovePhase) -> None:
        about: Attributes = {
            "pdserve.from": move.source[:MAX_ATTRIBUTE],
            "pdserve.to": move.target[:MAX_ATTRIBUTE],
            "pdserve.gap": max(0.0, move.end - move.start),
            "pdserve.reason": move.reason,
            "pdserve.outcome": move.outcome,
        }
        self._child(parent, "pdserve.move", move.start, move.end, about)

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
        """A span between two times of the phases' clock, as far as they lie in its parent. If there
        is no room for it, returns its parent in its place."""
        if self._full:
            self._left_out += 1
            return parent
        zero = self._zero
        start = _within(start - zero, parent.start, parent.end)
        span = Span(
            span_id=self._new_id(),
            parent_id=parent.span_id,
            name=name,
            start=start,
            end=_within(end - zero, start, parent.end),
            attributes=attributes,
            error=_clip(error) if error else "",
        )
        self.spans.append(span)
        return span

    @property
    def _full(self) -> bool:
        return len(self.spans) >= MOST_SPANS

    def _new_id(self) -> bytes:
        number = self._next_id
        self._next_id = number + 1
        return number.to_bytes(8, "big")


def _steps(prompt: PromptPhases) -> int:
    """Spans of a prompt, without those below its attempts."""
    return len(prompt.routes) + len(prompt.attempts) + len(prompt.moves)


def _within(at: Seconds, start: Seconds, end: Seconds) -> Seconds:
    """The time, or the nearest one between the other two."""
    return start if at < start else end if at > end else at


def _arrival(sent: Seconds, first: Seconds, own: Seconds) -> Seconds:
    """When the request arrived at the worker, by the frontend's clock: the time that the worker
    does not account for was spent on the way, half of it on the way there."""
    return min(sent + max(0.0, first - sent - own) / 2, first)


def _prefill_attributes(attempt: AttemptPhase) -> Attributes:
    started, finish = attempt.started, attempt.finish
    about: Attributes = {}
    cached = 0
    if started is not None:
        about["pdserve.cached_tokens"] = cached = started.cached_tokens
        if started.prefill:
            about["pdserve.where"] = started.prefill[:MAX_ATTRIBUTE]
        if started.received_tokens:
            about["pdserve.received_tokens"] = started.received_tokens
        about |= _source_attributes("cached", started.sources)
        if started.prefill_cached:
            about["pdserve.prefill_cached_tokens"] = started.prefill_cached
            about |= _source_attributes("prefill_cached", started.prefill_sources)
    elif finish is not None:
        about["pdserve.cached_tokens"] = cached = finish.cached_tokens
    if finish is not None and finish.prompt_tokens:
        about["pdserve.computed_tokens"] = max(0, finish.prompt_tokens - cached)
    return about


def _source_attributes(what: str, sources: Iterable[CachedSource]) -> Attributes:
    """Cached tokens that came from below the device or from other workers. `what`: the first part
    of the names."""
    tokens = Counter[str]()
    about: Attributes = {}
    for one in sources:
        tokens[f"pdserve.{what}_tokens.{one.source}"] += one.tokens
        if one.node:
            about[f"pdserve.{what}_from"] = one.node[:MAX_ATTRIBUTE]
    return about | tokens


def _decode_attributes(attempt: AttemptPhase, end: Seconds) -> Attributes:
    finish = attempt.finish
    if finish is None:
        return {}
    tokens = max(0, finish.completion_tokens - attempt.tokens_before)
    about: Attributes = {"pdserve.tokens": tokens, "pdserve.preemptions": attempt.preemptions}
    if tokens > 1:
        about["pdserve.itl_mean"] = max(0.0, end - attempt.first) / (tokens - 1)
    return about


def _clip(text: str) -> str:
    return text if len(text) <= MAX_ATTRIBUTE else f"{text[: MAX_ATTRIBUTE - 1]}…"
