"""Where a guide lets a sequence go, whatever it has come through."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

import pdserve
from pdserve.engine_core import structured_output
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.engine_core.structured_output import (
    GrammarError,
    StructuredOutputManager,
    _everything,
    _nothing,
    _with,
    _without,
    pick_allowed_token,
    read_tokenizer,
    structured_output_features,
)
from pdserve.messages.request import GenerateRequest, SamplingParams, Thinking

BUNDLED = Path(pdserve.__file__).parent / "bundled"
VOCAB, END = 1280, 3
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
WORDS = range(300, 600)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


START, STOP = tuple(tokens("<think>")), tuple(tokens("</think>"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})


@pytest.fixture(scope="module")
def guides():
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    yield guides
    guides.close()


def sequence(text: str = "", handle: int = 1, output: list[int] | None = None, **sampling: Any):
    fields: dict[str, Any] = {
        "max_tokens": 99,
        "grammar": GRAMMAR,
        "eos_token_ids": (END,),
    } | sampling
    request = GenerateRequest(
        request_id="r", model="m", prompt=[5, 6], sampling=SamplingParams(**fields)
    )
    return Sequence(handle, 0, request, [5, 6, *(output or tokens(text))], 2, arrival=0.0)


def thinking(**fields: Any) -> Thinking:
    return Thinking(start=START, end=STOP, **fields)


def ids(mask: bytes | None) -> set[int]:
    assert mask is not None
    assert len(mask) == VOCAB // 8
    return {token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1}


def allowed(guides: StructuredOutputManager, one: Sequence) -> set[int]:
    try:
        return ids(guides.allowed(one))
    finally:
        guides.release(one.key)


def begins(text: str) -> set[int]:
    """Tokens that a text may begin with."""
    return {token for token in range(4, VOCAB) if text.startswith(TOKENIZER.decode([token]) or "x")}


def test_a_grammar_says_what_may_come_next(guides):
    assert allowed(guides, sequence()) == begins('{"a":') - {END}
    assert allowed(guides, sequence('{"a":')) >= set(tokens("1"))
    assert END not in allowed(guides, sequence('{"a":1'))
    assert allowed(guides, sequence('{"a":1}')) == {END}


def test_a_sequence_without_anything_to_follow_is_free(guides):
    assert guides.allowed(sequence("x", grammar="")) is None
    assert guides.allowed(sequence("x", grammar="", thinking=thinking(begun=True))) is None
    assert len(guides) == 0


def test_every_end_that_the_request_knows_is_one(guides):
    assert allowed(guides, sequence('{"a":1}', eos_token_ids=(END, 1))) == {END, 1}
    assert guides._vocabulary().eos_tokens == [END]
    other = allowed(guides, sequence('{"a":1}', eos_token_ids=(1,)))
    assert 1 in other


def test_an_end_that_is_ignored_repeats(guides):
    one = sequence(output=[*tokens('{"a":1}'), END, END], ignore_eos=True)
    assert ids(guides.allowed(one)) == {END}
    assert guides.forced(one)
    guides.release(one.key)


def test_at_an_end_without_a_token_for_it_the_sequence_fails(guides):
    bare = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (), inline=True)
    with pytest.raises(GrammarError, match="no end token"):
        bare.allowed(sequence('{"a":1}', eos_token_ids=()))


def test_it_follows_tokens_however_they_come(guides):
    """One by one, all at once after a preemption, or shorter after another one."""
    whole = tokens('{"a":123,"b":[1]}')
    one = sequence()
    seen = []
    for token in whole:
        seen.append(guides.allowed(one))
        one.tokens.append(token)
    guides.release(one.key)
    for cut in (3, 9, 5, 0, len(whole) - 1):
        again = sequence(output=whole[:cut] or None)
        assert guides.allowed(again) == seen[cut]
    guides.release(one.key)
    assert len(guides) == 0


def test_an_output_that_does_not_fit_fails_alone(guides):
    with pytest.raises(GrammarError, match="does not fit"):
        guides.allowed(sequence("hello", handle=7))
    assert allowed(guides, sequence()) == begins('{"a":') - {END}
    guides.release((7, 0))


@pytest.mark.parametrize("grammar", ['start: "a', "start: nowhere", '{"grammars": 1}'])
def test_a_grammar_that_cannot_be_compiled_says_why(guides, grammar):
    with pytest.raises(GrammarError, match="cannot be compiled"):
        guides.allowed(sequence(grammar=grammar))


def test_a_vocabulary_that_cannot_be_read_is_nobodys_crash():
    for threads in (False, True):
        broken = StructuredOutputManager(b"{}", VOCAB, (), inline=not threads)
        with pytest.raises(GrammarError, match="tokenizer"):
            broken.allowed(sequence())
        broken.close()


# ---------------------------------------------------------------- reasoning


def test_inside_of_reasoning_anything_but_the_end_may_come(guides):
    inside = set(range(VOCAB)) - {END}
    assert allowed(guides, sequence(thinking=thinking(begun=True))) == inside
    assert allowed(guides, sequence("<think>hm", thinking=thinking())) == inside
    assert allowed(guides, sequence("hm {", thinking=thinking(begun=True))) == inside
    after = sequence("hm</think>", thinking=thinking(begun=True))
    assert allowed(guides, after) == begins('{"a":') - {END}


def test_reasoning_may_begin_or_be_left_out(guides):
    first = allowed(guides, sequence(thinking=thinking()))
    assert first == begins('{"a":') - {END} | {START[0]}
    second = sequence(output=list(START[:2]), thinking=thinking())
    assert allowed(guides, second) == {START[2]}
    assert START[0] not in allowed(guides, sequence("{", thinking=thinking()))


def test_a_beginning_that_could_be_both_stays_both(guides):
    lark = 'start: "<think" /[a-z]+/'
    both = allowed(guides, sequence(output=list(START[:-1]), thinking=thinking(), grammar=lark))
    assert both > {START[-1]}
    gone = sequence(output=[*START[:-1], *tokens("x")], thinking=thinking(), grammar=lark)
    assert START[-1] not in allowed(guides, gone)


@pytest.mark.parametrize("grammar", ["", GRAMMAR])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_that_is_used_up_forces_the_end_of_reasoning(guides, grammar, budget):
    one = sequence(thinking=thinking(begun=True, budget=budget), grammar=grammar)
    one.tokens += [300] * budget
    for token in STOP:
        assert ids(guides.allowed(one)) == {token}
        one.tokens.append(token)
    after = guides.allowed(one)
    assert after is None if not grammar else ids(after) == begins('{"a":') - {END}
    guides.release(one.key)


def test_an_end_that_had_begun_counts_and_is_not_begun_again(guides):
    budget = thinking(begun=True, budget=3)
    begun = sequence(output=[300, 300, 300, *STOP[:2]], thinking=budget)
    assert allowed(guides, begun) == {STOP[2]}
    inside = sequence(output=[300, *STOP[:2], 300], thinking=budget)
    assert allowed(guides, inside) == {STOP[0]}


CALL = tuple(tokens("<tool_call>"))
CALLS = f'start: "<tool_call>" %json {json.dumps(SCHEMA)} "</tool_call>"'
FREE = r"""
start: before arguments
before[lazy]: /(?s:.*)/ "<tool_call>"
arguments: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
"""
BEHIND = f"start: %json {json.dumps(SCHEMA)}"


@pytest.mark.parametrize("lark", [CALLS, FREE, BEHIND])
@pytest.mark.parametrize("fields", [{"begun": True}, {}, {"begun": True, "budget": 20}])
def test_a_call_ends_the_reasoning_and_follows_the_grammar(guides, lark, fields):
    """Whether the grammar has the marker or begins behind it."""
    before = () if fields else START
    thoughts = [*before, 300, *CALL[:-1], *tokens("no"), 300]
    marked = thinking(**fields, call=CALL)

    def after(text: str) -> set[int]:
        output = [*thoughts, *CALL, *tokens(text)]
        return allowed(guides, sequence(output=output, thinking=marked, grammar=lark))

    inside = sequence(output=thoughts, thinking=marked, grammar=lark)
    assert len(allowed(guides, inside)) == VOCAB - 1
    assert set(tokens("{")) <= after("") <= begins('{"a":') | begins("{ ") | begins("{\n")
    assert not after('{"a":') & set(tokens("x"))
    with pytest.raises(GrammarError, match="does not fit"):
        after('{"zzz"')


def test_the_last_token_of_an_enforced_call_may_be_followed_by_the_end(guides):
    output = [300, *CALL, *tokens('{"a":1}</tool_call>')]
    marked = thinking(begun=True, call=CALL)
    assert allowed(guides, sequence(output=output, thinking=marked, grammar=CALLS)) == {END}


def test_a_budget_does_not_count_in_a_call(guides):
    marked = thinking(begun=True, budget=len(CALL) + 2, call=CALL)
    free = sequence(output=[300, *CALL, *[300] * 20], thinking=marked, grammar="")
    assert guides.allowed(free) is None
    guides.release(free.key)
    thought = sequence(output=[300] * 20, thinking=marked, grammar="")
    assert allowed(guides, thought) == {STOP[0]}


def test_without_tools_a_call_stays_reasoning(guides):
    one = sequence(output=[300, *CALL], thinking=thinking(begun=True), grammar=CALLS)
    assert allowed(guides, one) == set(range(VOCAB)) - {END}


# ---------------------------------------------------------------- bounds


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_COMPILED", 3)
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    for number in range(6):
        guides.expect(sequence(grammar=f'start: "{number}"').sampling)
    assert guides.compiled == 3
    monkeypatch.setattr(structured_output, "MAX_COMPILED_BYTES", 20)
    guides.expect(sequence(grammar='start: "more"').sampling)
    assert guides.compiled == 0
    assert ids(guides.allowed(sequence(grammar='start: "0"'))) >= set(tokens("0"))


def test_a_grammar_that_takes_too_long_is_not_waited_for_for_ever(monkeypatch):
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), patience=0.0)
    guides.expect(sequence().sampling)
    with pytest.raises(GrammarError, match="not compiled within"):
        guides.allowed(sequence(grammar=json.dumps({"grammars": [{"json_schema": SCHEMA}]})))
    guides.close()


def test_what_took_long_to_compile_counts_for_more(monkeypatch):
    """A short grammar may come to megabytes."""
    monkeypatch.setattr(structured_output, "MAX_COMPILED_BYTES", 1 << 20)
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    for number in range(6):
        guides.expect(sequence(grammar=f'start: "{number}"').sampling)
    assert guides.compiled == 6
    divisor = json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 9973}}]})
    guides.expect(sequence(grammar=divisor).sampling)
    assert guides.compiled == 0


def test_what_waits_to_be_compiled_is_bounded_and_comes(monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_PREFETCHED", 3)
    monkeypatch.setattr(structured_output, "MAX_PENDING", 5)
    go, made = threading.Event(), []

    def make(self, grammar):
        assert go.wait(50)
        made.append(grammar)
        raise GrammarError("enough is known")

    monkeypatch.setattr(StructuredOutputManager, "_make", make)
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,))
    many = [sequence(grammar=f'start: "{number}"', handle=number) for number in range(9)]
    for one in many:
        guides.expect(one.sampling)
    assert guides.compiled == 3
    assert not any([guides.ready(one) for one in many])
    assert guides.compiled == 5
    go.set()
    while not all([guides.ready(one) for one in many]):
        guides.wait_ready(50.0)
    assert set(made) == {one.sampling.grammar for one in many}
    guides.close()


def test_a_thread_compiles_what_is_expected():
    guides = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,))
    guides.warm()
    guides.expect(sequence().sampling)
    assert allowed(guides, sequence('{"a":1}')) == {END}
    guides.close()
    guides.close()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 130])
def test_masks_are_sets_of_tokens(size: int) -> None:
    tokens = range(size)
    assert _everything(size) == bytes(_with(_nothing(size), tokens))
    assert bytes(_without(_everything(size), tokens)) == _nothing(size)
    last = _with(_nothing(size), [size - 1])
    assert int.from_bytes(last, "little") == 1 << size - 1
    assert _without(last, [size - 1, 0]) == _nothing(size)


def test_features_follow_from_what_a_checkpoint_has(tmp_path):
    assert structured_output_features(BUNDLED) == ("thinking", "grammar")
    assert structured_output_features(tmp_path) == ("thinking",)


def test_invented_words_come_to_an_end(guides):
    """And the same ones for the same numbers."""
    for seed in range(5):
        outputs = [invented(guides, seed) for _ in range(2)]
        assert outputs[0] == outputs[1]
        assert outputs[0][-1] == END
        assert isinstance(json.loads(TOKENIZER.decode(outputs[0][:-1]))["a"], int)


def invented(guides: StructuredOutputManager, seed: int) -> list[int]:
    rng, one = random.Random(seed), sequence()
    while one.tokens[-1] != END and one.num_output < 2000:
        mask = guides.allowed(one)
        assert mask is not None
        one.tokens.append(pick_allowed_token(mask, WORDS, rng.getrandbits(64), (END,)))
    guides.release(one.key)
    return one.output
