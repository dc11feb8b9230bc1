"""Runs one admitted generation request: plans it, dispatches it, answers it.

Only this file orders these steps. `active_requests.py` admits and ends the request. Owned by the
API; one call per request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec.structs import replace

from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.frontend.api.unknown_fields import UnknownFields
from pdserve.frontend.http.http_response import EVENTS, JSON, HttpResponse, connection_of
from pdserve.frontend.http.request_id import check_request_id
from pdserve.frontend.http.sse_response import Flusher, SseWriter
from pdserve.frontend.images.loader import ImageLoader
from pdserve.frontend.output.embedding_response import EmbeddingResponseBuilder
from pdserve.frontend.output.full_response import FullResponseBuilder
from pdserve.frontend.output.response_memory import ResponseMemory
from pdserve.frontend.output.score_response import ScoreResponseBuilder
from pdserve.frontend.output.streaming_response import (
    StreamingResponseBuilder,
    streaming_response_builder,
)
from pdserve.frontend.preprocess.input_processor import PlanContext
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING, PromptHasher
from pdserve.frontend.request_log import request_fields
from pdserve.frontend.request_metrics import EndReport, count_ended, ended_request
from pdserve.frontend.routing_hints import parse_hints
from pdserve.protocols.anthropic_messages import CountTokensRequest, MessagesRequest
from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest
from pdserve.protocols.embeddings import EmbeddingRequest
from pdserve.protocols.ollama.answers import NDJSON
from pdserve.protocols.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from pdserve.protocols.responses_api import ResponsesRequest
from pdserve.protocols.scoring import RerankRequest, ScoreRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from pdserve.frontend.active_requests import ActiveRequest, ActiveRequests
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.frontend.http.body_reader import RequestBody
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.frontend.images.loader import ImageIntake
    from pdserve.frontend.model_registry import ModelRegistry, PreparedModel
    from pdserve.frontend.output.response_builder import PromptSink, ResponseBuilder
    from pdserve.frontend.plan import RequestPlan
    from pdserve.frontend.request_traces import RequestTraces
    from pdserve.ids import Seconds
    from pdserve.messages.request import GenerateRequest
    from pdserve.observe.metrics import Metrics
    from pdserve.protocols.request_decoder import RequestDecoder
    from pdserve.text.text_pool import TextPool

logger = logging.getLogger("pdserve.frontend")

_NOTICED: Final[Seconds] = 0.1
"""Seconds of waiting from which on the deadline sent to the worker is adjusted."""

R = TypeVar(
    "R",
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    RerankRequest,
    ScoreRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
)


@dataclass(frozen=True, slots=True)
class RequestKind(Generic[R]):
    """One kind of generation request."""

    decoder: RequestDecoder[R]
    plan: Callable[[R, PlanContext], Awaitable[RequestPlan]]
    tagged: bool = False
    """True if `:latest` may follow a model's name."""


