"""Turns request fields into the engine's sampling parameters, for one model.

Checks fields against each other and against the model: its limits, vocabulary and recommended
defaults. Decoding has already validated each field alone.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.frontend.output.response_memory import tokens_bytes
from pdserve.frontend.preprocess.context_length import (
    ContextFit,
    check_prompt_length,
    max_output_tokens,
)
from pdserve.messages.request import SamplingParams
from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest, GenerationRequest
from pdserve.text.repetition import RepetitionDetector
from pdserve.token_ids import TokenIds, largest_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import Thinking
    from pdserve.text.tokenization.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as at OpenAI."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""Most logprobs of prompt tokens in one answer: alternatives, prompts and choices multiply. This
many make an answer of 20 MB and a second of work."""
MAX_STREAMED_PROMPT_LOGPROBS = 1 << 16
"""Most logprobs of prompt tokens in a stream. Its chunks are made on the event loop, which this
many block for 0.1 s."""
T = TypeVar("T")
_SEED_BITS = (1 << 63) - 1
MAX_BAD_TOKENS = 1 << 16
"""Most tokens of all bad words together: they travel with the request."""


def sampling_params(
    request: ChatRequest | CompletionRequest,
    card: ModelCard,
    prompt_tokens: int,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    thinking: Thinking | None = None,
    fit: ContextFit = ContextFit.WITHIN,
    like: SamplingParams | None = None,
) -> SamplingParams:
    """Parameters for one prompt of the request.

    Args: `seed` is used when the request has none; `bad_words` are its bad words as tokens;
    `grammar` and `thinking` come from `structured_output`; `fit`: whether more output may be
    requested than fits; `like`: the parameters of another prompt of the request, which are reused
    where the prompt does not matter, because a request may name 65,536 tokens and have 128 prompts.

    Errors: `ContextLengthExceeded`, `InvalidRequest`.
    """
    limit, asked_by = _max_tokens(request, card, prompt_tokens, fit)
    minimum = request.min_tokens or 0
    if minimum > limit:
        raise InvalidRequest(
            f"'min_tokens' ({minimum}) is more than {asked_by} ({limit})", param="min_tokens"
        )
    if like is not None:
        return replace(like, max_tokens=limit, thinking=thinking)
    defaults = card.defaults
    params = SamplingParams(
        max_tokens=limit,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, card),
        logprobs=_sampled_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        min_tokens=minimum,
        stop_token_ids=_stop_token_ids(request, card),
        eos_token_ids=card.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        seed=seed if request.seed is None else request.seed & _SEED_BITS,
        allowed_token_ids=_allowed(request, card),
        grammar=grammar,
        thinking=thinking,
        bad_words=bad_words,
        logprob_token_ids=_logprob_token_ids(request, card),
    )
    check_tokens_left(params, card)
    return params


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The request's stop strings, without duplicates, in its order."""
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))


def choice_count(request: ChatRequest | CompletionRequest, prompts: int, limit: int) -> int:
    """`n`, checked against `best_of` and the limit on choices per request.

    Errors: `InvalidRequest`.
    """
    n = request.n or 1
    if isinstance(request, CompletionRequest) and request.best_of not in (None, n):
        raise InvalidRequest(
            "'best_of' is not supported: set it to 'n' or leave it out", param="best_of"
        )
    if n * prompts > limit:
        raise InvalidRequest(
            f"the request asks for {n * prompts} choices; the limit is {limit}: lower 'n' or send "
            "fewer prompts",
            param="n",
        )
    return n


def check_prompt_logprobs(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, n: int
) -> None:
    """Limits the prompt logprobs. Args: `prompt_tokens` of all prompts together. Errors:
    `InvalidRequest`."""
    top = _prompt_logprobs(request)
    if top is None:
        return
    field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "'prompt_logprobs' come with whole answers only: leave 'stream' out",
            param="prompt_logprobs",
        )
    wanted = prompt_tokens * n * (1 + top)
    limit = MAX_STREAMED_PROMPT_LOGPROBS if request.stream else MAX_PROMPT_LOGPROBS
    if wanted > limit:
        raise InvalidRequest(
            f"'{field}' of the prompts come to {wanted} numbers; the limit is {limit}: ask for "
            "fewer alternatives or choices, or send fewer prompts per request",
            param=field,
        )


