"""Events of a worker's KV pool, for whoever keeps an index of it."""

from __future__ import annotations

from typing import Literal

import msgspec

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
