"""Every sampling field is mapped and read back, refused by name, or named as not exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.messages.request import GenerateRequest, SamplingParams, Thinking
from pdserve_engines.tensorrt_llm.params import (
    FORBIDDEN,
    Support,
    choice_seed,
    inexact,
    next_part,
    priority_of,
    refusal,
    sampling_arguments,
)

VOCAB = 24
NEW = Support(VOCAB, 100)
OLD = Support(VOCAB, 100, penalties=False, ignore_length=False)
TOKENS = st.integers(0, VOCAB - 1)


def request(**changes: Any) -> GenerateRequest:
    sampling = {
        name: changes.pop(name)
        for name in list(changes)
        if name in SamplingParams.__struct_fields__
    }
    defaults: dict[str, Any] = {"request_id": "r", "model": "m", "prompt": [3, 4, 5]}
    return GenerateRequest(
        **(defaults | changes), sampling=SamplingParams(**({"max_tokens": 20} | sampling))
    )


def refused(wanted: GenerateRequest, support: Support = NEW) -> str:
    unable = refusal(wanted, support)
    assert unable is not None
    return unable[0]


def arguments(wanted: GenerateRequest, output: tuple[int, ...] = (), choice: int = 0) -> Any:
    return sampling_arguments(wanted, choice, next_part(wanted, output, NEW), NEW)


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 50),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(TOKENS, max_size=3, unique=True).map(tuple),
    eos_token_ids=st.lists(TOKENS, max_size=2, unique=True).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(0, (1 << 63) - 1),
    bad_words=st.lists(TOKENS.map(lambda token: (token,)), max_size=2).map(tuple),
)
"""What the newest known release takes."""


@given(samplings, st.lists(TOKENS, max_size=6))
def test_what_is_mapped_can_be_read_back(sampling, output) -> None:
    wanted = request(**{name: getattr(sampling, name) for name in sampling.__struct_fields__})
    assert refusal(wanted, NEW) is None
    part = next_part(wanted, output, NEW)
    given_back = sampling_arguments(wanted, 0, part, NEW)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert given_back[name] == getattr(sampling, name)
    ends = set(() if sampling.ignore_eos else sampling.eos_token_ids) | set(sampling.stop_token_ids)
    told = {given_back["end_id"], *given_back["stop_token_ids"]} - {-1}
    bias = given_back.get("embedding_bias") or [0.0] * VOCAB
    banned = {token for token, value in enumerate(bias) if value == FORBIDDEN}
    words = {word[0] for word in sampling.bad_words}
    if part.endless:
        assert (told, banned) == (set(), ends | words)
    else:
        assert (told, banned) == (ends, words)
    for token in set(range(VOCAB)) - banned:
        assert bias[token] == sampling.logit_bias.get(token, 0.0)
    assert given_back["ignore_eos"] == (not told)
    assert given_back["pad_id"] >= 0
    asked = given_back.get("logprobs")
    assert asked == (None if sampling.logprobs is None else max(1, sampling.logprobs))
    made = len(output)
    assert part.prompt == [3, 4, 5, *output]
    if not part.endless:
        assert part.max_tokens == max(min(sampling.max_tokens, 97) - made, 0)


@given(samplings)
def test_the_parts_of_a_choice_come_to_its_limit(sampling) -> None:
    """However the engine's tokens come, all parts together make exactly `max_tokens`."""
    wanted = request(**{name: getattr(sampling, name) for name in sampling.__struct_fields__})
    output: list[int] = []
    parts = 0
    while (part := next_part(wanted, output, NEW)).max_tokens:
        output += [1] * part.max_tokens
        parts += 1
    assert len(output) == min(sampling.max_tokens, 97)
    assert parts <= 2


def test_every_field_is_mapped_refused_or_gated() -> None:
    """A field that is new in pdserve must be put into one of these rows."""
    mapped = {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "min_tokens",
        "stop_token_ids", "eos_token_ids", "ignore_eos", "seed", "grammar", "allowed_token_ids",
        "bad_words",
    }  # fmt: skip
    refused = {"prompt_logprobs", "thinking", "logprob_token_ids"}
    assert mapped | refused == set(SamplingParams.__struct_fields__)
    for field, value in (
        ("prompt_logprobs", 1),
        ("thinking", Thinking(start=(1,), end=(2,), budget=5)),
        ("logprob_token_ids", (3,)),
    ):
        unable = refusal(request(**{field: value}), NEW)
        assert unable is not None
        assert unable[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("frequency_penalty", -0.5)],
)
def test_a_release_that_ignores_penalties_refuses_them_by_name(field, value) -> None:
    assert refused(request(**{field: value}), OLD) == field
    assert field not in sampling_arguments(
        request(**{field: value}), 0, next_part(request(), (), OLD), OLD
    )
    assert refusal(request(**{field: value}), NEW) is None


