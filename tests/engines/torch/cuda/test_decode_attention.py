"""Attention over random pools, against float64. What the sequences do not own is NaN."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve_engines.torch.cuda import decode_attention, decode_plan
from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules, attend_decodes
from pdserve_engines.torch.cuda.decode_plan import SEGMENT, list_items
from tests.engines.torch.cuda.pools import Paged, Shape, attention, far_pool, paged

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def inputs_of(
    made: Paged,
    rows: list[int],
    device: torch.device,
    window: int | None,
    padding: int = 0,
    programs: int | None = None,
) -> DecodeInputs:
    """`padding`: room for so many work items after the others; the device has not to look there."""
    lengths = [len(keys) for keys in made.keys]
    listed = list_items(np.array(lengths, np.int32), window)
    items = np.concatenate([listed.items, np.zeros((padding, 2), np.int32)])
    offsets = np.cumsum([0, *map(len, made.tables)])[:-1]
    flat = [block for table in made.tables for block in table]

    def upload(values: Any) -> torch.Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32, device=device)

    return DecodeInputs(
        rows=upload(rows),
        lengths=upload(lengths),
        tables=upload(flat),
        table_offsets=upload(offsets),
        items=upload(items),
        first_items=upload(listed.first_items),
        count=upload(listed.count),
        splits=listed.splits or programs is not None,
        programs=programs,
    )


def attend(
    made: Paged,
    shape: Shape,
    rules: ScoreRules,
    seed: int,
    padding: int = 0,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute for each sequence, and the oracle's."""
    device, dtype, count = made.pool.device, made.keys[0].dtype, len(made.keys)
    generator = torch.Generator().manual_seed(seed + 1)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(count + 3, width, generator=generator).to(device=device, dtype=dtype)
    rows = random.Random(seed).sample(range(count + 3), count)
    untouched = sorted(set(range(count + 3)) - set(rows))
    out = torch.full((count + 3, shape.heads * shape.head_dim), torch.nan, device=device).to(dtype)
    inputs = inputs_of(made, rows, device, rules.window, padding, programs)
    attend_decodes(qkv, out, made.pool, inputs, rules)
    assert out[untouched].isnan().all()
    queries = qkv.view(count + 3, -1, shape.head_dim)[rows, : shape.heads]
    expected = [
        attention(query, keys, values, rules.scale, rules.window, rules.cap).flatten()
        for query, keys, values in zip(queries, made.keys, made.values, strict=True)
    ]
    return out[rows].double(), torch.stack(expected)


def check(made: Paged, shape: Shape, rules: ScoreRules, seed: int = 0) -> None:
    found, expected = attend(made, shape, rules, seed)
    assert (found - expected).abs().max() < TOLERANCE[made.keys[0].dtype]


LENGTHS = [1, 15, 16, 17, 63, 65, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 70]


def _shapes() -> Iterator[object]:
    """Head sizes and groups; some in every run, the others as long tests."""
    always = {(64, 4, 2), (80, 2, 1), (128, 4, 1), (256, 1, 1)}
    for head_dim in (16, 64, 80, 96, 128, 256):
        for heads, kv_heads in ((1, 1), (2, 1), (4, 2), (4, 1), (7, 1), (17, 1)):
            marks = [] if (head_dim, heads, kv_heads) in always else [pytest.mark.long]
            yield pytest.param(Shape(heads, kv_heads, head_dim), marks=marks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", list(_shapes()))
def test_every_head_size_and_group(device: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    made = paged(shape, [1, 70, SEGMENT + 5], device, dtype, shape.heads)
    check(made, shape, ScoreRules(shape.head_dim**-0.5))


@pytest.mark.parametrize("block_size", [16, 24, 32, 128])
def test_every_length_and_block_size(device: torch.device, block_size: int) -> None:
    shape = Shape(2, 1, 16, block_size)
    made = paged(shape, LENGTHS, device, torch.float32, block_size)
    check(made, shape, ScoreRules(0.25), seed=block_size)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, SEGMENT, SEGMENT + 40, 5000])
