"""Keeps Triton from compiling a kernel anew for the place of a batch in memory.

It compiles other code for a pointer at a multiple of 16 bytes than for others, and code for other
pointers might sum in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["aligned"]

_BYTES: Final = 16


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and at a multiple of 16 bytes: a copy if it is not there already."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _BYTES else x