class GenerationHandler:
    """Runs generation requests."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        models: ModelRegistry,
        pool: TextPool,
        active_requests: ActiveRequests,
        metrics: Metrics,
        naming: PromptHasher = NO_HASHING,
        images: ImageLoader | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        """`traces` records and traces requests; None: nothing is recorded."""
        self.images = images or ImageLoader(config, metrics)
        self._config = config
        self._naming = naming
        self._traces = traces
        self._backend = backend
        self._models = models
        self._pool = pool
        self._metrics = metrics
        self._unknown = UnknownFields(metrics)
        self._loop = asyncio.get_running_loop()
        # uvloop's own clock counts whole milliseconds, which is too coarse.
        self._time = SystemClock().now
        self._flusher = Flusher(self._loop)
        self._active_requests = active_requests
        self.gathered = ResponseMemory(config.max_answer, config.max_answers)

    async def serve(self, route: RequestKind[R], call: HttpRequest) -> web.StreamResponse:
        """Answers one request.

        Errors: `PdserveError` if the answer has not begun; later errors end the stream.
        Cancellation (the client has disconnected): everything is freed.
        """
        if self._traces is not None:
            self._traces.begin(call)
        return await self._active_requests.run(
            call, lambda body, active: self._serve(route, body, active), self._count
        )

    async def serve_by_body(
        self, kind_of: Callable[[bytes], RequestKind[Any]], call: HttpRequest
    ) -> web.StreamResponse:
        """Answers one request, whose kind its body says. Errors: those of `serve` and `kind_of`."""

        async def serve(body: RequestBody, active: ActiveRequest) -> web.StreamResponse:
            return await self._serve(await body.look(kind_of), body, active)

        if self._traces is not None:
            self._traces.begin(call)
        return await self._active_requests.run(call, serve, self._count)

    async def count(self, route: RequestKind[R], call: HttpRequest) -> int:
        """Returns the number of tokens of a request's prompt; generates nothing.

        Errors: those of `plan`, `DeadlineExceeded`.
        """
        plan = await self._active_requests.run(
            call, lambda body, active: self.plan(route, body, active)
        )
        return plan.prompt_tokens

    async def _serve(
        self, route: RequestKind[R], body: RequestBody, active: ActiveRequest
    ) -> web.StreamResponse:
        images = self.images.intake(active.call.key)
        try:
            return await self._answer(await self.plan(route, body, active, images), body, active)
        finally:
            images.release()

    async def _answer(
        self, plan: RequestPlan, body: RequestBody, active: ActiveRequest
    ) -> web.StreamResponse:
        if plan.ready is not None:
            kind = NDJSON if plan.stream else JSON
            return HttpResponse(200, plan.ready, kind, active.call.headers)
        # A body may be large and its answer long, so only what the answer repeats is kept.
        body.keep_only(plan.repeats)
        assert active.ticket is not None
        active.ticket.check_tokens(plan.prompt_tokens, self._time())
        if plan.stream:
            return await self._stream(plan, active)
        return await self._whole(plan, active)

    # ------------------------------------------------------------------ before the answer

    async def plan(
        self,
        route: RequestKind[R],
        body: RequestBody,
        active: ActiveRequest,
        images: ImageIntake | None = None,
    ) -> RequestPlan:
        """Makes the plan for a body, and stores the client's options in the exchange. `images`
        holds its images until the caller releases them; None: it may have none.

        Errors: `InvalidRequest` and its subclasses, `NoWorker`, `Overloaded`.
        """
        phases = active.call.phases
        if phases is not None:
            phases.planning = self._time()
        plan = await self._plan(route, body, active, images)
        active.plan = plan
        if phases is not None:
            phases.planned, phases.prompt_tokens = self._time(), plan.prompt_tokens
        return plan

    async def _plan(
        self,
        route: RequestKind[R],
        body: RequestBody,
        active: ActiveRequest,
        images: ImageIntake | None,
    ) -> RequestPlan:
        decoded = await body.decode(route.decoder, strict=self._config.strict_api)
        if decoded.unknown:
            self._unknown.report(decoded.unknown)
        request = decoded.request
        call = active.call
        active.hints = parse_hints(call.http.headers, request.session_id, call.key)
        if request.request_id is not None:
            call.name(check_request_id(request.request_id))
        name = self._models.without_tag(request.model) if route.tagged else request.model
        model = await self._model(name, active)
        active.stage = "preparing the prompt"
        context = PlanContext(
            model=model,
            config=self._config,
            pool=active.work(self._pool),
            request_id=call.request_id,
            naming=self._naming,
            key=call.key,
            deadline=self._config.request_timeout,
            images=images,
            arrival=active.arrival,
            time=self._time,
        )
        plan = await route.plan(request, context)
        if plan.left_out:
            self._unknown.report_left_out(plan.left_out)
        return plan

    async def _model(self, name: str | None, active: ActiveRequest) -> PreparedModel:
        card = self._models.card(name, active.call.key)
        active.model = card.name
        if self._traces is not None and active.call.phases is not None:
            self._traces.tracer.watch(active.call.phases, card.name)
        refusal = self._backend.refusal(card, name)
        if refusal is not None:
            raise refusal
        model = self._models.get_nowait(card)
        if model is None:
            active.stage = "waiting for the model's tokenizer"
            model = await self._models.get(card)
        return model.adapted(name)

    async def _dispatch(
        self, plan: RequestPlan, answer: ResponseBuilder, active: ActiveRequest
    ) -> None:
        active.stage = "waiting for a worker"
        self._report_end(answer, active)
        prompts = list(zip(plan.requests, answer.sinks, strict=True))
        if len(prompts) == 1:
            await self._open(*prompts[0], active)
        else:
            await self._open_all(prompts, active)
        active.answer = answer
        await answer.finished

    async def _dispatch_in_turn(
        self, plan: RequestPlan, answer: EmbeddingResponseBuilder, active: ActiveRequest
    ) -> None:
        """Dispatches inputs, at most as many at a time as a request may have prompts. The first
        failure ends them all."""
        active.answer = answer
        self._report_end(answer, active)
        left = zip(plan.requests, answer.sinks, answer.choices, strict=True)

        async def one_by_one() -> None:
            for request, sink, choice in left:
                await self._open(request, sink, active)
                await choice.over.wait()

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(len(plan.requests), self._config.max_prompts)):
                    lanes.create_task(one_by_one())
                await answer.finished
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _open_all(
        self, prompts: list[tuple[GenerateRequest, PromptSink]], active: ActiveRequest
    ) -> None:
        """Dispatches prompts at the same time, because a router may hold each for a while. The
        first failure ends them all."""
        try:
            async with asyncio.TaskGroup() as opening:
                for request, sink in prompts:
                    opening.create_task(self._open(request, sink, active))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _open(
        self, request: GenerateRequest, sink: PromptSink, active: ActiveRequest
    ) -> None:
        now = self._time()
        hints = replace(active.hints, waited=max(0.0, now - active.arrival))
        left = active.expires - now
        if request.deadline is not None and request.deadline - left > _NOTICED:
            request = replace(request, deadline=max(0.001, left))
        if active.call.phases is not None:
            sink.phases = active.call.phases.add_prompt()
        held = self._metrics.of_model(active.model).num_requests_held
        held.value += 1
        try:
            assert active.end_report is not None
            opened = await self._backend.open(
                request, sink, hints, sink.on_placed, sink.phases, active.end_report
            )
        finally:
            held.value -= 1
        sink.opened(opened)

    # ------------------------------------------------------------------ the answer

    async def _whole(self, plan: RequestPlan, active: ActiveRequest) -> HttpResponse:
        metrics = self._metrics.of_model(active.model)
        answer = _builder(plan)(plan, metrics, active.arrival, self._time, self.gathered)
        try:
            if isinstance(answer, EmbeddingResponseBuilder):
                await self._dispatch_in_turn(plan, answer, active)
            else:
                await self._dispatch(plan, answer, active)
            active.composing = True
            body = await active.work(self._pool).finish(answer.work, answer.body)
            lines = active.call.headers + _seed_line(plan) + answer.served_lines()
            return HttpResponse(200, body, headers=lines)
        finally:
            self._close(answer, active)

    async def _stream(self, plan: RequestPlan, active: ActiveRequest) -> web.StreamResponse:
        lines = active.call.headers + _seed_line(plan)
        kind = EVENTS if plan.adapter is None else plan.adapter.stream_type
        wire = SseWriter(active.call.http, lines, self._config.write_buffer, self._flusher, kind)
        metrics = self._metrics.of_model(active.model)
        answer = streaming_response_builder(
            plan, metrics, active.arrival, self._time, wire, self.gathered
        )
        pulse = _KeepAlive(self._loop, answer, self._config.header_wait)
        pulse.begin(self._time() - active.arrival)
        try:
            await self._run_stream(plan, answer, active)
            return await wire.reply()
        finally:
            pulse.end()
            self._close(answer, active)
            wire.release()

    async def _run_stream(
        self, plan: RequestPlan, answer: StreamingResponseBuilder, active: ActiveRequest
    ) -> None:
        """Runs a stream. Once it has begun its status is sent, so an error becomes its last
        event."""
        try:
            await self._dispatch(plan, answer, active)
            answer.finish()
        except PdserveError as error:
            if not answer.wire.started:
                raise
            active.error = error
            logger.warning("stream ended early: %s", error)
            _end_early(answer, error)
        except asyncio.CancelledError:
            if active.error is None or not answer.wire.started:
                raise
            # The task was cancelled only to deliver this error.
            active.task.uncancel()
            _end_early(answer, active.error)
        except Exception:
            if answer.wire.started:
                # The client would read an error response as part of the stream.
                connection_of(active.call.http).cut("server fault")
            raise

    # ------------------------------------------------------------------ the end

    def _close(self, answer: ResponseBuilder, active: ActiveRequest) -> None:
        answer.cancel()
        if not answer.finished.done():
            answer.finished.cancel()
        elif not answer.finished.cancelled():
            # This marks the error as retrieved, so that asyncio does not log it.
            answer.finished.exception()
        if active.answer is not answer:
            # No worker took it, so nobody asks how it was served.
            answer.release()

    def _count(self, active: ActiveRequest) -> None:
        """Counts the ended request in the metrics."""
        now = self._time()
        answer, error = active.answer, active.error
        if answer is not None and error is not None:
            active.call.served_lines = answer.served_lines()
        if self._config.log_requests:
            active.call.log_fields = request_fields(active)
        if self._traces is not None and active.call.phases is not None:
            self._traces.note(active.call.phases, active)
        metrics = self._metrics.of_model(active.model)
        count_ended(metrics, answer, error, active.arrival, now)
        told, report = False, active.end_report
        if report is not None:
            report.close()
            told = report.told
        if metrics.objectives and active.model and not told:
            model = _routed_model(active)
            ended = ended_request(metrics.objectives, model, answer, error, active.arrival)
            if ended.verdicts:
                self._backend.note_ended(ended)

    def _report_end(self, answer: ResponseBuilder, active: ActiveRequest) -> None:
        """From now on the router of the request's last worker is told how the request ends."""
        objectives = self._metrics.of_model(active.model).objectives
        model = _routed_model(active)
        active.end_report = EndReport(objectives, model, answer, active.arrival)


