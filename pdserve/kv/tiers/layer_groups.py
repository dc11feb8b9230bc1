"""Divides a model's layers into groups, so that a step may begin before all layers are loaded.

A block lies layer by layer in memory, so the layers of a group are one run of its bytes. More
groups let a step begin sooner, but each costs a copy of its own, and short runs are copied slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["LayerGroups", "most_groups"]

MOST: Final = 4

GROUP_BYTES: Final[Bytes] = 5_000_000
"""Least bytes of a group: about a tenth of a millisecond on a fast bus, well above the cost of a
copy."""

RUN_BYTES: Final[Bytes] = 256 << 10
"""Least bytes of a run: below that, a copy engine is slowed by the number of runs."""


def most_groups(size: Bytes, block_bytes: Bytes, layers: int) -> int:
    """How many groups `size` bytes of blocks are copied in: 1, 2 or 4."""
    groups = MOST
    while groups > 1 and (
        groups > layers or size < groups * GROUP_BYTES or block_bytes < groups * RUN_BYTES
    ):
        groups //= 2
    return groups


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one engine's layers."""

    layers: int
    block_bytes: Bytes
    forced: int = 0
    """This number of groups for every size; 0: as many as `most_groups` says."""

    def count(self, blocks: int) -> int:
        """How many groups this many blocks are copied in."""
        if self.forced:
            return min(self.forced, self.layers)
        return most_groups(blocks * self.block_bytes, self.block_bytes, self.layers)

    def first_layer(self, group: int, groups: int) -> int:
        """First layer of a group; that of the group behind the last one is the number of layers."""
        return group * self.layers // groups

    def span(self, group: int, groups: int) -> tuple[Bytes, Bytes]:
        """Where the bytes of a group begin and end in a block."""
        each = self.block_bytes // self.layers
        return self.first_layer(group, groups) * each, self.first_layer(group + 1, groups) * each
