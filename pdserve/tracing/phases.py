"""Records what a request goes through while it runs: routing, attempts, moves, in monotonic time.

The frontend fills the record as things happen; a record is a few small objects, so every request
can have one. `tree.py` makes a trace of it once the request is over and its trace is kept. Every
list is bounded: the first entries stay, the others are counted. The clock is given; it decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from pdserve.ids import Seconds
from pdserve.messages.request import Finish, FirstTokenStats
from pdserve.messages.routing import RouteDecision
from pdserve.tracing.context import TraceContext

__all__ = [
    "MOST",
    "MOST_PROMPTS",
    "AttemptPhase",
    "MovePhase",
    "PromptPhases",
    "RequestPhases",
    "RoutePhase",
    "in_words",
]

MOST: Final = 16
"""Most routing decisions, attempts, moves and events that are kept per prompt, of each."""
MOST_PROMPTS: Final = 16
"""Most prompts of a request that are recorded."""
_FAILED_PREFILLS: Final = frozenset(
    {
        *("unclaimed", "deadline", "draining", "no_room", "attempts_failed", "lost", "returned"),
        *("no_time", "congested", "displaced", "too_many", "own_rejoin", "source_failed"),
    }
)
"""Reasons for prefilling a prompt at its decode worker after all (docs/disaggregation.md)."""


class RoutePhase(msgspec.Struct, frozen=True, gc=False):
    """Routers were asked where the prompt goes."""

    start: Seconds
    end: Seconds
    why: str
    """`first`, or why the request needs another worker."""
    router: str = ""
    decision: RouteDecision | None = None
    """None: there was none, see `error`."""
    overlap_tokens: int = 0
    error: str = ""


class AttemptPhase(msgspec.Struct, gc=False):
    """One worker is asked to serve the prompt, from the decision to the worker's last word."""

    number: int
    """From 1, without gaps."""
    worker: str
    epoch: int
    why: str
    start: Seconds
    sent: Seconds = 0.0
    """When the request left for the worker; 0: it did not."""
    accepted: Seconds = 0.0
    """When the worker had taken it; 0: it did not."""
    first: Seconds = 0.0
    """When its first token came; 0: none did."""
    end: Seconds = 0.0
    how: str = ""
    """How it ended, in a word; empty while it has not."""
    error: str = ""
    started: FirstTokenStats | None = None
    finish: Finish | None = None
    """The end of its longest choice that has ended."""
    preemptions: int = 0
    """The most preemptions of one choice."""
    tokens_before: int = 0
    """Tokens of the longest choice that earlier attempts brought."""

    def finished(self, finish: Finish) -> None:
        """Notes the end of one choice."""
        if finish.preemptions > self.preemptions:
            self.preemptions = finish.preemptions
        if self.finish is None or finish.completion_tokens > self.finish.completion_tokens:
            self.finish = finish

    def close(self, now: Seconds, how: str, error: str = "") -> None:
        """Ends it; a second end is ignored."""
        if not self.how:
            self.end, self.how, self.error = now, how, error


class MovePhase(msgspec.Struct, frozen=True, gc=False):
    """The request went from one worker to another."""

    start: Seconds
    """When it left the first worker, or lost it."""
    end: Seconds
    """First token at the other one, or the end of the request."""
    reason: str
    source: str
    target: str
    """Empty: it did not arrive anywhere."""
    outcome: str


