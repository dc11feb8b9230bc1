"""Describes a block that is stored on a lower tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["TierBlock"]


@dataclass(frozen=True, slots=True)
class TierBlock:
    """One full block: its name, its place in its chain, and what is known of its use."""

    hash: bytes
    parent: bytes
    """Hash of the block before it; for a chain's first block the root."""
    turns: int = 1
    """Turns of the conversation that the block belongs to, as far as they were seen here."""
    tokens: int = 0
    pin_until: Seconds = 0.0
    """Time until which a tier should keep it; 0: no wish."""
    root: bytes = b""
    """The chain's root hash, by which all blocks of a tenant are found; empty: not known."""
