"""Runs one request that has a body, from admission to its end.

Every endpoint that reads a body runs here. The request is refused while the server drains, takes
an admission place, counts for its API key, has a deadline, and ends with exactly one outcome.
This file does not know what endpoints do. Owned by the service.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.errors import Cancelled, DeadlineExceeded, Draining, EngineError, PdserveError
from pdserve.frontend.access.admission import Admission, AdmissionTicket
from pdserve.frontend.access.api_keys import cache_salt_of
from pdserve.frontend.http.http_request import HttpRequest
from pdserve.frontend.output.response_builder import ResponseBuilder
from pdserve.frontend.plan import RequestPlan
from pdserve.frontend.request_metrics import EndReport
from pdserve.frontend.routing_hints import NO_HINTS, RoutingHints
from pdserve.ids import Seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.http.body_reader import BodyReader, RequestBody
    from pdserve.text.text_pool import TextPool, TextWork

__all__ = ["ActiveRequest", "ActiveRequests"]

T = TypeVar("T")


class ActiveRequest(msgspec.Struct, kw_only=True, eq=False):
    """One request in progress, as far as shutdown and deadlines need to know it."""

    call: HttpRequest
    arrival: Seconds
    hints: RoutingHints = NO_HINTS
    expires: Seconds = 0.0
    """Time of the deadline; 0 until the body has arrived."""
    ticket: AdmissionTicket | None = None
    """The admission ticket; None until the body has arrived."""
    task: asyncio.Task[Any]
    stage: str = "reading the request"
    model: str = ""
    """The name of the model that serves it; empty until that is known."""
    plan: RequestPlan | None = None
    """None until the prompt is ready."""
    answer: ResponseBuilder | None = None
    composing: bool = False
    """True while a complete answer is built from all its tokens."""
    error: PdserveError | None = None
    """The error that ends the request early, if another part of the frontend ended it."""
    end_report: EndReport | None = None
    """Tells a router how the request ended; None until it is dispatched."""

    def fail(self, error: PdserveError) -> None:
        """Ends the request with `error`, at whatever stage it is."""
        if self.answer is not None and not self.composing:
            self.answer.fail(error)
        elif self.error is None:
            self.error = error
            self.task.cancel()

    def release(self) -> None:
        """Drops the answer's references, once metrics and trace have read it. Idempotent."""
        if self.answer is not None:
            self.answer.release()

    @property
    def where(self) -> str:
        """The stage, in words."""
        if self.composing:
            return "putting the answer together"
        return self.stage if self.answer is None else self.answer.stage

    def work(self, pool: TextPool) -> TextWork:
        """The text pool on behalf of this request's tenant; without keys, of all."""
        key = self.call.key
        return pool.of("" if key is None else key.tenant, cache_salt_of(key, None))


class ActiveRequests:
    """Admits requests and knows those in progress. Used on the event loop's thread."""

    def __init__(
        self, config: FrontendConfig, bodies: BodyReader, time: Callable[[], Seconds]
    ) -> None:
        self._config = config
        self._bodies = bodies
        self._time = time
        self._loop = asyncio.get_running_loop()
        self.admission = Admission(config.max_in_flight, config.retry_after)
        self.active: set[ActiveRequest] = set()
        self.draining = False
        """True once no new requests are taken."""

    async def run(
        self,
        call: HttpRequest,
        work: Callable[[RequestBody, ActiveRequest], Awaitable[T]],
        over: Callable[[ActiveRequest], None] = lambda active: None,
    ) -> T:
        """Reads the request's body, admits the request, and returns the result of `work`.

        `over` is called when a request has ended, also one that was refused. A body that arrives
        slowly holds a connection, but no place.

        Errors: `Draining`, `Overloaded` and `RateLimited`, before the body is read or after it;
        `DeadlineExceeded`; those of `work`. Cancellation: the client has disconnected.
        """
        arrival = self._time()
        task = asyncio.current_task(self._loop)
        # aiohttp runs every handler in a task.
        assert task is not None
        active = ActiveRequest(call=call, arrival=arrival, task=task)
        try:
            self._check(call, arrival)
            self.active.add(active)
            return await self._run(active, work)
        except PdserveError as error:
            active.error = error
            raise
        except asyncio.CancelledError:
            if active.error is None:
                active.error = Cancelled("the client went away")
                raise
            # The task was cancelled only to deliver this error.
            task.uncancel()
            raise active.error from None
        except ConnectionError:
            active.error = Cancelled("the client went away")
            raise
        except Exception as error:
            active.error = EngineError(f"{type(error).__name__} in the server")
            raise
        finally:
            self._release(active)
            over(active)
            # The error's traceback refers to this frame, and so to `active`: the cycle would keep
            # the request and its text until the garbage collector runs.
            active.error = None
            if call.phases is None or call.phases.owner is not active:
                # Otherwise the record of the request reads the answer, then releases it.
                active.release()

    def _check(self, call: HttpRequest, now: Seconds) -> None:
        """Refuses a request without a place, or over its limit, before its body is read. Errors:
        `Draining`, `Overloaded`."""
        if self.draining:
            raise Draining("the server is shutting down")
        self.admission.check(call.key, now)

    async def _run(
        self, active: ActiveRequest, work: Callable[[RequestBody, ActiveRequest], Awaitable[T]]
    ) -> T:
        body = await self._bodies.read(active.call)
        now = self._time()
        if active.call.phases is not None:
            active.call.phases.body_read = now
        active.ticket = self.admission.admit(active.call.key, now)
        limit = self._config.request_timeout
        active.expires = now + limit
        deadline = self._loop.call_later(limit, _expire, active, limit)
        try:
            return await work(body, active)
        finally:
            deadline.cancel()

    def _release(self, active: ActiveRequest) -> None:
        self.active.discard(active)
        answer = active.answer
        output = 0 if answer is None else answer.completion_tokens
        if active.ticket is not None:
            active.ticket.release(output, self._time())


def _expire(active: ActiveRequest, limit: Seconds) -> None:
    active.fail(
        DeadlineExceeded(f"the request took longer than {limit:g} s; it was {active.where}")
    )
