"""The Triton kernels of the questions. Importing it needs Triton."""

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def noop(out) -> None:  # type: ignore[no-untyped-def]
    """Does nothing, so that only its launch takes time."""


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def read_pieces(source, table, out, start, stride, pieces, PIECE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Reads `pieces` pieces of `PIECE` numbers of each block of the table, one a program, and
    writes their sums. Block `b` begins at `start + b * stride`."""
    program = tl.program_id(0)
    block = tl.load(table + program // pieces).to(tl.int64)
    first = start + block * stride + (program % pieces) * PIECE
    numbers = tl.load(source + first + tl.arange(0, PIECE))
    tl.store(out + program, tl.sum(numbers, 0))
