"""Tokens that a request itself rules out: all but the allowed ones, and the ends of bad words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch

    from pdserve.engine.sequence import Sequence


def ban(logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Minus infinity where row i of `logits` `[n, vocab]`, which continues `sequences[i]`, may not
    go; in place."""
