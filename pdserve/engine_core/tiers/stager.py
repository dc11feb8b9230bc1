"""Brings blocks of lower tiers to the device, for a peer that fetches them from this worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.kv_fetch.chains import blocks_up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.tiers.onboarder import Onboarder
    from pdserve.kv.block_pool import BlockPool
    from pdserve.kv.tiers.lower_tiers import LowerTiers

__all__ = ["Stager"]


class Stager:
    """Implements `kv_fetch.ports.StageBlocks`. The onboarder bounds how much comes at once."""

    def __init__(self, pool: BlockPool, tiers: LowerTiers, onboarder: Onboarder) -> None:
        self._pool = pool
        self._tiers = tiers
        self._onboarder = onboarder

    def begin(self, hashes: Sequence[bytes], done: Callable[[], None]) -> int:
        """Begin to bring the leading run of `hashes` that lower tiers have; 0: there is none, or
        no room for it. `done` is called while the blocks are still held."""
        parent = self._tiers.parent(hashes[0])
        if parent is None:
            return 0
        before = blocks_up_to(self._pool, parent)
        names = [name for name in map(self._pool.name, before) if name is not None]
        onboarding = self._onboarder.begin(
            [*names, *hashes],
            before,
            self._onboarder.now,
            0,
            root=parent,
            done=lambda blocks: done(),
            all_local=True,
        )
        return 0 if onboarding is None else onboarding.number

    def cancel(self, number: int) -> None:
        """`done` is not called any more."""
        self._onboarder.drop(number)
