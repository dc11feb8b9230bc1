"""The 32 bits that a notification carries: kind, slot, the slot's generation, part.

As RDMA's immediate data they are all that tells the receiver what has arrived. Of the generation
only four bits travel; slots are reused in turn, so that a number comes back late.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["IMM_GENERATIONS", "ImmData", "ImmKind"]

IMM_GENERATIONS = 1 << 4


class ImmKind(IntEnum):
    """What is notified; new ones are appended."""

    PART = 1


class ImmData(NamedTuple):
    """One notification."""

    kind: int
    slot: int
    generation: int
    part: int

    def pack(self) -> int:
        """As a number; its byte order is the device's matter."""
        return (
            self.kind << 28 | self.slot << 16 | self.generation % IMM_GENERATIONS << 12 | self.part
        )

    @classmethod
    def unpack(cls, word: int) -> ImmData:
        return cls(word >> 28, word >> 16 & 0xFFF, word >> 12 & 0xF, word & 0xFFF)