def test_penalties_that_would_count_the_prompt_are_refused() -> None:
    support = Support(VOCAB, 100, ignore_length=False)
    assert refused(request(presence_penalty=1.0), support) == "presence_penalty"
    assert refusal(request(repetition_penalty=1.1), support) is None


def test_earlier_output_counts_for_penalties_and_the_prompt_does_not() -> None:
    made = arguments(request(frequency_penalty=0.5), (7, 8))
    assert made["prompt_ignore_length"] == 3


def test_a_continuation_is_never_refused_and_what_is_not_exact_is_named() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.0}, ""),
        ({"temperature": 0.7}, "noise"),
        ({"temperature": 0.0, "grammar": "start: /a/"}, "grammar"),
        ({"temperature": 0.0, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"temperature": 0.0, "bad_words": ((1, 2),)}, "bad_words"),
        ({"temperature": 0.0, "logprob_token_ids": (3,)}, "logprob_token_ids"),
    ]
    for changes, named in rows:
        wanted = request(output=[[9]], **changes)
        assert refusal(wanted, NEW) is None
        assert inexact(wanted, NEW) == named
        assert inexact(replace(wanted, output=[]), NEW) == ""
    assert inexact(request(output=[[9]], temperature=0.0, presence_penalty=1.0), OLD) == (
        "presence_penalty"
    )


def test_another_models_adapter_is_always_refused() -> None:
    assert refusal(request(lora="a@1"), NEW) is not None
    assert refusal(request(lora="a@1", output=[[9]]), NEW) is not None


def test_allowed_tokens_forbid_all_others() -> None:
    bias = arguments(request(allowed_token_ids=(2, 5), logit_bias={5: 3.0, 6: 9.0}))[
        "embedding_bias"
    ]
    assert len(bias) == VOCAB
    assert [token for token, value in enumerate(bias) if value > FORBIDDEN] == [2, 5]
    assert (bias[2], bias[5]) == (0.0, 3.0)


def test_something_can_always_be_sampled() -> None:
    """If only end tokens are allowed, `min_tokens` does not forbid them."""
    made = arguments(request(allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=3))
    assert made["embedding_bias"][2] == 0.0


@pytest.mark.parametrize(
    ("grammar", "guide"),
    [
        ("start: /a+/", {"grammar": "start: /a+/"}),
        ('{"grammars": [{"lark_grammar": "start: /b/"}]}', {"grammar": "start: /b/"}),
        ('{"grammars": [{"json_schema": {"type": "object"}}]}', {"json": '{"type": "object"}'}),
    ],
)
def test_grammars_are_given_as_llguidance_reads_them_there(grammar, guide) -> None:
    assert refusal(request(grammar=grammar), NEW) is None
    assert arguments(request(grammar=grammar))["guided_decoding"] == guide


def test_grammars_that_it_cannot_apply_are_refused() -> None:
    two = json.dumps({"grammars": [{"lark_grammar": "a"}, {"lark_grammar": "b"}]})
    thinking = Thinking(start=(1,), end=(2,))
    for changes in ({"grammar": two}, {"grammar": "start: /a/", "thinking": thinking}):
        assert refused(request(**changes), NEW) == "response_format"
    assert refusal(request(grammar="start: /a/"), Support(VOCAB, 100, grammar=False)) is not None
    assert refusal(request(thinking=thinking), NEW) is None  # nothing to do without a grammar


def test_choices_positions_and_prompts_have_seeds_of_their_own() -> None:
    seeds = {
        choice_seed(5, prompt, choice, position)
        for prompt in range(3)
        for choice in range(4)
        for position in range(4)
    }
    assert len(seeds) == 48
    assert choice_seed(5, 0, 0, 0) == 5
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    shapes = [arguments(request(n=3, seed=5), choice=choice)["seed"] for choice in range(3)]
    assert len(set(shapes)) == 3


@given(st.integers(-(1 << 40), 1 << 40), st.integers(-(1 << 40), 1 << 40))
def test_priorities_keep_their_order_within_the_engines_range(one, other) -> None:
    low, high = sorted((one, other))
    assert 0.0 <= priority_of(low) <= priority_of(high) <= 1.0
    assert priority_of(0) == 0.5
    if abs(one) < 1000 and abs(other) < 1000 and low < high:
        assert priority_of(low) < priority_of(high)
