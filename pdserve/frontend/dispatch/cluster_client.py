"""Connects the frontend to the cluster: finds models, asks routers, opens streams to workers.

If a worker cannot be reached, refuses a request or loses it, `dispatched_request` excludes it and
asks a router again. Without a router, requests wait up to `router_wait`. Without a worker, new
requests are refused at once; requests that already had a worker wait up to `worker_wait`.

A router may hold a query until the request's deadline. The query moves to another router when the
link ends, the router is dead or fails inside, or it is suspected while a healthy one exists. Only
a router's decision about the request ends the search. Placements that arrive too late are returned.

Owns the worker streams: one per worker for new requests, and older ones until their last request
ends. `model_discovery` finds the models; routers choose the workers.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from pdserve.errors import (
    DeadlineExceeded,
    DialFailed,
    DialTimeout,
    Draining,
    LinkError,
    LinkLost,
    ModelNotFound,
    NoRouter,
    NotReady,
    NoWorker,
    Overloaded,
    PdserveError,
    RequestError,
    WorkerLost,
)
from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest, no_worker_error
from pdserve.frontend.dispatch.kv_prewarm import PrewarmSink
from pdserve.frontend.dispatch.model_discovery import ModelDiscovery
from pdserve.frontend.dispatch.poison_isolation import PoisonIsolation
from pdserve.frontend.dispatch.routers import Routers, RouterSearch
from pdserve.frontend.dispatch.worker_stream import WorkerStream
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.ids import NodeLife
from pdserve.messages.engine import EngineStats
from pdserve.messages.routing import ReleaseBooking, RouterMigrationHint
from pdserve.observe.metrics import Metrics
from pdserve.runtime.registry import MemberChanged, MemberGone
from pdserve.runtime.rpc_methods import EXPLAIN, MOVE, RELEASE, ROUTE
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from pdserve.engine.port import TokenSink
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.dispatched_request import Assignment
    from pdserve.frontend.dispatch.migration_state import LifeStatus
    from pdserve.frontend.dispatch.worker_stream import RemoteSequence
    from pdserve.frontend.placement import Placement
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RequestOutcome, RouteDecision, RoutingPreview
    from pdserve.net.base import Link
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.tracing.phases import PromptPhases
    from pdserve.wire.parser import Buffer

__all__ = ["ClusterClient"]

_log = logging.getLogger(__name__)

_EXPLAIN_TIMEOUT: Final[Seconds] = 2.0
"""A router explains within one turn of its event loop; one that takes longer is stuck."""
_CATCH_UP: Final[Seconds] = 2.0
"""Seconds within which a router that has just joined learns what the workers serve."""
_PAUSE: Final[Seconds] = 0.05
"""Seconds before a router that has just joined is asked again."""
_LINK_TIMEOUT: Final[Seconds] = 3.0
_ACCEPT_TIMEOUT: Final[Seconds] = 5.0
"""A worker's node accepts a request within one turn of its event loop."""
_LAST_WORDS: Final[Seconds] = 2.0
"""A node that leaves in order ends its streams itself, after its last output."""
_SWEEP: Final[Seconds] = 5.0
_REMEMBERED: Final = 1024
"""Number of ended node lives whose end is remembered."""

_DECISIONS: Final = (RequestError, Overloaded, NoWorker, NotReady)
"""Errors that are a router's decision about a request. For any other error another router is
asked."""
_ABSENT: Final = (LinkError, DeadlineExceeded, Draining)
"""Errors that show that a router is gone or about to go."""

_decode_move = decoder(RouterMigrationHint)


