"""Checks every KV write of a simulation as it happens: may the source be read, and the target be
written?

A block that a core has free, cached or in use elsewhere must not be written; only blocks of an open
attempt, or in quarantine after one, may be. A block that is read for a peer must be held until the
read ends. Most such errors would do no visible harm in a run, so this guard raises at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.testing.fake_rdma import FakeTransport
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from pdserve.engine_core.core import EngineCore
    from pdserve.ids import Bytes

__all__ = ["GuardedTransport", "MemoryGuard"]


class MemoryGuard:
    """Guards the blocks of one core, while it lives."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        """None if the process has ended."""

    def read(self, blocks: range) -> None:
        """Checks blocks whose bytes are being sent to a peer."""
        core = self.core
        for block in blocks if core is not None else ():
            assert core is not None
            assert core.pool.references(block), f"block {block} is read, and no sequence holds it"

    def written(self, blocks: range) -> None:
        """Checks blocks to which bytes of a peer are being written."""
        incoming = None if self.core is None else self.core._incoming
        if incoming is None:
            return
        theirs = {block for fresh in incoming._closing.values() for block in fresh}
        theirs.update(block for one in incoming._attempts.values() for block in one.fresh)
        if self.core is not None and self.core._puller is not None:
            theirs |= self.core._puller.writable
        strange = sorted(set(blocks) - theirs)
        assert not strange, f"a peer writes to blocks {strange}, which are of no attempt"


class GuardedTransport(FakeTransport):
    """A node's fake devices, checked by a guard."""

    guard: MemoryGuard

    def reading(self, region: int, offset: Bytes, length: Bytes) -> None:
        self.guard.read(self._blocks(region, offset, length))

    def writing(self, region: int, offset: Bytes, length: Bytes) -> None:
        self.guard.written(self._blocks(region, offset, length))

    def _blocks(self, region: int, offset: Bytes, length: Bytes) -> range:
        size = block_bytes(self.regions[region].layout)
        return range(offset // size, (offset + length - 1) // size + 1)
