"""Records what a dispatched request goes through: questions to routers, workers, moves.

One object per request, also where nothing is recorded: then every method does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import PdserveError
from pdserve.tracing.phases import AttemptPhase, MovePhase, RoutePhase, in_words

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.assignment import Assignment
    from pdserve.frontend.dispatch.router_client import RouterBooking
    from pdserve.ids import Seconds
    from pdserve.messages.request import TokenDelta
    from pdserve.messages.routing import RouteDecision
    from pdserve.tracing.phases import PromptPhases

__all__ = ["DispatchPhases"]


class DispatchPhases:
    """The record of one request."""

    __slots__ = ("_phases", "trace_id", "traced")

    def __init__(self, phases: PromptPhases | None) -> None:
        """`phases` None: nothing is recorded."""
        self._phases = phases
        self.traced = phases is not None and phases.traced
        self.trace_id = b"" if phases is None else phases.trace_id

    def time(self) -> Seconds:
        """The time on the record's clock; 0 if nothing is recorded."""
        return 0.0 if self._phases is None else self._phases.time()

    # ------------------------------------------------------------------ routers

    def routed(self, start: Seconds, why: str, booking: RouterBooking, block_size: int) -> None:
        """A router has decided."""
        phases = self._phases
        if phases is not None:
            decision = booking.decision
            overlap = decision.overlap_blocks * block_size
            phases.add_route(
                RoutePhase(start, phases.time(), why, booking.router, decision, overlap)
            )

    def not_routed(self, start: Seconds, why: str, error: BaseException) -> None:
        """No router has decided, or one has refused the request."""
        phases = self._phases
        if phases is not None:
            phases.add_route(RoutePhase(start, phases.time(), why, error=in_words(error)))

    # ------------------------------------------------------------------ workers

    def add_attempt(self, number: int, decision: RouteDecision, why: str) -> AttemptPhase | None:
        """A worker is about to be asked; returns the attempt's record."""
        phases = self._phases
        if phases is None:
            return None
        return phases.add_attempt(
            AttemptPhase(number, decision.worker, decision.epoch, why, phases.time())
        )

    def sent(self, phase: AttemptPhase | None, tokens_before: int) -> None:
        """The request is on its way to the worker. `tokens_before`: output of earlier ones."""
        if phase is not None:
            phase.sent = self.time()
            phase.tokens_before = tokens_before

    def accepted(self, phase: AttemptPhase | None) -> None:
        """The worker has taken it."""
        if phase is not None:
            phase.accepted = self.time()

    def first(self, phase: AttemptPhase | None, delta: TokenDelta) -> None:
        """The worker's first token has come."""
        if phase is not None:
            phase.first = self.time()
            phase.started = delta.started

    def end_attempt(
        self, phase: AttemptPhase | None, how: str, error: BaseException | None = None
    ) -> None:
        """Closes the record of an attempt, unless it is closed."""
        if phase is not None:
            phase.close(self.time(), how, "" if error is None else in_words(error))

    def moved(self, began: Seconds, reason: str, source: str, target: str, outcome: str) -> None:
        """A migration has ended."""
        phases = self._phases
        if phases is not None:
            now = phases.time()
            phases.add_move(MovePhase(min(began, now), now, reason, source, target, outcome))

    # ------------------------------------------------------------------ the end

    def finished(self, attempt: Assignment | None) -> None:
        """The last token has come."""
        if self._phases is not None and attempt is not None:
            self._phases.close(attempt.phase, "finished")

    def close(self, attempt: Assignment | None, error: PdserveError | None, *, ended: bool) -> None:
        """The request has ended otherwise. `ended`: its worker has sent all tokens."""
        phases = self._phases
        if phases is not None and not phases.over:
            how = "finished" if ended else "failed" if error is not None else "cancelled"
            phase = None if attempt is None else attempt.phase
            phases.close(phase, how, "" if error is None else in_words(error))


def end_of(error: BaseException, phase: AttemptPhase | None) -> str:
    """How an attempt ended that the worker did not accept, in a word."""
    if not isinstance(error, PdserveError):
        return "cancelled"
    return "refused" if phase is not None and phase.sent else "unreachable"
