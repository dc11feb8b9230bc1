"""Asks the cluster's routers for workers, and tells them how bookings end.

A router may hold a question until the request's deadline. The question moves to another router when
the link ends, the router is dead or fails inside, or it is suspected while a healthy one exists.
Only a router's decision about the request ends the search. Decisions that arrive too late are given
back. `routers` chooses the router.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

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
)
from pdserve.frontend.dispatch.cluster_members import in_doubt
from pdserve.frontend.dispatch.routers import Routers, RouterSearch
from pdserve.ids import NodeId, NodeLife, Seconds
from pdserve.messages.routing import ReleaseBooking, RouterMigrationHint
from pdserve.runtime.peers.handlers import hears
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.rpc_methods import EXPLAIN, MOVE, RELEASE, ROUTE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.cluster_members import ClusterMembers
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.routing import (
        RequestOutcome,
        RouteDecision,
        RouteRequest,
        RoutingPreview,
    )
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.net.base import Peer
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent

__all__ = ["Booked", "RouterBooking", "RouterClient", "aged", "no_worker_error"]

_log = logging.getLogger(__name__)

_EXPLAIN_TIMEOUT: Final[Seconds] = 2.0
"""A router explains within one turn of its event loop; one that takes longer is stuck."""
_CATCH_UP: Final[Seconds] = 2.0
"""Seconds within which a router that has just joined learns what the workers serve."""
_PAUSE: Final[Seconds] = 0.05
"""Seconds before a router that has just joined is asked again."""
_LINK_TIMEOUT: Final[Seconds] = 3.0
_NO_BOOKING: Final = 0

_DECISIONS: Final = (RequestError, Overloaded)
"""Errors that are a router's decision about a request. For any other error another router is
asked."""
_NO_WORKER: Final = (ModelNotFound, NoWorker, NotReady)
"""A router's decisions that another router may contradict: this one may have just joined, or may be
cut off from a worker."""
_ABSENT: Final = (LinkError, DeadlineExceeded, Draining)
"""Errors that show that a router is gone or about to go."""


class Booked(Protocol):
    """A request that holds a booking."""

    def on_moving(self, reason: MigrationHintReason) -> None:
        """A router asks to move the request."""
        ...

    def fail(self, error: PdserveError) -> None:
        """Ends the request."""
        ...

    def ended(self) -> EndedRequest | None:
        """How the client's request ended, once: afterwards, and while it goes on, None."""
        ...


class RouterBooking:
    """A router's decision, and the room that it keeps at the worker until `end`."""

    __slots__ = ("_client", "_ended", "decision", "router")

    def __init__(self, client: RouterClient, router: NodeId, decision: RouteDecision) -> None:
        self._client = client
        self._ended = False
        self.router = router
        self.decision = decision

    @property
    def life(self) -> NodeLife:
        """The worker of the decision."""
        return NodeLife(self.decision.worker, self.decision.epoch)

    def hold(self, request: Booked) -> None:
        """`request` is about to be sent to the worker."""
        self._client.booked[self.decision.booking] = request

    def end(self, outcome: RequestOutcome) -> None:
        """Tells the router how it ended. Idempotent."""
        if not self._ended:
            self._ended = True
            booking = self.decision.booking
            request = self._client.booked.get(booking)
            ended = None if request is None else request.ended()
            self._client.release(self.router, booking, outcome, ended)


