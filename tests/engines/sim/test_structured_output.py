"""Simulated outputs follow grammars, and are the reference's on every path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

import pdserve
from pdserve.engine_core.structured_output import StructuredOutputManager, read_tokenizer
from pdserve.messages.request import Thinking
from pdserve.testing.inline_engine import InlineEngine
from pdserve.text.grammar.grammar_source import from_schema
from pdserve_engines.sim import SimExecutor
from pdserve_engines.sim.tokens import reference_tokens
from tests.engines.sim.driver import request, spec
from tests.support.json_schemas import ENFORCED, valid

if TYPE_CHECKING:
    from collections.abc import Iterator

BUNDLED = Path(pdserve.__file__).parent / "bundled"
END = 3
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
NAMES = list(ENFORCED)[::4]


def wanted(name: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "grammar": from_schema(ENFORCED[name], "x").text,
        "max_tokens": 80,
        "eos_token_ids": (END,),
        "ignore_eos": False,
        "temperature": 1.0,
    }
    return request(**fields | changes)


@pytest.fixture(params=["on", "off"])
def engine(request: pytest.FixtureRequest) -> Iterator[InlineEngine]:
    model = spec(model=str(BUNDLED), vocab=0, content=request.param, blocks=60, steps_at_once=8)
    with InlineEngine.of(SimExecutor(), model) as engine:
        engine.content = request.param == "on"  # type: ignore[attr-defined]
        yield engine


def test_outputs_are_valid_and_those_of_the_reference(engine: InlineEngine) -> None:
    requests = [wanted(name, seed=seed) for seed, name in enumerate(NAMES)]
    outputs = engine.generate(requests)
    vocabulary = engine.core._executor.vocabulary  # type: ignore[attr-defined]
    whole = 0
    for name, one, (output,) in zip(NAMES, requests, outputs, strict=True):
        structured_output = StructuredOutputManager(
            read_tokenizer(BUNDLED), vocabulary.size, (END,), inline=True
        )
        content = engine.content  # type: ignore[attr-defined]
        assert output == reference_tokens(
            one, vocabulary, content=content, structured_output=structured_output
        )
        if output[-1] == END:
            whole += 1
            assert valid(ENFORCED[name], TOKENIZER.decode(output[:-1])), name
    assert whole > len(NAMES) / 2


def test_reasoning_is_bounded(engine: InlineEngine) -> None:
    start, end = (
        tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)
        for text in ("<think>", "</think>")
    )
    thinking = Thinking(start=start, end=end, begun=True, budget=5)
    ((output,),) = engine.generate([wanted("boolean", thinking=thinking)])
    assert tuple(output[5 : 5 + len(end)]) == end
    assert TOKENIZER.decode(output[5 + len(end) : -1]) in ("true", "false")


def test_an_invented_vocabulary_promises_nothing() -> None:
    with InlineEngine.of(SimExecutor(), spec()) as engine:
        assert "grammar" not in engine.capabilities.features