def test_every_window(device: torch.device, window: int) -> None:
    """What is before it may be NaN: its blocks may have other owners by then."""
    shape = Shape(2, 1, 16)
    made = paged(shape, [1, 64, 65, 100, SEGMENT + 64, 2 * SEGMENT + 1], device, torch.float32, 1)
    for keys, table in zip(made.keys, made.tables, strict=True):
        for position in range(max(0, len(keys) - window)):
            made.pool[table[position // 16], :, :, position % 16] = torch.nan
    check(made, shape, ScoreRules(0.25, window))


def test_a_cap_bounds_scores(device: torch.device) -> None:
    shape = Shape(2, 1, 16)
    made = paged(shape, [40, SEGMENT + 9], device, torch.float32, 2)
    check(made, shape, ScoreRules(2.0, cap=3.0))


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    shape = Shape(2, 1, 16)
    made = paged(shape, [40, SEGMENT + 9], device, torch.float32, 3)
    check(made, shape, ScoreRules(100.0))


def test_blocks_may_lie_beyond_32_bits(device: torch.device) -> None:
    shape = Shape(2, 2, 16)
    made = paged(shape, [63], device, torch.float16, 8, far_pool(shape, device))
    check(made, shape, ScoreRules(0.25))


def test_an_fp8_pool_is_read_with_its_scales(device: torch.device) -> None:
    shape, scales = Shape(4, 2, 16), (0.5, 2.0)
    made = paged(shape, [5, SEGMENT + 9], device, torch.float16, 9)
    stored = made.pool / torch.tensor(scales, device=device).view(1, 2, 1, 1, 1)
    stored = stored.to(torch.float8_e4m3fn)
    read = stored.half() * torch.tensor(scales, device=device).view(1, 2, 1, 1, 1).half()
    exact = Paged(read.contiguous(), made.tables, [], [])
    for table, keys in zip(made.tables, made.keys, strict=True):
        whole = exact.pool[table].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, : len(keys)]
        exact.keys.append(whole[0])
        exact.values.append(whole[1])
    expected, _ = attend(exact, shape, ScoreRules(0.25), 9)
    made.pool = stored
    found, _ = attend(made, shape, ScoreRules(0.25, kv_scales=scales), 9)
    assert (found - expected).abs().max() < 3e-3


@pytest.mark.parametrize("programs", [1, 3, 4, 7, 40])
def test_a_fixed_number_of_programs_computes_any_number_of_items(
    device: torch.device, programs: int
) -> None:
    """As in a graph: there is room for more items than there are, whose numbers mean nothing."""
    shape = Shape(2, 2, 16)
    made = paged(shape, [5, SEGMENT + 9, 1, 2 * SEGMENT], device, torch.float32, 4)
    found, expected = attend(made, shape, ScoreRules(0.25), 0, 3, programs)
    assert (found - expected).abs().max() < TOLERANCE[torch.float32]
    one_each, _ = attend(made, shape, ScoreRules(0.25), 0)
    assert torch.equal(found, one_each)


def test_more_segments_are_merged_than_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEGMENT", 64)
    monkeypatch.setattr(decode_attention, "SEGMENT", 64)
    shape = Shape(2, 1, 16)
    made = paged(shape, [64 * 37 + 5, 64 * 16, 64 * 17], device, torch.float32, 7)
    check(made, shape, ScoreRules(2.0))


def test_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    """A sequence's keys are summed in the same order in any company."""
    shape = Shape(4, 2, 16)
    lengths = [3, 2 * SEGMENT + 70, 90]
    whole, _ = attend(paged(shape, lengths, device, torch.float32, 5), shape, ScoreRules(0.25), 5)
    made = paged(shape, lengths, device, torch.float32, 5)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rows = random.Random(5).sample(range(6), 3)
    generator = torch.Generator().manual_seed(6)
    qkv = torch.randn(6, width, generator=generator).to(device)
    for index, row in enumerate(rows):
        alone = Paged(made.pool, [made.tables[index]], [made.keys[index]], [made.values[index]])
        out = torch.empty(1, shape.heads * shape.head_dim, device=device)
        inputs = inputs_of(alone, [0], device, None)
        attend_decodes(qkv[row : row + 1], out, made.pool, inputs, ScoreRules(0.25))
        assert torch.equal(out[0].double(), whole[index])
