"""Every sampling field of ours has its argument of vLLM, with the same meaning."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.messages.request import GenerateRequest, SamplingParams, Thinking
from pdserve.token_ids import token_ids
from pdserve_engines.vllm.params import choice_seed, inexact, sampling_arguments

VOCAB, LENGTH = 64, 1000

ELSEWHERE = {
    "grammar": "travels as the text of a grammar (`grammar.grammar_text`), with min_tokens",
    "thinking": "the same text",
    "bad_words": "`Engine` sets the tokens after vLLM's check, which expects words",
}
"""Fields that no argument of `SamplingParams` carries, and what carries them."""

CHANGES: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 7},
    "temperature": {"temperature": 0.3},
    "top_p": {"top_p": 0.4},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {3: 4.0}},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "min_tokens": {"min_tokens": 4},
    "stop_token_ids": {"stop_token_ids": (9,)},
    "eos_token_ids": {"eos_token_ids": (2,)},
    "ignore_eos": {"eos_token_ids": (2,), "ignore_eos": True},
    "seed": {"seed": 11},
    "allowed_token_ids": {"allowed_token_ids": (4, 5)},
    "logprob_token_ids": {"logprobs": 0, "logprob_token_ids": (4, 6)},
}
"""A change of each other field."""


def generate(
    given_output: list[list[int]] | None = None, n: int = 1, index: int = 0, **sampling: Any
) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0} | sampling
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1, 2, 3]),
        sampling=SamplingParams(**fields),
        n=n,
        prompt_index=index,
        output=given_output or [],
    )


def arguments(
    request: GenerateRequest, choice: int = 0, *, constrained: bool = False
) -> dict[str, Any]:
    return sampling_arguments(request, choice, LENGTH, constrained=constrained)


# ------------------------------------------------------------------ fields


def test_every_field_is_somewhere() -> None:
    assert set(SamplingParams.__struct_fields__) == set(CHANGES) | set(ELSEWHERE)
    assert set(CHANGES) & set(ELSEWHERE) == set()


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_an_argument(name: str) -> None:
    before = dict(CHANGES[name])
    del before[name]
    assert arguments(generate(**CHANGES[name])) != arguments(generate(**before))


def test_a_field_that_travels_elsewhere_changes_no_argument() -> None:
    values: dict[str, Any] = {
        "grammar": 'start: "a"',
        "thinking": Thinking(start=(5,), end=(6,), budget=3),
        "bad_words": ((4, 5),),
    }
    assert values.keys() == ELSEWHERE.keys()
    assert arguments(generate(**values)) == arguments(generate())


tokens = st.integers(0, VOCAB - 1)
some_tokens = st.lists(tokens, max_size=4, unique=True).map(tuple)
numbers = st.floats(-2, 2, allow_nan=False)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 500),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, VOCAB),
    min_p=st.floats(0, 1),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 20),
    stop_token_ids=some_tokens,
    eos_token_ids=some_tokens,
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    allowed_token_ids=some_tokens,
)


@given(samplings)
def test_ours_to_theirs_and_back(sampling: SamplingParams) -> None:
    request = generate()
    request = GenerateRequest(
        request_id="r", model="m", prompt=request.prompt, sampling=sampling, n=1
    )
    found = arguments(request)
    same = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
    )
    assert {name: found[name] for name in same} == {name: getattr(sampling, name) for name in same}
    assert found["max_tokens"] == sampling.max_tokens
    assert found["seed"] == sampling.seed % 2**63
    assert found.get("logit_bias", {}) == sampling.logit_bias
    assert found.get("logprobs") == sampling.logprobs
    assert found.get("prompt_logprobs") == sampling.prompt_logprobs
    assert tuple(found.get("allowed_token_ids", ())) == sampling.allowed_token_ids
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    assert set(found["stop_token_ids"]) == {*sampling.stop_token_ids, *ends}
    assert len(found["stop_token_ids"]) == len(set(found["stop_token_ids"]))
    assert found["ignore_eos"] is True, "vLLM would add the checkpoint's end tokens"
    assert found["detokenize"] is False


def test_the_models_length_limits_the_output() -> None:
    request = generate(max_tokens=5000)
    assert arguments(request)["max_tokens"] == LENGTH - len(request.prompt)


def test_chosen_tokens_take_the_place_of_the_likeliest() -> None:
    found = arguments(generate(logprobs=0, logprob_token_ids=(4, 6)))
    assert found["logprob_token_ids"] == [4, 6]
    assert "logprobs" not in found
    assert "logprob_token_ids" not in arguments(generate(logprob_token_ids=(4, 6)))


# ------------------------------------------------------------------ continuation


outputs = st.lists(tokens, min_size=1, max_size=15)


@given(outputs, st.integers(16, 500), st.integers(0, 30))
def test_what_was_given_counts_against_the_limits(
    given_output: list[int], most: int, least: int
) -> None:
    found = arguments(generate([given_output], max_tokens=most, min_tokens=least))
    assert found["max_tokens"] + len(given_output) == most
    assert found["min_tokens"] == max(0, least - len(given_output))
    long = arguments(generate([given_output], max_tokens=5000))
    assert long["max_tokens"] + len(given_output) + 3 == LENGTH


@given(outputs, outputs, numbers, st.dictionaries(tokens, numbers, max_size=4))
def test_a_bias_stands_in_for_the_frequency_penalty(
    given_output: list[int], rest: list[int], frequency: float, bias: dict[int, float]
) -> None:
    """Bias, and vLLM's penalty of what it has sampled itself, sum to the penalty of the whole."""
    fields: dict[str, Any] = {"frequency_penalty": frequency, "logit_bias": bias}
    found = arguments(generate([given_output], **fields))
    whole, later = Counter([*given_output, *rest]), Counter(rest)
    for token in range(VOCAB):
        theirs = found.get("logit_bias", {}).get(token, 0.0)
        theirs -= found["frequency_penalty"] * later[token]
        ours = bias.get(token, 0.0) - frequency * whole[token]
        assert math.isclose(theirs, ours, abs_tol=1e-9)


