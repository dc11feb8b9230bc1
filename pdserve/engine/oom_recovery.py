"""Shrinks the KV pool of a core that the kernel's OOM killer has ended. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineCapabilities, EngineSpec

__all__ = ["with_less_kv"]

_LESS: Final = 3 / 4
"""Share of the pool that stays after each OOM kill. Five kills in a row leave a quarter."""


def with_less_kv(spec: EngineSpec, had: EngineCapabilities) -> EngineSpec | None:
    """The spec for the restart of a core that `had` these capabilities; None if its pool cannot be
    smaller.

    The context length stays, since routers and frontends have announced it. The spec of a core
    without a KV pool stays the same.
    """
    if not had.num_blocks:
        return spec
    pool: Bytes = had.num_blocks * had.block_bytes
    one: Bytes = -(-had.max_model_len // had.block_size) * had.block_bytes
    less = max(one, int(pool * _LESS) // had.block_bytes * had.block_bytes)
    if less >= pool:
        return None
    cap = math.ceil(less / spec.kv_share)
    # A float may be a byte short, and that would cost a block.
    cap += int(cap * spec.kv_share) < less
    return replace(spec, kv_cap=cap, max_model_len=had.max_model_len)
