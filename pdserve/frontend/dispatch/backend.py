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
    from pdserve.ids import NodeId
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineStats
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.routing import RoutingPreview


class RequestHandle(Protocol):
    """One request in progress."""

    def cancel(self) -> None:
        """The client is gone or has enough: free everything. Idempotent; the sink falls silent."""
        ...

    def end_choice(self, choice: int) -> None:
        """Nothing more is wanted of this choice: wherever the request goes on, it does without. The
        sink may still hear of it."""
        ...


class Backend(Protocol):
    """Where requests go. All calls happen on the event loop's thread."""

    def cards(self) -> Mapping[str, ModelCard]:
        """Served models by name and alias; empty while nothing has loaded."""
        ...

    def unready_reason(self) -> str | None:
        """None when requests can be served, else why not, in words for `/health`."""
        ...

    def refusal(self, card: ModelCard) -> PdserveError | None:
        """Why a request for this model is refused before any work is done for it; None: it is
        not."""
        ...

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints,
        on_placed: Callable[[Placement], None],
    ) -> RequestHandle:
        """Hand the request on, which may have to wait for room; tokens arrive at `sink`.

        `on_placed` hears, before the first token, of each worker that is asked to take it.

        Errors: `NotReady`, `Draining`, `NoWorker`, `NoRouter`, `WorkerLost`, `Overloaded`,
        `DeadlineExceeded`. Cancellation: nothing was opened.
        """
        ...

    async def explain(
        self, request: GenerateRequest, hints: RoutingHints
    ) -> tuple[NodeId, RoutingPreview]:
        """What would be done with the request now, and the router that says so; nothing is.

        Errors: `NoRouter`, `LinkError`, `DeadlineExceeded`, `ModelNotFound`.
        """
        ...

    def statistics(self) -> EngineStats:
        """Sums over the engines behind this port, for `/health` and `/metrics`."""
        ...
