"""Defines the backend interface: model cards to serve, and a token stream per request.

`cluster_client` implements it, in one process and across machines. The rest of the frontend owns
only the request and its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.engine.port import TokenSink
    from pdserve.errors import PdserveError
    from pdserve.frontend.placement import Placement
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.engine import EngineStats
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.routing import RoutingPreview
    from pdserve.tracing.phases import PromptPhases


class RequestHandle(Protocol):
    """One request in progress."""

    @property
    def moved(self) -> Seconds:
        """Seconds between two workers during which no token came, so far."""
        ...

    def cancel(self) -> None:
        """Cancels the request, because the client is gone or needs no more, and frees everything.
        Idempotent; the sink gets no further calls."""
        ...

    def end_choice(self, choice: int) -> None:
        """Ends one choice: if the request moves to another worker, it moves without this choice.
        The sink may still get deltas of it."""
        ...

    def output(self, choice: int) -> list[int]:
        """Output tokens of a choice so far; empty if they are not kept."""
        ...


class Backend(Protocol):
    """Dispatches requests. All calls happen on the event loop's thread."""

    def cards(self) -> Mapping[str, ModelCard]:
        """Served models by name and alias; empty while nothing has loaded."""
        ...

    def unready_reason(self) -> str | None:
        """The reason why requests cannot be served, for `/health`; None if they can."""
        ...

    async def wait_change(self, *, timeout: Seconds = 1.0) -> None:
        """Waits until `cards` may have changed, at most `timeout` seconds."""
        ...

    def refusal(self, card: ModelCard, name: str | None = None) -> PdserveError | None:
        """The error with which a request for this model is refused before any work is done for it;
        None if it is not refused. `name`: what the client asks for, an adapter perhaps."""
        ...

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints,
        on_placed: Callable[[Placement], None],
        phases: PromptPhases | None = None,
        ended: Callable[[], EndedRequest | None] = lambda: None,
    ) -> RequestHandle:
        """Dispatches the request, which may have to wait for room; tokens arrive at `sink`.

        `on_placed` is called before the first token, once for each worker that is asked to take the
        request. `phases` records what the request goes through. `ended` is asked when a worker's
        part in the request has ended: how the client's request ended, or None if it goes on, or
        this was told before.

        Errors: `NotReady`, `Draining`, `NoWorker`, `NoRouter`, `WorkerLost`, `Overloaded`,
        `DeadlineExceeded`. Cancellation: nothing stays open.
        """
        ...

    def note_ended(self, ended: EndedRequest) -> None:
        """Counts a request that ended without a worker, for planners."""
        ...

    async def explain(
        self, request: GenerateRequest, hints: RoutingHints
    ) -> tuple[NodeId, RoutingPreview]:
        """Returns where the request would be routed now, and the router that says so; dispatches
        nothing.

        Errors: `NoRouter`, `LinkError`, `DeadlineExceeded`, `ModelNotFound`.
        """
        ...

    def stats(self) -> EngineStats:
        """Sums over the engines behind this port, for `/health` and `/metrics`."""
        ...
