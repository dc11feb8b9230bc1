"""Defines pdserve's own request fields for the chat APIs other than OpenAI's.

Each field means the same as in `ChatRequest`, to which it is copied unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.protocols.completion_requests import (
    CacheScopeName,
    CacheTtl,
    LogitBias,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    StopTokens,
    StructuredOutputs,
    Token,
    TokenCount,
    TopK,
    Words,
)


class Extensions(msgspec.Struct, kw_only=True):
    """pdserve's extension fields of a request."""

    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenCount | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[Token], Meta(max_length=65536)] | None = None
    bad_words: Words | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_ttl: CacheTtl | None = None
    cache_scope: CacheScopeName | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None


def extensions_of(request: Extensions) -> dict[str, Any]:
    """Return the extension fields as arguments of `ChatRequest`."""
    return {name: getattr(request, name) for name in Extensions.__struct_fields__}