class RouterClient:
    """One frontend's way to the routers. Used on the event loop's thread."""

    def __init__(
        self,
        node: Node,
        config: FrontendConfig,
        members: ClusterMembers,
        degradations: Degradations,
        metrics: Metrics,
        own_router: NodeId | None = None,
    ) -> None:
        """Pass each member event to `note`. `own_router`: the router in this process, which is
        asked before all others."""
        self._node = node
        self._own_router = own_router
        self._config = config
        self._members = members
        self._degradations = degradations
        self._metrics = metrics
        self._routers = Routers()
        self.booked: dict[int, Booked] = {}
        """Requests at workers, by booking."""
        self._asking: dict[NodeId, dict[asyncio.Task[object], bool]] = {}
        """The tasks that wait for a router's answer, by router; True: another router is to be
        asked."""
        node.host(self)

    @property
    def order(self) -> tuple[NodeId, ...]:
        """Routers that take requests, best first."""
        return self._routers.order

    # ------------------------------------------------------------------ questions

    async def route(self, question: RouteRequest, patience: Seconds | None = None) -> RouterBooking:
        """Asks routers until one decides. `patience`: seconds that a router may take; None: until
        the request's deadline.

        Errors: `NoRouter`, `DeadlineExceeded`, and a router's decisions: `NoWorker`, `Overloaded`,
        `RequestError`. Cancellation: a decision that arrives later is given back.
        """
        now = self._node.now
        search, began = self._search(question), now()
        while True:
            router = await self._next_router(search)
            asked = now()
            try:
                decision = await self._ask(router, aged(question, asked - began), patience)
            except _NO_WORKER as error:
                self._note_answer(router)
                search.start += now() - asked
                self._check_behind(error, question, search)
                search.behind.add(router)
                if not isinstance(error, ModelNotFound):
                    question = _asked_again(question)
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
                    question = _asked_again(question)
            else:
                self._note_answer(router)
                return RouterBooking(self, router, decision)

    async def explain(self, question: RouteRequest) -> tuple[NodeId, RoutingPreview]:
        """Asks a router where the request would be routed now, and which router says so. Errors: as
        `Backend.explain`."""
        search, began = self._search(question), self._node.now()
        while True:
            router = await self._next_router(search)
            asked = aged(question, self._node.now() - began)
            try:
                asking = self._node.ref(router).ask(EXPLAIN, asked, timeout=_EXPLAIN_TIMEOUT)
                return router, await asking
            except (*_DECISIONS, *_NO_WORKER):
                raise
            except PdserveError as error:
                if self._node.now() >= search.over:
                    raise
                self._leave_router(router, error, search)

    async def _ask(
        self, router: NodeId, question: RouteRequest, patience: Seconds | None
    ) -> RouteDecision:
        """Asks one router; waits until the request's deadline, or until the router is suspected
        while a healthy one exists."""
        ref = self._node.ref(router)
        try:
            await ref.reach(timeout=_LINK_TIMEOUT)
        except DeadlineExceeded as error:
            # Only the dial has timed out; the request may have time left.
            raise DialTimeout(error.message) from None
        timeout = question.deadline or self._config.request_timeout
        if patience is not None:
            timeout = min(timeout, patience)
        asking = self._asking.setdefault(router, {})
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        asking[task] = False
        try:
            return await ref.ask(
                ROUTE, question, timeout=timeout, late=partial(self._came_late, router)
            )
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the request's deadline passed while router {router} held it: no worker had room"
            ) from None
        except asyncio.CancelledError:
            # As `asyncio.timeout`, which costs some microseconds of each request.
            if not asking[task] or task.uncancel() > cancelled:
                raise
            raise LinkLost(
                f"router {router} is suspected to be dead; another one is asked"
            ) from None
        finally:
            del asking[task]

    def _came_late(self, router: NodeId, decision: RouteDecision) -> None:
        self.release(router, decision.booking, "unreached")

    def _search(self, question: RouteRequest) -> RouterSearch:
        """A new search with the request's remaining time."""
        now, left = self._node.now(), question.deadline
        return RouterSearch(now) if left is None else RouterSearch(now, now + left)

    def _check_behind(
        self, error: PdserveError, question: RouteRequest, search: RouterSearch
    ) -> None:
        """Handles a router that knows no worker for the request. Returns if this node knows one, so
        that other routers are asked, for up to `_CATCH_UP` seconds; else raises."""
        takes = self._is_served(question)
        late = self._node.now() - search.start > _CATCH_UP
        if isinstance(error, NotReady) and (late or not takes):
            raise error
        if isinstance(error, NoWorker) and (question.excluded or not takes):
            raise error
        if late or not takes:
            raise no_worker_error(question.model, None) from None

    def _is_served(self, question: RouteRequest) -> bool:
        """True if a worker that may be chosen serves the model, has the adapter if the request
        names one, and does not drain."""
        lora, allowed = question.lora, question.allowed
        for worker in self._members.workers(question.model):
            member = self._members.get(worker)
            card = None if member is None else member.card
            if card is None or card.going or (lora and not card.has_lora(lora)):
                continue
            if worker not in question.excluded and (not allowed or worker in allowed):
                return True
        return False

    async def _next_router(self, search: RouterSearch) -> NodeId:
        """Returns the router to ask; waits for one while the request has time. Routers in
        `search.behind` come last, after a pause, and are removed from it. Errors: `NoRouter`,
        `DeadlineExceeded`."""
        until = search.start + self._config.router_wait
        while True:
            now, routers = self._node.now(), self._routers
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
                    f"no router answered within {self._config.router_wait:g} s", retry_after=1.0
                )
            change, end = routers.next_change(now), min(until, search.over)
            again = (end if change is None else min(end, change)) - now
            timeout = min(again, _PAUSE) if search.behind else again
            await self._members.wait_change(timeout=timeout)
            search.behind.clear()

    # ------------------------------------------------------------------ bookings

    def note_ended(self, ended: EndedRequest) -> None:
        """Tells a router how a request ended that has no booking. Any router may count it."""
        if self._routers.order:
            self.release(self._routers.order[0], _NO_BOOKING, "failed", ended)

    def release(
        self,
        router: NodeId,
        booking: int,
        outcome: RequestOutcome,
        ended: EndedRequest | None = None,
    ) -> None:
        """Tells the router how a booking ended; use `RouterBooking.end`. `ended`: the client's
        request has ended with it."""
        self.booked.pop(booking, None)
        try:
            self._node.ref(router).tell(RELEASE, ReleaseBooking(booking, outcome, ended))
        except PdserveError as error:
            # A router that is gone has lost its bookings, or learns of the end from the worker.
            _log.debug("a release was not sent to %s: %s", router, error)

    @hears(MOVE)
    def _on_move(self, hint: RouterMigrationHint, router: Peer) -> None:
        """Handles a router's hint that another worker would start the request sooner."""
        request = self.booked.get(hint.booking)
        if request is not None:
            request.on_moving("queue")

    # ------------------------------------------------------------------ failures of routers

    def _leave_router(self, router: NodeId, error: PdserveError, search: RouterSearch) -> None:
        """Records that a router did not answer, or failed for a reason other than the request."""
        now = self._node.now()
        if isinstance(error, _ABSENT):
            _log.info("router %s did not answer: %s", router, error)
            self._metrics.router_failures.labels("unreachable").inc()
            self._routers.unreachable(now, router)
            return
        _log.warning("router %s failed internally: %s", router, error)
        self._metrics.router_failures.labels("failed").inc()
        self._routers.failed(now, router)
        search.failed.add(router)
        self._tell_failing()

    def _note_answer(self, router: NodeId) -> None:
        if self._routers.answered(router):
            self._tell_failing()

    def _tell_failing(self) -> None:
        failing = self._routers.failing
        self._degradations.clear("router_failing")
        if failing:
            self._degradations.add(
                "router_failing",
                f"{', '.join(failing)} failed internally on a valid request: other routers are "
                "asked first; the log of the router says why, a restart may help",
            )

    # ------------------------------------------------------------------ membership

    def note(self, event: MemberEvent) -> None:
        """Takes over a change of the membership."""
        member = event.member
        if isinstance(event, MemberGone):
            self._forget(member.node)
        if member.role == "router":
            self._order_routers()

    def sweep(self) -> None:
        """Drops entries that have expired; call it now and then."""
        self._routers.sweep(self._node.now())

    def _forget(self, router: NodeId) -> None:
        failing = router in self._routers.failing
        self._routers.forget(router)
        # Questions that still wait have their own reference to this entry.
        self._asking.pop(router, None)
        if failing:
            self._tell_failing()

    def _order_routers(self) -> None:
        """Orders the routers. Each frontend has its own favourite, so that routers share the work
        and one router sees all requests of a frontend; one in its own process is before all
        others. Suspected ones come last; those without a card are left out."""
        members = [m for m in self._node.registry.by_role("router") if m.card is not None]
        usable = [m for m in members if m.card is not None and not m.card.draining]
        usable.sort(key=lambda m: _affinity(self._node.id, m.node))
        usable.sort(key=lambda m: m.node != self._own_router)
        usable.sort(key=in_doubt)
        self._routers.order = tuple(m.node for m in usable)
        if usable and not in_doubt(usable[0]):
            self._leave_doubtful(members)

    def _leave_doubtful(self, routers: Iterable[Member]) -> None:
        """Ends the questions at suspected routers, because a healthy one can be asked."""
        for member in routers:
            if in_doubt(member):
                asking = self._asking.get(member.node, {})
                for task in [task for task, given_up in asking.items() if not given_up]:
                    asking[task] = True
                    task.cancel()


