"""Defines events of a worker's KV pool, for routers that index which blocks are where.

Engines send full block hashes to their node (`KvEvent`); the node sends short ones to routers.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Tier = Literal["device", "host", "disk", "remote"]


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Blocks became reusable: each holds `block_size` tokens and continues the one before it."""

    hashes: list[bytes]
    parent: bytes
    """Hash of the block before the first one; the chain's root hash for a first block."""
    tier: Tier = "device"


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Blocks can no longer be reused."""

    hashes: list[bytes]
    tier: Tier = "device"


class PoolCleared(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Every block of the tier is gone."""

    tier: Tier = "device"


KvEvent = BlockStored | BlockRemoved | PoolCleared


KV = "kv"
"""Topic of a worker, a log: the blocks that can be reused there, by short hash
(`blocks.hashing.short_hashes`). An event is a list of `HashesChange`, in order; a piece of a
snapshot is a list of `HashesStored`, parents before their children. Only real changes are
published: no hash is stored twice in a tier, and none is removed that is not there."""

SHORT_HASH_BYTES: Final = 8
"""Bytes of a short block hash on the wire."""

TIERS: Final[tuple[Tier, ...]] = ("device", "host", "disk", "remote")
"""Storage tiers; on the wire a tier is its index here."""

TierNumber = Annotated[int, Meta(ge=0, le=3)]
ShortHash = Annotated[bytes, Meta(min_length=SHORT_HASH_BYTES, max_length=SHORT_HASH_BYTES)]


class HashesStored(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`BlockStored` with short hashes: a run of one chain."""

    tier: TierNumber
    parent: ShortHash
    """Short hash of the block before the first one; for a chain's first block the root hash, which
    is no block."""
    names: bytes
    """Short hashes, 8 bytes each."""


class HashesRemoved(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`BlockRemoved` with short hashes."""

    tier: TierNumber
    names: bytes


class HashesCleared(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`PoolCleared` of a tier."""

    tier: TierNumber


HashesChange = HashesStored | HashesRemoved | HashesCleared


def xor_hashes(names: bytes) -> int:
    """XOR of all 8-byte hashes, as a little-endian number. Folds the bytes in halves, so that the
    interpreter's long integers do the work."""
    count = len(names) // SHORT_HASH_BYTES
    folded = int.from_bytes(names, "little")
    while count > 1:
        half = (count + 1) // 2
        bits = half * 8 * SHORT_HASH_BYTES
        folded = (folded >> bits) ^ (folded & ((1 << bits) - 1))
        count = half
    return folded


_SPREAD: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd numbers: the same name in two tiers must not cancel out."""


class PoolDigest:
    """A 64-bit digest of the set of (tier, hash), kept alike at both ends of the topic.

    Short hashes are the output of a keyed hash, so the XOR of a tier's hashes is a hash of their
    set. It does not depend on order.
    """

    __slots__ = ("_xors",)

    def __init__(self) -> None:
        self._xors = [0] * len(TIERS)

    def change(self, tier: int, names: bytes) -> None:
        """Records that hashes were added or removed."""
        self._xors[tier] ^= xor_hashes(names)

    def clear(self, tier: int) -> None:
        """Records that the tier is empty."""
        self._xors[tier] = 0

    def value(self) -> int:
        total = 0
        for xor, spread in zip(self._xors, _SPREAD, strict=True):
            total ^= xor * spread
        return total & 0xFFFF_FFFF_FFFF_FFFF
