"""Turns a decoded `/v1/embeddings` request into a plan.

Each input is its own submission; the engine computes the prompt and returns a vector instead of a
token. Everything else is as with generation: `generation` orders the steps. `scoring.py` plans the
other requests that engines answer with vectors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.access.api_keys import cache_salt_of, check_priority
from pdserve.frontend.output.embedding_format import EmbeddingFormat
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.frontend.preprocess.input_processor import (
    chat_tokens,
    check_prompt_chars,
    max_prompt_chars,
)
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING
from pdserve.frontend.preprocess.sampling import check_prompt_tokens
from pdserve.frontend.preprocess.text_cost import texts_cost
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.protocols.completion_requests import TokenizeRequest
from pdserve.protocols.embeddings import MAX_INPUTS
from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.ids import Bytes
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import Pooling
    from pdserve.protocols.embeddings import EmbeddingRequest
    from pdserve.protocols.scoring import ScoringFields

_VECTOR = SamplingParams(max_tokens=1, temperature=0.0)
"""Nothing is sampled; other code needs to know how much output to expect."""
_MIXTURE = (
    "'input' must be one text, a list of texts, a list of token ids, or a list of lists of token "
    "ids, not a mixture"
)


async def plan_embeddings(request: EmbeddingRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of an embeddings request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    card = context.model.card
    shape = embedding_format_of(request, card)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("give exactly one of 'input' and 'messages'", param="input")
    if request.input is None:
        prompts = [Prompt(await _chat_tokens(request, context))]
    else:
        inputs = input_list(request.input)
        _check_size(shape, len(inputs), context.config.max_answer)
        prompts = [Prompt(tokens) for tokens in await _tokens(request, inputs, context)]
    return RequestPlan(
        chat=False,
        model=context.model,
        model_name=request.model or card.name,
        answer_id="",
        created=int(time.time()),
        prompts=prompts,
        requests=await pooling_requests(request, context, prompts),
        n=1,
        vectors=shape,
    )


def _check_size(shape: EmbeddingFormat, count: int, limit: Bytes) -> None:
    if shape.size * count > limit:
        raise InvalidRequest(
            f"{count} vectors of {shape.kept} numbers would take about {shape.size * count} bytes; "
            f"the limit is {limit}: send fewer inputs, or ask for 'encoding_format': \"base64\"",
            param="input",
        )


def makes_vectors(card: ModelCard) -> bool:
    """True if the model computes embeddings."""
    return "embeddings" in card.features and bool(card.pooling) and card.embedding_size > 0


def embedding_format_of(request: EmbeddingRequest, card: ModelCard) -> EmbeddingFormat:
    """The format of the answer's vectors.

    Errors: `InvalidRequest` if the model computes no embeddings, or none of that size.
    """
    if not makes_vectors(card):
        raise InvalidRequest(
            f"'{card.name}' makes no vectors: neither its files nor its workers' settings say how. "
            "Start its workers with --pooling=mean or --pooling=last, or name another model",
            param="model",
        )
    kept = card.embedding_size if request.dimensions is None else request.dimensions
    if kept != card.embedding_size:
        _check_dimensions(kept, card)
    return EmbeddingFormat(
        made=card.embedding_size,
        kept=kept,
        normalize=card.normalize or kept < card.embedding_size,
        base64=request.encoding_format == "base64",
    )


def _check_dimensions(wanted: int, card: ModelCard) -> None:
    allowed = card.dimensions
    if wanted in allowed or (0 in allowed and wanted < card.embedding_size):
        return
    whole = card.embedding_size
    if 0 in allowed:
        may = f"may have 1 to {whole} numbers"
    elif allowed:
        may = f"may have {', '.join(map(str, allowed))} or {whole} numbers"
    else:
        may = f"have {whole} numbers, and a part of them means nothing: leave 'dimensions' out"
    raise InvalidRequest(
        f"'dimensions' is {wanted}; vectors of '{card.name}' {may}", param="dimensions"
    )


# ---------------------------------------------------------------- inputs


def input_list(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The inputs, each a text or token ids, none empty.

    Errors: `InvalidRequest`.
    """
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return [given]  # type: ignore[list-item]  # checked above
    inputs: list[str | int | list[int]] = [given] if isinstance(given, str) else given
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(
            f"'input' holds {len(inputs)} inputs; send 1 to {MAX_INPUTS}", param="input"
        )
    kind = type(inputs[0])
    for index, item in enumerate(inputs):
        name = "input" if isinstance(given, str) else f"input[{index}]"
        if type(item) is not kind or isinstance(item, int):
            raise InvalidRequest(_MIXTURE, param=name)
        if not item:
            raise InvalidRequest(f"'{name}' must not be empty", param=name)
    return inputs  # type: ignore[return-value]  # checked above


async def _chat_tokens(request: EmbeddingRequest, context: PlanContext) -> TokenIds:
    """The tokens of a conversation, cut if requested. Errors: `InvalidRequest`,
    `ContextLengthExceeded`."""
    card = context.model.card
    keep = kept_tokens(request, card)
    chat = TokenizeRequest(
        messages=request.messages,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
    )
    found = (await chat_tokens(chat, context))[:keep]
    if not found:
        raise InvalidRequest(
            "the chat template writes nothing for these 'messages'", param="messages"
        )
    check_prompt_tokens(found, card, "messages")
    check_input_length(found, card, "messages")
    return found


