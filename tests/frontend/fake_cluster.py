"""A frontend's backend among nodes in virtual time: workers with an engine that is played by hand,
and routers that answer what a test tells them to."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.errors import Draining, NoWorker
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.dispatch.cluster_client import ClusterClient
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.messages.routing import ReleaseBooking, RouteDecision, RoutingPreview
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.peers.handlers import answers, hears
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.rpc_methods import EXPLAIN, RELEASE, ROUTE
from pdserve.worker.request_streams import RequestStreams
from tests.frontend.dispatch.test_model_discovery import model
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.engine.port import TokenSink
    from pdserve.errors import PdserveError
    from pdserve.messages.routing import RouteRequest
    from pdserve.net.base import IncomingCall, Peer
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from tests.runtime.cluster import Cluster


def request(name: str = "r", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "model": "tiny",
        "prompt": [7, 8, 9],
        "sampling": SamplingParams(max_tokens=8),
    }
    return GenerateRequest(**fields | changes)


class Sink:
    """What reached one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.by_choice: dict[int, list[int]] = {}
        self.deltas: list[TokenDelta] = []
        self.ends = 0
        self.errors: list[PdserveError] = []

    def on_delta(self, delta: TokenDelta) -> None:
        assert not self.errors
        self.deltas.append(delta)
        self.tokens += delta.tokens
        self.by_choice.setdefault(delta.choice, []).extend(delta.tokens)
        self.ends += delta.finish is not None

    def on_error(self, error: PdserveError) -> None:
        self.errors.append(error)


class Worker:
    """A node with channels over an engine that says what the test says."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.refusal: Exception | None = None
        self.running: dict[int, TokenSink] = {}
        self.names: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.deadlines: list[float | None] = []
        """Of all requests that were submitted."""
        self.aborted: list[int] = []
        self.bookings: list[int] = []
        """Held now."""
        self.channels = RequestStreams(
            self, on_begin=self.bookings.append, on_end=self.bookings.remove
        )
        node.host(self.channels)
        node.on_member(self._on_member)

    def _on_member(self, event: MemberEvent) -> None:
        if isinstance(event, MemberGone):
            self.channels.gone(event.member.node, event.member.epoch)

    def submit(self, request: GenerateRequest, sink: TokenSink) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.names.append(request.request_id)
        self.requests.append(request)
        self.deadlines.append(request.deadline)
        handle = len(self.names)
        self.running[handle] = sink
        return handle

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)
        self.running.pop(handle, None)

    def say(self, *tokens: int, end: bool = False, choice: int = 0, **fields: Any) -> None:
        """To all that run; one that has said its `end` is over unless it has more choices."""
        for handle, sink in tuple(self.running.items()):
            finish = Finish(reason="stop") if end else None
            sink.on_delta(TokenDelta(handle, choice, list(tokens), finish, **fields))
            if end and self.requests[handle - 1].n == 1:
                del self.running[handle]

    def refuse(self, error: PdserveError) -> None:
        """All that run, after they were accepted."""
        for sink in self.running.values():
            sink.on_error(error)
        self.running.clear()

    def serve(self, features: tuple[str, ...] = ("embeddings",), **card: Any) -> None:
        """Announce the model."""
        small, parts = summarize_card(replace(model(), features=features))
        fields = {"role": "worker", "started": 1, "models": (small,), **card}
        self.node.publish_card(NodeCard(**fields), parts)


class Router:
    """A node that sends requests to the first of `workers` that is not excluded."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.workers: list[tuple[str, int]] = []
        """Name and life."""
        self.refusal: Exception | None = None
        self.holds = False
        """Questions wait until `answer`."""
        self.held: list[tuple[RouteRequest, IncomingCall]] = []
        self.dropped: list[str] = []
        """Questions that were held and are no longer asked."""
        self.policy: dict[str, Any] = {}
        """What answers say besides the worker."""
        self.explained: RoutingPreview | None = None
        self.questions: list[RouteRequest] = []
        self.open: dict[int, str] = {}
        """Bookings that were not released, and the worker of each."""
        self.releases: list[str] = []
        node.host(self)

    @answers(ROUTE)
    def _route(self, question: RouteRequest, call: IncomingCall) -> RouteDecision | None:
        self.questions.append(question)
        if self.holds:
            self.held.append((question, call))
            call.on_cancel = lambda: self.dropped.append(question.request_id)
            return None
        if self.refusal is not None:
            raise self.refusal
        return self._decide(question)

    def answer(self) -> None:
        """All that is held."""
        while self.held:
            question, call = self.held.pop(0)
            if not call.done:
                call.reply(self._decide(question))

    def _decide(self, question: RouteRequest) -> RouteDecision:
        for name, epoch in self.workers:
            if name not in question.excluded and name in (question.allowed or (name,)):
                booking = len(self.open) + len(self.releases) + 1
                self.open[booking] = name
                return RouteDecision(NodeId(name), epoch, booking, **self.policy)
        raise NoWorker("nobody is left", retry_after=4.0)

    @answers(EXPLAIN)
    def _explain(self, question: RouteRequest, call: IncomingCall) -> RoutingPreview | None:
        self.questions.append(question)
        if self.refusal is not None:
            raise self.refusal
        return self.explained

    @hears(RELEASE)
    def _released(self, release: ReleaseBooking, frontend: Peer) -> None:
        del self.open[release.booking]  # once each
        self.releases.append(release.outcome)

    def serve(self) -> None:
        self.node.publish_card(NodeCard(role="router"), {})


class World:
    """One frontend `f`, its backend, and whoever a test adds."""

    def __init__(self, nodes: Cluster, node: Node, **config: Any) -> None:
        self.nodes = nodes
        self.node = node
        self.degradations = Degradations(Metrics())
        self.backend = ClusterClient(node, FrontendConfig(**config), self.degradations)
        self.routers: dict[str, Router] = {}
        self.workers: dict[str, Worker] = {}

    async def worker(
        self, name: str, *, serves: bool = True, features: tuple[str, ...] = ("embeddings",)
    ) -> Worker:
        """A worker that every router sends requests to, after those before it."""
        made = self.workers[name] = Worker(await self.nodes.add(name, role="worker"))
        if serves:
            made.serve(features)
        for router in self.routers.values():
            router.workers.append((name, made.node.epoch))
        return made

    async def router(self, name: str) -> Router:
        made = self.routers[name] = Router(await self.nodes.add(name, role="router"))
        made.workers = [(n, w.node.epoch) for n, w in self.workers.items()]
        made.serve()
        return made

    async def ready(self) -> None:
        """The frontend sees them all."""
        await self.nodes.until(lambda: self.backend.unready_reason() is None)
        await self.nodes.until(lambda: len(self.backend.routers.order) == len(self.routers))
        await self.nodes.until(self._all_serve)

    def _all_serve(self) -> bool:
        return len(self.backend.members.workers("tiny")) == len(self.workers)


@asynccontextmanager
async def world(seed: int = 0, **config: Any) -> AsyncIterator[World]:
    """Afterwards no request and no booking is left anywhere."""
    async with cluster(seed) as nodes:
        made = World(nodes, await nodes.add("f", role="frontend"), **config)
        yield made
        made.backend.close(Draining("the test is over"))
        assert made.backend.requests == 0
        assert not made.backend.workers.newest
        assert not made.backend.workers.retired
        await nodes.until(lambda: all(not w.channels.requests for w in made.workers.values()))
        assert all(not w.bookings for w in made.workers.values())
