"""Packs what a notification says into 32 bits of immediate data: kind, slot, generation, part.

They are all that the receiver learns of what has arrived. Only four bits of the slot's generation
travel; slots are reused in turn, so a generation repeats only after a long time.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["IMM_GENERATIONS", "ImmData", "ImmKind"]

IMM_GENERATIONS = 1 << 4


class ImmKind(IntEnum):
    """What is notified; new kinds are appended."""

    PART = 1


class ImmData(NamedTuple):
    """One notification."""

    kind: int
    slot: int
    generation: int
    part: int

    def pack(self) -> int:
        """The 32-bit number, in host byte order."""
        return (
            self.kind << 28 | self.slot << 16 | self.generation % IMM_GENERATIONS << 12 | self.part
        )

    @classmethod
    def unpack(cls, word: int) -> ImmData:
        return cls(word >> 28, word >> 16 & 0xFFF, word >> 12 & 0xF, word & 0xFFF)
