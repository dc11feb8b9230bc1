"""One generation request's whole life: admitted, read, planned, dispatched, answered, released.

The only place where these steps are put in order, and where each way to end (completed, refused,
out of time, client gone, server going) becomes one outcome. Owned by the API; one call per request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from pdserve.clock import SystemClock
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineError,
    PdserveError,
)
from pdserve.frontend.answer import Answer
from pdserve.frontend.call import Call
from pdserve.frontend.embeddings import VectorAnswer
from pdserve.frontend.gathered import Gathered
from pdserve.frontend.hints import NO_HINTS, Hints, hints_of
from pdserve.frontend.identity import check_request_id
from pdserve.frontend.limits import Admission, Ticket
from pdserve.frontend.naming import NAMELESS, Naming
from pdserve.frontend.prompts import Context
from pdserve.frontend.replies import Reply, connection_of
from pdserve.frontend.stream import StreamAnswer, stream_answer
from pdserve.frontend.unary import UnaryAnswer
from pdserve.frontend.unknown import UnknownFields
from pdserve.frontend.wire import EventWire, Flusher
from pdserve.ids import Seconds
from pdserve.observe.metrics import Metrics, outcome_of
from pdserve.openai.embeddings import EmbeddingRequest
from pdserve.openai.messages_api import CountTokensRequest, MessagesRequest
from pdserve.openai.responses_api import ResponsesRequest
from pdserve.openai.schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from pdserve.frontend.answer import PromptSink
    from pdserve.frontend.backend import Backend
    from pdserve.frontend.bodies import BodyReader
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.models import ModelDirectory, ServedModel
    from pdserve.frontend.plan import Plan
    from pdserve.messages.request import GenerateRequest
    from pdserve.openai.decode import RequestDecoder
    from pdserve.text.pool import TextPool

logger = logging.getLogger("pdserve.frontend")

_NOTICED: Final[Seconds] = 0.1
"""What has passed of a request's time and is worth a copy of it."""

R = TypeVar(
    "R",
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
)


@dataclass(frozen=True, slots=True)
class Route(Generic[R]):
    """One kind of generation request."""

    decoder: RequestDecoder[R]
    plan: Callable[[R, Context], Awaitable[Plan]]


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """One request in progress, as far as shutdown and deadlines need to know it."""

    call: Call
    arrival: Seconds
    hints: Hints = NO_HINTS
    expires: Seconds = 0.0
    """When its time is over; 0: the body is not here."""
    ticket: Ticket | None = None
    """Its place; None: the body is not here."""
    task: asyncio.Task[Any]
    stage: str = "reading the request"
    answer: Answer | None = None
    composing: bool = False
    """All tokens are here, and are being put together as a whole answer."""
    error: PdserveError | None = None
    """Why it ends early, if somebody else decided so."""

    def fail(self, error: PdserveError) -> None:
        """End it with `error`, wherever it is."""
        if self.answer is not None and not self.composing:
            self.answer.fail(error)
        elif self.error is None:
            self.error = error
            self.task.cancel()

    @property
    def where(self) -> str:
        """The stage, in words."""
        if self.composing:
            return "putting the answer together"
        return self.stage if self.answer is None else self.answer.stage


