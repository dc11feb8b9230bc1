"""Serves Ollama's API: generation and vectors, and what its clients ask about models before.

Models are loaded and unloaded by their workers, so the endpoints that would change them answer with
an error that says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve import __version__
from pdserve.errors import InvalidRequest, RouteNotFound
from pdserve.frontend.api.adapters.ollama_output import timestamp
from pdserve.frontend.api.request_kinds import (
    OLLAMA_CHAT_KIND,
    OLLAMA_EMBED_KIND,
    OLLAMA_EMBEDDINGS_KIND,
    OLLAMA_GENERATE_KIND,
)
from pdserve.frontend.api.unknown_fields import UnknownFields
from pdserve.frontend.http.http_response import HttpResponse
from pdserve.frontend.model_registry import fingerprint
from pdserve.frontend.preprocess.embeddings import makes_vectors
from pdserve.frontend.preprocess.infill import infill_format
from pdserve.protocols.ollama.answers import (
    OllamaDetails,
    OllamaModel,
    OllamaModelList,
    OllamaRunningList,
    OllamaRunningModel,
    OllamaShown,
    OllamaVersion,
)
from pdserve.protocols.ollama.requests import OLLAMA_SHOW

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.frontend.access.api_keys import ApiKey
    from pdserve.frontend.active_requests import ActiveRequest, ActiveRequests
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.frontend.generation import GenerationHandler
    from pdserve.frontend.http.body_reader import RequestBody
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.frontend.model_registry import ModelRegistry, PreparedModel
    from pdserve.messages.card import GenerationDefaults, ModelCard
    from pdserve.observe.metrics import Metrics

_ARCHITECTURE: Final = "pdserve"
"""Clients read `model_info` under the architecture's name; a frontend does not know it."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Served:
    """One served name."""

    name: str
    card: ModelCard


class OllamaEndpoints:
    """Answers `/api/*`. Used on the event loop's thread."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        models: ModelRegistry,
        active_requests: ActiveRequests,
        generations: GenerationHandler,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._backend = backend
        self._models = models
        self._active_requests = active_requests
        self._generations = generations
        self._unknown = UnknownFields(metrics)

    # ------------------------------------------------------------------ generation

    async def chat(self, call: HttpRequest) -> web.StreamResponse:
        """`POST /api/chat`"""
        return await self._generations.serve(OLLAMA_CHAT_KIND, call)

    async def generate(self, call: HttpRequest) -> web.StreamResponse:
        """`POST /api/generate`"""
        return await self._generations.serve(OLLAMA_GENERATE_KIND, call)

    async def embed(self, call: HttpRequest) -> web.StreamResponse:
        """`POST /api/embed`"""
        return await self._generations.serve(OLLAMA_EMBED_KIND, call)

    async def embeddings(self, call: HttpRequest) -> web.StreamResponse:
        """`POST /api/embeddings`"""
        return await self._generations.serve(OLLAMA_EMBEDDINGS_KIND, call)

    # ------------------------------------------------------------------ models

    async def tags(self, call: HttpRequest) -> HttpResponse:
        """`GET /api/tags`: every served name."""
        models = [OllamaModel(**_described(one)) for one in self._served(call.key)]
        return _json(call, OllamaModelList(models=models))

    async def ps(self, call: HttpRequest) -> HttpResponse:
        """`GET /api/ps`: the names that have a worker now."""
        models = [
            OllamaRunningModel(context_length=one.card.max_model_len, **_described(one))
            for one in self._served(call.key)
            if self._backend.refusal(one.card, one.name) is None
        ]
        return _json(call, OllamaRunningList(models=models))

    async def show(self, call: HttpRequest) -> HttpResponse:
        """`POST /api/show`"""
        return _json(call, await self._active_requests.run(call, self._shown))

    async def _shown(self, body: RequestBody, active: ActiveRequest) -> OllamaShown:
        decoded = await body.decode(OLLAMA_SHOW, strict=self._config.strict_api)
        self._unknown.report(decoded.unknown)
        request = decoded.request
        asked = request.model or request.name
        if not asked:
            raise InvalidRequest("'model' is required", param="model")
        name = self._models.without_tag(asked)
        card = self._models.card(name, active.call.key)
        model = self._models.get_nowait(card) or await self._models.get(card)
        return OllamaShown(
            parameters=_parameters(card.defaults),
            details=_details(_Served(name or card.name, card)),
            model_info=_model_info(card),
            capabilities=_capabilities(model),
            modified_at=timestamp(card.created),
        )

    def _served(self, key: ApiKey | None) -> list[_Served]:
        names = [model.id for model in self._models.listing(key)]
        return [_Served(name, self._models.card(name, key)) for name in names]

    # ------------------------------------------------------------------ the process

    async def version(self, call: HttpRequest) -> HttpResponse:
        """`GET /api/version`: that of the API, as clients compare it with Ollama's releases."""
        return _json(call, OllamaVersion(pdserve=__version__))

    async def root(self, call: HttpRequest) -> HttpResponse:
        """`GET /`: a text with status 200, by which Ollama's clients see that the server runs."""
        return HttpResponse(200, b"pdserve is running", b"text/plain", call.headers)

    async def unmanaged(self, call: HttpRequest) -> HttpResponse:
        """Errors: `RouteNotFound`, always: the endpoint would change which models there are."""
        raise RouteNotFound(
            "models are not loaded, copied or deleted through this API: workers bring them, "
            "started with --model; /api/tags lists those that are served"
        )


# ---------------------------------------------------------------- descriptions


def _described(one: _Served) -> dict[str, Any]:
    """The fields of a model in lists."""
    lora = one.card.lora(one.name)
    print_ = fingerprint(one.card, "" if lora is None else lora.id)
    return {
        "name": one.name,
        "model": one.name,
        "modified_at": timestamp(one.card.created),
        "digest": hashlib.sha256(print_.encode()).hexdigest(),
        "details": _details(one),
    }


def _details(one: _Served) -> OllamaDetails:
    is_adapter = one.card.lora(one.name) is not None
    return OllamaDetails(
        parent_model=one.card.name if is_adapter else "", quantization_level=one.card.dtype
    )


def _model_info(card: ModelCard) -> dict[str, Any]:
    info: dict[str, Any] = {
        "general.architecture": _ARCHITECTURE,
        "general.basename": card.name,
        f"{_ARCHITECTURE}.context_length": card.max_model_len,
        f"{_ARCHITECTURE}.vocab_size": card.vocab_size,
    }
    if card.embedding_size:
        info[f"{_ARCHITECTURE}.embedding_length"] = card.embedding_size
    return info


def _capabilities(model: PreparedModel) -> list[str]:
    card = model.card
    found = {
        "completion": True,
        "tools": model.tools is not None,
        "thinking": model.reasoning is not None,
        "vision": "images" in card.features and card.image is not None,
        "insert": _fills_in(model),
        "embedding": makes_vectors(card),
    }
    return [name for name, able in found.items() if able]


def _fills_in(model: PreparedModel) -> bool:
    try:
        infill_format(model.tokenizer)
    except InvalidRequest:
        return False
    return True


def _parameters(defaults: GenerationDefaults) -> str:
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    fields = msgspec.structs.asdict(defaults)
    lines = [
        f"{names.get(name, name)} {value}" for name, value in fields.items() if value is not None
    ]
    return "\n".join(lines)


def _json(call: HttpRequest, answer: msgspec.Struct) -> HttpResponse:
    return HttpResponse(200, _encode(answer), headers=call.headers)
