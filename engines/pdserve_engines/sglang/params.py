"""Translates a request into the arguments of SGLang's `async_generate`. Imports no SGLang.

`HOW` says for every sampling field what becomes of it. What SGLang cannot do exactly is done as
near as it can be, and `inexact` names it, so that the core can count such requests. What it cannot
do at all is refused by name (`check`).
"""

from __future__ import annotations

import json
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import InvalidRequest
from pdserve.ids import MAX_CHOICES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import TokenId
    from pdserve.messages.request import GenerateRequest, SamplingParams

__all__ = [
    "HOW",
    "check",
    "choice_seed",
    "given_output",
    "inexact",
    "input_tokens",
    "lark_text",
    "replays",
    "request_arguments",
    "request_id",
]

HOW: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_tokens": "max_new_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "repetition_penalty": "repetition_penalty",
        "logit_bias": "logit_bias",
        "logprobs": "return_logprob, top_logprobs_num",
        "prompt_logprobs": "return_logprob, logprob_start_len, top_logprobs_num",
        "min_tokens": "min_new_tokens",
        "stop_token_ids": "stop_token_ids",
        "eos_token_ids": "stop_token_ids",
        "ignore_eos": "ignore_eos",
        "seed": "sampling_seed",
        "grammar": "ebnf",
        "thinking": "require_reasoning; a budget needs the feature thinking",
        "allowed_token_ids": "needs the feature bans",
        "bad_words": "needs the feature bans",
        "logprob_token_ids": "token_ids_logprob",
    }
)
"""Field of our `SamplingParams` -> SGLang's arguments, or the feature that this engine lacks."""

_SEEDS: Final = 1 << 63
"""SGLang takes seeds below this."""
_MAX_REPETITION_PENALTY: Final = 2.0
"""SGLang refuses more."""
_HANDLE_DIGITS: Final = 20
_CHOICE_DIGITS: Final = 6


def request_id(handle: int, choice: int) -> str:
    """The id of a choice in SGLang. All have the same width: SGLang aborts every request whose id
    *begins* with the one it is given."""
    return f"{handle:0{_HANDLE_DIGITS}d}.{choice:0{_CHOICE_DIGITS}d}"


def given_output(request: GenerateRequest, choice: int) -> list[TokenId]:
    """Tokens that an earlier attempt has generated for a choice."""
    return list(request.output[choice]) if choice < len(request.output) else []


def replays(request: GenerateRequest, choice: int) -> bool:
    """Whether SGLang must generate the given output again.

    A grammar begins with SGLang's own output, so a choice under one begins anew, and the tokens
    that are given already are compared instead of reported.
    """
    return bool(request.sampling.grammar and given_output(request, choice))


def input_tokens(request: GenerateRequest, choice: int) -> list[TokenId]:
    """What SGLang computes as the prompt: the prompt and, unless it is replayed, given output."""
    if replays(request, choice):
        return list(request.prompt)
    return [*request.prompt, *given_output(request, choice)]


def check(request: GenerateRequest, *, min_p: bool, reasoning: bool) -> None:
    """Raise `InvalidRequest` for what SGLang cannot do.

    `min_p`: false if seeds are honoured, with which SGLang's sampler does not combine it.
    `reasoning`: SGLang has a reasoning parser, so that grammars can begin after the reasoning.
    """
    sampling = request.sampling
    if sampling.repetition_penalty > _MAX_REPETITION_PENALTY:
        raise _refused("repetition_penalty", f"takes at most {_MAX_REPETITION_PENALTY:g}")
    if sampling.min_p and not min_p:
        raise _refused("min_p", "does not combine it with enable_deterministic_inference")
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(sampling, name):
            raise _refused(name, "has no such limits on tokens")
    thinking = sampling.thinking
    if thinking is not None and thinking.budget is not None:
        raise _refused("thinking", "does not limit reasoning")
    if thinking is not None and sampling.grammar and not (reasoning and thinking.begun):
        raise _refused(
            "thinking",
            "applies a grammar after the reasoning only if the prompt opens the reasoning and the "
            "worker was started with --engine-option reasoning_parser=NAME",
        )
    lark_text(sampling.grammar)


