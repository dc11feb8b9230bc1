"""Where a grammar lets a sequence go, whatever it has come through."""

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
from pdserve.token_ids import token_ids

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
def manager():
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    yield manager
    manager.close()


def sequence(text: str = "", handle: int = 1, output: list[int] | None = None, **sampling: Any):
    fields: dict[str, Any] = {
        "max_tokens": 99,
        "grammar": GRAMMAR,
        "eos_token_ids": (END,),
    } | sampling
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids([5, 6]), sampling=SamplingParams(**fields)
    )
    return Sequence(
        handle, 0, request, token_ids([5, 6, *(output or tokens(text))]), 2, arrival=0.0
    )


def thinking(**fields: Any) -> Thinking:
    return Thinking(start=START, end=STOP, **fields)


def ids(mask: bytes | None) -> set[int]:
    assert mask is not None
    assert len(mask) == VOCAB // 8
    return {token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1}


def allowed(manager: StructuredOutputManager, one: Sequence) -> set[int]:
    try:
        return ids(manager.allowed(one))
    finally:
        manager.release(one.key)


def begins(text: str) -> set[int]:
    """Tokens that a text may begin with."""
    return {token for token in range(4, VOCAB) if text.startswith(TOKENIZER.decode([token]) or "x")}


def test_a_grammar_says_what_may_come_next(manager):
    assert allowed(manager, sequence()) == begins('{"a":') - {END}
    assert allowed(manager, sequence('{"a":')) >= set(tokens("1"))
    assert END not in allowed(manager, sequence('{"a":1'))
    assert allowed(manager, sequence('{"a":1}')) == {END}


def test_a_sequence_without_anything_to_follow_is_free(manager):
    assert manager.allowed(sequence("x", grammar="")) is None
    assert manager.allowed(sequence("x", grammar="", thinking=thinking(begun=True))) is None
    assert len(manager) == 0


def test_every_end_that_the_request_knows_is_one(manager):
    assert allowed(manager, sequence('{"a":1}', eos_token_ids=(END, 1))) == {END, 1}
    assert manager._vocabulary().eos_tokens == [END]
    other = allowed(manager, sequence('{"a":1}', eos_token_ids=(1,)))
    assert 1 in other


def test_an_end_that_is_ignored_repeats(manager):
    one = sequence(output=[*tokens('{"a":1}'), END, END], ignore_eos=True)
    assert ids(manager.allowed(one)) == {END}
    assert manager.forced(one)
    manager.release(one.key)


def test_at_an_end_without_a_token_for_it_the_sequence_fails(manager):
    bare = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (), inline=True)
    with pytest.raises(GrammarError, match="no end token"):
        bare.allowed(sequence('{"a":1}', eos_token_ids=()))


def test_it_follows_tokens_however_they_come(manager):
    """One by one, all at once after a preemption, or shorter after another one."""
    whole = tokens('{"a":123,"b":[1]}')
    one = sequence()
    seen = []
    for token in whole:
        seen.append(manager.allowed(one))
        one.tokens.append(token)
    manager.release(one.key)
    for cut in (3, 9, 5, 0, len(whole) - 1):
        again = sequence(output=whole[:cut] or None)
        assert manager.allowed(again) == seen[cut]
    manager.release(one.key)
    assert len(manager) == 0


def test_an_output_that_does_not_fit_fails_alone(manager):
    with pytest.raises(GrammarError, match="does not fit"):
        manager.allowed(sequence("hello", handle=7))
    assert allowed(manager, sequence()) == begins('{"a":') - {END}
    manager.release((7, 0))


@pytest.mark.parametrize("grammar", ['start: "a', "start: nowhere", '{"grammars": 1}'])
def test_a_grammar_that_cannot_be_compiled_says_why(manager, grammar):
    with pytest.raises(GrammarError, match="cannot be compiled"):
        manager.allowed(sequence(grammar=grammar))


def test_a_vocabulary_that_cannot_be_read_is_nobodys_crash():
    for threads in (False, True):
        broken = StructuredOutputManager(b"{}", VOCAB, (), inline=not threads)
        with pytest.raises(GrammarError, match="tokenizer"):
            broken.allowed(sequence())
        broken.close()


# ---------------------------------------------------------------- reasoning


def test_inside_of_reasoning_anything_but_the_end_may_come(manager):
    inside = set(range(VOCAB)) - {END}
    assert allowed(manager, sequence(thinking=thinking(begun=True))) == inside
    assert allowed(manager, sequence("<think>hm", thinking=thinking())) == inside
    assert allowed(manager, sequence("hm {", thinking=thinking(begun=True))) == inside
    after = sequence("hm</think>", thinking=thinking(begun=True))
    assert allowed(manager, after) == begins('{"a":') - {END}


def test_reasoning_may_begin_or_be_left_out(manager):
    first = allowed(manager, sequence(thinking=thinking()))
    assert first == begins('{"a":') - {END} | {START[0]}
    second = sequence(output=list(START[:2]), thinking=thinking())
    assert allowed(manager, second) == {START[2]}
    assert START[0] not in allowed(manager, sequence("{", thinking=thinking()))


def test_a_beginning_that_could_be_both_stays_both(manager):
    lark = 'start: "<think" /[a-z]+/'
    both = allowed(manager, sequence(output=list(START[:-1]), thinking=thinking(), grammar=lark))
    assert both > {START[-1]}
    gone = sequence(output=[*START[:-1], *tokens("x")], thinking=thinking(), grammar=lark)
    assert START[-1] not in allowed(manager, gone)


