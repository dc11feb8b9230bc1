"""Ranks under the real scheduler: the tokens of `transformers` and of one rank, in every schedule
and for every kind of request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.engine_core.core import EngineCore
from pdserve.testing.exactness import SCENARIOS, Scenario, mixed_requests, solo_outputs
from pdserve.testing.inline_engine import InlineEngine
from pdserve.text.grammar.grammar_source import from_schema
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.checkpoints import VOCAB, checkpoint, model_for, oracle_generate
from tests.engines.torch.driver import spec
from tests.engines.torch.tensor_parallel.thread_ranks import ranks_as_threads
from tests.engines.torch.test_handoff import BUNDLED, VARIANTS, prompt_of, request
from tests.support.seeds import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import GenerateRequest
    from pdserve.testing.output_checker import OutputChecker

BLOCK = 8
RANKS = [2, 4]
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 40}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_as_threads():
        yield


def alone(directory: Path, **fields: Any) -> EngineSpec:
    """One rank that computes with the kernels of ranks."""
    defaults: dict[str, Any] = {"kv_memory": 8 << 20, "options": {"kernels": "torch"}}
    return spec(directory, **defaults | fields)


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_requests_that_preempt_each_other_get_the_tokens_of_transformers(ranks: int) -> None:
    """Of a pool of ten blocks."""
    memory = 10 * 2 * 2 * 2 * 12 * BLOCK * 4
    wanted = alone(
        checkpoint("llama")[0],
        block_size=BLOCK,
        kv_memory=memory,
        max_model_len=10 * BLOCK,
        max_batch_tokens=12,
        max_sequences=8,
        tensor_parallel=ranks,
    )
    model = model_for("llama", 10 * BLOCK)
    prompts = [prompt_of(14, seed) for seed in range(4)]
    with InlineEngine.of(TorchExecutor(), wanted) as engine:
        found = engine.generate(
            request(prompt, temperature=0.0, max_tokens=24) for prompt in prompts
        )
        assert isinstance(engine.core, EngineCore)
        assert engine.core.stats().preemptions > 0
    assert found == [[oracle_generate(model, prompt, 24)] for prompt in prompts]


@pytest.mark.parametrize("ranks", drawn(RANKS, 1, "schedules"))
@pytest.mark.parametrize("scenario", drawn(SCENARIOS, 1, "scenario"), ids=lambda one: one.name)
def test_scheduling_never_shows_in_the_tokens(scenario: Scenario, ranks: int) -> None:
    """The same requests in every run: near ties are luck."""
    requests = mixed_requests(random.Random(5), range(3, VOCAB - 1))
    one = alone(checkpoint("llama")[0], block_size=4, max_model_len=96)
    expected = solo_outputs(TorchExecutor, one, requests)
    divided = replace(one, tensor_parallel=ranks)
    assert scenario.outputs(TorchExecutor, divided, requests) == expected


def kinds() -> list[GenerateRequest]:
    """One of each; the grammars need a tokenizer, which the bundled model has."""
    plain = [
        request(prompt_of(9 + number, number), **fields | {"max_tokens": 12})
        for number, fields in enumerate(VARIANTS.values())
    ]
    grammar = from_schema(LIST, "x").text
    guided = [
        {"temperature": 0.0},
        {"seed": 5, "top_p": 0.95, "logprobs": 2},
        {"seed": 7, "frequency_penalty": 0.4, "n": 2},
    ]
    return plain + [
        request(prompt_of(11, 40 + number), grammar=grammar, eos_token_ids=(3,), **fields)
        for number, fields in enumerate(guided)
    ]


@pytest.mark.parametrize("ranks", drawn(RANKS, 1, "kinds"))
def test_every_kind_of_request_is_answered_as_by_one_rank(ranks: int) -> None:
    """All at once and in small chunks; logprobs within 1e-4."""
    one = alone(BUNDLED, block_size=BLOCK, max_model_len=64)
    with InlineEngine.of(TorchExecutor(), one) as engine:
        wanted = [told(engine, each) for each in kinds()]
    divided = replace(one, tensor_parallel=ranks, max_batch_tokens=12, max_sequences=12)
    with InlineEngine.of(TorchExecutor(), divided) as engine:
        found = [engine.submit(each) for each in kinds()]
        engine.run()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.tokens == theirs.tokens
        check_close(ours.logprobs, theirs.logprobs)
        check_close([each or [] for each in ours.prompt_logprobs], theirs.prompt_logprobs)
    assert sum(len(rows) for ledger in found for rows in ledger.logprobs) == 20


def told(engine: InlineEngine, wanted: GenerateRequest) -> OutputChecker:
    """What a request gets alone."""
    ledger = engine.submit(wanted)
    engine.run()
    assert ledger.error is None
    return ledger


def check_close(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine, other or [], strict=True):
            assert one.token == two.token
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
