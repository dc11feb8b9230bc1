"""Forgets reusable blocks on the device and on the tiers below it, by an operator's order. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.engine_core.tiers.ownership import owned
from pdserve.kv.tiers.block import TierBlock
from pdserve.messages.engine import KvDropped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdserve.engine_core.scheduler.block_hasher import BlockHasher
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import DropKv
    from pdserve.messages.kv_events import Tier

__all__ = ["LowerBlocks", "drop_kv"]


class LowerBlocks(Protocol):
    """The tiers below the device."""

    def blocks(self) -> Iterable[TierBlock]:
        """Every block on every tier, also those that are on their way. O(all)."""
        ...

    def drop(
        self, hashes: Collection[bytes] | None, older: Seconds, now: Seconds
    ) -> dict[Tier, int]:
        """Forget these blocks, or all; with `older` only those unused for so long. Returns their
        numbers by tier."""
        ...


def drop_kv(
    order: DropKv,
    pool: BlockPool,
    names: BlockHasher | None,
    loras: Sequence[str],
    lower: LowerBlocks | None,
    now: Seconds,
) -> KvDropped:
    """Follow an order. Takes time in proportion to all blocks.

    Args: `loras` are the ids of the adapters that are served; `names` None: nothing is reused.
    """
    hashes = None
    if order.owners is not None:
        below = [] if lower is None else lower.blocks()
        on_device = (TierBlock(name, parent) for name, parent in pool.names().items())
        hashes = owned([*on_device, *below], _names_of(order.owners, names, loras))
    gone: dict[Tier, int] = {}
    if not order.older:
        # First: what is gone here is not copied down any more.
        gone["device"] = pool.clear() if hashes is None else pool.drop(hashes)
    if lower is not None:
        gone |= lower.drop(hashes, order.older, now)
    return KvDropped(order.number, gone)


def _names_of(owners: Sequence[str], names: BlockHasher | None, loras: Sequence[str]) -> set[bytes]:
    """Marks of the owners, and the roots of their chains as far as these can be known: a tenant's
    requests may have salts of their own, which only the marks tell."""
    if names is None:
        return set()
    salts = [salt for owner in owners for salt in (owner, f"{owner}\0")]
    roots = {names.root(salt, lora) for salt in salts for lora in ("", *loras)}
    return roots | {names.owner_mark(owner) for owner in owners}
