"""Defines the request and response of `POST /v1/embeddings` as typed records."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.protocols.completion_requests import Message, Priority, Token, field_doc
from pdserve.protocols.completion_responses import Usage
from pdserve.protocols.request_decoder import RequestDecoder
from pdserve.protocols.unsupported_fields import UnsupportedField

MAX_INPUTS: Final = 2048
"""Maximum inputs of one request: OpenAI's limit."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/embeddings`: exactly one of `input` and `messages`.

    `input` is a string, a list of strings, one list of token ids, or a list of such lists.
    """

    input: str | list[str | Token | list[Token]] | None = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)] | None,
        field_doc("A conversation, instead of `input`: the chat template makes one text of it."),
    ] = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Annotated[
        bool | None,
        field_doc("If true, the template opens the model's turn after `messages`. Default: false."),
    ] = None
    continue_final_message: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    request_id: str | None = None
    user: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    index: int
    embedding: list[float] | str
    """List of numbers, or base64 of little-endian float32 values."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/embeddings`, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: Usage | None = None
    """Token counts; null only from other servers."""
    object: Literal["list"] = "list"


REFUSED_BY_EMBEDDINGS = {
    "truncation_side": UnsupportedField("inputs lose their end; leave it out", ("right",)),
}
EMBEDDING = RequestDecoder(EmbeddingRequest, REFUSED_BY_EMBEDDINGS)