async def _tokens(
    request: EmbeddingRequest, inputs: Sequence[str | list[int]], context: PlanContext
) -> list[TokenIds]:
    """The tokens of each input, cut if requested. Errors: `InvalidRequest`,
    `ContextLengthExceeded`."""
    model = context.model
    keep = kept_tokens(request, model.card)
    batch = isinstance(request.input, list) and type(request.input[0]) is not int
    names = [f"input[{index}]" if batch else "input" for index in range(len(inputs))]
    texts = [each for each in inputs if isinstance(each, str)]
    encoded: Iterator[TokenIds] = iter(())
    # Either all inputs are texts or none is.
    if texts:
        special = request.add_special_tokens is not False
        size = texts_cost(texts, model.tokenizer)
        encoded = iter(
            await context.pool.run(size, encode_inputs, texts, names, special, keep, model)
        )
    found = []
    for name, each in zip(names, inputs, strict=True):
        ids = next(encoded) if isinstance(each, str) else token_ids(each[:keep])
        check_prompt_tokens(ids, model.card, name)
        check_input_length(ids, model.card, name)
        found.append(ids)
    return found


def kept_tokens(request: EmbeddingRequest | ScoringFields, card: ModelCard) -> int | None:
    """The most tokens of an input that are kept; None: an input that does not fit is refused."""
    wanted = request.truncate_prompt_tokens
    if wanted == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be at least 1, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    return card.max_model_len if wanted == -1 else wanted


def check_input_length(ids: Sequence[int], card: ModelCard, name: str) -> None:
    """Errors: `ContextLengthExceeded`."""
    if len(ids) > card.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.max_model_len} tokens. However, "
            f"'{name}' has {len(ids)} tokens: send less, or let it be cut by "
            "'truncate_prompt_tokens': -1",
            param=name,
        )


def check_input_chars(text: str, name: str, keep: int | None, model: PreparedModel) -> None:
    """Refuses a text that would take too long to tokenise. Errors: `InvalidRequest`,
    `ContextLengthExceeded`."""
    if keep is None:
        check_prompt_chars(text, model, name)
    elif len(text) > (most := max_prompt_chars(model.card)):
        raise InvalidRequest(
            f"'{name}' has {len(text)} characters; {most} may be sent with "
            "'truncate_prompt_tokens': shorten it",
            param=name,
        )


def encode_inputs(
    texts: Sequence[str],
    names: Sequence[str],
    special: bool,
    keep: int | None,
    model: PreparedModel,
) -> list[TokenIds]:
    """The tokens of texts, the first `keep` of each."""
    for text, name in zip(texts, names, strict=True):
        check_input_chars(text, name, keep, model)
    found = model.tokenizer.encode_batch(texts, special)
    if keep is None or all(len(ids) <= keep for ids in found):
        return found
    bare = model.tokenizer.encode_batch(texts, False) if special else found
    return [truncate_input(ids, inner, keep) for ids, inner in zip(found, bare, strict=True)]


def truncate_input(ids: TokenIds, bare: TokenIds, keep: int) -> TokenIds:
    """The first `keep` tokens of a text. The special tokens that the tokenizer puts around it are
    always kept, because the last one may be what the embedding is made from; `bare` is the text
    without them.

    Errors: `InvalidRequest` if nothing of the text would be left.
    """
    if len(ids) <= keep:
        return ids
    around = len(ids) - len(bare)
    if keep <= around:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' of {keep} leaves no room for text beside {around} special "
            "tokens",
            param="truncate_prompt_tokens",
        )
    places = (n for n in range(around + 1) if ids[n : n + len(bare)] == bare)
    before = next(places, 0)
    after = ids[before + len(bare) :]
    return ids[: before + keep - around] + after


async def pooling_requests(
    request: EmbeddingRequest | ScoringFields,
    context: PlanContext,
    prompts: Sequence[Prompt],
    *,
    classify: bool = False,
) -> list[GenerateRequest]:
    """The requests to engines, one per prompt; `classify`: for what the model's classification head
    makes of it. Errors: `Forbidden`, `Overloaded`."""
    card, priority = context.model.card, request.priority or 0
    check_priority(priority, context.key, context.config.max_priority)
    salt = cache_salt_of(context.key, request.cache_salt)
    tokens = [prompt.tokens for prompt in prompts]
    pooling: Pooling = "last" if classify else card.pooling
    # Mean pooling needs every token to be computed, so cached blocks are of no use to it.
    naming = NO_HASHING if pooling == "mean" else context.naming
    names = await naming.of(card, salt, tokens, context.pool, lora=context.model.lora)
    return [
        GenerateRequest(
            request_id=context.request_id,
            model=card.name,
            prompt=ids,
            sampling=_VECTOR,
            prompt_index=index,
            cache_salt=salt,
            priority=priority,
            deadline=context.deadline,
            block_names=named.hashes,
            names_id=named.id,
            pooling=pooling,
            lora=context.model.lora,
            classify=classify,
        )
        for index, (ids, named) in enumerate(zip(tokens, names, strict=True))
    ]
