"""Attention of prompts and decoding sequences by one kernel: against float64, and to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve_engines.torch.cuda.decode_attention import ScoreRules
from pdserve_engines.torch.cuda.invariant import tile_attention
from pdserve_engines.torch.cuda.invariant.tile_attention import (
    TileInputs,
    attend_tiles,
    queries_of,
)
from tests.engines.torch.cuda.pools import Paged, Shape, attention, paged

if TYPE_CHECKING:
    from collections.abc import Iterable

    Tile = tuple[int, int, int]
    """A sequence, the position of its first query, and the number of queries."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
SHAPE = Shape(4, 2, 16)
LENGTHS = [5, 35, 20]
RULES = ScoreRules(0.25)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of keys for few tokens: the interpreter takes seconds for some hundred."""
    whole = tile_attention._sizes
    monkeypatch.setattr(tile_attention, "_sizes", lambda *sizes: {**whole(*sizes), "TILE": 16})


class Prompts:
    """Sequences whose every token has a query."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, lengths: list[int] = LENGTHS
    ) -> None:
        self.shape, self.lengths = shape, lengths
        self.made: Paged = paged(shape, lengths, device, dtype, 3)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        generator = torch.Generator().manual_seed(4)
        self.qkv = [
            torch.randn(length, width, generator=generator).to(device=device, dtype=dtype)
            for length in lengths
        ]

    def attend(self, tiles: list[Tile], rules: ScoreRules = RULES) -> list[torch.Tensor]:
        """The results of these tiles, which are laid end to end."""
        device = self.made.pool.device
        parts = [self.qkv[which][first : first + count] for which, first, count in tiles]
        counts = np.array([count for *_, count in tiles])
        ends = np.array([first for _, first, _ in tiles]) + counts
        offsets = np.cumsum([0, *map(len, self.made.tables)])[[which for which, *_ in tiles]]
        flat = [block for table in self.made.tables for block in table]
        arrays = (np.cumsum(counts) - counts, ends, counts, flat, offsets)
        inputs = TileInputs(
            *(torch.tensor(np.array(each), dtype=torch.int32, device=device) for each in arrays)
        )
        qkv = torch.cat(parts)
        out = torch.full(
            (len(qkv), self.shape.heads * self.shape.head_dim), torch.nan, device=device
        ).to(qkv.dtype)
        attend_tiles(qkv, out, self.made.pool, inputs, rules)
        return list(out.split(counts.tolist()))

    def chunked(self, which: int, sizes: Iterable[int], rules: ScoreRules = RULES) -> torch.Tensor:
        """One sequence in chunks of these sizes in turn, each in tiles of its own."""
        most = queries_of(self.shape.heads, self.shape.kv_heads, self.qkv[0].itemsize)
        tiles: list[Tile] = []
        turn, first = list(sizes), 0
        while first < self.lengths[which]:
            end = min(first + turn[0], self.lengths[which])
            turn = [*turn[1:], turn[0]]
            tiles += [(which, at, min(most, end - at)) for at in range(first, end, most)]
            first = end
        return torch.cat(self.attend(tiles, rules))

    def expected(self, which: int, position: int, rules: ScoreRules) -> torch.Tensor:
        query = self.qkv[which][position].view(-1, self.shape.head_dim)[: self.shape.heads]
        keys, values = self.made.keys[which], self.made.values[which]
        seen = slice(0, position + 1)
        window, cap = rules.window, rules.cap
        return attention(query, keys[seen], values[seen], rules.scale, window, cap).flatten()