def _routed_model(active: ActiveRequest) -> str:
    """The model's name as routers know it."""
    plan = active.plan
    return plan.requests[0].model if plan is not None and plan.requests else active.model


class _KeepAlive:
    """Sends comments to a client that waits for its first token."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: StreamingResponseBuilder, interval: Seconds
    ) -> None:
        self._call_later = loop.call_later
        self._answer = answer
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, passed: Seconds) -> None:
        """Starts the timer; `passed`: seconds since the request arrived."""
        self._timer = self._call_later(max(0.0, self._interval - passed), self._beat)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if self._answer.tell_waiting():
            self._timer = self._call_later(self._interval, self._beat)


def _builder(
    plan: RequestPlan,
) -> type[FullResponseBuilder] | type[EmbeddingResponseBuilder]:
    if plan.vectors is None:
        return FullResponseBuilder
    return EmbeddingResponseBuilder if plan.scores is None else ScoreResponseBuilder


def _end_early(answer: StreamingResponseBuilder, error: PdserveError) -> None:
    """Stops all output before the end waits for a slow client: later output would follow the end of
    the body, where the connection's next answer begins."""
    answer.cancel()
    answer.abort(error)


def _seed_line(plan: RequestPlan) -> bytes:
    """A header line with the seed that was used, so that the answer can be repeated."""
    if plan.vectors is not None:
        return b""
    return b"x-pdserve-seed: %d\r\n" % plan.requests[0].sampling.seed
