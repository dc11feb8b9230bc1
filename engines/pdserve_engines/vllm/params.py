"""Translates a request's sampling parameters into those of vLLM. Imports no vLLM.

What vLLM cannot do exactly is done as near as it can be, and `inexact` names it, so that the core
can count such requests. All of it concerns requests that continue after output of an earlier
attempt, which vLLM takes as a part of the prompt:

- Noise. vLLM draws from a generator per request, so a continued request draws other numbers.
- `presence_penalty` and `frequency_penalty` look at vLLM's own output only. A bias on the earlier
  output's tokens stands in for them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import TokenId
    from pdserve.messages.request import GenerateRequest, SamplingParams

__all__ = ["choice_seed", "given_output", "inexact", "sampling_arguments"]

_SEEDS = 1 << 63
"""vLLM's seeds are those of a torch generator, which takes 63 bits."""


def given_output(request: GenerateRequest, choice: int) -> list[TokenId]:
    """Tokens that an earlier attempt has generated for a choice."""
    return list(request.output[choice]) if choice < len(request.output) else []


def sampling_arguments(
    request: GenerateRequest, choice: int, max_model_len: int, *, constrained: bool
) -> dict[str, Any]:
    """Arguments for vLLM's `SamplingParams` of one choice.

    `constrained`: a grammar or reasoning budget masks the tokens (`grammar`), so `min_tokens` is
    applied there.
    """
    sampling, given = request.sampling, given_output(request, choice)
    room = max_model_len - len(request.prompt)
    arguments: dict[str, Any] = {
        "max_tokens": min(sampling.max_tokens, room) - len(given),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": choice_seed(sampling.seed, request.prompt_index, choice, len(given)),
        # All end tokens are stop tokens of the request: the frontend has merged what the
        # checkpoint's files say, and vLLM would read them again.
        "ignore_eos": True,
        "stop_token_ids": _stop_ids(sampling),
        "min_tokens": 0 if constrained else max(0, sampling.min_tokens - len(given)),
        "detokenize": False,
    }
    arguments |= _logprob_arguments(sampling)
    if sampling.allowed_token_ids:
        arguments["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if bias := _bias(sampling, given):
        arguments["logit_bias"] = bias
    return arguments


def _stop_ids(sampling: SamplingParams) -> list[TokenId]:
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    return list(dict.fromkeys((*sampling.stop_token_ids, *ends)))


def _logprob_arguments(sampling: SamplingParams) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if sampling.logprob_token_ids and sampling.logprobs is not None:
        # vLLM returns either chosen tokens or the likeliest; the frontend asks for one of them.
        arguments["logprob_token_ids"] = list(sampling.logprob_token_ids)
    elif sampling.logprobs is not None:
        arguments["logprobs"] = sampling.logprobs
    if sampling.prompt_logprobs is not None:
        arguments["prompt_logprobs"] = sampling.prompt_logprobs
    return arguments


def _bias(sampling: SamplingParams, given: Sequence[TokenId]) -> dict[TokenId, float]:
    """The request's bias, and the penalties of output that vLLM does not know as output."""
    bias = dict(sampling.logit_bias)
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence or frequency:
        for token, count in Counter(given).items():
            bias[token] = bias.get(token, 0.0) - presence - frequency * count
    return bias


def choice_seed(seed: int, prompt_index: int, choice: int, position: int) -> int:
    """The seed of one choice from an output position on: the request's own for the first choice of
    the first prompt, and others that are drawn from it for the rest."""
    if not (prompt_index or choice or position):
        return seed % _SEEDS
    text = f"{seed} {prompt_index} {choice} {position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % _SEEDS


def inexact(request: GenerateRequest) -> str:
    """Which part of a continued request vLLM repeats only nearly; empty: none.

    A request without earlier output is always exact.
    """
    if not any(request.output):
        return ""
    sampling = request.sampling
    if sampling.temperature > 0:
        return "noise"
    if sampling.presence_penalty:
        return "presence_penalty"
    scaled = sampling.repetition_penalty != 1.0
    return "frequency_penalty" if sampling.frequency_penalty and scaled else ""