def check_response_size(
    request: ChatRequest | CompletionRequest, most: int, choices: int, limit: Bytes
) -> None:
    """Refuses a non-streamed answer that would be too large at the requested length. Answers are
    mostly shorter than allowed, so without a requested length only the actual size is checked,
    during generation.

    Args: `most` tokens per choice; `choices` of all prompts together.

    Errors: `InvalidRequest`.
    """
    top = _sampled_logprobs(request)
    field, asked = _asked(request)
    if request.stream or top is None or asked is None:
        return
    top += len(request.logprob_token_ids or ())
    asked = min(asked, most)
    size = tokens_bytes(asked * choices, top)
    if size > limit:
        raise InvalidRequest(
            f"'{field}' of {asked} with {top} alternatives, {choices} times, would take {size} "
            f"bytes; the limit is {limit}: stream it, or ask for fewer tokens, choices or logprobs",
            param=field,
        )


def scores_only(request: ChatRequest | CompletionRequest) -> bool:
    """True for a completion of 0 tokens, which wants only its prompt back, perhaps with logprobs.

    An engine always generates one token; the frontend drops it.
    """
    return isinstance(request, CompletionRequest) and request.max_tokens == 0


def _max_tokens(
    request: ChatRequest | CompletionRequest, card: ModelCard, prompt_tokens: int, fit: ContextFit
) -> tuple[int, str]:
    """The most output tokens, and which field or limit set that number."""
    check_prompt_length(prompt_tokens, card, _prompt_field(request))
    room = card.max_model_len - prompt_tokens
    field, asked = _asked(request)
    if asked is None:
        if isinstance(request, CompletionRequest):
            return min(COMPLETION_MAX_TOKENS, room), "the default"
        return min(card.defaults.max_tokens or room, room), "what fits the context"
    if asked == 0:
        if not (isinstance(request, CompletionRequest) and request.echo):
            raise InvalidRequest(
                "'max_tokens' must be at least 1, unless 'echo' is set", param="max_tokens"
            )
        return 1, f"'{field}'"
    limit = max_output_tokens(asked, field, prompt_tokens, card, fit)
    return limit, f"'{field}'" if limit == asked else "what fits the context"


