"""Grammar states inside of vLLM: masks follow the tokens, and a fault ends one request only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

import pdserve
from pdserve.engine_core.structured_output import GrammarError, pick_allowed_token, read_tokenizer
from pdserve.messages.request import SamplingParams, Thinking
from pdserve.text.grammar.grammar_source import from_schema
from pdserve_engines.vllm.grammar import ConstrainedChoice, Constraints, grammar_text

BUNDLED = Path(pdserve.__file__).parent / "bundled"
VOCAB, END = 1280, 3
WORDS = range(300, 600)
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LONG = SCHEMA | {"properties": {"a": {"type": "string"}}, "required": ["a"]}


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


THINKING: dict[str, Any] = {"start": tuple(tokens("<think>")), "end": tuple(tokens("</think>"))}


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(read_tokenizer(BUNDLED), VOCAB, (END,))


def valid(schema: dict[str, Any], text: str) -> bool:
    # Not in vLLM's environment, which reads this file too.
    from tests.support import json_schemas

    return json_schemas.valid(schema, text)


def sampling(schema: dict[str, Any] | None = None, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 200, "eos_token_ids": (END,)}
    if schema is not None:
        fields["grammar"] = from_schema(schema, "test").text
    return SamplingParams(**(fields | changes))


def make(
    constraints: Constraints, wanted: SamplingParams, given: list[int] | None = None, key: str = "1"
) -> ConstrainedChoice:
    return constraints.compile(grammar_text(key, wanted, given or []))


def allowed(choice: ConstrainedChoice) -> set[int]:
    """The tokens of the mask that vLLM's sampler sees; what is beyond the row counts, too."""
    bitmask = torch.full((3, -(-VOCAB // 32)), 0x55555555, dtype=torch.int32)
    choice.fill_bitmask(bitmask, 1)
    assert (bitmask[[0, 2]] == 0x55555555).all(), "another sequence's row was written"
    row = bitmask[1].numpy().view("uint32")
    return {token for token in range(VOCAB) if row[token // 32] >> (token % 32) & 1}


def mask_of(found: set[int]) -> bytes:
    return sum(1 << token for token in found).to_bytes(VOCAB // 8, "little")


def walk(choice: ConstrainedChoice, seed: int, made: int = 0, least: int = 0) -> list[int]:
    """Take allowed tokens until the end."""
    rng, output = random.Random(seed), list[int]()
    while made + len(output) < 200:
        found = allowed(choice)
        ends = (END,) if made + len(output) >= least else ()
        output.append(pick_allowed_token(mask_of(found), WORDS, rng.getrandbits(60), ends))
        assert output[-1] in found
        assert choice.accept_tokens("1", output[-1:])
        if output[-1] == END:
            return output
    raise AssertionError("it came to no end")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_allowed_fits_the_schema(constraints: Constraints, seed: int) -> None:
    output = walk(make(constraints, sampling(SCHEMA)), seed)
    assert valid(SCHEMA, TOKENIZER.decode(output[:-1]))
    assert constraints.faults == {}


def test_after_the_end_only_the_end_is_allowed(constraints: Constraints) -> None:
    choice = make(constraints, sampling(SCHEMA))
    walk(choice, 1)
    assert not choice.is_terminated(), "vLLM would allow every token then"
    assert allowed(choice) == {END}


def test_every_cut_is_continued_as_if_there_were_none(constraints: Constraints) -> None:
    wanted = sampling(SCHEMA, thinking=Thinking(**THINKING, begun=True, budget=5))
    output = [*tokens("hm"), *THINKING["end"], *walk(make(constraints, sampling(SCHEMA)), 3)]
    whole = make(constraints, wanted)
    for cut, token in enumerate(output):
        expected = allowed(whole)
        assert token in expected
        assert allowed(make(constraints, wanted, output[:cut])) == expected
        whole.accept_tokens("1", [token])
    assert constraints.faults == {}


def test_several_tokens_at_once_are_as_many_single_ones(constraints: Constraints) -> None:
    output = walk(make(constraints, sampling(SCHEMA)), 4)
    choice = make(constraints, sampling(SCHEMA))
    choice.accept_tokens("1", output[:-1])
    assert END in allowed(choice)


def test_choices_of_one_grammar_do_not_share_a_state(constraints: Constraints) -> None:
    one, other = (make(constraints, sampling(SCHEMA), key=key) for key in "12")
    before = allowed(other)
    walk(one, 2)
    assert allowed(other) == before


# ------------------------------------------------------------------ least length


@pytest.mark.parametrize("given", [0, 3])
def test_no_end_before_the_least_length(constraints: Constraints, given: int) -> None:
    stop = tokens("x")[0]
    wanted = sampling(LONG, min_tokens=12, stop_token_ids=(stop,))
    output = tokens('{"a":"abcdef')[:given]
    choice = make(constraints, wanted, output)
    rest = walk(choice, 5, given, 12)
    assert stop not in (*output, *rest)[:12]
    assert len(output) + len(rest) > 12


def test_a_grammar_at_its_end_wins_over_the_least_length(constraints: Constraints) -> None:
    choice = make(constraints, sampling({"const": 1}, min_tokens=50))
    assert choice.accept_tokens("1", tokens("1"))
    assert allowed(choice) == {END}
    assert constraints.faults == {}


@pytest.mark.parametrize("begun", [True, False])
def test_a_budget_alone_has_a_least_length_too(constraints: Constraints, begun: bool) -> None:
    """There is no mask before the budget is used up, or after the reasoning."""
    thinking = Thinking(**THINKING, begun=begun, budget=4)
    stop = tokens("x")[0]
    choice = make(constraints, sampling(thinking=thinking, min_tokens=2, stop_token_ids=(stop,)))
    everything = set(range(VOCAB))
    assert allowed(choice) == everything - {END, stop}
    choice.accept_tokens("1", tokens("a"))
    assert allowed(choice) == everything - {END, stop}
    choice.accept_tokens("1", tokens("a"))
    assert allowed(choice) == everything


# ------------------------------------------------------------------ reasoning


def test_a_budget_that_is_used_up_forces_the_end_of_the_reasoning(constraints: Constraints) -> None:
    thinking = Thinking(**THINKING, begun=True, budget=2)
    choice = make(constraints, sampling(thinking=thinking, min_tokens=99))
    choice.accept_tokens("1", tokens("a") * 2)
    for token in THINKING["end"]:
        assert allowed(choice) == {token}
        choice.accept_tokens("1", [token])
    assert len(allowed(choice)) == VOCAB - 1


def test_a_grammar_begins_after_the_reasoning(constraints: Constraints) -> None:
    thinking = Thinking(**THINKING, begun=True)
    choice = make(constraints, sampling({"const": 1}, thinking=thinking))
    assert allowed(choice) == set(range(VOCAB)) - {END}
    choice.accept_tokens("1", [*tokens("so"), *THINKING["end"]])
    assert {TOKENIZER.decode([token]).strip() for token in allowed(choice)} <= {"1", ""}


# ------------------------------------------------------------------ faults


def test_a_token_outside_of_the_grammar_is_a_fault_of_its_request(constraints: Constraints) -> None:
    one, other = (make(constraints, sampling({"const": 1}), key=key) for key in "12")
    assert one.accept_tokens("1", tokens("z")), "vLLM must not end the request by itself"
    fault = constraints.faults.pop("1")
    assert fault.lasting
    assert allowed(one) == set(range(VOCAB))
    assert constraints.faults.pop("1").lasting
    assert other.accept_tokens("2", tokens("1"))
    assert allowed(other) == {END}
    assert constraints.faults == {}


def test_a_state_without_a_next_token_is_a_fault_and_allows_all(constraints: Constraints) -> None:
    choice = make(constraints, sampling({"const": 1}, eos_token_ids=()))
    choice.accept_tokens("1", tokens("1"))
    assert allowed(choice) == set(range(VOCAB)), "vLLM's step goes on"
    assert "end token" in str(constraints.faults.pop("1"))


@pytest.mark.parametrize("grammar", ["start: nonsense", "{", 'start: "a" (', "\0"])
def test_a_grammar_that_does_not_compile_is_refused(constraints: Constraints, grammar: str) -> None:
    with pytest.raises(GrammarError, match="compile"):
        make(constraints, sampling(grammar=grammar))
    assert constraints.faults == {}


def test_earlier_output_that_does_not_fit_is_refused(constraints: Constraints) -> None:
    with pytest.raises(GrammarError, match="fit"):
        make(constraints, sampling({"const": 1}), tokens("zz"))


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        make(Constraints(b"", VOCAB, (END,)), sampling({"const": 1}))


def test_guessed_tokens_are_not_accepted(constraints: Constraints) -> None:
    assert make(constraints, sampling({"const": 1})).validate_tokens(tokens("1")) == []


# ------------------------------------------------------------------ the text


def test_the_text_carries_everything(constraints: Constraints) -> None:
    """What states depend on, with characters that JSON escapes."""
    wanted = sampling(
        {"const": 'say "é\n"'},
        thinking=Thinking(**THINKING, begun=True, budget=3),
        min_tokens=4,
        stop_token_ids=(7, 8),
    )
    choice = make(constraints, wanted, tokens("ab"), key="7.3")
    assert (choice._text.key, choice._text.given) == ("7.3", tokens("ab"))
    assert choice._text.sampling == wanted


def test_grammars_of_json_schemas_compile(constraints: Constraints) -> None:
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
    assert valid(SCHEMA, TOKENIZER.decode(walk(make(constraints, sampling(grammar=grammar)), 6)))
