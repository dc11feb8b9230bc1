"""The HTTP surface: which path and method is what, who may call it, and errors in OpenAI's shape.

Every request ends here in exactly one reply; a fault of the server itself becomes a 500 without
details, and a log line with them. What the endpoints do is in the files named by them.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import EngineError, MethodNotAllowed, PdserveError, RouteNotFound
from pdserve.frontend.call import Call
from pdserve.frontend.dialects.messages import plan_messages
from pdserve.frontend.dialects.responses import plan_responses
from pdserve.frontend.embeddings import plan_embeddings
from pdserve.frontend.generation import Generations, Route
from pdserve.frontend.identity import request_id_from
from pdserve.frontend.prompts import plan_chat, plan_completion
from pdserve.frontend.replies import Reply, error_reply
from pdserve.openai.decode import CHAT, COMPLETION
from pdserve.openai.embeddings import EMBEDDING
from pdserve.openai.fields import shorten
from pdserve.openai.messages_api import COUNT_TOKENS, MESSAGES, TokenTotal, messages_error_body
from pdserve.openai.responses_api import RESPONSES, InputTokens

if TYPE_CHECKING:
    from pdserve.frontend.cors import Cors
    from pdserve.frontend.explain import Explanations
    from pdserve.frontend.keys import KeyRing
    from pdserve.frontend.small import SmallEndpoints
    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend")
access = logging.getLogger("pdserve.frontend.access")

_encode = msgspec.json.Encoder().encode

Endpoint = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Target:
    """What a path leads to."""

    route: str
    """The path as metrics name it."""
    methods: Mapping[str, Endpoint]
    open: bool = False
    """Needs no API key."""

    @property
    def allow(self) -> str:
        """The value of the Allow header."""
        names = set(self.methods) | {"OPTIONS"} | ({"HEAD"} if "GET" in self.methods else set())
        return ", ".join(sorted(names))


_CHAT = Route(CHAT, plan_chat)
_COMPLETION = Route(COMPLETION, plan_completion)
_RESPONSES = Route(RESPONSES, plan_responses)
_MESSAGES = Route(MESSAGES, plan_messages)
_COUNT_TOKENS = Route(COUNT_TOKENS, plan_messages)
_EMBEDDINGS = Route(EMBEDDING, plan_embeddings)
_MESSAGES_PATH = "/v1/messages"


class Api:
    """Answers every request of one frontend."""

    def __init__(
        self,
        generations: Generations,
        explanations: Explanations,
        small: SmallEndpoints,
        metrics: Metrics,
        keys: KeyRing | None,
        cors: Cors,
    ) -> None:
        self.keys = keys
        """None: no authentication. Replaced when the file is read again."""
        self._generations = generations
        self._metrics = metrics
        self._cors = cors
        self._responses: dict[tuple[str, int], object] = {}
        self._models = Target("/v1/models/{id}", {"GET": small.model})
        self._stored = Target(
            "/v1/responses/{id}", dict.fromkeys(("GET", "POST", "DELETE"), _nothing_stored)
        )
        self._targets = {
            target.route: target
            for target in (
                Target("/v1/chat/completions", {"POST": self._chat}),
                Target("/v1/completions", {"POST": self._completion}),
                Target("/v1/embeddings", {"POST": self._embed}),
                Target("/v1/responses", {"POST": self._respond}),
                Target("/v1/responses/input_tokens", {"POST": self._input_tokens}),
                Target(_MESSAGES_PATH, {"POST": self._message}),
                Target("/v1/messages/count_tokens", {"POST": self._count_tokens}),
                Target("/route", {"POST": explanations.route}),
                Target("/v1/models", {"GET": small.models}),
                Target("/tokenize", {"POST": small.tokenize}),
                Target("/detokenize", {"POST": small.detokenize}),
                Target("/health", {"GET": small.health}, open=True),
                Target("/live", {"GET": small.live}, open=True),
                Target("/metrics", {"GET": small.metrics}, open=True),
                Target("/version", {"GET": small.version}, open=True),
                Target("/openapi.json", {"GET": small.openapi}, open=True),
            )
        }

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Cancellation: the client hung up."""
        headers = http.headers
        call = Call(http, self._cors.lines(headers.get("Origin")))
        if _is_messages(call):
            call.id_headers = (*call.id_headers, b"request-id")  # by which its clients know it
        call.name(request_id_from(headers.get("x-request-id")))
        route = "other"
        try:
            target, call.rest = self._find(http.rel_url.path)
            route = target.route
            reply = await self._call(target, call)
        except PdserveError as error:
            reply = self._refuse(error, call)
        except (asyncio.CancelledError, ConnectionError):
            self._count(route, 499)
            raise
        except Exception:
            logger.exception("answering %s failed", route)
            reply = self._refuse(EngineError("the server failed while answering"), call)
        if self._generations.draining:
            reply.force_close()  # the client's next request had better go elsewhere
        self._count(route, reply.status)
        if access.isEnabledFor(logging.DEBUG):
            access.debug("%s %s: %d", http.method, route, reply.status)
        return reply

    def _refuse(self, error: PdserveError, call: Call) -> Reply:
        if isinstance(error, EngineError):
            logger.warning("request failed: %s", error)
        lines = call.headers
        if isinstance(error, _NotAllowed):
            lines += b"Allow: %s\r\n" % error.allow.encode()
        if _is_messages(call):
            return error_reply(error, lines, messages_error_body(error, call.request_id))
        return error_reply(error, lines)

    def _find(self, path: str) -> tuple[Target, str]:
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

    def _call(self, target: Target, call: Call) -> Awaitable[web.StreamResponse]:
        method = call.http.method
        if method == "OPTIONS":
            return self._options(target, call)
        endpoint = target.methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            raise _NotAllowed(target.route, method, target.allow)
        if self.keys is not None and not target.open:
            headers = call.http.headers
            call.key = self.keys.authenticate(
                headers.get("Authorization"), headers.get("x-api-key")
            )
        return endpoint(call)

    async def _chat(self, call: Call) -> web.StreamResponse:
        return await self._generations.serve(_CHAT, call)

    async def _completion(self, call: Call) -> web.StreamResponse:
        return await self._generations.serve(_COMPLETION, call)

    async def _embed(self, call: Call) -> web.StreamResponse:
        return await self._generations.serve(_EMBEDDINGS, call)

    async def _respond(self, call: Call) -> web.StreamResponse:
        return await self._generations.serve(_RESPONSES, call)

    async def _input_tokens(self, call: Call) -> web.StreamResponse:
        counted = InputTokens(input_tokens=await self._generations.count(_RESPONSES, call))
        return Reply(200, _encode(counted), headers=call.headers)

    async def _message(self, call: Call) -> web.StreamResponse:
        return await self._generations.serve(_MESSAGES, call)

    async def _count_tokens(self, call: Call) -> web.StreamResponse:
        counted = TokenTotal(input_tokens=await self._generations.count(_COUNT_TOKENS, call))
        return Reply(200, _encode(counted), headers=call.headers)

    async def _options(self, target: Target, call: Call) -> web.StreamResponse:
        lines = call.headers + b"Allow: %s\r\n" % target.allow.encode()
        lines += self._cors.preflight_lines(call.http.headers.get("Origin"))
        return Reply(204, b"", b"", lines)

    def _count(self, route: str, status: int) -> None:
        self._metrics.http_responses.labels(route, str(status)).inc()


def _is_messages(call: Call) -> bool:
    """Whether its client expects Anthropic's words."""
    path = call.http.rel_url.path
    return path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")


async def _nothing_stored(call: Call) -> web.StreamResponse:
    raise RouteNotFound("responses are not stored here: there is none to fetch, change or cancel")


class _NotAllowed(MethodNotAllowed):
    """Carries the Allow header, which RFC 9110 wants with a 405."""

    def __init__(self, route: str, method: str, allow: str) -> None:
        super().__init__(f"'{route}' does not take {shorten(method)}; it takes {allow}")
        self.allow = allow