def check(prompts: Prompts, rules: ScoreRules = RULES) -> None:
    """All positions of all sequences, in the largest tiles."""
    for which, length in enumerate(prompts.lengths):
        found = prompts.chunked(which, [length], rules).double()
        expected = torch.stack([prompts.expected(which, each, rules) for each in range(length)])
        assert (found - expected).abs().max() < TOLERANCE[prompts.qkv[0].dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SHAPE, marks=pytest.mark.long),
        Shape(7, 1, 24),
        *(
            pytest.param(Shape(heads, kv_heads, dim), marks=pytest.mark.long)
            for dim in (64, 80, 96, 128, 256)
            for heads, kv_heads in ((1, 1), (2, 1), (4, 1), (17, 1))
        ),
    ],
)
def test_every_head_size_and_group(device: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    check(Prompts(shape, device, dtype, [1, 37]), ScoreRules(shape.head_dim**-0.5))


@pytest.mark.parametrize("block_size", [24, 128])
@pytest.mark.usefixtures("short_tiles")
def test_every_block_size(device: torch.device, block_size: int) -> None:
    check(Prompts(Shape(2, 1, 16, block_size), device, torch.float32, [30]))


@pytest.mark.parametrize(
    "window", [17, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 15, 16, 40, 5000))]
)
@pytest.mark.usefixtures("short_tiles")
def test_every_window(device: torch.device, window: int) -> None:
    """A decoding query never reads what is before it: those blocks may have other owners."""
    prompts, rules = Prompts(SHAPE, device, torch.float32, [36]), ScoreRules(0.25, window)
    check(prompts, rules)
    whole = prompts.chunked(0, [36], rules)
    assert torch.equal(prompts.chunked(0, [1], rules), whole)
    for position in range(36 - window):
        prompts.made.pool[prompts.made.tables[0][position // 16], :, :, position % 16] = torch.nan
    (last,) = prompts.attend([(0, 35, 1)], rules)
    assert torch.equal(last[0], whole[35])


def test_a_cap_bounds_scores(device: torch.device) -> None:
    check(Prompts(SHAPE, device, torch.float32, [20]), ScoreRules(2.0, cap=3.0))


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    check(Prompts(SHAPE, device, torch.float32, [20]), ScoreRules(30.0))


def test_an_fp8_pool_is_read_with_its_scales(device: torch.device) -> None:
    prompts, scales = Prompts(SHAPE, device, torch.float16, [20]), (0.5, 2.0)
    factors = torch.tensor(scales, device=device).view(1, 2, 1, 1, 1)
    stored = (prompts.made.pool / factors).to(torch.float8_e4m3fn)
    prompts.made.pool = (stored.half() * factors.half()).contiguous()
    expected = prompts.chunked(0, [20])
    prompts.made.pool = stored
    found = prompts.chunked(0, [20], ScoreRules(0.25, kv_scales=scales))
    assert (found - expected).abs().max() < 3e-3


def check_bits(prompts: Prompts) -> None:
    """Whole prompts, chunks of odd sizes, token by token, and decoding in any company."""
    whole = [prompts.chunked(which, [length]) for which, length in enumerate(prompts.lengths)]
    for sizes in ([7, 1, 13], [1]):
        assert torch.equal(prompts.chunked(1, sizes), whole[1])
    decodes = [(which, length - 1, 1) for which, length in enumerate(prompts.lengths)]
    for company in (decodes[:1], decodes[1:], decodes, [(1, 20, 4), *decodes[::-1]]):
        for (which, first, count), found in zip(company, prompts.attend(company), strict=True):
            assert torch.equal(found, whole[which][first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("short_tiles")
def test_a_query_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    check_bits(Prompts(SHAPE, device, dtype))


@pytest.mark.usefixtures("short_tiles")
def test_keys_that_are_divided_by_length_are_found(device: torch.device) -> None:
    """As decode kernels do that use more programs for a longer sequence: two halves are merged."""

    class Divided(Prompts):
        def attend(self, tiles: list[Tile], rules: ScoreRules = RULES) -> list[torch.Tensor]:
            found = super().attend(tiles, rules)
            for place, (which, first, count) in enumerate(tiles):
                if count == 1 and first > 16:
                    found[place] = self._merged(which, first)[None]
            return found

        def _merged(self, which: int, position: int) -> torch.Tensor:
            half = (position + 1) // 2
            heads, dim = self.shape.heads, self.shape.head_dim
            query = self.qkv[which][position].view(-1, dim)[:heads]
            group = heads // self.shape.kv_heads
            keys, values = (
                part[which][: position + 1].repeat_interleave(group, 1).transpose(0, 1)
                for part in (self.made.keys, self.made.values)
            )
            scores = (query.unsqueeze(1) @ keys.transpose(1, 2)).squeeze(1) * RULES.scale
            parts = []
            for seen in (slice(0, half), slice(half, None)):
                weight = (scores[:, seen] - scores.amax(1, keepdim=True)).exp()
                mixed = (weight.unsqueeze(1) @ values[:, seen]).squeeze(1)
                parts.append((mixed, weight.sum(1, keepdim=True)))
            (first, some), (second, others) = parts
            return ((first + second) / (some + others)).flatten()

    divided = Divided(SHAPE, device, torch.float32)
    (found,) = divided.attend([(1, 34, 1)])
    expected = divided.expected(1, 34, RULES)
    assert (found[0].double() - expected).abs().max() < TOLERANCE[torch.float32], "it is right"
    with pytest.raises(AssertionError):
        check_bits(divided)


def test_a_tile_of_no_keys_gets_zeros(device: torch.device) -> None:
    """As rows of padding in a graph."""
    prompts = Prompts(SHAPE, device, torch.float32, [5])
    places = [torch.tensor([each], dtype=torch.int32, device=device) for each in (0, 0, 1, 0, 0)]
    out = torch.full((1, 64), torch.nan, device=device)
    attend_tiles(
        prompts.qkv[0][:1].contiguous(), out, prompts.made.pool, TileInputs(*places), RULES
    )
    assert not out.any()
