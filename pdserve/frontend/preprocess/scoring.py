"""Turns a decoded score or rerank request into a plan.

A model with a classification head of one label reads each query with its document: one prompt per
pair, whose score is the head's output. An embedding model reads every text by itself; the score of
a pair is the cosine of both vectors. `pair_prompts.py` writes the prompts of pairs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import InvalidRequest
from pdserve.frontend.output.embedding_format import EmbeddingFormat
from pdserve.frontend.output.score_format import Ranking, ScoreFormat
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.frontend.preprocess.embeddings import (
    check_input_chars,
    check_input_length,
    encode_inputs,
    kept_tokens,
    makes_vectors,
    pooling_requests,
    truncate_input,
)
from pdserve.frontend.preprocess.pair_prompts import Pair, PairPrompts, pair_template
from pdserve.frontend.preprocess.sampling import check_prompt_tokens
from pdserve.frontend.preprocess.text_cost import (
    MIN_STRUCTURED_CHARS,
    encoded_chars,
    texts_chars,
    texts_cost,
)
from pdserve.protocols.scoring import MAX_DOCUMENTS, TextDocument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.messages.card import ModelCard
    from pdserve.protocols.scoring import (
        RerankRequest,
        ScoreRequest,
        ScoringFields,
        TextInput,
        TextInputs,
    )
    from pdserve.token_ids import TokenIds

__all__ = ["plan_rerank", "plan_score"]

_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Pairs of fields that hold the texts of a score request."""
_NUMBER = 4
"""Bytes of a number in a vector."""


class _Side(NamedTuple):
    """Texts of a request, and their names in errors."""

    texts: list[str]
    names: list[str]