def _asked_again(question: RouteRequest) -> RouteRequest:
    """The question after a router may have counted it: the next one does not."""
    return replace(question, asked=question.asked + 1)


def aged(question: RouteRequest, seconds: Seconds) -> RouteRequest:
    """The question `seconds` later. Errors: `DeadlineExceeded`."""
    if seconds <= 0.0:
        return question
    deadline = None if question.deadline is None else question.deadline - seconds
    if deadline is not None and deadline <= 0:
        raise DeadlineExceeded("the request's deadline passed while it waited for a worker")
    return replace(question, waited=question.waited + seconds, deadline=deadline)


def no_worker_error(model: str, last: PdserveError | None) -> PdserveError:
    """The error for a client when no worker is left to ask: the last worker's own error, if it
    answered. Addresses that did not answer are the operator's concern."""
    if last is None:
        return NoWorker(f"no worker takes requests for {model!r} at the moment", retry_after=1.0)
    if isinstance(last, LinkError):
        return NoWorker(f"no worker of {model!r} could be reached", retry_after=1.0)
    return last


def _affinity(frontend: NodeId, router: NodeId) -> bytes:
    """Rendezvous hash that orders the routers of a frontend."""
    return blake2b(f"{frontend}\0{router}".encode(), digest_size=8).digest()
