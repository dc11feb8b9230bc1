"""Plans the steps that warm up a device before the core reports that it is ready.

A ready core that makes no progress is killed as stalled, so whatever a device loads or compiles at
first use must happen while loading. The executor computes these plans; they use the pool's first
blocks, which are empty then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["largest_step", "warm_up_steps"]

_GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
_DRAWN = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.1,
    logprobs=2,
    seed=0,
)


def warm_up_steps(
    tokens: int, block_size: int, *, samples: bool
) -> Iterator[tuple[Sequence, StepPlan]]:
    """Plan a prompt of `tokens` tokens and a decode step after it, once for each way to choose a
    token; only the prompt if the model makes no text (`samples`). The last plan of a sequence is
    followed by the first of the next."""
    for number, sampling in enumerate((_GREEDY, _DRAWN) if samples else (_GREEDY,)):
        sequence = _sequence(number, tokens, block_size, sampling)
        yield sequence, StepPlan([ScheduledChunk(sequence, 0, tokens, samples)])
        if samples:
            sequence.tokens.append(0)
            yield sequence, StepPlan([ScheduledChunk(sequence, tokens, 1, samples)])


def largest_step(
    tokens: int, sequences: int, block_size: int, longest: int, *, samples: bool
) -> StepPlan:
    """Plan the step that takes most memory beside the KV: `tokens` tokens, of as many sequences as
    there may be, each of which draws a token and wants logprobs. One of them is a prompt of up to
    `longest` tokens. Their blocks are the pool's first ones."""
    short = min(sequences, tokens) - 1
    prompt = min(tokens - short, longest)
    plan, block = StepPlan(), 0
    for number, count in enumerate([prompt] + [1] * short):
        sequence = _sequence(number, count, block_size, _DRAWN if samples else _GREEDY)
        blocks = -(-count // block_size)
        sequence.blocks = list(range(block, block + blocks))
        block += blocks
        plan.chunks.append(ScheduledChunk(sequence, 0, count, samples))
    return plan


def _sequence(number: int, tokens: int, block_size: int, sampling: SamplingParams) -> Sequence:
    prompt = token_ids([0]) * tokens
    request = GenerateRequest(request_id="warm-up", model="", prompt=prompt, sampling=sampling)
    return Sequence(
        handle=-1 - number,
        choice=0,
        request=request,
        tokens=prompt[:],
        prompt_len=tokens,
        arrival=0.0,
        blocks=list(range(tokens // block_size + 1)),
    )
