"""Multiplies rows by a weight matrix, every row in the same way whatever is beside it.

One tile and one order of the inner dimension hold for any number of rows, so a decode step takes
as many operations as one of `ROWS` tokens. The inner dimension is never divided among programs:
their sums would be added in an order that depends on how many there are. Rows may have different
matrices, those of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from pdserve_engines.torch.cuda.invariant.alignment import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["ROWS", "ExpertRows", "linear", "linear_by_expert"]

ROWS: Final = 64
"""Rows of a program: the fewest that Hopper's tensor cores multiply at one time."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of a product, in groups of `ROWS` that have one expert each."""

    places: torch.Tensor
    """`[groups * ROWS]` int32: each row's number among the results; -1: none. A group without rows
    begins with -1."""
    experts: torch.Tensor
    """`[groups]` int32."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[T, K]` by `[N, K]` to `[T, N]`: summed in float32, with the bias, and rounded once."""
    out = x.new_empty((len(x), len(weight)))
    if len(x):
        _launch(x, weight, bias, out, None, 1)
    return out


def linear_by_expert(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routed: ExpertRows,
    per_token: int,
) -> torch.Tensor:
    """`[T, K]` by `[experts, N, K]` to `[T * per_token, N]`: result i is row `i // per_token` by
    the matrix of its expert, plus that expert's row of `bias`, `[experts, N]`."""
    out = x.new_empty((len(x) * per_token, weight.shape[1]))
    if len(x):
        _launch(x, weight, bias, out, routed, per_token)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routed: ExpertRows | None,
    per_token: int,
) -> None:
    columns, depth = weight.shape[-2:]
    assert weight.is_contiguous()
    sizes = _sizes(x.itemsize, depth)
    row_tiles = triton.cdiv(len(out), ROWS) if routed is None else len(routed.experts)
    _linear_kernel[(row_tiles * triton.cdiv(columns, sizes["COLUMNS"]),)](
        aligned(x),
        weight,
        weight if bias is None else bias,
        out,
        out if routed is None else routed.places,
        out if routed is None else routed.experts,
        len(out),
        columns,
        depth,
        per_token,
        BIASED=bias is not None,
        ROUTED=routed is not None,
        WHOLE=depth % sizes["DEPTH"] == 0,
        ROWS=ROWS,
        **sizes,
    )


def _sizes(itemsize: int, depth: int) -> Mapping[str, int]:
    """Sizes of a program. They depend on the dtype and the matrix alone. `num_stages` tiles of both
    factors lie in shared memory, of which the smallest GPU gives a program 99 KiB."""
    # Rows that begin anywhere are loaded number by number, each with an address in a register.
    warps = 8 if depth % 16 else 4
    if itemsize == 4:
        # Without tensor cores every thread multiplies by itself, from registers.
        return {"COLUMNS": 32, "DEPTH": 32, "num_warps": warps, "num_stages": 3}
    return {"COLUMNS": 64, "DEPTH": 64, "num_warps": warps, "num_stages": 4}


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    per_token: tl.tensor,
    BIASED: tl.constexpr,
    ROUTED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    # Programs next to each other read the same columns of the weights.
    row_tiles = tl.num_programs(0) // tl.cdiv(columns, COLUMNS)
    row_tile = tl.program_id(0) % row_tiles
    column = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    place = row_tile * ROWS + tl.arange(0, ROWS)
    wanted = column.to(tl.int64)
    if ROUTED:
        if tl.load(places + row_tile * ROWS) < 0:
            return
        place = tl.load(places + place)
        wanted += tl.load(experts + row_tile).to(tl.int64) * columns
    used = (place >= 0) & (place < rows)
    inside = column < columns
    inner = tl.arange(0, DEPTH)
    left = x + (place // per_token).to(tl.int64)[:, None] * depth + inner[None, :]
    right = weight + wanted[None, :] * depth + inner[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        row_mask = used[:, None]
        column_mask = inside[None, :]
        if not WHOLE:
            known = first + inner < depth
            row_mask = row_mask & known[None, :]
            column_mask = column_mask & known[:, None]
        values = tl.load(left + first, mask=row_mask, other=0.0)
        weights = tl.load(right + first, mask=column_mask, other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + wanted, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + place.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])