@pytest.mark.parametrize("grammar", ["", GRAMMAR])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_that_is_used_up_forces_the_end_of_reasoning(manager, grammar, budget):
    one = sequence(thinking=thinking(begun=True, budget=budget), grammar=grammar)
    one.tokens.extend([300] * budget)
    for token in STOP:
        assert ids(manager.allowed(one)) == {token}
        one.tokens.append(token)
    after = manager.allowed(one)
    assert after is None if not grammar else ids(after) == begins('{"a":') - {END}
    manager.release(one.key)


def test_an_end_that_had_begun_counts_and_is_not_begun_again(manager):
    budget = thinking(begun=True, budget=3)
    begun = sequence(output=[300, 300, 300, *STOP[:2]], thinking=budget)
    assert allowed(manager, begun) == {STOP[2]}
    inside = sequence(output=[300, *STOP[:2], 300], thinking=budget)
    assert allowed(manager, inside) == {STOP[0]}


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
def test_a_call_ends_the_reasoning_and_follows_the_grammar(manager, lark, fields):
    """Whether the grammar has the marker or begins behind it."""
    before = () if fields else START
    thoughts = [*before, 300, *CALL[:-1], *tokens("no"), 300]
    marked = thinking(**fields, call=CALL)

    def after(text: str) -> set[int]:
        output = [*thoughts, *CALL, *tokens(text)]
        return allowed(manager, sequence(output=output, thinking=marked, grammar=lark))

    inside = sequence(output=thoughts, thinking=marked, grammar=lark)
    assert len(allowed(manager, inside)) == VOCAB - 1
    assert set(tokens("{")) <= after("") <= begins('{"a":') | begins("{ ") | begins("{\n")
    assert not after('{"a":') & set(tokens("x"))
    with pytest.raises(GrammarError, match="does not fit"):
        after('{"zzz"')


def test_the_last_token_of_an_enforced_call_may_be_followed_by_the_end(manager):
    output = [300, *CALL, *tokens('{"a":1}</tool_call>')]
    marked = thinking(begun=True, call=CALL)
    assert allowed(manager, sequence(output=output, thinking=marked, grammar=CALLS)) == {END}


def test_a_budget_does_not_count_in_a_call(manager):
    marked = thinking(begun=True, budget=len(CALL) + 2, call=CALL)
    free = sequence(output=[300, *CALL, *[300] * 20], thinking=marked, grammar="")
    assert manager.allowed(free) is None
    manager.release(free.key)
    thought = sequence(output=[300] * 20, thinking=marked, grammar="")
    assert allowed(manager, thought) == {STOP[0]}


def test_without_tools_a_call_stays_reasoning(manager):
    one = sequence(output=[300, *CALL], thinking=thinking(begun=True), grammar=CALLS)
    assert allowed(manager, one) == set(range(VOCAB)) - {END}


# ---------------------------------------------------------------- bounds


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_COMPILED", 3)
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    for number in range(6):
        manager.expect(sequence(grammar=f'start: "{number}"').sampling)
    assert manager.compiled == 3
    monkeypatch.setattr(structured_output, "MAX_COMPILED_BYTES", 20)
    manager.expect(sequence(grammar='start: "more"').sampling)
    assert manager.compiled == 0
    assert ids(manager.allowed(sequence(grammar='start: "0"'))) >= set(tokens("0"))


def test_a_grammar_that_takes_too_long_is_not_waited_for_for_ever(monkeypatch):
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), patience=0.0)
    manager.expect(sequence().sampling)
    with pytest.raises(GrammarError, match="not compiled within"):
        manager.allowed(sequence(grammar=json.dumps({"grammars": [{"json_schema": SCHEMA}]})))
    manager.close()


def test_what_took_long_to_compile_counts_for_more(monkeypatch):
    """A short grammar may come to megabytes."""
    monkeypatch.setattr(structured_output, "MAX_COMPILED_BYTES", 1 << 20)
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    for number in range(6):
        manager.expect(sequence(grammar=f'start: "{number}"').sampling)
    assert manager.compiled == 6
    divisor = json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 9973}}]})
    manager.expect(sequence(grammar=divisor).sampling)
    assert manager.compiled == 0


def test_what_waits_to_be_compiled_is_bounded_and_comes(monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_PREFETCHED", 3)
    monkeypatch.setattr(structured_output, "MAX_PENDING", 5)
    go, made = threading.Event(), []

    def make(self, grammar):
        assert go.wait(50)
        made.append(grammar)
        raise GrammarError("enough is known")

    monkeypatch.setattr(StructuredOutputManager, "_make", make)
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,))
    many = [sequence(grammar=f'start: "{number}"', handle=number) for number in range(9)]
    for one in many:
        manager.expect(one.sampling)
    assert manager.compiled == 3
    assert not any([manager.ready(one) for one in many])
    assert manager.compiled == 5
    go.set()
    while not all([manager.ready(one) for one in many]):
        manager.wait_ready(50.0)
    assert set(made) == {one.sampling.grammar for one in many}
    manager.close()


def test_a_thread_compiles_what_is_expected():
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,))
    manager.warm()
    manager.expect(sequence().sampling)
    assert allowed(manager, sequence('{"a":1}')) == {END}
    manager.close()
    manager.close()


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


def test_invented_words_come_to_an_end(manager):
    """And the same ones for the same numbers."""
    for seed in range(5):
        outputs = [invented(manager, seed) for _ in range(2)]
        assert outputs[0] == outputs[1]
        assert outputs[0][-1] == END
        assert isinstance(json.loads(TOKENIZER.decode(outputs[0][:-1]))["a"], int)


def invented(manager: StructuredOutputManager, seed: int) -> list[int]:
    rng, one = random.Random(seed), sequence()
    while one.tokens[-1] != END and one.num_output < 2000:
        mask = manager.allowed(one)
        assert mask is not None
        one.tokens.append(pick_allowed_token(mask, WORDS, rng.getrandbits(64), (END,)))
    manager.release(one.key)
    return one.output
