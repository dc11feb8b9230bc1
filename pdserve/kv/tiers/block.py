"""Defines a block as the lower tiers know it: its name, its place in a chain, and how it was used.

It has no bytes and no place: the tier that holds it knows those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["TierBlock"]


@dataclass(frozen=True, slots=True)
class TierBlock:
    """One full block of KV, on any tier."""

    hash: bytes
    """Its keyed, chained hash, which names content, model, LoRA and salt."""
    parent: bytes
    """Hash of the block before it; for a chain's first block the root hash."""
    turns: int = 1
    """Most turns that a conversation with this block has had; 1: nobody continued one."""
    tokens: int = 0
    """Length of the prefix that ends with this block, in tokens; 0: not known."""
    pin_until: Seconds = 0.0
    """Time before which eviction does not take it, on the tier's clock; 0: not pinned."""
    root: bytes = b""
    """The chain's root hash, by which all blocks of a tenant are found; empty: not known."""
