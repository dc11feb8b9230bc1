"""One submission inside the scheduler: its sequences, and the rules that come with its request.

Checks a request against the engine's limits, builds the sequences of its choices, and says when a
choice ends. It knows nothing of blocks, steps or other submissions; the scheduler owns it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.engine.sequence import Sequence
from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.messages.request import (
    Finish,
    FinishReason,
    GenerateRequest,
    Started,
    TokenLogprob,
)

if TYPE_CHECKING:
    from pdserve.engine.attempt import Remote
    from pdserve.ids import Seconds

_MAX_PROMPT_LOGPROBS = 1 << 21
"""Entries for one prompt; they travel in one frame, where each takes up to 23 bytes."""

__all__ = [
    "Submission",
    "build_sequences",
    "check_request",
    "ending",
    "finish_record",
    "started_record",
]


@dataclass(slots=True, eq=False)
class Submission:
    """What the sequences of one request share."""

    handle: int
    request: GenerateRequest
    deadline: Seconds | None
    """On the scheduler's clock."""
    live: list[Sequence]
    """Choices that have not ended, wherever they are."""
    started: bool = False
    """A step has computed something for it."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Entry i belongs to prompt token i + 1; complete before the first delta."""
    counted: bool = True
    """By the counters of tokens and ends."""
    remote: Remote | None = None
    """As long as its prompt is to come from elsewhere."""

    @property
    def reads_cache(self) -> bool:
        """Logprobs of prompt tokens, and what a mean is taken of, exist only for what is computed,
        not for what is reused."""
        if self.request.pooling == "mean":
            return False
        if self.request.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) >= len(self.request.prompt) - 1


def check_request(
    request: GenerateRequest, *, max_model_len: int, vocab_size: int, embeds: bool = False
) -> None:
    """Raise `InvalidRequest` for what this engine could never serve; `embeds`: it makes vectors."""
    prompt = request.prompt
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if request.pooling:
        _check_pooling(request, max_model_len, embeds=embeds)
    elif len(prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; a context of {max_model_len} tokens leaves no "
            "room for output",
            param="prompt",
        )
    top = request.sampling.prompt_logprobs
    if top is not None and len(prompt) * (1 + top) > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{1 + top} logprobs for each of {len(prompt)} prompt tokens are too many; the limit "
            f"is {_MAX_PROMPT_LOGPROBS}",
            param="logprobs",
        )
    if request.n < 1 or len(request.output) not in (0, request.n):
        raise InvalidRequest("n and the given outputs do not agree", param="n")
    if request.ended and not (set(request.ended) < set(range(request.n))):
        raise InvalidRequest(
            f"choices {sorted(set(request.ended))} of {request.n} are said to have ended: one at "
            "least must be left, and none be unknown",
            param="ended",
        )
    for tokens in (prompt, *request.output):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
            raise InvalidRequest(
                f"a token id is outside the vocabulary of {vocab_size}", param="prompt"
            )


def _check_pooling(request: GenerateRequest, max_model_len: int, *, embeds: bool) -> None:
    """A prompt that becomes a vector may be as long as the context, and has nothing beside it."""
    if not embeds:
        raise InvalidRequest("this engine makes no vectors", param="model")
    if request.n != 1 or any(request.output) or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("a vector has one choice, no output and no logprobs", param="n")
    if len(request.prompt) > max_model_len:
        raise ContextLengthExceeded(
            f"the input has {len(request.prompt)} tokens, the context {max_model_len}",
            param="input",
        )


def build_sequences(
    handle: int, request: GenerateRequest, arrival: Seconds, number: int, max_model_len: int
) -> list[Sequence]:
    """One sequence per live choice, with its bounds; `number` orders submissions by arrival."""
    sampling = request.sampling
    prompt_len = len(request.prompt)
    longest = prompt_len + 1 if request.pooling else max_model_len
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= frozenset(sampling.eos_token_ids)
    return [
        Sequence(
            handle=handle,
            choice=choice,
            request=request,
            tokens=request.prompt + (request.output[choice] if request.output else []),
            prompt_len=prompt_len,
            arrival=arrival,
            order=(-request.priority, number, choice),
            max_len=min(prompt_len + sampling.max_tokens, longest),
            min_len=prompt_len + sampling.min_tokens,
            stop_ids=stop_ids,
            pools=bool(request.pooling),
            commit_at=sys.maxsize,
        )
        for choice in request.live
    ]


def ending(sequence: Sequence) -> tuple[FinishReason, int | None] | None:
    """Whether the last output token ends the choice: (reason, stop token id if one of the
    request's own did it). A stop id counts before the length. Without output there is no end: both
    bounds are at least the prompt's length."""
    length = len(sequence.tokens)
    token = sequence.tokens[-1]
    if token in sequence.stop_ids and length > sequence.min_len:
        sampling = sequence.sampling
        is_eos = not sampling.ignore_eos and token in sampling.eos_token_ids
        return "stop", None if is_eos else token
    if length >= sequence.max_len:
        return "length", None
    return None


def finish_record(
    sequence: Sequence,
    reason: FinishReason,
    stop_reason: int | None,
    now: Seconds,
    embedding: bytes = b"",
) -> Finish:
    """What the choice cost, as the client is told. `now` stands in for steps that never came."""
    first_step = now if sequence.first_step is None else sequence.first_step
    first_token = now if sequence.first_token is None else sequence.first_token
    return Finish(
        reason=reason,
        stop_reason=stop_reason,
        prompt_tokens=sequence.prompt_len,
        completion_tokens=sequence.num_output,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
        queue_seconds=first_step - sequence.arrival,
        prefill_seconds=first_token - first_step,
        embedding=embedding,
    )


def started_record(sequence: Sequence) -> Started:
    """How the choice came to its first token, which is there."""
    assert sequence.first_step is not None
    assert sequence.first_token is not None
    return Started(
        sequence.cached_tokens,
        sequence.first_step - sequence.arrival,
        sequence.first_token - sequence.first_step,
        sequence.work,
        sequence.received_tokens,
    )
