"""Whatever way is taken through a schema's grammar, what comes out fits the schema."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import pdserve
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.engine_core.structured_output import (
    GrammarError,
    StructuredOutputManager,
    pick_allowed_token,
    read_tokenizer,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.text.grammar.grammar_source import from_schema
from pdserve.token_ids import token_ids
from tests.support.json_schemas import ENFORCED, REFUSED, Schema, valid

BUNDLED = Path(pdserve.__file__).parent / "bundled"
VOCAB, END, MOST = 1280, 3, 600
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def manager():
    manager = StructuredOutputManager(read_tokenizer(BUNDLED), VOCAB, (END,), inline=True)
    yield manager
    manager.close()


def sequence(schema: Schema) -> Sequence:
    sampling = SamplingParams(
        max_tokens=MOST, grammar=from_schema(schema, "x").text, eos_token_ids=(END,)
    )
    request = GenerateRequest(request_id="r", model="m", prompt=token_ids([5]), sampling=sampling)
    return Sequence(1, 0, request, token_ids([5]), 1, arrival=0.0)


def walk(manager: StructuredOutputManager, schema: Schema, seed: int) -> str | None:
    """An output, if it has come to its end."""
    rng, one = random.Random(seed), sequence(schema)
    try:
        while one.num_output < MOST:
            mask = manager.allowed(one)
            assert mask is not None
            token = pick_allowed_token(mask, range(4, VOCAB), rng.getrandbits(60), (END,))
            if token == END:
                return TOKENIZER.decode(one.output)
            one.tokens.append(token)
    finally:
        manager.release(one.key)
    return None


@pytest.mark.parametrize("name", ENFORCED)
def test_every_output_that_ends_is_valid(manager, name):
    outputs = [walk(manager, ENFORCED[name], seed) for seed in range(6)]
    whole = [output for output in outputs if output is not None]
    assert whole, "none has come to its end"
    assert [output for output in whole if not valid(ENFORCED[name], output)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_not_passed_over(manager, name):
    with pytest.raises(GrammarError):
        manager.allowed(sequence(REFUSED[name]))
    manager.release((1, 0))


def test_there_are_enough_of_them():
    assert len(ENFORCED) >= 60
