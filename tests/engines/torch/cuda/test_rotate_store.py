"""Turned queries, and the keys and values in the pool, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.cuda.rotate_store import HeadNorms, rotate_store
from tests.engines.torch.cuda.pools import Shape, empty_pool, far_pool

EPS = 1e-3
TOKENS = 5
POSITIONS = [0, 17, 18, 31, 90]
"""In blocks of 16 tokens: places 0, 1, 2, 15 and 10."""
BLOCKS = [4, 2, 2, 0, 5]


def expected_heads(
    heads: torch.Tensor, shape: Shape, table: torch.Tensor | None, norms: HeadNorms | None
) -> torch.Tensor:
    """`[T, heads + 2 * kv_heads, head_dim]` as they are used, in float32."""
    dtype, split = heads.dtype, shape.heads + shape.kv_heads
    turned = heads[:, :split].float()
    if norms is not None:
        size = (shape.head_dim,)
        parts = (
            functional.rms_norm(turned[:, : shape.heads], size, norms.query.float(), EPS),
            functional.rms_norm(turned[:, shape.heads :], size, norms.key.float(), EPS),
        )
        turned = torch.cat(parts, dim=1).to(dtype).float()
    if table is not None:
        cosine, sine = table[POSITIONS].unsqueeze(1).unbind(2)
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return torch.cat((turned, heads[:, split:].float()), dim=1)


def made(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Random heads, a rope table, norms, and the index tensors."""
    generator = torch.Generator().manual_seed(shape.head_dim)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    qkv = draw(TOKENS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim).to(dtype)
    norms = HeadNorms(draw(shape.head_dim).to(dtype), draw(shape.head_dim).to(dtype), EPS)
    table = draw(100, 2, shape.head_dim // 2)
    places = (torch.tensor(each, dtype=torch.int32, device=device) for each in (POSITIONS, BLOCKS))
    return qkv, norms, table, *places


SHAPES = [Shape(2, 1, 16), Shape(6, 2, 64), Shape(7, 7, 20), Shape(9, 3, 80), Shape(2, 2, 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_turn_and_keys_and_values_are_stored(
    device: torch.device, shape: Shape, dtype: torch.dtype, normed: bool, turns: bool
) -> None:
    qkv, norms, table, positions, blocks = made(shape, device, dtype)
    pool = empty_pool(shape, 7, device, dtype)
    used = norms if normed else None
    heads = qkv.view(TOKENS, -1, shape.head_dim)
    expected = expected_heads(heads.clone(), shape, table if turns else None, used)
    rotate_store(qkv, table if turns else None, positions, blocks, pool, used)
    near = 4e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(
        heads[:, : shape.heads].float(), expected[:, : shape.heads], atol=near, rtol=near
    )
    stored = torch.stack([pool[b, :, :, p % 16] for p, b in zip(POSITIONS, BLOCKS, strict=True)])
    stored = stored.flatten(1, 2).float()
    torch.testing.assert_close(stored, expected[:, shape.heads :], atol=near, rtol=near)
    values = heads[:, shape.heads + shape.kv_heads :]
    assert torch.equal(stored[:, shape.kv_heads :], values.float())
    assert only_written(pool, shape)


def only_written(pool: torch.Tensor, shape: Shape) -> bool:
    """Whether the tokens' places hold numbers and all others, also in the other layer, do not."""
    whole = pool._base
    assert whole is not None
    numbers = ~whole.isnan()
    return int(numbers.sum()) == TOKENS * 2 * shape.kv_heads * shape.head_dim


def test_an_fp8_pool_is_written_with_its_scales(device: torch.device) -> None:
    """With numbers that FP8 has: Triton's interpreter rounds others wrongly."""
    shape, scales = Shape(2, 2, 16), torch.tensor([0.5, 0.25], device=device).view(1, 2, 1, 1)
    qkv, _, _, positions, blocks = made(shape, device, torch.float16)
    pool = empty_pool(shape, 7, device, torch.float16).to(torch.float8_e4m3fn)
    heads = qkv.view(TOKENS, 3, 2, 16)
    heads.copy_(heads.to(torch.float8_e4m3fn))
    expected = (heads[:, 1:] / scales).to(torch.float8_e4m3fn)
    rotate_store(qkv, None, positions, blocks, pool, None, (0.5, 0.25))
    stored = torch.stack([pool[b, :, :, p % 16] for p, b in zip(POSITIONS, BLOCKS, strict=True)])
    assert torch.equal(stored.float(), expected.float())


def test_blocks_may_lie_beyond_32_bits(device: torch.device) -> None:
    shape = Shape(2, 2, 16)
    qkv, _, _, positions, _ = made(shape, device, torch.float16)
    pool = far_pool(shape, device)
    last = torch.full((TOKENS,), 3, dtype=torch.int32, device=device)
    rotate_store(qkv, None, positions, last, pool)
    values = qkv.view(TOKENS, 3, 2, 16)[:, 2]
    assert torch.equal(pool[3, 1][:, [0, 1, 2, 15, 10]].transpose(0, 1), values)


def test_padding_rows_are_not_stored(device: torch.device) -> None:
    shape = SHAPES[0]
    qkv, _, table, positions, _ = made(shape, device, torch.float32)
    whole = empty_pool(shape, 7, device, torch.float32)
    padding = torch.full((TOKENS,), -1, dtype=torch.int32, device=device)
    rotate_store(qkv, table, positions, padding, whole[1:])  # before it lies a block, too
    assert whole.isnan().all()


def test_values_may_be_infinite(device: torch.device) -> None:
    """They are copied, never multiplied by zero."""
    shape = SHAPES[0]
    qkv, norms, table, positions, blocks = made(shape, device, torch.float32)
    qkv.view(TOKENS, -1, 16)[:, -1] = torch.inf
    pool = empty_pool(shape, 7, device, torch.float32)
    rotate_store(qkv, table, positions, blocks, pool, norms)
    assert (pool[BLOCKS, 1, :, [p % 16 for p in POSITIONS]] == torch.inf).all()


def test_no_rows(device: torch.device) -> None:
    shape = SHAPES[0]
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    pool = empty_pool(shape, 1, device, torch.float32)
    rotate_store(torch.empty(0, 64, device=device), None, nothing, nothing, pool)
    assert pool.isnan().all()