class PromptPhases(msgspec.Struct, eq=False):
    """What one prompt of a request goes through. Nothing is added once it is over."""

    time: Callable[[], Seconds]
    traced: bool = False
    """Workers and routers are asked for their own phases."""
    trace_id: bytes = b""
    """As that of the request."""
    over: bool = False
    routes: list[RoutePhase] = []
    attempts: list[AttemptPhase] = []
    moves: list[MovePhase] = []
    routes_left_out: int = 0
    attempts_left_out: int = 0
    moves_left_out: int = 0

    def add_route(self, phase: RoutePhase) -> None:
        if self.over:
            return
        if len(self.routes) < MOST:
            self.routes.append(phase)
        else:
            self.routes_left_out += 1

    def add_attempt(self, phase: AttemptPhase) -> AttemptPhase:
        """Records an attempt that begins; returns it, to be closed."""
        if self.over:
            return phase
        if len(self.attempts) < MOST:
            self.attempts.append(phase)
        else:
            self.attempts_left_out += 1
        return phase

    def add_move(self, phase: MovePhase) -> None:
        if self.over:
            return
        if len(self.moves) < MOST:
            self.moves.append(phase)
        else:
            self.moves_left_out += 1

    @property
    def preemptions(self) -> int:
        """The most preemptions of one choice, at all workers together."""
        found = 0
        for attempt in self.attempts:
            found += attempt.preemptions
        return found

    @property
    def prefill_failed(self) -> bool:
        """True if another worker was to prefill the prompt, and did not."""
        for attempt in self.attempts:
            where = "" if attempt.started is None else attempt.started.prefill
            if where and where.rpartition("reason=")[2] in _FAILED_PREFILLS:
                return True
        return False

    def finished(self, finish: Finish) -> None:
        """Notes the end of one choice at the worker that brings its tokens."""
        if self.attempts_left_out:
            return
        for attempt in reversed(self.attempts):
            if attempt.first:
                attempt.finished(finish)
                return

    def close(self, attempt: AttemptPhase | None, how: str, error: str = "") -> None:
        """Ends the prompt: the attempt that has it ends like that, every other one that is under
        way is cancelled. Idempotent."""
        if self.over:
            return
        self.over = True
        now = self.time()
        if attempt is not None:
            attempt.close(now, how, error)
        for other in self.attempts:
            other.close(now, "cancelled")


class RequestPhases(msgspec.Struct, eq=False):
    """What one request goes through."""

    arrival: Seconds
    time: Callable[[], Seconds]
    context: TraceContext | None = None
    """The caller's trace context; None: it sent none."""
    kept: tuple[str, ...] = ()
    """Why the trace is kept: what was known at the start, at the end all reasons."""
    trace_id: bytes = b""
    """Drawn at the start for a trace that is kept from then on; empty: not drawn yet."""
    root_id: int = 0
    """Id of the first span, drawn with `trace_id`; 0: not drawn yet."""
    traced: bool = False
    """Workers and routers are asked for their own phases."""
    body_read: Seconds = 0.0
    """When the body had arrived; this and all times below: 0 if it did not happen."""
    planning: Seconds = 0.0
    """When the prompt began to be decoded, rendered and tokenised,"""
    planned: Seconds = 0.0
    """and when that was done."""
    prompt_tokens: int = 0
    owner: Any = None
    """What the request's owner needs at its end; not read here."""
    first_token: Seconds = 0.0
    client_slow: Seconds = 0.0
    """When the client was first behind with reading."""
    stop_string: Seconds = 0.0
    """When a stop string ended a choice."""
    error: str = ""
    """Why the request failed, in words."""
    error_type: str = ""
    prompts: list[PromptPhases] = []
    prompts_left_out: int = 0

    @property
    def left_out(self) -> int:
        """Prompts, decisions, attempts and moves that are counted only."""
        count = self.prompts_left_out
        for prompt in self.prompts:
            count += prompt.routes_left_out + prompt.attempts_left_out + prompt.moves_left_out
        return count

    def add_prompt(self) -> PromptPhases | None:
        """A record for one more prompt; None if there are too many."""
        if len(self.prompts) >= MOST_PROMPTS:
            self.prompts_left_out += 1
            return None
        phases = PromptPhases(self.time, traced=self.traced, trace_id=self.trace_id)
        self.prompts.append(phases)
        return phases

    def fail(self, error: BaseException) -> None:
        """Notes why the request failed; only the first error counts. The error itself is not kept:
        its traceback refers to the request."""
        if not self.error_type:
            self.error_type, self.error = type(error).__name__, str(error)


def in_words(error: BaseException) -> str:
    """An error's class and message, for a span."""
    words = str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
