"""Requests in SGLang's words: every field is mapped, refused by name, or behind a feature."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import is_lark_syntax

from pdserve.errors import InvalidRequest
from pdserve.ids import MAX_CHOICES
from pdserve.messages.request import GenerateRequest, SamplingParams, Thinking
from pdserve_engines.sglang.params import (
    HOW,
    check,
    choice_seed,
    inexact,
    input_tokens,
    lark_text,
    replays,
    request_arguments,
    request_id,
)

LIMIT = 1000

tokens = st.integers(0, 63)
sampled = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 200),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 5),
    prompt_logprobs=st.none() | st.integers(0, 5),
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
    eos_token_ids=st.lists(tokens, max_size=2, unique=True).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(0, (1 << 64) - 1),
)


def request(sampling: SamplingParams, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "model": "m", "prompt": [1, 2, 3]} | changes
    return GenerateRequest(sampling=sampling, **fields)


@dataclass(frozen=True)
class Read:
    """What SGLang would do, read from its arguments."""

    limit: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    penalties: tuple[float, float, float]
    bias: dict[int, float]
    logprobs: bool
    prompt_logprobs: bool
    top: int
    min_tokens: int
    stops: frozenset[int]
    seed: int


def read(arguments: dict[str, Any]) -> Read:
    """Read SGLang's arguments by its own rules."""
    sampling = dict(arguments["sampling_params"])
    assert sampling.pop("skip_special_tokens") is False
    whole = sampling["top_k"] == -1
    # With ignore_eos SGLang looks at no stop token.
    stops = () if sampling["ignore_eos"] else sampling["stop_token_ids"]
    logprobs = bool(arguments.get("return_logprob"))
    return Read(
        limit=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=0 if whole else sampling["top_k"],
        min_p=sampling["min_p"],
        penalties=(
            sampling["presence_penalty"],
            sampling["frequency_penalty"],
            sampling["repetition_penalty"],
        ),
        bias={int(token): value for token, value in sampling.get("logit_bias", {}).items()},
        logprobs=logprobs,
        prompt_logprobs=logprobs and arguments.get("logprob_start_len", -1) == 0,
        top=arguments.get("top_logprobs_num", 0),
        min_tokens=sampling["min_new_tokens"],
        stops=frozenset(stops),
        seed=sampling["sampling_seed"],
    )


@given(sampled)
def test_sampling_parameters_read_back_are_equal(sampling: SamplingParams):
    found = read(request_arguments(request(sampling), 0, LIMIT))
    tops = [top for top in (sampling.logprobs, sampling.prompt_logprobs) if top is not None]
    ends = () if sampling.ignore_eos else (*sampling.eos_token_ids, *sampling.stop_token_ids)
    assert found == Read(
        limit=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        penalties=(
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        ),
        bias=sampling.logit_bias,
        logprobs=bool(tops),
        prompt_logprobs=sampling.prompt_logprobs is not None,
        top=max(tops, default=0),
        min_tokens=min(sampling.min_tokens, sampling.max_tokens),
        stops=frozenset(ends),
        seed=sampling.seed % (1 << 63),
    )


@given(sampled, st.lists(tokens, max_size=30))
def test_a_continuation_is_the_rest_of_the_request(sampling: SamplingParams, output: list[int]):
    """Prompt and output are the prompt, and what is given counts for every limit."""
    output = output[: sampling.max_tokens - 1]
    whole = request(sampling, output=[output])
    arguments = request_arguments(whole, 0, LIMIT)
    found, fresh = read(arguments), read(request_arguments(request(sampling), 0, LIMIT))
    assert arguments["input_ids"] == [1, 2, 3, *output]
    assert found.limit == fresh.limit - len(output)
    assert found.min_tokens == min(found.limit, max(0, sampling.min_tokens - len(output)))
    assert (found.seed, found.stops, found.penalties) == (fresh.seed, fresh.stops, fresh.penalties)
    for token in set(output):
        charged = sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        wanted = sampling.logit_bias.get(token, 0.0) - charged
        assert found.bias.get(token, 0.0) == pytest.approx(wanted, abs=1e-9)


def test_the_context_bounds_the_output():
    asked = request(SamplingParams(max_tokens=5000), output=[[7, 8]])
    arguments = request_arguments(asked, 0, LIMIT)["sampling_params"]
    assert arguments["max_new_tokens"] + len(input_tokens(asked, 0)) == LIMIT


def test_choices_have_seeds_of_their_own():
    asked = request(SamplingParams(max_tokens=5, seed=9), n=3)
    seeds = [read(request_arguments(asked, choice, LIMIT)).seed for choice in range(3)]
    assert seeds == [9, 10, 11]
    assert choice_seed(9, 1, 0) == 9 + MAX_CHOICES
    assert choice_seed((1 << 63) - 1, 0, 1) == 0


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, MAX_CHOICES - 1)), unique=True))
def test_no_id_begins_another(pairs: list[tuple[int, int]]):
    ids = [request_id(*pair) for pair in pairs]
    assert len({len(id) for id in ids}) <= 1
    assert len(set(ids)) == len(ids)


# ---------------------------------------------------------------- what becomes of each field

