"""Builds the OpenAPI 3.1 document from the records that serve the API."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.protocols import (
    anthropic_messages,
    completion_requests,
    completion_responses,
    embeddings,
    responses_api,
    scoring,
)
from pdserve.protocols.ollama import answers as ollama_answers
from pdserve.protocols.ollama import requests as ollama_requests
from pdserve.protocols.openai_errors import ErrorBody

_REF = "#/components/schemas/{name}"

_RECORDS = (
    completion_requests.ChatRequest,
    completion_requests.CompletionRequest,
    embeddings.EmbeddingRequest,
    scoring.RerankRequest,
    scoring.ScoreRequest,
    responses_api.ResponsesRequest,
    responses_api.ResponseObject,
    responses_api.InputTokens,
    anthropic_messages.MessagesRequest,
    anthropic_messages.CountTokensRequest,
    anthropic_messages.MessageObject,
    anthropic_messages.TokenTotal,
    anthropic_messages.MessagesModel,
    anthropic_messages.MessagesModelList,
    anthropic_messages.MessagesErrorBody,
    completion_requests.TokenizeRequest,
    completion_requests.DetokenizeRequest,
    completion_responses.ChatCompletion,
    completion_responses.ChatChunk,
    completion_responses.Completion,
    embeddings.EmbeddingList,
    scoring.RerankList,
    scoring.ScoreList,
    completion_responses.RouteExplanation,
    completion_responses.ModelList,
    completion_responses.Model,
    completion_responses.Tokenized,
    completion_responses.Detokenized,
    completion_responses.Health,
    completion_responses.Version,
    ollama_requests.OllamaChatRequest,
    ollama_requests.OllamaGenerateRequest,
    ollama_requests.OllamaEmbedRequest,
    ollama_requests.OllamaEmbeddingsRequest,
    ollama_requests.OllamaShowRequest,
    ollama_answers.OllamaChatAnswer,
    ollama_answers.OllamaGenerateAnswer,
    ollama_answers.OllamaVectors,
    ollama_answers.OllamaVector,
    ollama_answers.OllamaModelList,
    ollama_answers.OllamaRunningList,
    ollama_answers.OllamaShown,
    ollama_answers.OllamaVersion,
    ollama_answers.OllamaErrorBody,
    ErrorBody,
)

_ERRORS = {
    "400": "A field is malformed, out of range or not supported; `param` names it.",
    "401": "API keys are configured, and the request carries none that is known.",
    "403": "The key may not use this model.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "A bound was reached; Retry-After says when to come back.",
    "500": "The server or its engine failed.",
    "503": "No worker can serve this now; Retry-After says when to come back.",
    "504": "The request's time ran out; the message names the stage.",
}
_COMMON = ("400", "401", "403", "404", "408", "413", "429", "500", "503")

_EVENTS = (
    "Server-sent events: each `data:` line is one {chunk} object, the last is `[DONE]`. "
    "An error after the first event is an `ErrorBody` in an event of its own; the stream then "
    "ends without `[DONE]`."
)
_NAMED_EVENTS = (
    "Server-sent events as {api} names them: each has its name as `event:` and one JSON object "
    "with the same `type` as `data:`. {error}"
)
_RESPONSES_EVENTS = _NAMED_EVENTS.format(
    api="OpenAI",
    error="After a failure the last two are `error` and `response.failed`.",
)
_MESSAGES_EVENTS = _NAMED_EVENTS.format(
    api="Anthropic", error="After a failure the last is `error`, a `MessagesErrorBody`."
)
_LINES = (
    "The same, a JSON object per line, while tokens are generated; this is the default. The last "
    "has `done`, or is an `OllamaErrorBody` after a failure."
)
_OPENAI, _ANTHROPIC, _OLLAMA = "Error", "MessagesError", "OllamaError"
"""Component names of the error schemas."""


def document(version: str) -> dict[str, Any]:
    """Return the whole document, ready for JSON encoding."""
    _, components = msgspec.json.schema_components(_RECORDS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": _paths(),
        "components": {
            "schemas": components,
            "responses": {
                f"{whose}{code}": _error(code, f"{whose}Body")
                for whose in (_OPENAI, _ANTHROPIC, _OLLAMA)
                for code in _ERRORS
            },
            "securitySchemes": {
                "ApiKey": {"type": "http", "scheme": "bearer"},
                "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"ApiKey": []}, {"ApiKeyHeader": []}],
    }


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {
            "post": _generation("Answer a conversation", "Chat", "ChatCompletion", "ChatChunk")
        },
        "/v1/completions": {
            "post": _generation("Continue a text", "Completion", "Completion", "Completion")
        },
        "/v1/responses": {
            "post": _with_events(
                _post("Answer items of a conversation", "ResponsesRequest", "ResponseObject"),
                _RESPONSES_EVENTS,
            )
        },
        "/v1/responses/input_tokens": {
            "post": _timed(_post("Count a prompt's tokens", "ResponsesRequest", "InputTokens"))
        },
        "/v1/responses/{id}": _stored_response(),
        "/v1/messages": {
            "post": _with_events(
                _post("Answer messages", "MessagesRequest", "MessageObject", _ANTHROPIC),
                _MESSAGES_EVENTS,
                _ANTHROPIC,
            )
        },
        "/v1/messages/count_tokens": {
            "post": _timed(
                _post("Count a prompt's tokens", "CountTokensRequest", "TokenTotal", _ANTHROPIC),
                _ANTHROPIC,
            )
        },
        "/v1/embeddings": {
            "post": _timed(_post("Turn texts into vectors", "EmbeddingRequest", "EmbeddingList"))
        },
        **{
            path: {"post": _timed(_post("Order documents", "RerankRequest", "RerankList"))}
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        },
        **{
            path: {"post": _timed(_post("Score pairs of texts", "ScoreRequest", "ScoreList"))}
            for path in ("/v1/score", "/score")
        },
        "/invocations": {"post": _invocation()},
        "/route": {"post": _explanation()},
        "/v1/models": {
            "get": _or_anthropics(
                _get("List the models served here", "ModelList", "401"), "MessagesModelList"
            )
        },
        "/v1/models/{id}": {
            "parameters": [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "get": _or_anthropics(
                _get("Describe one model", "Model", "401", "403", "404", "503"), "MessagesModel"
            ),
        },
        "/tokenize": {"post": _post("Text to token ids", "TokenizeRequest", "Tokenized")},
        "/detokenize": {"post": _post("Token ids to text", "DetokenizeRequest", "Detokenized")},
        "/health": {"get": _health()},
        "/ping": {"get": _health(), "post": _health()},
        "/live": {"get": _text("200 while the process lives", "application/json")},
        "/metrics": {"get": _text("Metrics in Prometheus's text format", "text/plain")},
        "/version": {"get": _get("The server's version", "Version")},
        "/openapi.json": {"get": _text("This document", "application/json")},
        **_ollama_paths(),
    }


def _ollama_paths() -> dict[str, Any]:
    unmanaged = {
        "summary": "Models are not managed through this API: always 404",
        "responses": {
            code: {"$ref": f"#/components/responses/{_OLLAMA}{code}"} for code in ("401", "404")
        },
    }
    answers = {
        "/api/chat": ("Answer a conversation", "OllamaChatRequest", "OllamaChatAnswer"),
        "/api/generate": ("Answer a prompt", "OllamaGenerateRequest", "OllamaGenerateAnswer"),
        "/api/embed": ("Turn texts into vectors", "OllamaEmbedRequest", "OllamaVectors"),
        "/api/embeddings": ("Turn a text into a vector", "OllamaEmbeddingsRequest", "OllamaVector"),
    }
    paths: dict[str, Any] = {
        path: {"post": _timed(_post(*names, _OLLAMA), _OLLAMA)} for path, names in answers.items()
    }
    for path in ("/api/chat", "/api/generate"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        content["application/x-ndjson"] = {"schema": {"type": "string", "description": _LINES}}
    changes = {path: "post" for path in ("/api/pull", "/api/push", "/api/create", "/api/copy")}
    return {
        **paths,
        "/api/show": {
            "post": _post("Describe one model", "OllamaShowRequest", "OllamaShown", _OLLAMA)
        },
        "/api/tags": {
            "get": _get("List the models served here", "OllamaModelList", "401", whose=_OLLAMA)
        },
        "/api/ps": {
            "get": _get("List those with a worker", "OllamaRunningList", "401", whose=_OLLAMA)
        },
        "/api/version": {"get": _get("The version of this API", "OllamaVersion")},
        "/": {"get": _text("200 while the process lives", "text/plain")},
        **{
            path: {method: unmanaged}
            for path, method in (changes | {"/api/delete": "delete"}).items()
        },
    }


def _generation(summary: str, kind: str, answer: str, chunk: str) -> dict[str, Any]:
    operation = _post(summary, f"{kind}Request", answer)
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": _EVENTS.format(chunk=f"`{chunk}`")},
        "x-event-schema": _ref(chunk),
    }
    operation["responses"]["504"] = {"$ref": "#/components/responses/Error504"}
    return operation


def _with_events(
    operation: dict[str, Any], description: str, whose: str = _OPENAI
) -> dict[str, Any]:
    schema = {"type": "string", "description": description}
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": schema}
    return _timed(operation, whose)


def _timed(operation: dict[str, Any], whose: str = _OPENAI) -> dict[str, Any]:
    operation["responses"]["504"] = {"$ref": f"#/components/responses/{whose}504"}
    return operation


def _stored_response() -> dict[str, Any]:
    """The operations on a stored response, which does not exist."""
    errors = {code: {"$ref": f"#/components/responses/Error{code}"} for code in ("401", "404")}
    operation = {"summary": "Nothing is stored: always 404", "responses": errors}
    return {
        "parameters": [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ],
        "get": operation,
        "delete": operation,
    }


def _invocation() -> dict[str, Any]:
    """Each kind of body and its answer."""
    operation = _generation("Answer as the body's endpoint", "Chat", "ChatCompletion", "ChatChunk")
    requests = ("Chat", "Completion", "Embedding", "Rerank", "Score")
    answers = ("ChatCompletion", "Completion", "EmbeddingList", "RerankList", "ScoreList")
    content = operation["responses"]["200"]["content"]
    content["application/json"]["schema"] = {"anyOf": [_ref(name) for name in answers]}
    del content["text/event-stream"]["x-event-schema"]
    operation["requestBody"]["content"]["application/json"]["schema"] = {
        "anyOf": [_ref(f"{name}Request") for name in requests]
    }
    return operation


def _explanation() -> dict[str, Any]:
    operation = _post("What would be done with a request now", "ChatRequest", "RouteExplanation")
    either = {"anyOf": [_ref("ChatRequest"), _ref("CompletionRequest")]}
    operation["requestBody"]["content"]["application/json"]["schema"] = either
    operation["responses"]["504"] = {"$ref": "#/components/responses/Error504"}
    return operation


def _post(summary: str, request: str, answer: str, whose: str = _OPENAI) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return {
        "summary": summary,
        "requestBody": body,
        "responses": _responses(answer, *_COMMON, whose=whose),
    }


def _get(summary: str, answer: str, *errors: str, whose: str = _OPENAI) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses(answer, *errors, whose=whose)}


def _or_anthropics(operation: dict[str, Any], answer: str) -> dict[str, Any]:
    """Adds the answer for requests with the header `anthropic-version`."""
    content = operation["responses"]["200"]["content"]["application/json"]
    content["schema"] = {"anyOf": [content["schema"], _ref(answer)]}
    return operation


def _health() -> dict[str, Any]:
    operation = _get("Whether requests can be served", "Health")
    operation["responses"]["503"] = {
        "description": "They cannot; `reason` says why.",
        "content": {"application/json": {"schema": _ref("Health")}},
    }
    return operation


def _text(summary: str, kind: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {kind: {}}}},
    }


def _responses(answer: str, *errors: str, whose: str = _OPENAI) -> dict[str, Any]:
    ok = {
        "description": "OK",
        "headers": {"x-request-id": {"schema": {"type": "string"}}},
        "content": {"application/json": {"schema": _ref(answer)}},
    }
    references = {code: {"$ref": f"#/components/responses/{whose}{code}"} for code in errors}
    return {"200": ok} | references


def _error(code: str, body: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _ERRORS[code],
        "content": {"application/json": {"schema": _ref(body)}},
    }
    if code in ("429", "503"):
        answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return answer


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