def _asked(request: ChatRequest | CompletionRequest) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _prompt_field(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return None


def _sampled_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """The number of logprobs to sample. Tokens requested by id replace the most likely ones."""
    count = _logprobs(request)
    return 0 if count is not None and request.logprob_token_ids else count


def _prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """The number of prompt logprobs. Two fields may request them; the larger number is computed."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    asked = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(asked, default=None)


def _logit_bias(request: GenerationRequest, card: ModelCard) -> dict[int, float]:
    bias = request.logit_bias or {}
    _check_tokens(bias, card, "logit_bias")
    return bias


def _stop_token_ids(request: GenerationRequest, card: ModelCard) -> tuple[int, ...]:
    ids = request.stop_token_ids or ()
    _check_tokens(ids, card, "stop_token_ids")
    return tuple(dict.fromkeys(ids))


# ---------------------------------------------------------------- token bans


def check_token_bans(request: GenerationRequest, card: ModelCard) -> None:
    """Checks that the model's engine supports the request's bans and choices of single tokens, and
    that no other field contradicts them. Errors: `InvalidRequest`."""
    for field in ("allowed_token_ids", "bad_words", "logprob_token_ids"):
        asked = getattr(request, field)
        if not asked and (asked is None or field != "allowed_token_ids"):
            # An empty list asks for nothing, except in `allowed_token_ids`.
            continue
        if "bans" not in card.features:
            raise InvalidRequest(
                f"'{field}' is not supported by the engine of '{card.name}'; leave it out",
                param=field,
            )
        if field != "logprob_token_ids" and (other := _structure(request)) is not None:
            raise InvalidRequest(
                f"'{field}' and '{other}' exclude each other: leave one of them out",
                param=field,
            )


def _structure(request: GenerationRequest) -> str | None:
    """The field that restricts the answer by a grammar, if any."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    if request.response_format is not None and request.response_format.type != "text":
        return "response_format"
    if isinstance(request, ChatRequest) and request.thinking_token_budget is not None:
        return "thinking_token_budget"
    return None


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it begins a text and as it stands within one, if the space before it
    is part of its first token. Slow: call it in a thread.

    Errors: `InvalidRequest` for a word without tokens or too many of them.
    """
    bare = [word.lstrip() for word in words]
    first = tokenizer.encode_batch(bare, add_special_tokens=False)
    within = tokenizer.encode_batch([f" {word}" for word in bare], add_special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for index, (start, inner) in enumerate(zip(first, within, strict=True)):
        if not start:
            raise InvalidRequest(
                f"'bad_words[{index}]' has no tokens; leave it out", param=f"bad_words[{index}]"
            )
        found[tuple(start)] = None
        if inner and inner[0] != start[0] and len(inner) == len(start):
            found[tuple(inner)] = None
    if sum(map(len, found)) > MAX_BAD_TOKENS:
        raise InvalidRequest(
            f"'bad_words' come to more than {MAX_BAD_TOKENS} tokens; send fewer", param="bad_words"
        )
    return tuple(found)


def check_tokens_left(params: SamplingParams, card: ModelCard) -> None:
    """Checks that at every position some token can still be sampled.

    Errors: `InvalidRequest`.
    """
    allowed = params.allowed_token_ids
    if not (allowed or params.bad_words):
        return
    banned = {word[-1] for word in params.bad_words}
    if params.min_tokens:
        banned.update(params.stop_token_ids)
        banned.update(() if params.ignore_eos else params.eos_token_ids)
    if allowed and banned.issuperset(allowed):
        raise InvalidRequest(
            "'allowed_token_ids' may leave nothing to say: 'bad_words' or 'min_tokens' rule all of "
            "them out; allow more",
            param="allowed_token_ids",
        )
    if len(banned) >= card.vocab_size:
        raise InvalidRequest("'bad_words' may leave nothing to say; send fewer", param="bad_words")


def _allowed(request: GenerationRequest, card: ModelCard) -> tuple[int, ...]:
    ids = request.allowed_token_ids
    if ids is None:
        return ()
    check_prompt_tokens(ids, card, "allowed_token_ids")
    return tuple(sorted(set(ids)))


def _logprob_token_ids(
    request: ChatRequest | CompletionRequest, card: ModelCard
) -> tuple[int, ...]:
    ids = request.logprob_token_ids
    if not ids:
        return ()
    if _logprobs(request) is None:
        raise InvalidRequest(
            "'logprob_token_ids' needs 'logprobs', which may be 0 or true",
            param="logprob_token_ids",
        )
    check_prompt_tokens(ids, card, "logprob_token_ids")
    return tuple(dict.fromkeys(ids))


# ---------------------------------------------------------------- the prompt's length


def truncate_prompt(
    tokens: TokenIds, request: ChatRequest | CompletionRequest, card: ModelCard
) -> TokenIds:
    """Returns the prompt's last (or first) `truncate_prompt_tokens` tokens, or all if that is not
    set.

    With -1, keeps as many as leave room for the requested output, or for 16 tokens.

    Errors: `InvalidRequest`."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be at least 1, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        _, asked = _asked(request)
        reserved = COMPLETION_MAX_TOKENS if asked is None else max(1, asked)
        keep = max(1, card.max_model_len - reserved)
    return tokens[:keep] if request.truncation_side == "right" else tokens[-keep:]


def repetition_detector(request: GenerationRequest) -> Callable[[], RepetitionDetector] | None:
    """Makes a repetition detector for each choice. Errors: `InvalidRequest`."""
    wanted = request.repetition_detection
    if wanted is None:
        return None
    least = wanted.min_pattern_size or 1
    if least > wanted.max_pattern_size:
        raise InvalidRequest(
            f"'repetition_detection.min_pattern_size' ({least}) is more than 'max_pattern_size' "
            f"({wanted.max_pattern_size})",
            param="repetition_detection.min_pattern_size",
        )
    return partial(
        RepetitionDetector,
        wanted.max_pattern_size,
        wanted.min_count,
        least,
        request.min_tokens or 0,
    )


def check_prompt_tokens(ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Errors: `InvalidRequest` for an empty list or ids outside the vocabulary."""
    if not ids:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    if (largest_id(ids) if isinstance(ids, array) else max(ids)) >= card.vocab_size:
        at = next(index for index, token in enumerate(ids) if token >= card.vocab_size)
        raise _no_such_token(ids[at], card, f"{param}[{at}]")


def _check_tokens(ids: Sequence[int] | dict[int, float], card: ModelCard, param: str) -> None:
    for index, token in enumerate(ids):
        if token >= card.vocab_size:
            where = param if isinstance(ids, dict) else f"{param}[{index}]"
            raise _no_such_token(token, card, where)


def _no_such_token(token: int, card: ModelCard, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}': the vocabulary of '{card.name}' has {card.vocab_size} tokens, "
        f"there is no token {token}",
        param=param,
    )


def _first(asked: T | None, recommended: T | None, otherwise: T) -> T:
    """The request's value, else the model's recommended one, else the neutral one."""
    if asked is not None:
        return asked
    return otherwise if recommended is None else recommended