class ClusterClient:
    """Dispatches requests through routers to workers. Implements `backend.Backend` and
    `dispatched_request.ClusterPort`. The node must have started."""

    def __init__(
        self,
        node: Node,
        config: FrontendConfig,
        degradations: Degradations,
        metrics: Metrics | None = None,
    ) -> None:
        self._node = node
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self._degradations = degradations
        self._news: asyncio.Future[None] | None = None
        self._offers = ModelDiscovery(
            node, config.remember_models, self._note_conflicts, self._tell_news
        )
        self._channels: dict[NodeId, WorkerStream] = {}
        """The stream for new requests, by worker."""
        self._retired: dict[WorkerStream, None] = {}
        """Replaced streams that still carry requests."""
        self.routers = Routers()
        self._asking: dict[NodeId, dict[asyncio.Timeout, None]] = {}
        """The timeouts of routing requests without an answer, by router; to end them early."""
        self._again: dict[asyncio.Task[None], DispatchedRequest] = {}
        """Tasks that look for another worker for a request."""
        self._booked: dict[int, Assignment] = {}
        """Requests at workers, by booking."""
        self.trials = PoisonIsolation()
        self._over: dict[NodeLife, str] = {}
        """How the last node lives ended."""
        self._closed: PdserveError | None = None
        self._refreshing = False
        self._conflicts = ""
        self.rerouted = 0
        """Number of times that a worker did not take a request and another was asked for."""
        node.on_member(self._on_member)
        node.serve_tell(MOVE, self._on_move)
        self._sweep()

    # ------------------------------------------------------------------ the port

    def cards(self) -> Mapping[str, ModelCard]:
        """Served models by name and alias, as the workers' cards announce them."""
        return self._offers.cards()

    def unready_reason(self) -> str | None:
        """The reason why requests cannot be served, such as no worker or no router; None if they
        can."""
        if not self._offers.any_worker:
            return self._why_no_worker()
        return None if self.routers.order else "there is no router in the cluster"

    def refusal(self, card: ModelCard, name: str | None = None) -> PdserveError | None:
        """The error for a request whose model or adapter no worker serves: `NotReady` before this
        node has joined, else `NoWorker`. A missing router is no reason: `open` waits for one."""
        lora = None if name is None else card.lora(name)
        if self._offers.workers(card.name if lora is None else lora.name):
            return None
        if lora is not None and self._offers.workers(card.name):
            why = f"no worker has the adapter {lora.name!r} at the moment"
            return NoWorker(why, retry_after=1.0)
        why = self._why_no_worker()
        if not self._node.joined:
            # Before it has joined, this node does not know which workers the cluster has.
            return NotReady(why, retry_after=1.0)
        return NoWorker(f"no worker serves {card.name!r} at the moment: {why}", retry_after=1.0)

    @property
    def requests(self) -> int:
        """Number of requests at workers, or on their way from one to another."""
        channels = (*self._channels.values(), *self._retired)
        return sum(c.requests for c in channels) + len(self._again)

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints = NO_HINTS,
        on_placed: Callable[[Placement], None] = lambda placement: None,
        phases: PromptPhases | None = None,
    ) -> DispatchedRequest:
        """Dispatches the request; returns when a worker has accepted it. Errors and cancellation:
        as `Backend.open`."""
        dispatched = DispatchedRequest(self, request, sink, hints, on_placed, phases)
        await dispatched.dispatch()
        return dispatched

    async def explain(
        self, request: GenerateRequest, hints: RoutingHints = NO_HINTS
    ) -> tuple[NodeId, RoutingPreview]:
        """Asks a router where the request would be routed now; dispatches nothing. Errors: as
        `Backend.explain`."""
        dispatched = DispatchedRequest(self, request, _NOBODY, hints, lambda placement: None)
        search = self._search(dispatched)
        while True:
            router = await self._next_router(search)
            try:
                link = await self._node.link(router, timeout=_LINK_TIMEOUT)
                routing = dispatched.route_request()
                return router, await link.request(EXPLAIN, routing, timeout=_EXPLAIN_TIMEOUT)
            except _DECISIONS:
                raise
            except PdserveError as error:
                if dispatched.remaining is not None and dispatched.remaining <= 0:
                    raise
                self._leave_router(router, error, search)

    def stats(self) -> EngineStats:
        """Zeros: the workers report their engines' statistics on their own ports."""
        return _NOTHING

    async def wait_news(self, *, timeout: Seconds = 1.0, at_least: Seconds = 0.0) -> None:
        """Waits until a member or model has come, changed or gone, at most `timeout` seconds.
        `at_least`: minimum wait in seconds, so that waiting requests do not ask at every change of
        a large cluster."""
        if at_least:
            await asyncio.sleep(at_least)
            timeout -= at_least
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._news}, timeout=max(0.0, timeout))

    def close(self, error: PdserveError) -> None:
        """Ends every stream; requests on them end with `error`."""
        self._closed = error
        placed = [attempt.dispatched for attempt in self._booked.values()]
        for dispatched in (*self._again.values(), *placed):
            dispatched.fail(error)
        for channel in (*self._channels.values(), *self._retired):
            channel.close(error)

    # ------------------------------------------------------------------ routing

    def now(self) -> Seconds:
        """The node's time in seconds."""
        return self._node.now()

    def block_size(self, model: str) -> int:
        """Tokens per KV block of the model; 0 if it is not served."""
        card = self._offers.cards().get(model)
        return 0 if card is None else card.block_size

    def epoch_of(self, worker: NodeId) -> Epoch | None:
        """The epoch of the worker's present life; None if it is not a member."""
        member = self._node.registry.get(worker)
        return None if member is None else member.epoch

    def lacking(self, model: str, features: tuple[str, ...]) -> tuple[NodeId, ...]:
        """Workers that serve the model without one of these features."""
        return tuple(
            member.node
            for member in self._node.registry.by_role("worker")
            for offer in (member.card.models if member.card is not None else ())
            if offer.name == model and not set(features) <= set(offer.features)
        )

    def standing(self, life: NodeLife) -> LifeStatus:
        """The status of a worker's life, as this node knows it."""
        node, epoch = life
        member = self._node.registry.get(node)
        if member is not None and member.epoch == epoch:
            return "doubtful" if _in_doubt(member) else "here"
        return "died" if self._over.get(life) == "died" else "gone"

    def shares_kv(self, one: NodeId, other: NodeId) -> bool:
        """True if the two workers have a transfer backend in common."""
        members = map(self._node.registry.get, (one, other))
        ways = [() if m is None or m.card is None else m.card.transfers for m in members]
        return not set(ways[0]).isdisjoint(ways[1])

    def run(
        self, dispatched: DispatchedRequest, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Runs `work` for the request as a task of the node. Raises the closing error after
        `close`."""
        if self._closed is not None:
            work.close()
            raise self._closed
        task = self._node.tasks.spawn(work, f"another worker for {dispatched.request.request_id}")
        self._again[task] = dispatched
        task.add_done_callback(lambda done: self._again.pop(done, None))
        return task

    async def route(self, dispatched: DispatchedRequest) -> tuple[NodeId, RouteDecision]:
        """Asks routers until one decides; returns the router and its decision.

        Errors: `NoRouter`, `DeadlineExceeded`, and a router's decisions: `NoWorker`, `Overloaded`,
        `RequestError`. Cancellation: a decision that arrives later is given back.
        """
        now = self._node.now
        search = self._search(dispatched)
        while True:
            router = await self._next_router(search)
            asked = now()
            try:
                routed = await self._ask(router, dispatched)
            except (ModelNotFound, NoWorker) as error:
                self._note_answer(router)
                self._check_behind(error, dispatched, search)
                search.behind.add(router)
            except _DECISIONS:
                self._note_answer(router)
                raise
            except DeadlineExceeded:
                raise
            except PdserveError as error:
                self._leave_router(router, error, search)
                if not isinstance(error, DialFailed):
                    # The time that a router held the request does not count as waiting for a
                    # router.
                    search.start += now() - asked
            else:
                self._note_answer(router)
                return router, routed

    def _check_behind(
        self, error: PdserveError, dispatched: DispatchedRequest, search: RouterSearch
    ) -> None:
        """Handles a router that knows no worker: returns if the router may have just joined, else
        raises."""
        model = dispatched.request.model
        takes = self._takes(dispatched.request, dispatched.hints)
        if isinstance(error, NoWorker) and (dispatched.excluded() or not takes):
            raise error
        # If this node knows a worker that takes the request, the router may have just joined.
        if self._node.now() - search.start > _CATCH_UP or not takes:
            raise no_worker_error(model, None) from None

    async def _ask(self, router: NodeId, dispatched: DispatchedRequest) -> RouteDecision:
        """Asks one router; waits until the request's deadline, or until the router is suspected
        while a healthy one exists."""
        try:
            link = await self._node.link(router, timeout=_LINK_TIMEOUT)
        except DeadlineExceeded as error:
            # Only the dial has timed out; the request may have time left.
            raise DialTimeout(error.message) from None
        routing = dispatched.route_request()
        timeout = routing.deadline or self.config.request_timeout
        if dispatched.patience is not None:
            timeout = min(timeout, dispatched.patience)
        asking = self._asking.setdefault(router, {})
        try:
            async with asyncio.timeout(None) as patience:
                asking[patience] = None
                try:
                    return await link.request(
                        ROUTE, routing, timeout=timeout, late=partial(self.give_back, router)
                    )
                finally:
                    del asking[patience]
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the request's deadline passed while router {router} held it: no worker had room"
            ) from None
        except TimeoutError:
            raise LinkLost(
                f"router {router} is suspected to be dead; another one is asked"
            ) from None

    def give_back(self, router: NodeId, routed: RouteDecision) -> None:
        """Gives back a decision that came too late or is not followed."""
        _Releaser(self, router, routed.booking)("unreached")

    def _leave_router(self, router: NodeId, error: PdserveError, search: RouterSearch) -> None:
        """Records that a router did not answer, or failed for a reason other than the request."""
        now = self._node.now()
        if isinstance(error, _ABSENT):
            _log.info("router %s did not answer: %s", router, error)
            self.metrics.router_failures.labels("unreachable").inc()
            self.routers.unreachable(now, router)
            return
        _log.warning("router %s failed internally: %s", router, error)
        self.metrics.router_failures.labels("failed").inc()
        self.routers.failed(now, router)
        search.failed.add(router)
        self._tell_failing()

    def _note_answer(self, router: NodeId) -> None:
        if self.routers.answered(router):
            self._tell_failing()

    def _tell_failing(self) -> None:
        failing = self.routers.failing
        self._degradations.clear("router_failing")
        if failing:
            self._degradations.add(
                "router_failing",
                f"{', '.join(failing)} failed internally on a valid request: other routers are "
                "asked first; the log of the router says why, a restart may help",
            )

    def _search(self, dispatched: DispatchedRequest) -> RouterSearch:
        """A new search with the request's remaining time."""
        now, left = self._node.now(), dispatched.remaining
        return RouterSearch(now) if left is None else RouterSearch(now, now + left)

    async def _next_router(self, search: RouterSearch) -> NodeId:
        """Returns the router to ask; waits for one while the request has time. Routers in
        `search.behind` come last, after a pause, and are removed from it. Errors: `NoRouter`,
        `DeadlineExceeded`."""
        until = search.start + self.config.router_wait
        while True:
            now, routers = self._node.now(), self.routers
            router = routers.choose(now, search)
            if router is not None:
                return router
            if routers.all_failed(search):
                raise NoRouter(
                    "every router failed internally on this request; their logs say why",
                    retry_after=1.0,
                )
            if now >= search.over:
                raise DeadlineExceeded("the request's deadline passed while it waited for a router")
            if now >= until:
                raise NoRouter(
                    f"no router answered within {self.config.router_wait:g} s", retry_after=1.0
                )
            change, end = routers.next_change(now), min(until, search.over)
            again = (end if change is None else min(end, change)) - now
            await self.wait_news(timeout=min(again, _PAUSE) if search.behind else again)
            search.behind.clear()

    def _takes(self, request: GenerateRequest, hints: RoutingHints) -> bool:
        """True if a worker serves the model, has the adapter if the request names one, does not
        drain, and is allowed by the client's hints."""
        lora, workers = request.lora, self._offers.workers(request.model)
        members = map(self._node.registry.get, filter(hints.takes, workers))
        cards = [member.card for member in members if member is not None]
        return any(
            card is not None and not card.draining and (not lora or card.has_lora(lora))
            for card in cards
        )

    def _order_routers(self) -> None:
        """Orders the routers. Each frontend has its own favourite, so that routers share the work
        and one router sees all requests of a frontend. Suspected ones come last; those without a
        card are left out."""
        members = [m for m in self._node.registry.by_role("router") if m.card is not None]
        usable = [m for m in members if m.card is not None and not m.card.draining]
        usable.sort(key=lambda m: _affinity(self._node.id, m.node))
        usable.sort(key=_in_doubt)
        self.routers.order = tuple(m.node for m in usable)
        if usable and not _in_doubt(usable[0]):
            self._leave_doubtful(members)

    def _leave_doubtful(self, routers: list[Member]) -> None:
        """Ends the routing requests at suspected routers, because a healthy one can be asked."""
        now = self._node.now()
        for member in routers:
            if _in_doubt(member):
                for patience in self._asking.get(member.node, ()):
                    if not patience.expired():
                        # An expired timeout cannot be rescheduled; its task has not run since.
                        patience.reschedule(now)

    # ------------------------------------------------------------------ to the worker

    async def place(
        self,
        begin: Callable[[], GenerateRequest],
        attempt: Assignment,
        router: NodeId,
        routed: RouteDecision,
    ) -> RemoteSequence | None:
        """Hands a request to a worker. Tells the router once how the booking ends. Returns None
        if the router meant a life of the worker that is over."""
        release = _Releaser(self, router, routed.booking)
        try:
            channel = await self._channel(routed.worker, routed.epoch)
        except BaseException:
            release("unreached")
            raise
        if channel is None:
            release("unreached")
            return None
        self._booked[routed.booking] = attempt
        try:
            return await channel.open(
                begin(),
                routed.booking,
                attempt,
                release,
                timeout=_ACCEPT_TIMEOUT,
                on_moving=attempt.on_moving,
            )
        except BaseException:
            release("failed")
            raise

    async def warm(self, request: GenerateRequest, routed: RouteDecision, timeout: Seconds) -> None:
        """Runs a prewarm request at the worker until it ends; its output is discarded. Errors:
        those of the worker, `DeadlineExceeded`. Cancellation: the request is cancelled."""
        channel = await self._channel(routed.worker, routed.epoch)
        if channel is None:
            raise LinkLost(f"worker {routed.worker} has restarted", sent=False)
        warming = PrewarmSink(asyncio.get_running_loop())
        sequence = await channel.open(
            request, 0, warming, lambda outcome: None, timeout=min(timeout, _ACCEPT_TIMEOUT)
        )
        try:
            await warming.wait(timeout)
        finally:
            sequence.cancel()

    def release(self, router: NodeId, booking: int, outcome: RequestOutcome) -> None:
        """Tells the router how a booking ended."""
        self._booked.pop(booking, None)
        link = self._node.link_nowait(router)
        if link is None:
            # The router is gone with its bookings, or learns of the end from the worker.
            return
        try:
            link.tell(RELEASE, encode(ReleaseBooking(booking, outcome)))
        except PdserveError as error:
            _log.debug("a release was not sent to %s: %s", router, error)

    def _on_move(self, link: Link, body: Buffer) -> None:
        """Handles a router's hint that another worker would start the request sooner."""
        attempt = self._booked.get(_decode_move(body).booking)
        if attempt is not None:
            attempt.on_moving("queue")

    async def _channel(self, worker: NodeId, epoch: Epoch) -> WorkerStream | None:
        """The stream to this life of the worker, opened if needed; None if a later life has
        begun."""
        link = self._node.link_nowait(worker)
        if link is not None and link.peer.epoch < epoch:
            # This end has not noticed yet that the older life is over.
            link.abort("the peer has restarted")
            link = None
        if link is None or link.retiring:
            try:
                link = await self._node.link(worker, timeout=_LINK_TIMEOUT)
            except DeadlineExceeded as error:
                # Only the dial has timed out; the request may have time left.
                raise DialTimeout(error.message) from None
        if link.peer.epoch != epoch:
            return None
        channel = self._channels.get(worker)
        if channel is not None and channel.link is link and channel.over is None:
            return channel
        return self._make_channel(link)

    def _make_channel(self, link: Link) -> WorkerStream:
        """Opens a stream on this link for new requests; the old stream, if any, ends with its last
        request."""
        worker = link.peer.node
        channel = WorkerStream(link, self._node.timers)
        old = self._channels.get(worker)
        self._channels[worker] = channel
        channel.on_over = lambda: self._forget(channel)
        if old is not None:
            self._retired[old] = None
            old.retire()
        return channel

    def _forget(self, channel: WorkerStream) -> None:
        self._retired.pop(channel, None)
        if self._channels.get(channel.worker) is channel:
            del self._channels[channel.worker]

    # ------------------------------------------------------------------ membership

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if isinstance(event, MemberGone):
            self._note_over(NodeLife(member.node, member.epoch), event.reason)
            self._forget_router(member.node)
            # Calls that still wait have their own reference to this entry.
            self._asking.pop(member.node, None)
            error = WorkerLost(f"worker {member.node} is gone: {event.reason}", retry_after=1.0)
            for channel in (*self._channels.values(), *self._retired):
                peer = channel.link.peer
                if (peer.node, peer.epoch) != (member.node, member.epoch):
                    continue
                if event.reason == "left":
                    # The news may overtake the worker's last tokens.
                    self._node.timers.call_later(_LAST_WORDS, partial(channel.close, error))
                else:
                    channel.close(error)
        if member.role == "router":
            self._order_routers()
        elif member.role == "worker" and not (
            self._refreshing
            or (isinstance(event, MemberChanged) and event.before.card is member.card)
        ):
            self._refreshing = True
            self._node.timers.call_later(0.0, self._refresh)
        self._tell_news()

    def _forget_router(self, router: NodeId) -> None:
        failing = router in self.routers.failing
        self.routers.forget(router)
        if failing:
            self._tell_failing()

    def _note_over(self, life: NodeLife, how: str) -> None:
        self._over[life] = how
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def _tell_news(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _refresh(self) -> None:
        self._refreshing = False
        self._offers.refresh()

    def _sweep(self) -> None:
        self._node.timers.call_later(_SWEEP, self._sweep)
        self.routers.sweep(self._node.now())
        self._offers.refresh()

    def _note_conflicts(self, conflicts: Mapping[NodeId, str]) -> None:
        words = "; ".join(f"worker {node}: {why}" for node, why in sorted(conflicts.items()))
        if words == self._conflicts:
            return
        self._conflicts = words
        self._degradations.clear("model_conflict")
        if words:
            self._degradations.add("model_conflict", words)

    def _why_no_worker(self) -> str:
        workers = self._node.registry.by_role("worker")
        if not self._node.joined:
            return "starting: joining the cluster"
        if not workers:
            return "there is no worker in the cluster"
        words = [m.card.reason for m in workers if m.card is not None and m.card.reason]
        if not words and all(m.card is not None and m.card.mode == "prefill" for m in workers):
            return (
                "there are only prefill workers, which take no requests by themselves: start one "
                "with --mode=decode"
            )
        return words[0] if words else "starting: workers are loading"


class _Releaser:
    """Tells the router once how a booking ended."""

    __slots__ = ("_backend", "_booking", "_router", "_told")

    def __init__(self, backend: ClusterClient, router: NodeId, booking: int) -> None:
        self._backend = backend
        self._router = router
        self._booking = booking
        self._told = False

    def __call__(self, outcome: RequestOutcome) -> None:
        if not self._told:
            self._told = True
            self._backend.release(self._router, self._booking, outcome)


def _in_doubt(router: Member) -> bool:
    return router.suspect or not router.reachable


def _affinity(frontend: NodeId, router: NodeId) -> bytes:
    """Rendezvous hash that orders the routers of a frontend."""
    return blake2b(f"{frontend}\0{router}".encode(), digest_size=8).digest()


class _Nobody:
    """A sink that ignores everything."""

    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_error(self, error: PdserveError) -> None: ...


_NOBODY: Final = _Nobody()
_NOTHING: Final = EngineStats()
