"""What the frontend needs from whoever computes: cards to serve by, and a stream per request.

`cluster` stands behind it, in one process as among many machines. The rest of the frontend owns the
request and its text, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.engine.api import TokenSink
    from pdserve.errors import PdserveError
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineStats
    from pdserve.messages.request import GenerateRequest


class OpenStream(Protocol):
    """One request in progress."""

    def cancel(self) -> None:
        """The client is gone or has enough: free everything. Idempotent; the sink falls silent."""
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

    async def open(self, request: GenerateRequest, sink: TokenSink) -> OpenStream:
        """Hand the request on; tokens arrive at `sink`.

        Errors: `NotReady`, `Draining`, `NoWorker`, `NoRouter`, `WorkerLost`, `Overloaded`.
        Cancellation: nothing was opened.
        """
        ...

    def statistics(self) -> EngineStats:
        """Sums over the engines behind this port, for `/health` and `/metrics`."""
        ...