CHANGED: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 9},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "min_tokens": {"min_tokens": 3},
    "stop_token_ids": {"stop_token_ids": (4,)},
    "eos_token_ids": {"eos_token_ids": (5,)},
    "ignore_eos": {"ignore_eos": True},
    "seed": {"seed": 3},
    "grammar": {"grammar": "start: /a/"},
    "thinking": {"grammar": "start: /a/", "thinking": Thinking(start=(1,), end=(2,), begun=True)},
    "allowed_token_ids": {"allowed_token_ids": (3,)},
    "bad_words": {"bad_words": ((3,),)},
    "logprob_token_ids": {"logprobs": 1, "logprob_token_ids": (3,)},
}
"""A value of each field that is not its default, with what it needs."""


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_field_is_mapped_or_needs_a_feature(field: str):
    """A field that neither changes SGLang's arguments nor is refused would be ignored."""
    assert field in HOW
    assert field in CHANGED, "a new field: map it, refuse it by name or put it behind a feature"
    base = {"max_tokens": 5} | {k: v for k, v in CHANGED[field].items() if k != field}
    asked = request(SamplingParams(**base | CHANGED[field]))
    if HOW[field].startswith("needs"):
        assert asked.needs
        with pytest.raises(InvalidRequest) as caught:
            check(asked, min_p=True, reasoning=True)
        assert caught.value.param == field
        return
    check(asked, min_p=True, reasoning=True)
    before = request_arguments(request(SamplingParams(**base)), 0, LIMIT)
    assert request_arguments(asked, 0, LIMIT) != before


@pytest.mark.parametrize(
    ("sampling", "param", "known"),
    [
        ({"repetition_penalty": 2.5}, "repetition_penalty", {}),
        ({"min_p": 0.1}, "min_p", {"min_p": False}),
        ({"thinking": Thinking(start=(1,), end=(2,), budget=5)}, "thinking", {}),
        (CHANGED["thinking"], "thinking", {"reasoning": False}),
        (
            {"grammar": "start: /a/", "thinking": Thinking(start=(1,), end=(2,))},
            "thinking",
            {},
        ),
        ({"grammar": '{"grammars": [{"other": 1}]}'}, "grammar", {}),
        ({"grammar": '{"grammars": '}, "grammar", {}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    sampling: dict[str, Any], param: str, known: dict[str, bool]
):
    asked = request(SamplingParams(**{"max_tokens": 5} | sampling))
    with pytest.raises(InvalidRequest, match="the sglang engine") as caught:
        check(asked, **{"min_p": True, "reasoning": True} | known)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("sampling", "output", "seeded", "names"),
    [
        ({"temperature": 0.0}, [], False, []),
        ({"temperature": 0.0}, [[3]], False, []),
        ({"temperature": 1.0}, [], True, []),
        ({"temperature": 1.0}, [], False, ["seed"]),
        ({"temperature": 0.0, "presence_penalty": 1.0}, [], False, []),
        ({"temperature": 0.0, "presence_penalty": 1.0}, [[3]], False, ["presence_penalty"]),
        ({"temperature": 0.0, "frequency_penalty": 1.0}, [[3]], False, []),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, [], False, ["repetition_penalty"]),
        ({"temperature": 0.0, "grammar": "start: /a/"}, [[3]], False, ["grammar"]),
        ({"temperature": 0.0, "min_tokens": 2, "ignore_eos": True}, [], False, ["min_tokens"]),
        ({"temperature": 0.0, "logprobs": 1}, [], False, ["rank"]),
    ],
)
def test_what_is_only_nearly_done_is_named(
    sampling: dict[str, Any], output: list[list[int]], seeded: bool, names: list[str]
):
    asked = request(SamplingParams(**{"max_tokens": 5} | sampling), output=output)
    assert inexact(asked, seeded=seeded) == names


# ---------------------------------------------------------------- grammars

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMARS = {
    "lark": "start: /[a-z]+/",
    "one lark": json.dumps({"grammars": [{"lark_grammar": "start: /[a-z]+/"}]}),
    "one schema": json.dumps({"grammars": [{"json_schema": SCHEMA}]}),
    "tool calls or text": json.dumps(
        {
            "grammars": [
                {"name": "either", "lark_grammar": "start: @calls | @text"},
                {"name": "calls", "lark_grammar": 'start: "<call>" NAME "}"\nNAME: /[a-z{}]+/'},
                {"name": "text", "json_schema": SCHEMA},
            ]
        }
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_become_one_lark_text(name: str):
    """SGLang takes a text for Lark by llguidance's own rule, and llguidance compiles it."""
    text = lark_text(GRAMMARS[name])
    assert is_lark_syntax(text)
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text)) == ""


def test_no_grammar_stays_none():
    asked = request(SamplingParams(max_tokens=5))
    assert lark_text("") == ""
    assert "ebnf" not in request_arguments(asked, 0, LIMIT)["sampling_params"]


def test_a_continuation_under_a_grammar_begins_anew():
    asked = request(SamplingParams(max_tokens=5, grammar="start: /a/"), output=[[7, 8]])
    assert replays(asked, 0)
    arguments = request_arguments(asked, 0, LIMIT)
    assert arguments["input_ids"] == [1, 2, 3]
    assert arguments["sampling_params"]["max_new_tokens"] == 5
