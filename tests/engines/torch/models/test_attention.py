"""How chunks are put together: what one group gathers fits into what is kept free for it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve_engines.torch.models.attention import GATHERED, PagedAttention, _group_chunks
from pdserve_engines.torch.models.forward_batch import ForwardBatch
from tests.engines.torch.checkpoints import VOCAB, checkpoint, oracle_generate
from tests.engines.torch.driver import Driver, loaded

if TYPE_CHECKING:
    import pytest

BLOCK = 8


def batch_of(*chunks: tuple[int, int]) -> ForwardBatch:
    """Of chunks (start, count), as far as grouping looks at it."""
    starts, counts = (np.array(each, np.int32) for each in zip(*chunks, strict=True))
    nothing = np.zeros(0, np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return ForwardBatch(nothing, nothing, offsets, starts, nothing, nothing, nothing)


def test_tokens_of_similar_length_are_one_group_and_prompts_one_each() -> None:
    batch = batch_of((100, 1), (0, 5), (120, 1), (0, 9), (10, 1))
    assert _group_chunks(batch, BLOCK, most=1000) == [[1], [3], [0, 2], [4]]


def test_a_group_gathers_no_more_than_it_may() -> None:
    rng = random.Random(1)
    batch = batch_of(*((rng.randrange(300), 1) for _ in range(200)))
    groups = _group_chunks(batch, BLOCK, most=1000)
    assert sorted(chunk for group in groups for chunk in group) == list(range(200))
    for group in groups:
        widest = max(int(batch.starts[chunk]) // BLOCK + 1 for chunk in group) * BLOCK
        assert widest * len(group) <= 1000


def test_a_sequence_that_fills_the_bound_is_a_group_by_itself() -> None:
    assert _group_chunks(batch_of((79, 1), (79, 1)), BLOCK, most=80) == [[0], [1]]


def test_sequences_that_share_a_prefix_gather_no_more_than_is_kept_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve sequences over the same blocks have five times the pool's tokens together."""
    gathered: list[int] = []
    real = PagedAttention._gather

    def gather(self: PagedAttention, layer: int, part: int, group: Any) -> Any:
        gathered.append(group.n * group.length)
        return real(self, layer, part, group)

    monkeypatch.setattr(PagedAttention, "_gather", gather)
    directory, model = checkpoint("qwen2")
    executor = loaded(directory, num_blocks=48, block_size=BLOCK, options={"kernels": "torch"})
    driver = Driver(executor)
    prompt = random.Random(3).choices(range(VOCAB), k=160)
    first = driver.add(prompt)
    driver.finish([first], 1)
    others = [driver.add(prompt) for _ in range(12)]
    for each in others:
        driver.share(first, each, 152)
    driver.finish(others, 6, chunk=1)
    executor.close()
    assert sum(each.num_tokens for each in others) > 5 * 48 * BLOCK
    assert max(gathered) <= GATHERED * 48 * BLOCK
    expected = oracle_generate(model, prompt, 6)
    assert all(each.output == expected for each in others)
