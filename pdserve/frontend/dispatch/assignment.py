"""A dispatched request at one worker: takes that worker's output.

The usual token goes from the worker's stream through `Assignment.on_delta` to the answer, and only
what needs a decision reaches the `DispatchedRequest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.ids import NodeLife

if TYPE_CHECKING:
    from pdserve.engine.port import TokenSink
    from pdserve.errors import PdserveError
    from pdserve.frontend.dispatch.migration.migration_state import ReceivedTokens
    from pdserve.frontend.dispatch.worker_stream import RemoteSequence
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.request import TokenDelta
    from pdserve.messages.routing import RouteDecision
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.tracing.phases import AttemptPhase

__all__ = ["Assignment"]


class _Owner(Protocol):
    """What an assignment tells of; `dispatched_request.DispatchedRequest`."""

    def heard(self, attempt: Assignment, delta: TokenDelta) -> TokenDelta | None: ...

    def failed(self, attempt: Assignment, error: PdserveError) -> None: ...

    def unwanted(self, attempt: Assignment, reason: MigrationHintReason) -> None: ...

    def fail(self, error: PdserveError) -> None: ...

    def ended(self) -> EndedRequest | None: ...


class Assignment:
    """The request at one worker. Implements `TokenSink` for that worker's output, and
    `router_client.Booked`."""

    __slots__ = (
        "_owner",
        "_received",
        "_sink",
        "_tails",
        "begun",
        "life",
        "moving",
        "phase",
        "plain",
        "sequence",
        "unwanted",
    )

    def __init__(
        self, owner: _Owner, sink: TokenSink, received: ReceivedTokens, decision: RouteDecision
    ) -> None:
        self._owner = owner
        self._sink = sink
        self._received = received
        self._tails = received.tails
        self.life = NodeLife(decision.worker, decision.epoch)
        self.sequence: RemoteSequence | None = None
        """None until the worker has accepted the request."""
        self.begun = False
        """True once a token has come from this worker."""
        self.plain = False
        """True if deltas need no check except for the end of a choice."""
        self.moving: MigrationHintReason | None = None
        """The reason why another worker is searched while this one continues; None if none is."""
        self.unwanted: MigrationHintReason | None = None
        """The reason for a move, received before the worker's acceptance; None if none was."""
        self.phase: AttemptPhase | None = None
        """The record of this attempt; None: nothing is recorded."""

    def on_delta(self, delta: TokenDelta) -> None:
        if not self.plain or delta.finish is not None:
            seen = self._owner.heard(self, delta)
            if seen is None:
                return
            delta = seen
        choice = delta.choice
        tail = self._tails[choice]
        tail += delta.tokens
        if len(tail) > 255:
            self._received.pack(choice)
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        self._owner.failed(self, error)

    def on_moving(self, reason: MigrationHintReason) -> None:
        """Called when the worker or a router asks to move the request."""
        self._owner.unwanted(self, reason)

    def fail(self, error: PdserveError) -> None:
        """Ends the request, since its frontend closes. One that the worker has not accepted yet
        ends as its stream does: `dispatch` raises the error, and the sink must not hear it too."""
        if self.sequence is not None:
            self._owner.fail(error)

    def ended(self) -> EndedRequest | None:
        """How the client's request ended, once: afterwards, and while it goes on, None."""
        return self._owner.ended()
