"""From a request's fields to the engine's sampling parameters, for one model.

Everything here is about what fields mean together, or for this model: its limits, vocabulary and
recommended defaults. Each field alone was validated when it was decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.gathered import size_of_tokens
from pdserve.messages.request import SamplingParams
from pdserve.openai.schema import ChatRequest, CompletionRequest, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.messages.card import ModelCard

COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates when the request does not say; OpenAI's default."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""Logprobs of prompt tokens in one answer: alternatives, prompts and choices multiply. So many make
an answer of 20 MB and a second of work."""
MAX_STREAMED_PROMPT_LOGPROBS = 1 << 16
"""The same for a stream: its chunks are made on the event loop, which this delays by 0.1 s."""
T = TypeVar("T")
_SEED_BITS = (1 << 63) - 1


def sampling_params(
    request: ChatRequest | CompletionRequest, card: ModelCard, prompt_tokens: int, seed: int
) -> SamplingParams:
    """Parameters for one prompt of the request.

    Args: `seed` is used when the request has none.
    Errors: `ContextLengthExceeded`, `InvalidRequest`.
    """
    limit, asked_by = _max_tokens(request, card, prompt_tokens)
    minimum = request.min_tokens or 0
    if minimum > limit:
        raise InvalidRequest(
            f"'min_tokens' ({minimum}) is more than {asked_by} ({limit})", param="min_tokens"
        )
    defaults = card.defaults
    return SamplingParams(
        max_tokens=limit,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, card),
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        min_tokens=minimum,
        stop_token_ids=_stop_token_ids(request, card),
        eos_token_ids=card.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        seed=seed if request.seed is None else request.seed & _SEED_BITS,
    )


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The request's stop strings, without repetitions, in its order."""
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))


def choices(request: ChatRequest | CompletionRequest, prompts: int, limit: int) -> int:
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
    """Args: `prompt_tokens` of all prompts together. Errors: `InvalidRequest`."""
    top = _prompt_logprobs(request)
    if top is None:
        return
    wanted = prompt_tokens * n * (1 + top)
    limit = MAX_STREAMED_PROMPT_LOGPROBS if request.stream else MAX_PROMPT_LOGPROBS
    if wanted > limit:
        raise InvalidRequest(
            f"'logprobs' of the echoed prompts come to {wanted} numbers; the limit is {limit}: ask "
            "for fewer alternatives or choices, or send fewer prompts per request",
            param="logprobs",
        )


def check_answer(request: ChatRequest | CompletionRequest, choices: int, limit: Bytes) -> None:
    """Whether a whole answer of the length that is asked for may be gathered. Most are shorter than
    they may be: those that do not say are only looked at while they are made.

    Args: `choices` of all prompts together. Errors: `InvalidRequest`.
    """
    top = _logprobs(request)
    field, asked = _asked(request)
    if request.stream or top is None or asked is None:
        return
    size = size_of_tokens(asked * choices, top)
    if size > limit:
        raise InvalidRequest(
            f"'{field}' of {asked} with {top} alternatives, {choices} times, would take {size} "
            f"bytes; the limit is {limit}: stream it, or ask for fewer tokens, choices or logprobs",
            param=field,
        )


def scores_only(request: ChatRequest | CompletionRequest) -> bool:
    """A completion of 0 tokens: it wants its prompt back, with logprobs perhaps.

    An engine always makes one token; the frontend drops it.
    """
    return isinstance(request, CompletionRequest) and request.max_tokens == 0


def _max_tokens(
    request: ChatRequest | CompletionRequest, card: ModelCard, prompt_tokens: int
) -> tuple[int, str]:
    """Output tokens at most, and what in the request or model set that number."""
    room = card.max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, but the context of '{card.name}' is "
            f"{card.max_model_len} tokens, output included; shorten the prompt",
            param=_prompt_field(request),
        )
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
    if asked > room:
        raise ContextLengthExceeded(
            f"{prompt_tokens} prompt tokens and '{field}' of {asked} make "
            f"{prompt_tokens + asked}, but the context of '{card.name}' is {card.max_model_len} "
            f"tokens; shorten the prompt or lower '{field}' to {room}",
            param=field,
        )
    return asked, f"'{field}'"


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


def _prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest) and request.echo:
        return request.logprobs
    return None


def _logit_bias(request: GenerationRequest, card: ModelCard) -> dict[int, float]:
    bias = request.logit_bias or {}
    _check_tokens(bias, card, "logit_bias")
    return bias


def _stop_token_ids(request: GenerationRequest, card: ModelCard) -> tuple[int, ...]:
    ids = request.stop_token_ids or ()
    _check_tokens(ids, card, "stop_token_ids")
    return tuple(dict.fromkeys(ids))


def check_prompt_tokens(ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Errors: `InvalidRequest` for no ids at all or ids outside the vocabulary."""
    if not ids:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    if max(ids) >= card.vocab_size:
        at = next(index for index, token in enumerate(ids) if token >= card.vocab_size)
        raise _no_such_token(ids[at], card, f"{param}[{at}]")


def _check_tokens(ids: Sequence[int] | dict[int, float], card: ModelCard, param: str) -> None:
    for token in ids:
        if token >= card.vocab_size:
            raise _no_such_token(token, card, param)


def _no_such_token(token: int, card: ModelCard, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}': the vocabulary of '{card.name}' has {card.vocab_size} tokens, "
        f"there is no token {token}",
        param=param,
    )


def _first(asked: T | None, recommended: T | None, otherwise: T) -> T:
    """The request's own value, else the model's recommendation, else the neutral one."""
    if asked is not None:
        return asked
    return otherwise if recommended is None else recommended