@given(outputs, numbers)
def test_a_bias_stands_in_for_the_presence_penalty(
    given_output: list[int], presence: float
) -> None:
    found = arguments(generate([given_output], presence_penalty=presence))
    bias = found.get("logit_bias", {})
    for token in range(VOCAB):
        expected = -presence if token in given_output else 0.0
        assert math.isclose(bias.get(token, 0.0), expected, abs_tol=1e-9)


def test_each_choice_continues_its_own_output() -> None:
    request = generate([[4, 5, 6], [7]], n=2, frequency_penalty=1.0)
    first, second = arguments(request, 0), arguments(request, 1)
    assert (first["max_tokens"], second["max_tokens"]) == (17, 19)
    assert first["logit_bias"].keys() == {4, 5, 6}
    assert second["logit_bias"].keys() == {7}


def test_the_requests_own_bias_is_not_changed() -> None:
    request = generate([[4]], frequency_penalty=1.0, logit_bias={4: 1.0})
    arguments(request)
    assert request.sampling.logit_bias == {4: 1.0}


def test_a_grammar_state_applies_the_least_length_itself() -> None:
    assert arguments(generate(min_tokens=5), constrained=True)["min_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.5}, "noise"),
        ({"temperature": 0.0}, ""),
        ({"temperature": 0.0, "presence_penalty": 0.5}, "presence_penalty"),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, ""),
        (
            {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
            "frequency_penalty",
        ),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, ""),
    ],
)
def test_what_is_repeated_only_nearly_is_named(fields: dict[str, Any], named: str) -> None:
    assert inexact(generate([[4]], **fields)) == named
    assert inexact(generate(**fields)) == ""
    assert inexact(generate([[], []], n=2, **fields)) == ""


# ------------------------------------------------------------------ seeds


@given(st.integers(0, 2**64 - 1))
def test_seeds_differ_and_fit_a_generator(seed: int) -> None:
    places = [(index, choice, at) for index in range(3) for choice in range(4) for at in (0, 1, 9)]
    seeds = [choice_seed(seed, *place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= each < 2**63 for each in seeds)
    assert seeds == [choice_seed(seed, *place) for place in places]


def test_seeds_of_neighbours_differ() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 11, 1), (11, 1, 1)]
    seeds = {choice_seed(seed, *place) for seed in range(100) for place in places}
    assert len(seeds) == 100 * len(places)


def test_a_request_has_the_seeds_of_its_choices() -> None:
    request = generate([[], [4, 5]], n=2, index=3, seed=8)
    assert arguments(request, 0)["seed"] == choice_seed(8, 3, 0, 0)
    assert arguments(request, 1)["seed"] == choice_seed(8, 3, 1, 2)
