"""Grammars on the torch engine: every output fits, and the tokens are the same on every path."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.structured_output import (
    GrammarError,
    StructuredOutputManager,
    read_tokenizer,
)
from pdserve.errors import InvalidRequest, StepFailed
from pdserve.messages.request import GenerateRequest, SamplingParams, Thinking
from pdserve.testing.inline_engine import InlineEngine
from pdserve.text.grammar.grammar_source import from_choice, from_schema
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.sampling.grammar_masks import GrammarMasks
from pdserve_engines.torch.sampling.sampler import Sampler
from tests.engines.torch.driver import sequence
from tests.engines.torch.test_handoff import BLOCK, BUNDLED, engine_spec
from tests.engines.torch.test_migration import move
from tests.support.disagg_pair import make_pair
from tests.support.json_schemas import ENFORCED, valid

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB, END = 1280, 3
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 40}
LONG = from_schema(LIST, "x").text


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


THINKING = Thinking(start=tuple(ids("<think>")), end=tuple(ids("</think>")), begun=True, budget=9)


def request(text: str = "Give me an answer.", **changes: Any) -> GenerateRequest:
    n, output = changes.pop("n", 1), changes.pop("output", [])
    fields: dict[str, Any] = {"max_tokens": 60, "eos_token_ids": (END,), "grammar": LONG}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(ids(text)),
        sampling=SamplingParams(**fields | changes),
        n=n,
        output=output,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[InlineEngine]:
    spec = replace(engine_spec(BUNDLED, "auto"), transfer=None, kv_memory=1 << 24)
    with InlineEngine.of(TorchExecutor(), replace(spec, max_sequences=64)) as engine:
        yield engine


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "top_p": 0.95},
    "after reasoning": {"seed": 6, "thinking": THINKING},
    "with penalties": {"seed": 7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
}


# ---------------------------------------------------------------- what comes out


def test_the_engine_says_that_it_can(engine: InlineEngine) -> None:
    assert {"grammar", "thinking"} <= set(engine.capabilities.features)


def test_every_output_that_ends_is_valid(engine: InlineEngine) -> None:
    """All schemas in one batch, beside requests that follow nothing."""
    names = [name for name in ENFORCED for _ in range(2)]
    requests = [
        request(f"Prompt {number}", seed=number, grammar=from_schema(ENFORCED[name], "x").text)
        for number, name in enumerate(names)
    ]
    requests += [request(f"Text {number}", grammar="", max_tokens=9) for number in range(4)]
    outputs = engine.generate(requests)
    whole = 0
    for name, (output,) in zip(names, outputs[: len(names)], strict=True):
        if output[-1] == END:
            whole += 1
            text = TOKENIZER.decode(output[:-1])
            assert valid(ENFORCED[name], text), (name, text)
    assert whole > len(names) / 2


def test_choices_of_one_request_go_their_own_ways(engine: InlineEngine) -> None:
    grammar = from_choice(["red", "green", "blue", "black"], "x").text
    (outputs,) = engine.generate([request(grammar=grammar, n=8, seed=3, temperature=2.0)])
    texts = {TOKENIZER.decode(output[:-1]) for output in outputs}
    assert texts <= {"red", "green", "blue", "black"}
    assert len(texts) > 1


def test_reasoning_within_its_budget_comes_before_the_grammar(engine: InlineEngine) -> None:
    grammar = from_choice(["yes", "no"], "x").text
    ((output,),) = engine.generate([request(grammar=grammar, thinking=THINKING, seed=2)])
    end = list(THINKING.end)
    at = next(i for i in range(len(output)) if output[i : i + len(end)] == end)
    assert at <= 9
    assert TOKENIZER.decode(output[at + len(end) : -1]) in ("yes", "no")


@pytest.mark.parametrize("fields", [{"min_tokens": 12}, {"ignore_eos": True}])
def test_what_has_ended_says_its_end_until_it_may_stop(
    engine: InlineEngine, fields: dict[str, Any]
) -> None:
    grammar = from_choice(["yes"], "x").text
    ((output,),) = engine.generate([request(grammar=grammar, max_tokens=15, **fields)])
    text = [token for token in output if token != END]
    assert TOKENIZER.decode(text) == "yes"
    assert output[len(text) :] == [END] * (len(output) - len(text))
    assert len(output) >= 12


def test_a_request_that_cannot_go_on_fails_alone(engine: InlineEngine) -> None:
    good, bad = engine.submit(request(max_tokens=5)), engine.submit(request(grammar="start: x"))
    engine.run()
    assert good.error is None
    assert good.done
    assert bad.error is not None
    assert "cannot be compiled" in bad.error.message


def test_who_waits_for_a_grammar_holds_nobody_up(
    engine: InlineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets its tokens later, and the same ones; an abort meanwhile leaves nothing."""
    ((alone,),) = engine.generate([request(seed=5)])
    compiled, make = threading.Event(), StructuredOutputManager._make

    def slow(self: StructuredOutputManager, grammar: str) -> Any:
        assert compiled.wait(50)
        return make(self, grammar)

    monkeypatch.setattr(StructuredOutputManager, "_make", slow)
    late = engine.submit(request(seed=5, grammar=LONG + " "))
    several = engine.submit(request("Two answers.", seed=5, grammar=LONG + " ", n=2, max_tokens=3))
    gone = engine.submit(request("Never mind.", grammar=LONG + "  "))
    plain = engine.submit(request("Just talk.", grammar="", max_tokens=20, ignore_eos=True))
    for _ in range(30):
        engine.step()
    assert plain.done
    assert not any((late.tokens[0], several.tokens[0], gone.tokens[0]))
    assert late.error is None
    engine.abort(gone)
    compiled.set()
    engine.run()
    assert late.tokens == [alone]
    assert all(len(output) == 3 for output in several.tokens)


