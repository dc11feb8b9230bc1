"""Known facts of the public traces. Their folder is named by PDSERVE_TRACES; without it, a skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.cache_hits import IDEAL, PUBLISHED, ideal_rate, lru_rate, pool_rate, read
from pdserve.sim.workloads.trace_file import open_trace
from pdserve.sim.workloads.trace_request import length_of


def trace(name: str) -> Path:
    folder = os.environ.get("PDSERVE_TRACES", "")
    path = next(Path(folder).rglob(name), None) if folder else None
    if path is None:
        pytest.skip(f"needs the public trace {name}: name its folder by PDSERVE_TRACES")
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return read(trace("conversation_trace.jsonl"))


def test_a_cache_without_a_bound_hits_as_published(prompts) -> None:
    assert ideal_rate(prompts) == pytest.approx(IDEAL, abs=0.0001)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "published"), PUBLISHED.items())
def test_the_block_pool_hits_as_published(prompts, tokens: int, published: float) -> None:
    assert pool_rate(prompts, tokens) == pytest.approx(published, abs=0.001)
    assert lru_rate(prompts, tokens) == pytest.approx(published, abs=0.001)


def test_the_conversation_trace_is_what_it_is_known_as() -> None:
    requests = list(open_trace(trace("conversation_trace.jsonl")))
    lengths = [length_of(request.pieces) for request in requests]
    assert len(requests) == 12_031
    assert sum(lengths) / len(lengths) == pytest.approx(12_035, abs=1)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(343, abs=1)
    assert requests[-1].at == pytest.approx(3537, abs=3)


def test_the_azure_trace_is_what_it_is_known_as() -> None:
    requests = list(open_trace(trace("AzureLLMInferenceTrace_code.csv")))
    assert len(requests) == 8_819
    assert sum(length_of(r.pieces) for r in requests) / len(requests) == pytest.approx(2048, abs=2)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(28, abs=1)
