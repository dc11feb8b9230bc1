"""How chunks are put together: what one group gathers fits into what is kept free for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.models import attention
from pdserve_engines.torch.models.attention import (
    GATHERED,
    PagedAttention,
    _bias,
    _group_chunks,
)
from pdserve_engines.torch.models.forward_batch import ForwardBatch
from tests.engines.torch.checkpoints import VOCAB, checkpoint, oracle_generate
from tests.engines.torch.driver import Driver, loaded

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

    def gather(self: PagedAttention, layer: int, group: Any) -> Any:
        gathered.append(group.n * group.length)
        return real(self, layer, group)

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


@pytest.mark.parametrize("name", ["llama", "mistral_windowed", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("chunk", [7, 40])
@pytest.mark.filterwarnings("ignore:.*")  # the CPU has no such kernel, and torch says so
def test_causal_chunks_without_masks_give_the_same_tokens(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes this way in half precision: whole prompts, and chunks behind computed tokens."""
    causal: list[tuple[int, int]] = []
    real = PagedAttention._attend_causal

    def attend(self: PagedAttention, group: Any, *tensors: torch.Tensor) -> Any:
        causal.append((group.count, group.length))
        return real(self, group, *tensors)

    monkeypatch.setattr(attention, "_skips_hidden_keys", lambda device, dtype: True)
    monkeypatch.setattr(PagedAttention, "_attend_causal", attend)
    directory, model = checkpoint(name)
    executor = loaded(directory, block_size=BLOCK, options={"kernels": "torch"})
    driver = Driver(executor)
    prompts = [random.Random(length).choices(range(VOCAB), k=length) for length in (9, 40)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.finish(sequences, 6, chunk=chunk)
    executor.close()
    assert [each.output for each in sequences] == [
        oracle_generate(model, prompt, 6) for prompt in prompts
    ]
    assert causal
    assert chunk == 40 or any(count < length for count, length in causal)


def test_a_bias_does_what_its_mask_does() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(3, 2, rows, 16, generator=generator) for rows in (4, 21, 21)
    )
    mask = (torch.arange(21) <= torch.tensor([5, 20, 13])[:, None])[:, None, None]
    bias = _bias(mask, torch.float32)
    assert all(stride % 16 == 0 for stride in bias.stride()[:-1])
    attend = functional.scaled_dot_product_attention
    assert torch.equal(
        attend(queries, keys, values, attn_mask=mask), attend(queries, keys, values, attn_mask=bias)
    )


def test_only_blocks_that_stay_unfilled_are_cleared() -> None:
    """An earlier owner's numbers in a filled block are overwritten before they are read."""
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK, options={"kernels": "torch"})
    assert executor.pool is not None
    pool = executor.pool
    pool.tensor.fill_(torch.nan)
    counts = (11, 1)
    starts = np.array([8, 16], np.int32)
    batch = ForwardBatch(
        tokens=np.zeros(12, np.int32),
        positions=np.array([*range(8, 19), 16], np.int32),
        offsets=np.array([0, 11, 12], np.int32),
        starts=starts,
        tables=np.array([1, 2, 3, 4, 5, 6], np.int32),
        table_offsets=np.array([0, 3, 6], np.int32),
        rows=np.array([10, 11], np.int32),
    )
    PagedAttention(batch, pool, groups=2)
    cleared = [block for block in range(8) if not pool.tensor[block].isnan().any()]
    executor.close()
    assert list(np.diff(batch.offsets)) == list(counts)
    assert cleared == [3, 6]
