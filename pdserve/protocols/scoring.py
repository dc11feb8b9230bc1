"""Defines the requests and responses of the score and rerank endpoints as typed records.

`/v1/rerank`, `/rerank` and `/v2/rerank` take one form, which is Cohere's and Jina's; `/v1/score`
and `/score` take vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pdserve.protocols.completion_requests import Priority, field_doc
from pdserve.protocols.completion_responses import Usage
from pdserve.protocols.request_decoder import RequestDecoder
from pdserve.protocols.unsupported_fields import UnsupportedField

MAX_DOCUMENTS: Final = 2048
"""Maximum documents of one request; as many as inputs of `/v1/embeddings`."""

_Limit = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TextDocument(msgspec.Struct, kw_only=True):
    """A query or document as an object."""

    text: str


TextInput = str | TextDocument
TextInputs = str | TextDocument | list[TextInput]


class ScoringFields(msgspec.Struct, kw_only=True):
    """The fields that scoring and reranking share."""

    model: str | None = None
    instruction: Annotated[
        str | None,
        field_doc(
            "Task of a reranker whose template takes one: the template's variable of this name, "
            "and its message of the role `system`."
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, field_doc("Variables for the template of a reranker.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        field_doc(
            "Longer prompts are cut: a text or, with a reranker, its document loses its end; -1: "
            "down to the context."
        ),
    ] = None
    max_tokens_per_query: Annotated[
        _Limit | None, field_doc("Queries keep so many tokens at most; 0 is off.")
    ] = None
    max_tokens_per_doc: Annotated[
        _Limit | None, field_doc("Documents keep so many tokens at most; 0 is off.")
    ] = None
    use_activation: Annotated[
        bool | None, field_doc("False: a reranker's scores are its logits. Default: true.")
    ] = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    request_id: str | None = None
    user: str | None = None


class ScoreRequest(ScoringFields, kw_only=True):
    """The body of `POST /v1/score`: two texts or lists of texts, under one of four pairs of names.

    One text on the first side is scored with each on the second; else both have the same number.
    """

    text_1: Annotated[TextInputs | None, field_doc("The first texts; needs `text_2`.")] = None
    text_2: Annotated[TextInputs | None, field_doc("The second texts.")] = None
    queries: Annotated[
        TextInputs | None, field_doc("The first texts; needs `documents` or `items`.")
    ] = None
    documents: Annotated[TextInputs | None, field_doc("The second texts.")] = None
    items: Annotated[TextInputs | None, field_doc("The second texts.")] = None
    data_1: Annotated[TextInputs | None, field_doc("The first texts; needs `data_2`.")] = None
    data_2: Annotated[TextInputs | None, field_doc("The second texts.")] = None


class RerankRequest(ScoringFields, kw_only=True):
    """The body of `POST /v1/rerank`."""

    query: Annotated[TextInput, field_doc("The text that documents are compared with.")]
    documents: Annotated[
        TextInputs, field_doc("Texts, or objects with `text`; at most 2048, none empty.")
    ]
    top_n: Annotated[
        _Limit | None, field_doc("Number of results; 0 and more than there are: all.")
    ] = None
    return_documents: Annotated[
        bool | None, field_doc("False: results have no `document`. Default: true.")
    ] = None


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/score`, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document as the request has it."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """One document's place in the ranking."""

    index: int
    """Place of the document in the request."""
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankList(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/rerank`, the most relevant documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


_CUT = UnsupportedField("documents lose their end; leave it out", ("right",))
_ONE_PROMPT = UnsupportedField("scores come from a model's head or vectors; leave it out")

REFUSED_BY_SCORE = {
    "apply_softmax": _ONE_PROMPT,
    "item_first": UnsupportedField("send the texts in the other order", (False,)),
    "label_token_ids": _ONE_PROMPT,
    "mm_processor_kwargs": UnsupportedField("only text is understood; leave it out", ({},)),
    "truncation_side": _CUT,
}
REFUSED_BY_RERANK = {
    "max_chunks_per_doc": UnsupportedField("documents are not cut into parts; leave it out", (1,)),
    "mm_processor_kwargs": UnsupportedField("only text is understood; leave it out", ({},)),
    "rank_fields": UnsupportedField("send each document as one text", (["text"],)),
    "truncation_side": _CUT,
}
SCORE = RequestDecoder(ScoreRequest, REFUSED_BY_SCORE)
RERANK = RequestDecoder(RerankRequest, REFUSED_BY_RERANK)
