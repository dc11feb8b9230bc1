"""Defines a submission: one request in the scheduler, with a sequence per choice.

It builds the sequences and decides when a choice ends. It knows neither blocks nor steps nor other
submissions; the scheduler owns it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import (
    Finish,
    FinishReason,
    FirstTokenStats,
    GenerateRequest,
    TokenLogprob,
)
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from pdserve.engine_core.kv_transfer.remote_prefill import RemotePrefillState
    from pdserve.ids import Seconds

__all__ = [
    "Submission",
    "build_sequences",
    "end_reason",
    "finish_record",
    "first_token_stats",
]


@dataclass(slots=True, eq=False)
class Submission:
    """State that all sequences of one request share."""

    handle: int
    request: GenerateRequest
    deadline: Seconds | None
    """Deadline on the scheduler's clock; None for none."""
    live: list[Sequence]
    """Sequences of the choices that have not ended."""
    started: bool = False
    """Whether a step has computed something for it."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Entry i belongs to prompt token i + 1; complete before the first delta."""
    counted: bool = True
    """Whether its tokens and finishes count in the stats."""
    remote: RemotePrefillState | None = None
    """Set while another worker prefills the prompt."""

    @property
    def reads_cache(self) -> bool:
        """Whether it may use the prefix cache. Prompt logprobs and mean pooling need every prompt
        token to be computed."""
        if self.request.pooling == "mean":
            return False
        if self.request.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) >= len(self.request.prompt) - 1


def build_sequences(
    handle: int, request: GenerateRequest, arrival: Seconds, number: int, max_model_len: int
) -> list[Sequence]:
    """Build one sequence per live choice; `number` orders submissions by arrival."""
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
            tokens=request.prompt + token_ids(request.output[choice] if request.output else ()),
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


def end_reason(sequence: Sequence) -> tuple[FinishReason, int | None] | None:
    """Why the last output token ends the choice: (reason, stop token id if it is one of the
    request's own); None if it does not. A stop id counts before the length. A choice without output
    never ends here."""
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
    """The record of a choice's end with its usage. `now` replaces the times of missing steps."""
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
        phases=sequence.take_phases() if sequence.phases else (),
    )


def first_token_stats(sequence: Sequence) -> FirstTokenStats:
    """Stats of a choice that has its first token."""
    assert sequence.first_step is not None
    assert sequence.first_token is not None
    return FirstTokenStats(
        sequence.cached_tokens,
        sequence.first_step - sequence.arrival,
        sequence.first_token - sequence.first_step,
        sequence.work,
        sequence.received_tokens,
        phases=sequence.take_phases() if sequence.phases else (),
        sources=sequence.sources,
    )
