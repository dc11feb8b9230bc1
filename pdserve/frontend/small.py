"""The endpoints beside generation: models, tokenise, health, metrics, version, schema.

None of them reaches an engine. The ones that work on text are bounded by the text pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from typing import TYPE_CHECKING, Literal

import msgspec

from pdserve import __version__
from pdserve.errors import DeadlineExceeded, InvalidRequest
from pdserve.frontend.models import ModelDirectory, ServedModel, describe
from pdserve.frontend.prompts import Context, chat_tokens, most_chars
from pdserve.frontend.replies import Reply
from pdserve.frontend.sampling import check_prompt_tokens
from pdserve.frontend.unknown import UnknownFields
from pdserve.openai.decode import DETOKENIZE, TOKENIZE
from pdserve.openai.openapi import document
from pdserve.openai.responses import (
    Detokenized,
    Health,
    ModelList,
    Tokenized,
    Version,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from pdserve.frontend.backend import Backend
    from pdserve.frontend.bodies import BodyReader
    from pdserve.frontend.call import Call
    from pdserve.frontend.config import FrontendConfig
    from pdserve.ids import Bytes, Seconds
    from pdserve.observe.metrics import Metrics, Pages
    from pdserve.openai.schema import DetokenizeRequest, TokenizeRequest
    from pdserve.text.pool import TextPool

_encode = msgspec.json.Encoder().encode
_CHARS_PER_TOKEN = 4


class SmallEndpoints:
    """Everything that is not generation. Used on the event loop's thread."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        models: ModelDirectory,
        pool: TextPool,
        bodies: BodyReader,
        metrics: Metrics,
        time: Callable[[], Seconds],
        active: Callable[[], int],
        draining: Callable[[], bool],
        degraded: Mapping[str, str],
        pages: Pages,
    ) -> None:
        self._config = config
        self._backend = backend
        self._models = models
        self._pool = pool
        self._bodies = bodies
        self._unknown = UnknownFields(metrics)
        self._time = time
        self._started = time()
        self._active = active
        self._draining = draining
        self._degraded = degraded
        self._pages = pages
        self._document: bytes | None = None

    # ------------------------------------------------------------------ models

    async def models(self, call: Call) -> Reply:
        """`GET /v1/models`"""
        return _json(call, ModelList(data=self._models.listing(call.key)))

    async def model(self, call: Call) -> Reply:
        """`GET /v1/models/{id}`"""
        card = self._models.card(call.rest, call.key)
        return _json(call, describe(call.rest, card))

    # ------------------------------------------------------------------ text

    async def tokenize(self, call: Call) -> Reply:
        """`POST /tokenize`"""
        body = await self._bodies.read(call.http)
        decoded = TOKENIZE.decode(body, strict=self._config.strict_api)
        self._unknown.report(decoded.unknown)
        request = decoded.request
        async with self._deadline():
            return _json(call, await self._tokenized(request, call))

    async def _tokenized(self, request: TokenizeRequest, call: Call) -> Tokenized:
        model = await self._model(request.model, call)
        tokens = await self._tokens(request, model, call)
        names = None
        if request.return_token_strs:
            texts = map(model.tokenizer.token_text, tokens)
            names = await self._pool.run(_CHARS_PER_TOKEN * len(tokens), lambda: list(texts))
        return Tokenized(
            count=len(tokens),
            max_model_len=model.card.max_model_len,
            tokens=tokens,
            token_strs=names,
        )

    async def detokenize(self, call: Call) -> Reply:
        """`POST /detokenize`"""
        body = await self._bodies.read(call.http)
        decoded = DETOKENIZE.decode(body, strict=self._config.strict_api)
        self._unknown.report(decoded.unknown)
        async with self._deadline():
            return _json(call, await self._detokenized(decoded.request, call))

    async def _detokenized(self, request: DetokenizeRequest, call: Call) -> Detokenized:
        tokens = request.tokens
        model = await self._model(request.model, call)
        if tokens:
            check_prompt_tokens(tokens, model.card, "tokens")
        text = await self._pool.run(
            _CHARS_PER_TOKEN * len(tokens),
            model.tokenizer.decode,
            tokens,
            skip_special_tokens=False,
        )
        return Detokenized(prompt=text)

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Text work may have to wait for its turn."""
        limit = self._config.request_timeout
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took longer than {limit:g} s; it was working on the text"
            ) from None

    async def _model(self, name: str | None, call: Call) -> ServedModel:
        card = self._models.card(name, call.key)
        return self._models.get_nowait(card) or await self._models.get(card)

    async def _tokens(self, request: TokenizeRequest, model: ServedModel, call: Call) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of 'prompt' and 'messages'", param="prompt")
        if request.prompt is not None:
            _check_chars(request.prompt, model)
            special = request.add_special_tokens is not False
            return await self._pool.encode(model.tokenizer, request.prompt, special)
        context = Context(
            model=model, config=self._config, pool=self._pool, request_id=call.request_id
        )
        return await chat_tokens(request, context)

    # ------------------------------------------------------------------ the process

    async def health(self, call: Call) -> Reply:
        """`GET /health`: 200 when requests can be served, else 503 with the reason."""
        status, reason = self._status()
        answer = Health(
            status=status,
            reason=reason,
            version=__version__,
            uptime_seconds=round(self._time() - self._started, 3),
            active_requests=self._active(),
            memory_bytes=resident_memory(),
            degraded=dict(self._degraded),
        )
        reply = _json(call, answer, 200 if status == "ok" else 503)
        if status != "ok":
            reply.add_headers(b"Retry-After: 1\r\n")
        return reply

    def _status(self) -> tuple[Literal["ok", "loading", "draining", "unavailable"], str | None]:
        if self._draining():
            return "draining", "the server is shutting down"
        reason = self._backend.unready_reason()
        if reason is None:
            return "ok", None
        return ("unavailable" if self._backend.cards() else "loading"), reason

    async def live(self, call: Call) -> Reply:
        """`GET /live`: 200 while the event loop turns."""
        return Reply(200, b'{"status":"ok"}', headers=call.headers)

    async def metrics(self, call: Call) -> Reply:
        """`GET /metrics`: Prometheus's text format."""
        page, kind = await self._pages.page(call.http.headers.get("Accept", ""))
        return Reply(200, page, kind.encode(), call.headers)

    async def version(self, call: Call) -> Reply:
        """`GET /version`"""
        return _json(call, Version(version=__version__))

    async def openapi(self, call: Call) -> Reply:
        """`GET /openapi.json`"""
        if self._document is None:
            self._document = _encode(document(__version__))
        return Reply(200, self._document, headers=call.headers)


def _json(call: Call, answer: msgspec.Struct, status: int = 200) -> Reply:
    return Reply(status, _encode(answer), headers=call.headers)


def _check_chars(text: str, model: ServedModel) -> None:
    """Errors: `InvalidRequest` for a text that would take seconds and hundreds of megabytes."""
    limit = most_chars(model.card)
    if len(text) > limit:
        raise InvalidRequest(
            f"'prompt' has {len(text)} characters; the limit is {limit}: send it in parts",
            param="prompt",
        )


def resident_memory() -> Bytes:
    """Resident memory of this process; where the system does not tell, the most it ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
