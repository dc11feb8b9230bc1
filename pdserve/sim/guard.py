"""Looks at every write of KV while it happens: may these bytes be read, may those be written?

What a core holds free, cached or for another is nobody's to write to; only blocks of an attempt
that is open, or in quarantine because it was, are. What is read for a peer must be held by
somebody until the reading is over. A write that breaks a rule would mostly do no harm, and be seen
by nobody: here it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.transfer.fake import FakeTransport
from pdserve.transfer.plan import block_bytes

if TYPE_CHECKING:
    from pdserve.engine.core import EngineCore
    from pdserve.ids import Bytes

__all__ = ["Guard", "GuardedTransport"]


class Guard:
    """Of one core, while it lives."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        """None: it has ended, and its memory is nobody's."""

    def read(self, blocks: range) -> None:
        """Their bytes leave for a peer."""
        core = self.core
        for block in blocks if core is not None else ():
            assert core is not None
            assert core.pool.references(block), f"block {block} is read, and nobody holds it"

    def written(self, blocks: range) -> None:
        """Bytes of a peer arrive in them."""
        incoming = None if self.core is None else self.core._incoming
        if incoming is None:
            return
        theirs = {block for fresh in incoming._closing.values() for block in fresh}
        theirs.update(block for one in incoming._attempts.values() for block in one.fresh)
        strange = sorted(set(blocks) - theirs)
        assert not strange, f"a peer writes to blocks {strange}, which are of no attempt"


class GuardedTransport(FakeTransport):
    """A node's fake devices, watched."""

    guard: Guard

    def reading(self, region: int, offset: Bytes, length: Bytes) -> None:
        self.guard.read(self._blocks(region, offset, length))

    def writing(self, region: int, offset: Bytes, length: Bytes) -> None:
        self.guard.written(self._blocks(region, offset, length))

    def _blocks(self, region: int, offset: Bytes, length: Bytes) -> range:
        size = block_bytes(self.regions[region].layout)
        return range(offset // size, (offset + length - 1) // size + 1)