class Generations:
    """Runs generation requests and knows those in progress."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        models: ModelDirectory,
        pool: TextPool,
        bodies: BodyReader,
        metrics: Metrics,
        naming: Naming = NAMELESS,
    ) -> None:
        self._config = config
        self._naming = naming
        self._backend = backend
        self._models = models
        self._pool = pool
        self._bodies = bodies
        self._metrics = metrics
        self._unknown = UnknownFields(metrics)
        self._loop = asyncio.get_running_loop()
        self._time = SystemClock().now  # uvloop's own clock counts whole milliseconds
        self._flusher = Flusher(self._loop)
        self.admission = Admission(config.max_in_flight, config.retry_after)
        self.gathered = Gathered(config.max_answer, config.max_answers)
        self.active: set[Exchange] = set()
        self.draining = False
        """Nothing new is taken."""

    async def serve(self, route: Route[R], call: Call) -> web.StreamResponse:
        """Answer one request.

        Errors: `PdserveError`, if the answer has not begun; later ones end the stream. Cancellation
        (the client hung up): everything is freed.
        """
        if self.draining:
            raise Draining("the server is shutting down")
        arrival = self._time()
        self.admission.check(call.key, arrival)  # before a body is read for nothing
        exchange = self.exchange(call, arrival)
        self.active.add(exchange)
        try:
            return await self._serve(route, exchange)
        except PdserveError as error:
            exchange.error = error
            raise
        except asyncio.CancelledError:
            if exchange.error is None:
                exchange.error = Cancelled("the client went away")
                raise
            exchange.task.uncancel()  # it was cancelled to deliver this error, and goes on
            raise exchange.error from None
        except ConnectionError:
            exchange.error = Cancelled("the client went away")
            raise
        except Exception as error:
            exchange.error = EngineError(f"{type(error).__name__} in the server")
            raise
        finally:
            self._release(exchange)

    def exchange(self, call: Call, arrival: Seconds | None = None) -> Exchange:
        """The record of a request that begins now."""
        task = asyncio.current_task()
        assert task is not None  # aiohttp runs every handler in a task
        now = self._time() if arrival is None else arrival
        return Exchange(call=call, arrival=now, task=task)

    async def _serve(self, route: Route[R], exchange: Exchange) -> web.StreamResponse:
        """A body that comes slowly holds a connection, and nobody's place."""
        body = await self._bodies.read(exchange.call.http)
        ticket = exchange.ticket = self.admission.admit(exchange.call.key, self._time())
        limit = self._config.request_timeout
        exchange.expires = self._time() + limit
        deadline = self._loop.call_later(limit, _expire, exchange, limit)
        try:
            plan = await self.plan(route, body, exchange)
            del body  # as large as it may be, and the answer may take long
            ticket.check_tokens(plan.prompt_tokens, self._time())
            if plan.stream:
                return await self._stream(plan, exchange)
            return await self._whole(plan, exchange)
        finally:
            deadline.cancel()

    # ------------------------------------------------------------------ before the answer

    async def plan(self, route: Route[R], body: bytes, exchange: Exchange) -> Plan:
        """What is to be done for a body, and into the exchange what its client wishes.

        Errors: `InvalidRequest` and its kin, `NoWorker`, `Overloaded`.
        """
        decoded = route.decoder.decode(body, strict=self._config.strict_api)
        if decoded.unknown:
            self._unknown.report(decoded.unknown)
        request = decoded.request
        call = exchange.call
        exchange.hints = hints_of(call.http.headers, request.session_id, call.key)
        if request.request_id is not None:
            call.name(check_request_id(request.request_id))
        model = await self._model(request.model, exchange)
        exchange.stage = "preparing the prompt"
        context = Context(
            model=model,
            config=self._config,
            pool=self._pool,
            request_id=call.request_id,
            naming=self._naming,
            key=call.key,
            deadline=self._config.request_timeout,
        )
        return await route.plan(request, context)

    async def count(self, route: Route[R], call: Call) -> int:
        """Tokens of a request's prompt, as it would be: nothing else is done, no limit charged.

        Errors: those of `plan`, `DeadlineExceeded`.
        """
        body = await self._bodies.read(call.http)
        limit = self._config.request_timeout
        try:
            async with asyncio.timeout(limit):
                plan = await self.plan(route, body, self.exchange(call))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took longer than {limit:g} s; its tokens were being counted"
            ) from None
        return plan.prompt_tokens

    async def _model(self, name: str | None, exchange: Exchange) -> ServedModel:
        card = self._models.card(name, exchange.call.key)
        refusal = self._backend.refusal(card)
        if refusal is not None:
            raise refusal
        model = self._models.get_nowait(card)
        if model is None:
            exchange.stage = "waiting for the model's tokenizer"
            model = await self._models.get(card)
        return model

    async def _dispatch(self, plan: Plan, answer: Answer, exchange: Exchange) -> None:
        exchange.stage = "waiting for a worker"
        prompts = list(zip(plan.requests, answer.sinks, strict=True))
        if len(prompts) == 1:
            await self._open(*prompts[0], exchange)
        else:
            await self._open_all(prompts, exchange)
        exchange.answer = answer
        await answer.finished

    async def _dispatch_in_turn(self, plan: Plan, answer: VectorAnswer, exchange: Exchange) -> None:
        """No more at a time than a request may have prompts: inputs may be many more. The first
        that fails ends them all."""
        exchange.answer = answer
        left = zip(plan.requests, answer.sinks, answer.choices, strict=True)

        async def one_by_one() -> None:
            for request, sink, choice in left:
                await self._open(request, sink, exchange)
                await choice.over.wait()

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(len(plan.requests), self._config.max_prompts)):
                    lanes.create_task(one_by_one())
                await answer.finished
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _open_all(
        self, prompts: list[tuple[GenerateRequest, PromptSink]], exchange: Exchange
    ) -> None:
        """Side by side: each may be held for a while, and need not wait for the one before. The
        first that fails ends them all."""
        try:
            async with asyncio.TaskGroup() as opening:
                for request, sink in prompts:
                    opening.create_task(self._open(request, sink, exchange))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _open(self, request: GenerateRequest, sink: PromptSink, exchange: Exchange) -> None:
        now = self._time()
        hints = replace(exchange.hints, waited=max(0.0, now - exchange.arrival))
        left = exchange.expires - now
        if request.deadline is not None and request.deadline - left > _NOTICED:
            request = replace(request, deadline=max(0.001, left))
        sink.opened(await self._backend.open(request, sink, hints, sink.on_placed))

    # ------------------------------------------------------------------ the answer

    async def _whole(self, plan: Plan, exchange: Exchange) -> Reply:
        kind = UnaryAnswer if plan.vectors is None else VectorAnswer
        answer = kind(plan, self._metrics, exchange.arrival, self._time, self.gathered)
        try:
            if isinstance(answer, VectorAnswer):
                await self._dispatch_in_turn(plan, answer, exchange)
            else:
                await self._dispatch(plan, answer, exchange)
            exchange.composing = True
            body = await self._pool.run(answer.work, answer.body)
            lines = exchange.call.headers + _seed_line(plan) + answer.served_lines()
            return Reply(200, body, headers=lines)
        finally:
            self._close(answer)

    async def _stream(self, plan: Plan, exchange: Exchange) -> web.StreamResponse:
        lines = exchange.call.headers + _seed_line(plan)
        wire = EventWire(exchange.call.http, lines, self._config.write_buffer, self._flusher)
        answer = stream_answer(
            plan, self._metrics, exchange.arrival, self._time, wire, self.gathered
        )
        pulse = _Pulse(self._loop, answer, self._config.header_wait)
        pulse.begin(self._time() - exchange.arrival)
        try:
            await self._run_stream(plan, answer, exchange)
            return await wire.reply()
        finally:
            pulse.end()
            self._close(answer)
            wire.release()

    async def _run_stream(self, plan: Plan, answer: StreamAnswer, exchange: Exchange) -> None:
        """Once the stream has begun its status is sent: an error becomes its last event."""
        try:
            await self._dispatch(plan, answer, exchange)
            answer.finish()
        except PdserveError as error:
            if not answer.wire.started:
                raise
            exchange.error = error
            logger.warning("stream ended early: %s", error)
            _end_early(answer, error)
        except asyncio.CancelledError:
            if exchange.error is None or not answer.wire.started:
                raise
            exchange.task.uncancel()  # it was cancelled to deliver this error, and goes on
            _end_early(answer, exchange.error)
        except Exception:
            if answer.wire.started:  # an answer to this fault would be read as the stream's text
                connection_of(exchange.call.http).cut("server fault")
            raise

    # ------------------------------------------------------------------ the end

    def _close(self, answer: Answer) -> None:
        answer.cancel()
        if not answer.finished.done():
            answer.finished.cancel()
        elif not answer.finished.cancelled():
            answer.finished.exception()  # known to whoever raised it

    def _release(self, exchange: Exchange) -> None:
        now = self._time()
        self.active.discard(exchange)
        answer, error = exchange.answer, exchange.error
        output = 0 if answer is None else answer.completion_tokens
        if exchange.ticket is not None:
            exchange.ticket.release(output, now)
        metrics = self._metrics
        metrics.requests.labels(outcome_of(error)).inc()
        if answer is not None and error is None:
            metrics.e2e_request_latency.observe(now - exchange.arrival)
            metrics.request_prompt_tokens.observe(answer.plan.prompt_tokens)
            metrics.request_generation_tokens.observe(output)


class _Pulse:
    """Tells a client that waits for its first token, from time to time, that it is served."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: StreamAnswer, interval: Seconds
    ) -> None:
        self._call_later = loop.call_later
        self._answer = answer
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, passed: Seconds) -> None:
        """`passed` since the request arrived."""
        self._timer = self._call_later(max(0.0, self._interval - passed), self._beat)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if self._answer.tell_waiting():
            self._timer = self._call_later(self._interval, self._beat)


def _end_early(answer: StreamAnswer, error: PdserveError) -> None:
    """Nothing may be computed or said any more while the end waits for a slow client: it would
    stand behind the end of the body, where the connection's next answer begins."""
    answer.cancel()
    answer.abort(error)


def _expire(exchange: Exchange, limit: Seconds) -> None:
    exchange.fail(
        DeadlineExceeded(f"the request took longer than {limit:g} s; it was {exchange.where}")
    )


def _seed_line(plan: Plan) -> bytes:
    """The seed that was used, so that an answer can be had again."""
    if plan.vectors is not None:
        return b""
    return b"x-pdserve-seed: %d\r\n" % plan.requests[0].sampling.seed
