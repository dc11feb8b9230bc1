"""Serves the endpoints other than generation: models, tokenize, health, metrics, version, schema.

None of them reaches an engine. Those that process text are admitted like generation and share the
text pool with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from pdserve import __version__
from pdserve.errors import InvalidRequest
from pdserve.frontend.api.unknown_fields import UnknownFields
from pdserve.frontend.http.http_response import HttpResponse
from pdserve.frontend.model_registry import ModelRegistry, PreparedModel, model_object
from pdserve.frontend.preprocess.input_processor import (
    PlanContext,
    chat_tokens,
    check_chars_to_count,
)
from pdserve.frontend.preprocess.sampling import check_prompt_tokens
from pdserve.limits.process_usage import own_memory
from pdserve.observe.scrapes import ScrapeForm
from pdserve.protocols.anthropic_messages import messages_model, messages_models
from pdserve.protocols.completion_responses import (
    Detokenized,
    Health,
    ModelList,
    Tokenized,
    Version,
)
from pdserve.protocols.openapi import document
from pdserve.protocols.request_decoder import DETOKENIZE, TOKENIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.frontend.active_requests import ActiveRequest, ActiveRequests
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.frontend.http.body_reader import RequestBody
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics
    from pdserve.observe.scrapes import ScrapeHandler
    from pdserve.protocols.completion_requests import TokenizeRequest
    from pdserve.text.text_pool import TextPool, TextWork

_encode = msgspec.json.Encoder().encode
_CHARS_PER_TOKEN = 4


class UtilityEndpoints:
    """All endpoints other than generation. Used on the event loop's thread."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        models: ModelRegistry,
        pool: TextPool,
        active_requests: ActiveRequests,
        metrics: Metrics,
        time: Callable[[], Seconds],
        degraded: Mapping[str, str],
        pages: ScrapeHandler,
    ) -> None:
        self._config = config
        self._backend = backend
        self._models = models
        self._pool = pool
        self._active_requests = active_requests
        self._unknown = UnknownFields(metrics)
        self._metrics = metrics
        self._time = time
        self._started = time()
        self._degraded = degraded
        self._pages = pages
        self._document: bytes | None = None

    # ------------------------------------------------------------------ models

    async def models(self, call: HttpRequest) -> HttpResponse:
        """`GET /v1/models`"""
        models = self._models.listing(call.key)
        if call.is_anthropic:
            return _json(call, messages_models(models))
        return _json(call, ModelList(data=models))

    async def model(self, call: HttpRequest) -> HttpResponse:
        """`GET /v1/models/{id}`"""
        model = model_object(call.rest, self._models.card(call.rest, call.key))
        return _json(call, messages_model(model) if call.is_anthropic else model)

    # ------------------------------------------------------------------ text

    async def tokenize(self, call: HttpRequest) -> HttpResponse:
        """`POST /tokenize`"""
        return _json(call, await self._active_requests.run(call, self._tokenized))

    async def _tokenized(self, body: RequestBody, active: ActiveRequest) -> Tokenized:
        decoded = await body.decode(TOKENIZE, strict=self._config.strict_api)
        self._unknown.report(decoded.unknown)
        active.stage = "working on the text"
        request, call = decoded.request, active.call
        model = await self._model(request.model, call)
        pool = active.work(self._pool)
        tokens = await self._tokens(request, model, call, pool)
        names = None
        if request.return_token_strs:
            texts = map(model.tokenizer.token_name, tokens)
            names = await pool.run(_CHARS_PER_TOKEN * len(tokens), lambda: list(texts))
        return Tokenized(
            count=len(tokens),
            max_model_len=model.card.max_model_len,
            tokens=tokens,
            token_strs=names,
        )

    async def detokenize(self, call: HttpRequest) -> HttpResponse:
        """`POST /detokenize`"""
        return _json(call, await self._active_requests.run(call, self._detokenized))

    async def _detokenized(self, body: RequestBody, active: ActiveRequest) -> Detokenized:
        decoded = await body.decode(DETOKENIZE, strict=self._config.strict_api)
        self._unknown.report(decoded.unknown)
        active.stage = "working on the text"
        tokens = decoded.request.tokens
        model = await self._model(decoded.request.model, active.call)
        if tokens:
            check_prompt_tokens(tokens, model.card, "tokens")
        text = await active.work(self._pool).run(
            _CHARS_PER_TOKEN * len(tokens),
            model.tokenizer.decode,
            tokens,
            skip_special_tokens=False,
        )
        return Detokenized(prompt=text)

    async def _model(self, name: str | None, call: HttpRequest) -> PreparedModel:
        card = self._models.card(name, call.key)
        return self._models.get_nowait(card) or await self._models.get(card)

    async def _tokens(
        self, request: TokenizeRequest, model: PreparedModel, call: HttpRequest, pool: TextWork
    ) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of 'prompt' and 'messages'", param="prompt")
        if request.prompt is not None:
            check_chars_to_count(request.prompt, model, "prompt")
            special = request.add_special_tokens is not False
            return (await pool.encode(model.tokenizer, request.prompt, special)).tolist()
        context = PlanContext(
            model=model, config=self._config, pool=pool, request_id=call.request_id, key=call.key
        )
        return (await chat_tokens(request, context)).tolist()

    # ------------------------------------------------------------------ the process

    async def health(self, call: HttpRequest) -> HttpResponse:
        """`GET /health`: 200 when requests can be served, else 503 with the reason."""
        status, reason = self._status()
        answer = Health(
            status=status,
            reason=reason,
            version=__version__,
            uptime_seconds=round(self._time() - self._started, 3),
            active_requests=len(self._active_requests.active),
            memory_bytes=own_memory() + self._metrics.engine_memory,
            degraded=dict(self._degraded),
        )
        reply = _json(call, answer, 200 if status == "ok" else 503)
        if status != "ok":
            reply.add_headers(b"Retry-After: 1\r\n")
        return reply

    def _status(self) -> tuple[Literal["ok", "loading", "draining", "unavailable"], str | None]:
        if self._active_requests.draining:
            return "draining", "the server is shutting down"
        reason = self._backend.unready_reason()
        if reason is None:
            return "ok", None
        return ("unavailable" if self._backend.cards() else "loading"), reason

    async def live(self, call: HttpRequest) -> HttpResponse:
        """`GET /live`: 200 while the event loop runs."""
        return HttpResponse(200, b'{"status":"ok"}', headers=call.headers)

    async def metrics(self, call: HttpRequest) -> HttpResponse:
        """`GET /metrics`: Prometheus's text format."""
        headers = call.http.headers
        page = await self._pages.page(
            ScrapeForm.asked(
                headers.get("Accept", ""),
                headers.get("Accept-Encoding", ""),
                call.http.rel_url.query.get("names"),
                self._pages.names,
            )
        )
        lines = call.headers
        if page.encoding:
            lines += b"Content-Encoding: %s\r\n" % page.encoding.encode()
        return HttpResponse(200, page.body, page.content_type.encode(), lines)

    async def version(self, call: HttpRequest) -> HttpResponse:
        """`GET /version`"""
        return _json(call, Version(version=__version__))

    async def openapi(self, call: HttpRequest) -> HttpResponse:
        """`GET /openapi.json`"""
        if self._document is None:
            self._document = _encode(document(__version__))
        return HttpResponse(200, self._document, headers=call.headers)


def _json(call: HttpRequest, answer: msgspec.Struct, status: int = 200) -> HttpResponse:
    return HttpResponse(status, _encode(answer), headers=call.headers)
