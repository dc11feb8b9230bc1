"""Names the kinds of requests that are planned and answered: a decoder and a planner each.

`kind_of_body` tells them apart by their fields, for `/invocations`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.adapters.anthropic_request import plan_messages
from pdserve.frontend.api.adapters.ollama_request import (
    plan_ollama_chat,
    plan_ollama_embed,
    plan_ollama_embeddings,
    plan_ollama_generate,
)
from pdserve.frontend.api.adapters.responses_request import plan_responses
from pdserve.frontend.generation import RequestKind
from pdserve.frontend.preprocess.embeddings import plan_embeddings
from pdserve.frontend.preprocess.input_processor import plan_chat, plan_completion
from pdserve.frontend.preprocess.scoring import plan_rerank, plan_score
from pdserve.protocols.anthropic_messages import COUNT_TOKENS, MESSAGES
from pdserve.protocols.embeddings import EMBEDDING
from pdserve.protocols.ollama.requests import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
)
from pdserve.protocols.request_decoder import CHAT, COMPLETION
from pdserve.protocols.responses_api import RESPONSES
from pdserve.protocols.scoring import RERANK, SCORE

CHAT_KIND: Final = RequestKind(CHAT, plan_chat)
COMPLETION_KIND: Final = RequestKind(COMPLETION, plan_completion)
RESPONSES_KIND: Final = RequestKind(RESPONSES, plan_responses)
MESSAGES_KIND: Final = RequestKind(MESSAGES, plan_messages)
COUNT_TOKENS_KIND: Final = RequestKind(COUNT_TOKENS, plan_messages)
EMBEDDING_KIND: Final = RequestKind(EMBEDDING, plan_embeddings)
RERANK_KIND: Final = RequestKind(RERANK, plan_rerank)
SCORE_KIND: Final = RequestKind(SCORE, plan_score)
OLLAMA_CHAT_KIND: Final = RequestKind(OLLAMA_CHAT, plan_ollama_chat, tagged=True)
OLLAMA_GENERATE_KIND: Final = RequestKind(OLLAMA_GENERATE, plan_ollama_generate, tagged=True)
OLLAMA_EMBED_KIND: Final = RequestKind(OLLAMA_EMBED, plan_ollama_embed, tagged=True)
OLLAMA_EMBEDDINGS_KIND: Final = RequestKind(OLLAMA_EMBEDDINGS, plan_ollama_embeddings, tagged=True)

_BY_FIELD: Final[tuple[tuple[str, RequestKind[Any]], ...]] = (
    ("messages", CHAT_KIND),
    ("prompt", COMPLETION_KIND),
    ("input", EMBEDDING_KIND),
    ("query", RERANK_KIND),
    ("queries", SCORE_KIND),
    ("text_1", SCORE_KIND),
    ("data_1", SCORE_KIND),
)
"""The field that only requests of a kind have."""
_NULL: Final = msgspec.Raw(b"null")


class _Fields(msgspec.Struct):
    """The fields that tell requests apart, not decoded."""

    messages: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    query: msgspec.Raw = _NULL
    queries: msgspec.Raw = _NULL
    text_1: msgspec.Raw = _NULL
    data_1: msgspec.Raw = _NULL


_decode_fields = msgspec.json.Decoder(_Fields).decode


def kind_of_body(body: bytes) -> RequestKind[Any]:
    """The kind of a request whose path does not say it. The decoder finds all other errors in the
    body.

    Errors: `InvalidRequest` for a body of no kind, or of several.
    """
    try:
        fields = _decode_fields(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return CHAT_KIND
    given = [kind for name, kind in _BY_FIELD if bytes(getattr(fields, name)).strip() != b"null"]
    if len(set(map(id, given))) != 1:
        names = ", ".join(f"'{name}'" for name, _ in _BY_FIELD)
        raise InvalidRequest(
            f"the endpoint is chosen by the body's field: send exactly one of {names}"
        )
    return given[0]
