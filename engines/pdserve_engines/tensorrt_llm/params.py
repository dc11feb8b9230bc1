"""Translates requests into arguments of TensorRT-LLM. Imports no TensorRT-LLM.

A choice is one request to the engine, or two: until `min_tokens` are out, end tokens must not be
sampled, and only a bias that holds for a whole request can forbid them. So such a choice begins
with a request that generates just these tokens, and goes on with another (`Part`). Output of an
earlier attempt goes on in the same way: prompt and output are the next request's prompt.

`refusal` names what a release cannot do. Requests that go on after earlier output are not
refused: what is not exact then is named by `inexact`, so that the core can count it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import TokenId
    from pdserve.messages.request import GenerateRequest, SamplingParams

__all__ = [
    "FORBIDDEN",
    "Part",
    "Support",
    "choice_seed",
    "inexact",
    "next_part",
    "priority_of",
    "refusal",
    "sampling_arguments",
]

FORBIDDEN = float("-inf")
"""Bias of a token that must not be sampled."""

_SEEDS = 1 << 63
_HALF_PRIORITY = 50
"""A priority this far from 0 comes to 3/4 or 1/4 of the engine's range: more than most clusters
use, so that near ones stay apart."""


@dataclass(frozen=True, slots=True)
class Support:
    """What the loaded engine can do."""

    vocab_size: int
    max_model_len: int
    grammar: bool = True
    penalties: bool = True
    """Its sampler applies penalties."""
    ignore_length: bool = True
    """`SamplingParams` has `prompt_ignore_length`, which keeps the prompt out of presence and
    frequency counts."""


@dataclass(frozen=True, slots=True)
class Part:
    """One request to the engine for a choice."""

    prompt: list[TokenId]
    """The request's prompt and the choice's output so far."""
    max_tokens: int
    """Tokens to generate; 0: there is no room."""
    endless: bool
    """End tokens cannot be sampled, and another part follows."""


def next_part(request: GenerateRequest, output: Sequence[TokenId], support: Support) -> Part:
    """What to ask the engine for, after this much output of a choice."""
    sampling = request.sampling
    room = min(sampling.max_tokens, support.max_model_len - len(request.prompt)) - len(output)
    before_ends = sampling.min_tokens - len(output)
    endless = before_ends > 0 and bool(_ends(sampling)) and not sampling.grammar
    tokens = min(room, before_ends) if endless else room
    return Part([*request.prompt, *output], max(tokens, 0), endless)


def sampling_arguments(
    request: GenerateRequest, choice: int, part: Part, support: Support
) -> dict[str, Any]:
    """Arguments for TensorRT-LLM's `SamplingParams` of one part.

    `guided_decoding` holds the arguments of `GuidedDecodingParams`.
    """
    sampling = request.sampling
    position = len(part.prompt) - len(request.prompt)
    ends = [] if part.endless else _ends(sampling)
    end_id = ends[0] if ends else -1
    arguments: dict[str, Any] = {
        "max_tokens": part.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": choice_seed(sampling.seed, request.prompt_index, choice, position),
        # Newer releases drop the stop tokens with `ignore_eos`, and without it add the
        # checkpoint's end tokens to them. -1 is no token.
        "ignore_eos": not ends,
        "end_id": end_id,
        "pad_id": max(end_id, 0),
        "stop_token_ids": ends[1:],
        # Otherwise the stop token is cut off the output.
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
    }
    arguments |= _penalty_arguments(request, support)
    if sampling.logprobs is not None:
        # 0 means none here; the sampled token's comes with any other number.
        arguments["logprobs"] = max(sampling.logprobs, 1)
    if bias := _bias(sampling, part, support.vocab_size):
        arguments["embedding_bias"] = bias
    if sampling.grammar and support.grammar and not position:
        arguments["guided_decoding"] = _guide(sampling.grammar)
    return arguments


def _ends(sampling: SamplingParams) -> list[TokenId]:
    eos = () if sampling.ignore_eos else sampling.eos_token_ids
    return list(dict.fromkeys((*eos, *sampling.stop_token_ids)))


def _penalty_arguments(request: GenerateRequest, support: Support) -> dict[str, Any]:
    sampling = request.sampling
    if not support.penalties:
        return {}
    arguments: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if support.ignore_length and (sampling.presence_penalty or sampling.frequency_penalty):
        # Our prompt only: earlier output, which is a prompt to the engine, still counts.
        arguments["prompt_ignore_length"] = len(request.prompt)
    return arguments


def _bias(sampling: SamplingParams, part: Part, vocab_size: int) -> list[float]:
    """A bias for every token, or nothing if all are 0."""
    allowed = sampling.allowed_token_ids
    single = [word[0] for word in sampling.bad_words if len(word) == 1]
    ends = _ends(sampling) if part.endless else []
    if allowed and not set(allowed).difference(ends, single):
        ends = []  # nothing else could be sampled
    banned = single + ends
    if not (allowed or banned or sampling.logit_bias):
        return []
    bias = [FORBIDDEN if allowed else 0.0] * vocab_size
    for token in allowed:
        bias[token] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    for token in banned:
        bias[token] = FORBIDDEN
    return bias


def _guide(grammar: str) -> dict[str, Any]:
    """Arguments for `GuidedDecodingParams`. With llguidance, `grammar` is Lark text."""
    parts = _json_grammars(grammar)
    if parts is None:
        return {"grammar": grammar}
    (only,) = parts
    if "lark_grammar" in only:
        return {"grammar": only["lark_grammar"]}
    return {"json": json.dumps(only["json_schema"])}


def _json_grammars(grammar: str) -> list[dict[str, Any]] | None:
    """The list in llguidance's JSON form; None: it is Lark text."""
    if not grammar.lstrip().startswith("{"):
        return None
    try:
        return list(json.loads(grammar)["grammars"])
    except (ValueError, KeyError, TypeError):
        return None