def test_a_grammar_that_never_comes_is_its_requests_end_alone(
    engine: InlineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    structured_output = engine.core._executor._sampler.masks.structured_output  # type: ignore[attr-defined]
    over = threading.Event()

    def never(self: StructuredOutputManager, grammar: str) -> Any:
        over.wait(50)
        raise GrammarError("nobody hears it")

    monkeypatch.setattr(StructuredOutputManager, "_make", never)
    monkeypatch.setattr(structured_output, "_patience", 0.05)
    late, plain = engine.submit(request(grammar=LONG + "   ")), engine.submit(request(grammar=""))
    engine.run()
    over.set()
    assert isinstance(late.error, StepFailed)
    assert "not compiled within" in late.error.message
    assert plain.error is None


def test_what_could_go_on_nowhere_is_the_requests_own_fault(engine: InlineEngine) -> None:
    """Nobody tries it again at another worker, and no worker is blamed for it."""
    properties = {f"p{number}": {"type": "string"} for number in range(700)}
    grammar = from_schema({"type": "object", "properties": properties}, "x").text
    wide, good = engine.submit(request(grammar=grammar)), engine.submit(request(max_tokens=5))
    engine.run()
    assert isinstance(wide.error, InvalidRequest)
    assert "max is 2000" in wide.error.message
    assert good.error is None
    names = engine.core.pool.names()  # type: ignore[attr-defined]
    wide = engine.submit(request(grammar=grammar))
    engine.run()
    assert engine.core.pool.names() == names, "its prompt is healthy"  # type: ignore[attr-defined]


def test_what_is_over_is_forgotten(engine: InlineEngine) -> None:
    engine.generate([request(max_tokens=4, n=3)])
    executor = engine.core._executor  # type: ignore[attr-defined]
    engine.run()
    engine.generate([request(grammar="", max_tokens=1)])  # a step releases what ended before it
    assert len(executor._sampler.masks.structured_output) == 0


# ---------------------------------------------------------------- the same on every path


@pytest.mark.parametrize(
    "name",
    [
        name if name == "after reasoning" else pytest.param(name, marks=pytest.mark.long)
        for name in VARIANTS
    ],
)
def test_the_tokens_are_the_same_on_every_road(engine: InlineEngine, name: str) -> None:
    """In chunks, after preemptions, handed over, moved in the middle, and given back as output."""
    wanted = request(max_tokens=48, **VARIANTS[name])
    ((alone,),) = engine.generate([wanted])
    # In chunks, in a pool in which the three push each other out.
    spec = engine_spec(BUNDLED, "auto", max_batch_tokens=5, max_sequences=3)
    memory = 9 * engine.capabilities.block_bytes
    small = replace(spec, transfer=None, kv_memory=memory, max_model_len=64, prefix_cache=False)
    with InlineEngine.of(TorchExecutor(), small) as chunks:
        crowd = [chunks.submit(replace(wanted, request_id=str(i))) for i in range(3)]
        chunks.run()
        assert [ledger.tokens[0] for ledger in crowd] == [alone] * 3
        assert isinstance(chunks.core, EngineCore)
        assert chunks.core.stats().preemptions > 0
    pair = make_pair(TorchExecutor, engine_spec(BUNDLED, "auto"))
    (ledger,) = pair.generate([wanted])
    assert ledger.tokens == [alone]
    pair.close()
    pair = make_pair(TorchExecutor, engine_spec(BUNDLED, "auto"))
    assert move(pair, wanted, BLOCK + 3, later=2) == alone
    pair.close()
    for cut in (1, 11, 30):
        ((again,),) = engine.generate([replace(wanted, output=[alone[:cut]])])
        assert again == alone


# ---------------------------------------------------------------- masks


def test_only_rows_that_follow_something_are_touched() -> None:
    masks = GrammarMasks()
    masks.structured_output = StructuredOutputManager(
        read_tokenizer(BUNDLED), VOCAB, (END,), inline=True
    )
    grammar = from_choice(["yes", "no"], "x").text
    steered = SamplingParams(max_tokens=9, grammar=grammar, eos_token_ids=(END,))
    free = SamplingParams(max_tokens=9)
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    rows = [sequence([5], free, 1), sequence([5], steered, 2), sequence([6], free, 3)]
    masks.apply(logits, rows)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    left = {at for at, value in enumerate(logits[1].tolist()) if value > -math.inf}
    assert left
    assert all(
        "yes".startswith(t) or "no".startswith(t)
        for t in map(TOKENIZER.decode, ([i] for i in left))
    )
    assert torch.equal(logits[1, list(left)], before[1, list(left)])


@pytest.mark.parametrize("rows", [VOCAB - 3, VOCAB, VOCAB + 9])
def test_a_model_may_have_more_or_fewer_rows_than_its_vocabulary(rows: int) -> None:
    sampler = Sampler()
    sampler.masks.structured_output = StructuredOutputManager(
        read_tokenizer(BUNDLED), rows, (END,), inline=True
    )
    steered = SamplingParams(
        max_tokens=9, grammar=from_choice(["yes"], "x").text, eos_token_ids=(END,), seed=3
    )
    one = sequence([5], steered, 2)
    while one.tokens[-1] != END and one.num_output < 9:
        tokens, _ = sampler.sample(torch.randn(1, rows), [one])
        one.tokens.extend(tokens)
    assert TOKENIZER.decode(one.tokens[1:-1]) == "yes"


@pytest.mark.parametrize(
    "wish",
    [
        {"allowed_token_ids": (300, 301)},
        {"bad_words": ((THINKING.end[0],),)},
        {"stop_token_ids": (THINKING.end[-1],), "min_tokens": 30},
        {"grammar": 'start: ""', "min_tokens": 30},
    ],
)
def test_an_end_that_has_to_come_comes_whatever_is_wished_besides(wish: dict[str, Any]) -> None:
    sampler = Sampler()
    sampler.masks.structured_output = StructuredOutputManager(
        read_tokenizer(BUNDLED), VOCAB, (END,), inline=True
    )
    fields: dict[str, Any] = {"max_tokens": 30, "eos_token_ids": (END,), "thinking": THINKING}
    one = sequence([5], SamplingParams(**fields | wish), 2)
    while one.num_output < 20:
        tokens, _ = sampler.sample(torch.randn(1, VOCAB), [one])
        assert tokens != [-1]
        one.tokens.extend(tokens)
    budget = THINKING.budget or 0
    assert one.output[budget : budget + len(THINKING.end)] == list(THINKING.end)


@pytest.mark.parametrize("marks", [((4,), (VOCAB,)), ((70_000,), (4,)), ((4,), (-1,))])
def test_marks_that_the_model_has_no_tokens_for_fail_alone(
    engine: InlineEngine, marks: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    start, end = marks
    thinking = Thinking(start=start, end=end, begun=True, budget=0)
    bad = engine.submit(request(grammar="", thinking=thinking))
    good = engine.submit(request(max_tokens=5))
    engine.run()
    assert isinstance(bad.error, InvalidRequest)
    assert good.error is None


def test_without_a_vocabulary_nobody_is_left_without_a_word() -> None:
    sampler = Sampler()
    steered = SamplingParams(max_tokens=9, grammar="start: /a/")
    one = sequence([5], steered, 2)
    tokens, _ = sampler.sample(torch.zeros(1, VOCAB), [one])
    assert tokens == [-1]
    assert "does not support grammars" in sampler.faults([one])[0]
