"""One worker's pool in the index, as its log tells it: all tiers, in one slot of the tree.

A snapshot comes in under a slot that nobody sees, and takes the place of the one in use at once.
The digest is of what was said, not of what the tree holds, since a full tree refuses blocks; what
was refused is asked for again when there is room: then the digest is a wrong one on purpose, the
reader finds that the states differ, and a snapshot follows.

A feed whose worker is gone takes everything and does nothing. Made by the index; see
`runtime.topics.reader.LogTarget` for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.messages.kv import NAME_BYTES, NamesChange, NamesRemoved, NamesStored, PoolDigest
from pdserve.router.index.tree import DEVICE
from pdserve.wire.codec import decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.router.bookings import Life
    from pdserve.router.index.routed import Memory
    from pdserve.router.index.slots import Slots
    from pdserve.router.index.tree import Tree

__all__ = ["Feed"]

_decode_event: Final[Callable[[bytes], list[NamesChange]]] = decoder(list[NamesChange])
_decode_piece: Final[Callable[[bytes], list[NamesStored]]] = decoder(list[NamesStored])


class _Copy:
    """What one slot holds."""

    __slots__ = ("digest", "missing", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.digest = PoolDigest()
        self.missing = 0
        """Blocks that a full tree refused, of those that are there now; never too few."""


class Feed:
    """See above."""

    def __init__(
        self,
        tree: Tree,
        slots: Slots,
        life: Life,
        predicted: Memory,
        *,
        room: Callable[[], int],
        on_lower: Callable[[], None],
    ) -> None:
        """`predicted` hears what the worker removes; `room` says how many blocks the tree would
        still take; `on_lower` hears of every block that is not on the device."""
        self.life = life
        self.open = True
        self.events = 0
        self.stored = 0
        self.removed = 0
        """Blocks, ever, by events and snapshots."""
        self._tree = tree
        self._slots = slots
        self._predicted = predicted
        self._room = room
        self._on_lower = on_lower
        self._copy = _Copy(slots.take())
        self._shadow: _Copy | None = None
        slots.show(self._copy.slot, life.node)

    # ------------------------------------------------------------------ events

    def apply(self, event: bytes) -> None:
        """See `LogTarget`."""
        if not self.open:
            return
        self.events += 1
        copy = self._copy
        for change in _decode_event(event):
            if isinstance(change, NamesStored):
                self._store(copy, change)
            elif isinstance(change, NamesRemoved):
                self._remove(copy, change)
            else:
                self._clear(copy, change.tier)

    def _store(self, copy: _Copy, change: NamesStored) -> None:
        names, tier = change.names, change.tier
        count = len(names) // NAME_BYTES
        parent = int.from_bytes(change.parent, "little")
        short = count - self._tree.stored(copy.slot, tier, parent, names)
        copy.digest.change(tier, names)
        self.stored += count
        if tier != DEVICE:
            self._on_lower()
        if short and self._room() <= 0:
            copy.missing += short

    def _remove(self, copy: _Copy, change: NamesRemoved) -> None:
        names, tier = change.names, change.tier
        count = len(names) // NAME_BYTES
        if tier == DEVICE:  # before the tree forgets them: runs that it has are passed at once
            self._predicted.removed(self.life, names)
        short = count - self._tree.removed(copy.slot, tier, names)
        copy.digest.change(tier, names)
        copy.missing = max(0, copy.missing - short)
        self.removed += count

    def _clear(self, copy: _Copy, tier: int) -> None:
        self.removed += self._tree.cleared(copy.slot, tier)
        copy.digest.clear(tier)
        if not self._tree.blocks(copy.slot):
            copy.missing = 0
        if tier == DEVICE:
            self._predicted.forget(self.life)

    # ------------------------------------------------------------------ snapshots

    def reset(self) -> None:
        """See `LogTarget`."""
        if self.open:
            self._drop_shadow()
            self._shadow = _Copy(self._slots.take())

    def load(self, chunk: bytes) -> None:
        """See `LogTarget`."""
        if self._shadow is not None:
            for change in _decode_piece(chunk):
                self._store(self._shadow, change)

    def commit(self) -> None:
        """See `LogTarget`."""
        if self._shadow is None:
            return
        old, self._copy, self._shadow = self._copy, self._shadow, None
        self._slots.show(self._copy.slot, self.life.node)
        self._end(old)

    def digest(self) -> int:
        """See `LogTarget`."""
        value = self._copy.digest.value()
        missing = self._copy.missing
        return ~value & 0xFFFF_FFFF_FFFF_FFFF if missing and missing <= self._room() else value

    def _drop_shadow(self) -> None:
        if self._shadow is not None:
            shadow, self._shadow = self._shadow, None
            self._end(shadow)

    def _end(self, copy: _Copy) -> None:
        self._tree.drop(copy.slot)
        self._slots.give(copy.slot)

    # ------------------------------------------------------------------ looking, ending

    @property
    def slot(self) -> int:
        """Of what is in use."""
        return self._copy.slot

    @property
    def missing(self) -> int:
        """Blocks that a full tree refused."""
        return self._copy.missing

    @property
    def slots(self) -> int:
        """In use, for audits."""
        return self.open + (self._shadow is not None)

    def close(self) -> None:
        """The worker is gone. Idempotent; takes time in proportion to its blocks."""
        if self.open:
            self._drop_shadow()
            self._end(self._copy)
            self.open = False