def choice_seed(seed: int, prompt_index: int, choice: int, position: int) -> int:
    """The seed of one choice from an output position on: the request's own for the first choice of
    the first prompt, and others that are drawn from it for the rest."""
    if not (prompt_index or choice or position):
        return seed % _SEEDS
    text = f"{seed} {prompt_index} {choice} {position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % _SEEDS


def priority_of(priority: int) -> float:
    """The engine's priority: from 0 to 1, 0.5 is ordinary, higher is sooner, as ours."""
    return 0.5 + 0.5 * priority / (abs(priority) + _HALF_PRIORITY)


def refusal(request: GenerateRequest, support: Support) -> tuple[str, str] | None:
    """(field, reason) if the engine cannot serve the request; None if it can."""
    if request.lora:
        # Another model's output, whatever comes before it.
        return "model", "LoRA adapters"
    return None if any(request.output) else _field_refusal(request.sampling, support)


def _field_refusal(sampling: SamplingParams, support: Support) -> tuple[str, str] | None:
    if not support.penalties:
        if sampling.repetition_penalty != 1.0:
            return "repetition_penalty", "a repetition penalty"
        if sampling.presence_penalty:
            return "presence_penalty", "a presence penalty"
        if sampling.frequency_penalty:
            return "frequency_penalty", "a frequency penalty"
    elif not support.ignore_length and (sampling.presence_penalty or sampling.frequency_penalty):
        return "presence_penalty", "penalties that leave the prompt out"
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs", "the logprobs of the prompt's own tokens"
    if sampling.logprob_token_ids:
        return "logprob_token_ids", "the logprobs of chosen tokens"
    if any(len(word) != 1 for word in sampling.bad_words):
        return "bad_words", "banned words of several tokens"
    return _grammar_refusal(sampling, support)


def _grammar_refusal(sampling: SamplingParams, support: Support) -> tuple[str, str] | None:
    thinking = sampling.thinking
    if thinking is not None and thinking.budget is not None:
        return "thinking", "a reasoning budget"
    if not sampling.grammar:
        return None
    if not support.grammar:
        return "response_format", "grammars"
    if thinking is not None:
        return "response_format", "a grammar that begins after the reasoning"
    parts = _json_grammars(sampling.grammar)
    if parts is not None and (
        len(parts) != 1 or not ({"lark_grammar", "json_schema"} & parts[0].keys())
    ):
        return "response_format", "a grammar of several parts"
    return None


def inexact(request: GenerateRequest, support: Support) -> str:
    """The field that the engine honours only nearly; empty: none.

    All but `min_tokens` of a grammar concern requests that go on after earlier output.
    """
    sampling = request.sampling
    if sampling.grammar and sampling.min_tokens and _ends(sampling):
        return "min_tokens"
    if not any(request.output):
        return ""
    if sampling.grammar:
        return "grammar"
    if (unable := _field_refusal(sampling, support)) is not None:
        return unable[0]
    return "noise" if sampling.temperature > 0 else ""
