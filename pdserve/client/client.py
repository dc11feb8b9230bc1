"""Defines the client class: one method for each request that a server answers.

Owns one session of connections. Many tasks of one loop may use all methods at once. Cancelling a
call closes its connection, and the server ends its work for it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from pdserve.client.errors import BadAnswer, NotFound, Unavailable
from pdserve.client.policy import Retries, Timeouts
from pdserve.client.stream import ChatStream, CompletionStream
from pdserve.client.transport import Call, Transport
from pdserve.errors import ConfigError
from pdserve.ids import new_request_id
from pdserve.protocols.completion_responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    RouteExplanation,
    Tokenized,
    Version,
)
from pdserve.protocols.embeddings import EmbeddingList
from pdserve.protocols.scoring import RerankList, ScoreList

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self, Unpack

    from pdserve.client.fields import (
        ChatFields,
        CompletionFields,
        EmbedFields,
        Messages,
        RerankFields,
        ScoreFields,
        TokenizeFields,
    )
    from pdserve.client.policy import Attempt
    from pdserve.client.transport import Answered
    from pdserve.ids import Seconds

__all__ = ["Client", "ServedModel"]

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class ServedModel(msgspec.Struct, kw_only=True):
    """One served model; other servers than pdserve may give only its name."""

    id: str
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


class _ServedModels(msgspec.Struct, kw_only=True):
    data: list[ServedModel]


class Client:
    """A client of one server."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout: Timeouts | Seconds | None = None,
        retries: Retries | int | None = None,
        headers: Mapping[str, str] | None = None,
        random: Random | None = None,
        watch: Callable[[Attempt], None] | None = None,
    ) -> None:
        """Args: `url` may end in `/v1`. `model` is used where a call names none; by default the
        first served one. `timeout` is the number of seconds for a whole request, or `Timeouts`.
        `retries` is how often a request is tried again, or `Retries`. `watch` is called with each
        failed attempt.

        Errors: `ConfigError` for an invalid URL.
        """
        self.url = address_of(url)
        self._model = model
        self._timeouts = _timeouts(timeout, Timeouts())
        self._has_key = bool(api_key)
        whole = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        policy = Retries(attempts=retries + 1) if isinstance(retries, int) else retries or Retries()
        self._transport = Transport(
            self.url, {**whole, **(headers or {})}, policy, random or Random(), watch
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        await self._transport.close()

    # ---------------------------------------------------------------- generation

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion:
        """Return the whole answer. Errors: any `ClientError`."""
        body = {"messages": _messages(messages), "model": model, **fields}
        return await self._post(_CHAT, body, ChatCompletion, headers, timeout)

    def chat_stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatStream:
        """Return the answer as a stream; the request is sent at its first read."""
        body = {"messages": _messages(messages), "model": model, **fields}
        return ChatStream(lambda: self._stream(_CHAT, body, headers, timeout))

    async def complete(
        self,
        prompt: str | Sequence[Any],
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Completion:
        """Return the whole completion of a text, of token ids, or of several of either. Errors: any
        `ClientError`."""
        body = {"prompt": prompt, "model": model, **fields}
        return await self._post(_COMPLETION, body, Completion, headers, timeout)

    def complete_stream(
        self,
        prompt: str | Sequence[Any],
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[CompletionFields],
    ) -> CompletionStream:
        """Return the completion as a stream; the request is sent at its first read."""
        body = {"prompt": prompt, "model": model, **fields}
        return CompletionStream(lambda: self._stream(_COMPLETION, body, headers, timeout))

    async def embed(
        self,
        input: str | Sequence[Any] | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[EmbedFields],
    ) -> EmbeddingList:
        """Return the embedding vectors of one or more texts, or of a conversation."""
        body: dict[str, Any] = {"model": model, **fields}
        if input is not None:
            body["input"] = input
        if messages is not None:
            body["messages"] = _messages(messages)
        return await self._post("/v1/embeddings", body, EmbeddingList, headers, timeout)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[RerankFields],
    ) -> RerankList:
        """Return the documents in the order of their relevance. Errors: any `ClientError`."""
        body = {"query": query, "documents": documents, "model": model, **fields}
        return await self._post("/v1/rerank", body, RerankList, headers, timeout)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
        **fields: Unpack[ScoreFields],
    ) -> ScoreList:
        """Return the score of one text with each document, or of as many pairs. Errors: any
        `ClientError`."""
        body = {"queries": queries, "documents": documents, "model": model, **fields}
        return await self._post("/v1/score", body, ScoreList, headers, timeout)

    # ---------------------------------------------------------------- the small ones

    async def models(self) -> list[ServedModel]:
        """The served models."""
        return (await self._get("/v1/models", _ServedModels)).data

    async def model(self, name: str) -> ServedModel:
        """One served model. Errors: `NotFound`."""
        return await self._get(f"/v1/models/{quote(name)}", ServedModel)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        **fields: Unpack[TokenizeFields],
    ) -> Tokenized:
        """The token ids of a text, or of a conversation with the model's chat template."""
        body: dict[str, Any] = {"model": model, **fields}
        if prompt is not None:
            body["prompt"] = prompt
        if messages is not None:
            body["messages"] = _messages(messages)
        return await self._post("/tokenize", body, Tokenized)

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        body = {"tokens": tokens, "model": model}
        return (await self._post("/detokenize", body, Detokenized)).prompt

    async def route(
        self, messages: Messages, *, model: str | None = None, **fields: Unpack[ChatFields]
    ) -> RouteExplanation:
        """The worker that a router would choose for this chat, and why."""
        body = {"messages": _messages(messages), "model": model, **fields}
        return await self._post("/route", body, RouteExplanation)

    async def health(self) -> Health:
        """The server's health. A server that is not ready is no error and is not retried."""
        call = self._call("GET", "/health", None, None, None)
        try:
            answered = await self._transport.ask(call, retry=False)
        except Unavailable as error:
            return _decoded(Health, error.body)
        return _decoded(Health, await answered.body())

    async def version(self) -> str:
        """The server's version."""
        return (await self._get("/version", Version)).version

    # ---------------------------------------------------------------- inside

    async def _get(self, path: str, record: type[T]) -> T:
        answered = await self._transport.ask(self._call("GET", path, None, None, None))
        return _decoded(record, await answered.body())

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        record: type[T],
        headers: Mapping[str, str] | None = None,
        timeout: Timeouts | Seconds | None = None,
    ) -> T:
        body["model"] = await self._name(body["model"])
        answered = await self._transport.ask(self._call("POST", path, body, headers, timeout))
        return _decoded(record, await answered.body())

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str] | None,
        timeout: Timeouts | Seconds | None,
    ) -> Answered:
        body["model"] = await self._name(body["model"])
        whole = {"stream_options": {"include_usage": True}, **body, "stream": True}
        return await self._transport.ask(self._call("POST", path, whole, headers, timeout))

    async def _name(self, given: str | None) -> str:
        """The model to ask; found out once."""
        if given is not None:
            return given
        if self._model is None:
            served = await self.models()
            if not served:
                raise NotFound(self._no_model(), status=404)
            self._model = served[0].id
        return self._model

    def _no_model(self) -> str:
        if not self._has_key:
            return f"the server at {self.url} serves no model yet"
        return (
            f"the server at {self.url} lists no model for this API key: it serves none yet, or the "
            "key's `models` names none of them"
        )

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        headers: Mapping[str, str] | None,
        timeout: Timeouts | Seconds | None,
    ) -> Call:
        given = None if body is None else body.get("request_id")
        return Call(
            method=method,
            path=path,
            request_id=given or new_request_id(),
            timeouts=_timeouts(timeout, self._timeouts),
            body=None if body is None else _encode(body),
            headers=headers or {},
        )


_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"


def address_of(url: str) -> str:
    """The server's URL without the API's own path. Errors: `ConfigError`."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or " " in url:
        raise ConfigError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    return whole.rstrip("/").removesuffix("/v1")


def _messages(messages: Messages) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _timeouts(given: Timeouts | Seconds | None, default: Timeouts) -> Timeouts:
    if given is None or isinstance(given, Timeouts):
        return given or default
    return replace(default, total=given)


def _decoded(record: type[T], body: bytes) -> T:
    try:
        return msgspec.json.decode(body, type=record)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadAnswer(f"the answer does not follow the OpenAI API: {error}") from None
