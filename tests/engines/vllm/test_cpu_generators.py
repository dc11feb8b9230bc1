"""A draw that is taken back is drawn again."""

from __future__ import annotations

import pytest
import torch

from pdserve_engines.vllm.cpu_generators import rewind_generators


@pytest.fixture(autouse=True)
def _in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    assert rewind_generators(None)


def draw(generator: torch.Generator) -> int:
    """As vLLM does for one sequence of a step (0.32.0, `v1/sample/ops/topk_topp_sampler.py`)."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())


def take_back(generator: torch.Generator) -> None:
    """As vLLM does after a chunk (`v1/worker/gpu_model_runner.py`)."""
    generator.set_offset(generator.get_offset() - 4)


@pytest.mark.parametrize("chunks", [(0,), (1,), (0, 0, 3), (2, 5, 5, 9)])
def test_draws_are_those_without_chunks(chunks: tuple[int, ...]) -> None:
    """`chunks`: before which kept draws a number is drawn and taken back."""
    plain = torch.Generator(device="cpu").manual_seed(7)
    expected = [draw(plain) for _ in range(12)]
    generator = torch.Generator(device="cpu")
    generator.manual_seed(7)
    found = []
    for number in range(12):
        for _ in range(chunks.count(number)):
            assert draw(generator) == expected[number]
            take_back(generator)
        found.append(draw(generator))
    assert found == expected
