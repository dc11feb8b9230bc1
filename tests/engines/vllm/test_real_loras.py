"""LoRA adapters in the real vLLM: answers, names of blocks, and what is kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.errors import InvalidRequest
from tests.engines.vllm import models, real
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = [*real.MARKS, pytest.mark.long(one_in=8, turn=5)]

MODEL, BASE = models.checkpoint("Llama")
ADAPTERS = (models.adapter("one", 1, BASE), models.adapter("two", 2, BASE, rank=4))
SPEC = msgspec.structs.replace(real.MAIN, model=str(MODEL), loras=ADAPTERS)
engines_of_this_file = real.keeps(SPEC)

PROMPT = list(range(20, 90))


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline(SPEC) as inline:
        yield inline


def safe(model: object, prompt: list[int]) -> list[int]:
    """The answer up to a step that rounding may decide."""
    output, gaps = models.greedy(model, prompt, 12)
    return output[: next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(output))]


def test_answers_are_those_of_merged_weights(engine: InlineEngine) -> None:
    """All in one batch."""
    expected = [safe(BASE, PROMPT), *(safe(models.merged(BASE, a), PROMPT) for a in ADAPTERS)]
    assert len({tuple(output[:3]) for output in expected}) == 3
    names = ("", *(adapter.id for adapter in ADAPTERS))
    requests = [real.request(PROMPT, max_tokens=12, lora=name) for name in names]
    for _ in range(2):  # the second time from the cache
        for output, (found,) in zip(expected, engine.generate(requests), strict=True):
            assert len(output) >= 3
            assert found[: len(output)] == output


def test_blocks_are_named_by_their_adapter(engine: InlineEngine) -> None:
    router = Router()
    secret = real.SECRET
    expected = set[bytes]()
    for lora in ("", *(adapter.id for adapter in ADAPTERS)):
        root = prompt_root(secret, engine.capabilities.compat_hash, "", lora)
        expected |= set(block_hashes(PROMPT, real.BLOCK, parent=root, secret=secret))
        real.answer(engine, prompt=PROMPT, max_tokens=1, lora=lora)
    router.hear(engine.kv_events)
    assert len(expected) == 6
    assert router.device == expected


def test_an_unknown_adapter_is_refused(engine: InlineEngine) -> None:
    """Also another revision of a known one."""
    for lora in ("three@1", "one@2", "one"):
        ledger = engine.submit(real.request(PROMPT, lora=lora))
        engine.run()
        assert isinstance(ledger.error, InvalidRequest)


def test_adapters_are_a_feature(engine: InlineEngine) -> None:
    assert "lora" in engine.capabilities.features
