"""Maps HTTP paths and methods to endpoints, checks access, and writes errors in the API's shape.

Every request gets exactly one reply. A fault of the server becomes a 500 without details, and a
log line with them. The endpoints themselves are in other files.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import EngineError, MethodNotAllowed, PdserveError, RouteNotFound
from pdserve.frontend.access.api_keys import KeyRefused
from pdserve.frontend.access.auth_failures import AuthFailures
from pdserve.frontend.api.adapters.responses_request import FailedStream
from pdserve.frontend.api.request_kinds import (
    CHAT_KIND,
    COMPLETION_KIND,
    COUNT_TOKENS_KIND,
    EMBEDDING_KIND,
    MESSAGES_KIND,
    RERANK_KIND,
    RESPONSES_KIND,
    SCORE_KIND,
    kind_of_body,
)
from pdserve.frontend.http.http_request import HttpRequest
from pdserve.frontend.http.http_response import EVENTS, HttpResponse, connection_of, error_response
from pdserve.frontend.http.request_id import request_id_from
from pdserve.protocols.anthropic_messages import TokenTotal, messages_error_body
from pdserve.protocols.ollama.answers import ollama_error_body
from pdserve.protocols.responses_api import InputTokens
from pdserve.protocols.unsupported_fields import shorten

if TYPE_CHECKING:
    from pdserve.frontend.access.api_keys import ApiKey, KeyRing
    from pdserve.frontend.access.trusted_hosts import TrustedHosts
    from pdserve.frontend.active_requests import ActiveRequests
    from pdserve.frontend.api.ollama_endpoints import OllamaEndpoints
    from pdserve.frontend.api.route_explain import RouteExplainer
    from pdserve.frontend.api.utility_endpoints import UtilityEndpoints
    from pdserve.frontend.generation import GenerationHandler
    from pdserve.frontend.http.cors import Cors
    from pdserve.frontend.request_log import RequestLog
    from pdserve.frontend.request_traces import RequestTraces
    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend")
access = logging.getLogger("pdserve.frontend.access")

_encode = msgspec.json.Encoder().encode

Endpoint = Callable[[HttpRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """The endpoint of a path."""

    route: str
    """The path in metrics."""
    methods: Mapping[str, Endpoint]
    open: bool = False
    """True if it needs no API key."""

    @property
    def allow(self) -> str:
        """The value of the Allow header."""
        names = set(self.methods) | {"OPTIONS"} | ({"HEAD"} if "GET" in self.methods else set())
        return ", ".join(sorted(names))


class Api:
    """Answers every request of one frontend."""

    def __init__(
        self,
        generations: GenerationHandler,
        active_requests: ActiveRequests,
        explanations: RouteExplainer,
        small: UtilityEndpoints,
        metrics: Metrics,
        keys: KeyRing | None,
        cors: Cors,
        visitors: TrustedHosts,
        ollama: OllamaEndpoints,
        traces: RequestTraces,
        log: RequestLog | None = None,
    ) -> None:
        """`log` gets a line per request; None: there are none."""
        self.keys = keys
        """None: no authentication. Replaced when the file is read again."""
        self._generations = generations
        self._active_requests = active_requests
        self._traces = traces
        self._log = log
        self._metrics = metrics
        self._refusals = AuthFailures(metrics, time.monotonic())
        self._cors = cors
        self._visitors = visitors
        self._responses: dict[tuple[str, int], object] = {}
        self._models = ApiRoute("/v1/models/{id}", {"GET": small.model})
        self._stored = ApiRoute(
            "/v1/responses/{id}", dict.fromkeys(("GET", "POST", "DELETE"), _nothing_stored)
        )
        self._targets = {
            target.route: target
            for target in (
                ApiRoute("/v1/chat/completions", {"POST": self._chat}),
                ApiRoute("/v1/completions", {"POST": self._completion}),
                ApiRoute("/v1/embeddings", {"POST": self._embed}),
                ApiRoute("/v1/rerank", {"POST": self._rerank}),
                ApiRoute("/v2/rerank", {"POST": self._rerank}),
                ApiRoute("/rerank", {"POST": self._rerank}),
                ApiRoute("/v1/score", {"POST": self._score}),
                ApiRoute("/score", {"POST": self._score}),
                ApiRoute("/v1/responses", {"POST": self._respond}),
                ApiRoute("/v1/responses/input_tokens", {"POST": self._input_tokens}),
                ApiRoute("/v1/messages", {"POST": self._message}),
                ApiRoute("/v1/messages/count_tokens", {"POST": self._count_tokens}),
                ApiRoute("/invocations", {"POST": self._invoke}),
                ApiRoute("/route", {"POST": explanations.route}),
                ApiRoute("/v1/models", {"GET": small.models}),
                ApiRoute("/tokenize", {"POST": small.tokenize}),
                ApiRoute("/detokenize", {"POST": small.detokenize}),
                ApiRoute("/health", {"GET": small.health}, open=True),
                ApiRoute("/ping", dict.fromkeys(("GET", "POST"), small.health), open=True),
                ApiRoute("/live", {"GET": small.live}, open=True),
                ApiRoute("/metrics", {"GET": small.metrics}, open=True),
                ApiRoute("/version", {"GET": small.version}, open=True),
                ApiRoute("/openapi.json", {"GET": small.openapi}, open=True),
                ApiRoute("/", {"GET": ollama.root}, open=True),
                ApiRoute("/api/version", {"GET": ollama.version}, open=True),
                ApiRoute("/api/chat", {"POST": ollama.chat}),
                ApiRoute("/api/generate", {"POST": ollama.generate}),
                ApiRoute("/api/embed", {"POST": ollama.embed}),
                ApiRoute("/api/embeddings", {"POST": ollama.embeddings}),
                ApiRoute("/api/show", {"POST": ollama.show}),
                ApiRoute("/api/tags", {"GET": ollama.tags}),
                ApiRoute("/api/ps", {"GET": ollama.ps}),
                ApiRoute("/api/pull", {"POST": ollama.unmanaged}),
                ApiRoute("/api/push", {"POST": ollama.unmanaged}),
                ApiRoute("/api/create", {"POST": ollama.unmanaged}),
                ApiRoute("/api/copy", {"POST": ollama.unmanaged}),
                ApiRoute("/api/delete", {"DELETE": ollama.unmanaged}),
            )
        }

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answers one request. Cancellation: the client has disconnected."""
        headers = http.headers
        call = HttpRequest(http, self._cors.lines(headers.get("Origin")))
        if call.is_anthropic:
            # Anthropic's clients read the request id from this header.
            call.id_headers = (*call.id_headers, b"request-id")
        call.name(request_id_from(headers.get("x-request-id")))
        if self._log is not None:
            self._log.begin(call)
        route = "other"
        try:
            self._visitors.check(headers)
            target, call.rest = self._find(http.rel_url.path)
            route = call.route = target.route
            reply = await self._call(target, call)
        except PdserveError as error:
            reply = self._refuse(error, call)
        except (asyncio.CancelledError, ConnectionError):
            self._count(route, 499)
            self._traces.end(call, 499)
            self._log_end(call, 499)
            raise
        except Exception:
            logger.exception("answering %s failed", route)
            reply = self._refuse(EngineError("the server failed while answering"), call)
        finally:
            call.close()
        if self._active_requests.draining:
            # This process refuses further requests, so the client should connect anew.
            reply.force_close()
        self._count(route, reply.status)
        if call.phases is not None:
            self._traces.end(call, reply.status)
        self._log_end(call, reply.status)
        if access.isEnabledFor(logging.DEBUG):
            access.debug("%s %s: %d", http.method, route, reply.status)
        return reply

    def _log_end(self, call: HttpRequest, status: int) -> None:
        """Logs a request, unless it is a probe or a scrape."""
        if self._log is not None:
            target = self._targets.get(call.route)
            if target is None or not target.open:
                self._log.end(call, status)

    def _refuse(self, error: PdserveError, call: HttpRequest) -> HttpResponse:
        if isinstance(error, EngineError):
            logger.warning("request failed: %s", error)
        if call.phases is not None:
            call.phases.fail(error)
        lines = call.headers
        if isinstance(error, _NotAllowed):
            lines += b"Allow: %s\r\n" % error.allow.encode()
        if call.is_anthropic:
            return error_response(error, lines, messages_error_body(error, call.request_id))
        if call.is_ollama:
            return error_response(error, lines, ollama_error_body(error))
        return error_response(error, lines)

    def _find(self, path: str) -> tuple[ApiRoute, str]:
        target = self._targets.get(path)
        if target is not None:
            return target, ""
        if path.startswith("/v1/models/") and len(path) > len("/v1/models/"):
            return self._models, path.removeprefix("/v1/models/")
        if path.startswith("/v1/responses/"):
            return self._stored, ""
        near = difflib.get_close_matches(path[:64], self._targets, n=1, cutoff=0.8)
        hint = f"did you mean '{near[0]}'?" if near else "see /openapi.json"
        raise RouteNotFound(f"there is nothing at '{shorten(path)}'; {hint}")

    def _call(self, target: ApiRoute, call: HttpRequest) -> Awaitable[web.StreamResponse]:
        method = call.http.method
        if method == "OPTIONS":
            return self._options(target, call)
        endpoint = target.methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            raise _NotAllowed(target.route, method, target.allow)
        if self.keys is not None and not target.open:
            call.key = self._authenticate(self.keys, call)
        if not target.open:
            connection_of(call.http).begin_work()
        return endpoint(call)

    def _authenticate(self, keys: KeyRing, call: HttpRequest) -> ApiKey:
        headers = call.http.headers
        try:
            return keys.authenticate(headers.get("Authorization"), headers.get("x-api-key"))
        except KeyRefused as error:
            self._refusals.note(error, call.http.remote, time.monotonic())
            raise

    async def _chat(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(CHAT_KIND, call)

    async def _completion(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(COMPLETION_KIND, call)

    async def _embed(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(EMBEDDING_KIND, call)

    async def _rerank(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(RERANK_KIND, call)

    async def _score(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(SCORE_KIND, call)

    async def _invoke(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve_by_body(kind_of_body, call)

    async def _respond(self, call: HttpRequest) -> web.StreamResponse:
        try:
            return await self._generations.serve(RESPONSES_KIND, call)
        except FailedStream as error:
            return HttpResponse(200, error.events, EVENTS, call.headers)

    async def _input_tokens(self, call: HttpRequest) -> web.StreamResponse:
        counted = InputTokens(input_tokens=await self._generations.count(RESPONSES_KIND, call))
        return HttpResponse(200, _encode(counted), headers=call.headers)

    async def _message(self, call: HttpRequest) -> web.StreamResponse:
        return await self._generations.serve(MESSAGES_KIND, call)

    async def _count_tokens(self, call: HttpRequest) -> web.StreamResponse:
        counted = TokenTotal(input_tokens=await self._generations.count(COUNT_TOKENS_KIND, call))
        return HttpResponse(200, _encode(counted), headers=call.headers)

    async def _options(self, target: ApiRoute, call: HttpRequest) -> web.StreamResponse:
        lines = call.headers + b"Allow: %s\r\n" % target.allow.encode()
        lines += self._cors.preflight_lines(call.http.headers.get("Origin"))
        return HttpResponse(204, b"", b"", lines)

    def _count(self, route: str, status: int) -> None:
        self._metrics.http_responses.labels(route, str(status)).inc()


async def _nothing_stored(call: HttpRequest) -> web.StreamResponse:
    raise RouteNotFound("responses are not stored here: there is none to fetch, change or cancel")


class _NotAllowed(MethodNotAllowed):
    """Carries the Allow header that RFC 9110 requires with a 405."""

    def __init__(self, route: str, method: str, allow: str) -> None:
        super().__init__(f"'{route}' does not take {shorten(method)}; it takes {allow}")
        self.allow = allow
