"""Embeddings and classification heads of the real vLLM: the numbers of transformers."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.errors import InvalidRequest
from tests.engines.vllm import models, real

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = [*real.MARKS, pytest.mark.long(one_in=8, turn=7)]

MODEL, ORACLE = models.checkpoint("Llama", seed=5)
SPEC = msgspec.structs.replace(
    real.MAIN, model=str(MODEL), options=real.MAIN.options | {"runner": "pooling"}
)
JUDGE, JUDGES_ORACLE = models.classifier("Qwen3", labels=1, seed=6)
SCORES = msgspec.structs.replace(SPEC, model=str(JUDGE))
engines_of_this_file = real.keeps(SPEC, SCORES)


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline(SPEC) as inline:
        yield inline


@torch.inference_mode()
def expected(prompt: list[int]) -> list[float]:
    """The last token's hidden state after the last norm."""
    vector: list[float] = ORACLE.model(torch.tensor([prompt])).last_hidden_state[0, -1].tolist()
    return vector


def vectors(engine: InlineEngine, prompts: list[list[int]], **fields: Any) -> list[list[float]]:
    shape: dict[str, Any] = {"pooling": "last", "max_tokens": 1} | fields
    ledgers = [engine.submit(real.request(prompt, **shape)) for prompt in prompts]
    engine.run()
    found = []
    for ledger in ledgers:
        assert ledger.error is None, ledger.error
        assert ledger.finishes[0] is not None
        data = ledger.finishes[0].embedding
        found.append(list(struct.unpack(f"<{len(data) // 4}f", data)))
    return found


PROMPTS = [[9], [20, 21, 22], list(range(30, 100)), list(range(10, 202))]
"""One token, a few, several chunks, and the whole context."""


def test_vectors_are_those_of_the_model(engine: InlineEngine) -> None:
    assert engine.capabilities.embedding_size == 64
    assert "embeddings" in engine.capabilities.features
    for _ in range(2):  # then from the cache
        for prompt, vector in zip(PROMPTS, vectors(engine, PROMPTS), strict=True):
            assert vector == pytest.approx(expected(prompt), abs=2e-3)


def test_a_prompt_in_the_cache_is_not_computed_again(engine: InlineEngine) -> None:
    prompt = list(range(30, 30 + 2 * real.BLOCK + 1))
    cached = []
    for _ in range(2):
        ledger = engine.submit(real.request(prompt, pooling="last", max_tokens=1))
        engine.run()
        assert ledger.finishes[0] is not None
        cached.append(ledger.finishes[0].cached_tokens)
    assert cached == [0, 2 * real.BLOCK]


def test_a_pooling_that_the_engine_does_not_compute_is_refused(engine: InlineEngine) -> None:
    """A mean of all tokens must not become the last token's vector."""
    ledger = engine.submit(real.request([20, 21, 22], pooling="mean", max_tokens=1))
    engine.run()
    assert isinstance(ledger.error, InvalidRequest)


def test_a_model_for_vectors_writes_no_text(engine: InlineEngine) -> None:
    ledger = engine.submit(real.request([20, 21, 22]))
    engine.run()
    assert isinstance(ledger.error, InvalidRequest)
    assert vectors(engine, [[9]])


def test_logits_are_those_of_the_models_head() -> None:
    with real.inline(SCORES) as engine:
        told = engine.capabilities
        assert (told.num_labels, told.embedding_size) == (1, 0)
        assert "classify" in told.features
        for _ in range(2):  # then from the cache
            found = vectors(engine, PROMPTS, classify=True)
            for prompt, logits in zip(PROMPTS, found, strict=True):
                with torch.inference_mode():
                    hidden = JUDGES_ORACLE.model(torch.tensor([prompt])).last_hidden_state[0, -1]
                    wanted = JUDGES_ORACLE.score(hidden).tolist()
                assert logits == pytest.approx(wanted, abs=2e-3)
        plain = engine.submit(real.request([20, 21, 22], pooling="last", max_tokens=1))
        engine.run()
        assert isinstance(plain.error, InvalidRequest), "it computes no vectors"


def test_a_model_without_a_head_gives_no_logits(engine: InlineEngine) -> None:
    ledger = engine.submit(real.request([9], pooling="last", classify=True, max_tokens=1))
    engine.run()
    assert isinstance(ledger.error, InvalidRequest)
    assert "no classification head" in ledger.error.message