def _refused(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the sglang engine {why}", param=field)


def inexact(request: GenerateRequest, *, seeded: bool) -> list[str]:
    """Names of what SGLang does only nearly; empty: everything is exact.

    `seeded`: SGLang honours seeds (`enable_deterministic_inference`).
    """
    sampling, found = request.sampling, []
    if sampling.repetition_penalty != 1.0:
        found.append("repetition_penalty")  # SGLang counts tokens of its output, not the prompt's
    if sampling.ignore_eos and sampling.min_tokens:
        found.append("min_tokens")  # SGLang masks the model's end tokens as well
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        found.append("rank")  # SGLang gives none; beyond the alternatives it is a lower bound
    if sampling.temperature > 0 and not seeded:
        found.append("seed")
    if any(map(len, request.output)):
        if sampling.presence_penalty:
            found.append("presence_penalty")  # given tokens that come again are charged twice
        if sampling.grammar:
            found.append("grammar")
    return found


def request_arguments(request: GenerateRequest, choice: int, max_model_len: int) -> dict[str, Any]:
    """Keyword arguments for `async_generate`, but for the id, the salt and the adapter."""
    sampling = request.sampling
    arguments: dict[str, Any] = {
        "input_ids": input_tokens(request, choice),
        "sampling_params": _sampling_arguments(request, choice, max_model_len),
        "stream": True,
        "priority": request.priority,
        **_logprob_arguments(sampling),
    }
    if sampling.grammar and sampling.thinking is not None:
        arguments["require_reasoning"] = True
    return arguments


def _sampling_arguments(
    request: GenerateRequest, choice: int, max_model_len: int
) -> dict[str, Any]:
    sampling, given = request.sampling, given_output(request, choice)
    done = 0 if replays(request, choice) else len(given)
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt)) - done
    arguments: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": min(limit, max(0, sampling.min_tokens - done)),
        "sampling_seed": choice_seed(sampling.seed, request.prompt_index, choice),
        # SGLang looks at no stop token at all while end tokens are ignored. The adapter then looks
        # at the stop tokens itself; they are sent for `min_new_tokens`, which masks them.
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": _stop_ids(sampling),
        # These concern text, which is the frontend's; only token ids are read.
        "skip_special_tokens": False,
    }
    if bias := _bias(sampling, given[:done]):
        arguments["logit_bias"] = bias
    if sampling.grammar:
        arguments["ebnf"] = lark_text(sampling.grammar)
    return arguments


def _stop_ids(sampling: SamplingParams) -> list[TokenId]:
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    return sorted({*sampling.stop_token_ids, *ends})


def _logprob_arguments(sampling: SamplingParams) -> dict[str, Any]:
    wanted = [top for top in (sampling.logprobs, sampling.prompt_logprobs) if top is not None]
    if not wanted:
        return {}
    arguments: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": max(wanted)}
    if sampling.prompt_logprobs is not None:
        arguments["logprob_start_len"] = 0
    if sampling.logprob_token_ids and sampling.logprobs is not None:
        arguments["token_ids_logprob"] = list(sampling.logprob_token_ids)
    return arguments


def _bias(sampling: SamplingParams, given: Sequence[TokenId]) -> dict[str, float]:
    """The request's bias, and the penalties of output that SGLang takes for prompt. Its keys are
    texts."""
    bias = dict(sampling.logit_bias)
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence or frequency:
        for token, count in Counter(given).items():
            bias[token] = bias.get(token, 0.0) - presence - frequency * count
    return {str(token): value for token, value in bias.items()}


def choice_seed(seed: int, prompt_index: int, choice: int) -> int:
    """The seed of one choice: the request's own for the first choice of the first prompt, and the
    numbers after it for the rest. SGLang's noise depends on the position besides, so a choice that
    continues keeps its seed."""
    return (seed + choice + prompt_index * MAX_CHOICES) % _SEEDS


def lark_text(grammar: str) -> str:
    """The grammar as one Lark text, the only form of llguidance that SGLang takes.

    A JSON list of grammars becomes nested ones. Raises `InvalidRequest` for what has no such form.
    """
    if not grammar.lstrip().startswith("{"):
        return _marked(grammar)
    try:
        grammars = json.loads(grammar)["grammars"]
        if len(grammars) == 1:
            return _marked(_alone(grammars[0]))
        first, *others = grammars
        rules = [f"{each['name']}: {_nested(each)}" for each in others]
        text = first["lark_grammar"]
    except (ValueError, KeyError, TypeError) as error:
        raise _refused("grammar", "cannot read this grammar") from error
    for each in others:
        text = text.replace(f"@{each['name']}", each["name"])
    return _marked("\n".join([text, *rules]))


def _alone(grammar: Mapping[str, Any]) -> str:
    lark = grammar.get("lark_grammar")
    return lark if isinstance(lark, str) else f"start: {_nested(grammar)}"


def _nested(grammar: Mapping[str, Any]) -> str:
    if "lark_grammar" in grammar:
        return "%lark {\n" + str(grammar["lark_grammar"]) + "\n}"
    return "%json " + json.dumps(grammar["json_schema"], ensure_ascii=False)


def _marked(lark: str) -> str:
    """Begin with a line by which SGLang knows Lark from GBNF."""
    return lark if not lark or lark.startswith("%llguidance") else "%llguidance {}\n" + lark
