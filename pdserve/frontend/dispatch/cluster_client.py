"""Connects a frontend to the cluster. Implements `backend.Backend`.

Four objects do the work, each for one question: `cluster_members` (who is there?), `router_client`
(which worker takes a request?), `worker_streams` (how does a request reach it?), and one
`dispatched_request` for each request (what becomes of it if workers refuse or lose it?).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.frontend.dispatch.cluster_members import ClusterMembers
from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
from pdserve.frontend.dispatch.poison_isolation import PoisonIsolation
from pdserve.frontend.dispatch.router_client import RouterClient
from pdserve.frontend.dispatch.worker_streams import WorkerStreams
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.messages.engine import EngineStats
from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping

    from pdserve.engine.port import TokenSink
    from pdserve.errors import PdserveError
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.placement import Placement
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RoutingPreview
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.tracing.phases import PromptPhases

__all__ = ["ClusterClient"]

_SWEEP: Final[Seconds] = 5.0


class ClusterClient:
    """Dispatches requests through routers to workers. Implements `backend.Backend` and
    `dispatched_request.DispatchContext`. The node must have started."""

    def __init__(
        self,
        node: Node,
        config: FrontendConfig,
        degradations: Degradations,
        metrics: Metrics | None = None,
        own_router: NodeId | None = None,
    ) -> None:
        """`own_router`: as in `RouterClient`."""
        self._node = node
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self.members = ClusterMembers(node, config.remember_models, degradations)
        self.routers = RouterClient(
            node, config, self.members, degradations, self.metrics, own_router
        )
        self.workers = WorkerStreams(node)
        self.trials = PoisonIsolation()
        self._searching: dict[asyncio.Task[None], DispatchedRequest] = {}
        """Tasks that look for another worker for a request."""
        self._closed: PdserveError | None = None
        self.rerouted = 0
        """Number of times that a worker did not take a request and another was asked for."""
        node.on_member(self._on_member)
        self._sweep()

    # ------------------------------------------------------------------ the port

    def cards(self) -> Mapping[str, ModelCard]:
        """Served models by name and alias, as the workers' cards announce them."""
        return self.members.cards()

    def unready_reason(self) -> str | None:
        """The reason why requests cannot be served, such as no worker or no router; None if they
        can."""
        if not self.members.any_worker:
            return self.members.why_no_worker()
        return None if self.routers.order else "there is no router in the cluster"

    def refusal(self, card: ModelCard, name: str | None = None) -> PdserveError | None:
        """As `ClusterMembers.refusal`. A missing router is no reason: `open` waits for one."""
        return self.members.refusal(card, name)

    @property
    def requests(self) -> int:
        """Number of requests at workers, or on their way from one to another."""
        return self.workers.requests + len(self._searching)

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints = NO_HINTS,
        on_placed: Callable[[Placement], None] = lambda placement: None,
        phases: PromptPhases | None = None,
        ended: Callable[[], EndedRequest | None] = lambda: None,
    ) -> DispatchedRequest:
        """Dispatches the request; returns when a worker has accepted it. Errors and cancellation:
        as `Backend.open`."""
        dispatched = DispatchedRequest(self, request, sink, hints, on_placed, phases, ended)
        await dispatched.dispatch()
        return dispatched

    def note_ended(self, ended: EndedRequest) -> None:
        """As `RouterClient.note_ended`."""
        self.routers.note_ended(ended)

    async def explain(
        self, request: GenerateRequest, hints: RoutingHints = NO_HINTS
    ) -> tuple[NodeId, RoutingPreview]:
        """Asks a router where the request would be routed now; dispatches nothing. Errors: as
        `Backend.explain`."""
        dispatched = DispatchedRequest(self, request, _NOBODY, hints, lambda placement: None)
        return await self.routers.explain(dispatched.route_request())

    def stats(self) -> EngineStats:
        """Zeros: the workers report their engines' statistics on their own ports."""
        return _NOTHING

    async def wait_change(self, *, timeout: Seconds = 1.0) -> None:
        """As `ClusterMembers.wait_change`."""
        await self.members.wait_change(timeout=timeout)

    def close(self, error: PdserveError) -> None:
        """Ends every stream; requests on them end with `error`."""
        self._closed = error
        for searching in tuple(self._searching.values()):
            searching.fail(error)
        for booked in tuple(self.routers.booked.values()):
            booked.fail(error)
        self.workers.close(error)

    # ------------------------------------------------------------------ for dispatched requests

    def now(self) -> Seconds:
        """The node's time in seconds."""
        return self._node.now()

    def run(
        self, dispatched: DispatchedRequest, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Runs `work` for the request as a task of the node. Raises the closing error after
        `close`."""
        if self._closed is not None:
            work.close()
            raise self._closed
        task = self._node.tasks.spawn(work, f"another worker for {dispatched.request.request_id}")
        self._searching[task] = dispatched
        task.add_done_callback(lambda done: self._searching.pop(done, None))
        return task

    # ------------------------------------------------------------------ membership

    def _on_member(self, event: MemberEvent) -> None:
        """Passes the event on. Members come first: the others ask them."""
        self.members.note(event)
        self.routers.note(event)
        self.workers.note(event)

    def _sweep(self) -> None:
        self._node.timers.call_later(_SWEEP, self._sweep)
        self.routers.sweep()
        self.members.refresh()


class _Nobody:
    """A sink that ignores everything."""

    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_error(self, error: PdserveError) -> None: ...


_NOBODY: Final = _Nobody()
_NOTHING: Final = EngineStats()