async def plan_rerank(request: RerankRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a rerank request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    queries, documents = _side(request.query, "query"), _side(request.documents, "documents")
    texts = None if request.return_documents is False else tuple(documents.texts)
    ranking = Ranking(texts=texts, top_n=request.top_n or 0)
    return await _plan(request, context, queries, documents, ranking)


async def plan_score(request: ScoreRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a score request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    first, second = _sides(request)
    if len(first.texts) not in (1, len(second.texts)):
        raise InvalidRequest(
            f"{len(first.texts)} texts cannot be compared with {len(second.texts)}: send one and "
            "any number, or the same number of both",
            param=first.names[0].partition("[")[0],
        )
    return await _plan(request, context, first, second, None)


async def _plan(
    request: ScoringFields,
    context: PlanContext,
    first: _Side,
    second: _Side,
    ranking: Ranking | None,
) -> RequestPlan:
    card = context.model.card
    by_pairs = _scores_pairs(card)
    if by_pairs:
        tokens, size = await _pair_tokens(request, first, second, context), 1
    else:
        tokens, size = await _texts_tokens(request, first, second, context), card.embedding_size
    prompts = [Prompt(each) for each in tokens]
    return RequestPlan(
        chat=False,
        model=context.model,
        model_name=request.model or card.name,
        answer_id=("score-" if ranking is None else "rerank-") + context.request_id,
        created=int(time.time()),
        prompts=prompts,
        requests=await pooling_requests(request, context, prompts, classify=by_pairs),
        n=1,
        vectors=EmbeddingFormat(made=size, kept=size, normalize=False, base64=False),
        scores=ScoreFormat(
            queries=0 if by_pairs else len(first.texts),
            sigmoid=card.score_activation != "identity" and request.use_activation is not False,
            ranking=ranking,
        ),
    )


def _scores_pairs(card: ModelCard) -> bool:
    """True if the model has a head that scores pairs, False if it computes embeddings.

    Errors: `InvalidRequest` if it does neither.
    """
    if "classify" in card.features and card.num_labels == 1:
        return True
    if makes_vectors(card):
        return False
    if card.num_labels > 1:
        raise InvalidRequest(
            f"'{card.name}' tells {card.num_labels} classes apart, which gives no score: name a "
            "reranker with one label, or an embedding model",
            param="model",
        )
    raise InvalidRequest(
        f"'{card.name}' makes no scores: it has no classification head, and neither its files nor "
        "its workers' settings say how it makes vectors. Name a reranker or an embedding model, or "
        "start its workers with --pooling=mean or --pooling=last",
        param="model",
    )


# ---------------------------------------------------------------- texts


def _sides(request: ScoreRequest) -> tuple[_Side, _Side]:
    """The texts of both sides. Errors: `InvalidRequest` unless exactly one pair is given."""
    given = [pair for pair in _SIDES if _has(request, pair[0]) and _has(request, pair[1])]
    names = {name for pair in _SIDES for name in pair if _has(request, name)}
    if len(given) != 1 or len(names) != 2:
        known = ", ".join(f"'{one}' and '{two}'" for one, two in _SIDES)
        raise InvalidRequest(f"give exactly one of these pairs of fields: {known}", param="text_1")
    one, two = given[0]
    return _side(getattr(request, one), one), _side(getattr(request, two), two)


def _has(request: ScoreRequest, name: str) -> bool:
    return getattr(request, name) is not None


def _side(given: TextInputs, field: str) -> _Side:
    """The texts of a field, none empty. Errors: `InvalidRequest`."""
    if not isinstance(given, list):
        return _Side([_checked(given, field)], [field])
    if not 0 < len(given) <= MAX_DOCUMENTS:
        raise InvalidRequest(
            f"'{field}' holds {len(given)} texts; send 1 to {MAX_DOCUMENTS}", param=field
        )
    names = [f"{field}[{index}]" for index in range(len(given))]
    return _Side(list(map(_checked, given, names)), names)


def _checked(given: TextInput, name: str) -> str:
    text = given.text if isinstance(given, TextDocument) else given
    if not text:
        raise InvalidRequest(f"'{name}' must not be empty", param=name)
    return text


# ---------------------------------------------------------------- an embedding model


async def _texts_tokens(
    request: ScoringFields, first: _Side, second: _Side, context: PlanContext
) -> list[TokenIds]:
    """The tokens of every text, those of the first side before the others."""
    card, count = context.model.card, len(first.texts) + len(second.texts)
    size, limit = card.embedding_size * _NUMBER * count, context.config.max_answer
    if size > limit:
        raise InvalidRequest(
            f"{count} vectors of {card.embedding_size} numbers would take {size} bytes; the limit "
            f"is {limit}: send fewer texts",
            param=second.names[0].partition("[")[0],
        )
    if request.chat_template_kwargs or request.instruction is not None:
        wrong = "instruction" if request.instruction is not None else "chat_template_kwargs"
        raise InvalidRequest(
            f"'{card.name}' makes a vector of each text and has no template for pairs: write the "
            "instruction into the texts",
            param=wrong,
        )
    keep = kept_tokens(request, card)
    limits = request.max_tokens_per_query or 0, request.max_tokens_per_doc or 0
    return await context.pool.run(
        texts_cost([*first.texts, *second.texts], context.model.tokenizer),
        lambda: [
            ids
            for side, most in zip((first, second), limits, strict=True)
            for ids in _encode(side, keep, most, context.model)
        ],
    )


def _encode(side: _Side, keep: int | None, most: int, model: PreparedModel) -> list[TokenIds]:
    """The tokens of one side's texts, at most `most` of each text beside the tokenizer's own."""
    if not most:
        found = encode_inputs(side.texts, side.names, True, keep, model)
        return _fitting(found, side.names, model.card)
    for text, name in zip(side.texts, side.names, strict=True):
        check_input_chars(text, name, most, model)
    whole = model.tokenizer.encode_batch(side.texts, True)
    bare = model.tokenizer.encode_batch(side.texts, False)
    found = [
        truncate_input(ids, inner, min(most + len(ids) - len(inner), keep or len(ids)))
        for ids, inner in zip(whole, bare, strict=True)
    ]
    return _fitting(found, side.names, model.card)


def _fitting(found: list[TokenIds], names: Sequence[str], card: ModelCard) -> list[TokenIds]:
    """The prompts, each checked. Errors: `InvalidRequest`, `ContextLengthExceeded`."""
    for ids, name in zip(found, names, strict=True):
        check_prompt_tokens(ids, card, name)
        check_input_length(ids, card, name)
    return found


# ---------------------------------------------------------------- a reranker


async def _pair_tokens(
    request: ScoringFields, first: _Side, second: _Side, context: PlanContext
) -> list[TokenIds]:
    """The tokens of each pair's prompt."""
    model = context.model
    queries = first.texts * len(second.texts) if len(first.texts) == 1 else first.texts
    pairs = list(map(Pair, queries, second.texts, second.names))
    chars = _check_chars(request, pairs, first, context)
    prompts = PairPrompts(
        model=model,
        instruction=request.instruction,
        variables=request.chat_template_kwargs or {},
        keep=kept_tokens(request, model.card),
        query_tokens=request.max_tokens_per_query or 0,
        document_tokens=request.max_tokens_per_doc or 0,
    )
    templated = pair_template(model) is not None
    if not templated and (request.instruction is not None or request.chat_template_kwargs):
        wrong = "instruction" if request.instruction is not None else "chat_template_kwargs"
        raise InvalidRequest(
            f"'{model.card.name}' has no template for pairs: write the instruction into the texts",
            param=wrong,
        )
    # A template's work depends on the template, too.
    size = max(MIN_STRUCTURED_CHARS, chars) if templated else chars
    return await context.pool.run(size, _encode_pairs, prompts, first, pairs)


def _check_chars(
    request: ScoringFields, pairs: Sequence[Pair], first: _Side, context: PlanContext
) -> int:
    """The cost of all prompts, in characters: query, instruction and variables are in the prompt of
    each document.

    Errors: `InvalidRequest` for more text than a body may have.
    """
    chars = texts_chars(text for pair in pairs for text in (pair.query, pair.document))
    chars += len(pairs) * encoded_chars([request.instruction, request.chat_template_kwargs])
    limit = context.config.max_body
    if chars > limit:
        raise InvalidRequest(
            f"with query and instruction in each, the prompts would have {chars} characters; the "
            f"limit is {limit}: send fewer documents, or a shorter query",
            param=first.names[0],
        )
    return chars


def _encode_pairs(prompts: PairPrompts, queries: _Side, pairs: Sequence[Pair]) -> list[TokenIds]:
    model, keep = prompts.model, prompts.keep
    for text, name in zip(queries.texts, queries.names, strict=True):
        check_input_chars(text, name, prompts.query_tokens or keep, model)
    for pair in pairs:
        check_input_chars(pair.document, pair.name, prompts.document_tokens or keep, model)
    return _fitting(prompts.encode(pairs), [pair.name for pair in pairs], model.card)
