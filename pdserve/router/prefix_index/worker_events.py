"""Applies one worker's KV events to the prefix index: all tiers, in one slot of the tree.

A snapshot is loaded under a hidden slot and then replaces the visible one at once. The digest
covers what the worker reported, not what the tree holds, since a full tree refuses blocks. When
there is room again, the digest is made wrong on purpose: the reader then finds that the states
differ and asks for a snapshot. After `close` it ignores everything. Made by the index; the
interface is `runtime.topics.reader.LogTarget`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.messages.kv_events import (
    SHORT_HASH_BYTES,
    HashesChange,
    HashesRemoved,
    HashesStored,
    PoolDigest,
)
from pdserve.router.prefix_index.radix_tree import DEVICE
from pdserve.wire.codec import decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeLife
    from pdserve.router.prefix_index.radix_tree import Tree
    from pdserve.router.prefix_index.recent_routes import RecentRoutes
    from pdserve.router.prefix_index.worker_slots import WorkerSlots

__all__ = ["WorkerEventFeed"]

_decode_event: Final[Callable[[bytes], list[HashesChange]]] = decoder(list[HashesChange])
_decode_piece: Final[Callable[[bytes], list[HashesStored]]] = decoder(list[HashesStored])


class _Copy:
    """The content of one slot."""

    __slots__ = ("digest", "missing", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.digest = PoolDigest()
        self.missing = 0
        """Present blocks that a full tree refused; an upper bound."""


class WorkerEventFeed:
    """Feeds one worker's KV events into the tree (a `LogTarget`)."""

    def __init__(
        self,
        tree: Tree,
        slots: WorkerSlots,
        life: NodeLife,
        predicted: RecentRoutes,
        *,
        room: Callable[[], int],
        on_lower: Callable[[], None],
    ) -> None:
        """Args: `predicted` gets the blocks that the worker removes. `room` gives the blocks that
        the tree would still take. `on_lower` is called for every block below the device tier.
        """
        self.life = life
        self.open = True
        self.events = 0
        self.stored = 0
        self.removed = 0
        """Blocks removed by events and snapshots, in total."""
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
        """Applies one event to the state in use."""
        if not self.open:
            return
        self.events += 1
        copy = self._copy
        for change in _decode_event(event):
            if isinstance(change, HashesStored):
                self._store(copy, change)
            elif isinstance(change, HashesRemoved):
                self._remove(copy, change)
            else:
                self._clear(copy, change.tier)

    def _store(self, copy: _Copy, change: HashesStored) -> None:
        names, tier = change.names, change.tier
        count = len(names) // SHORT_HASH_BYTES
        parent = int.from_bytes(change.parent, "little")
        short = count - self._tree.stored(copy.slot, tier, parent, names)
        copy.digest.change(tier, names)
        self.stored += count
        if tier != DEVICE:
            self._on_lower()
        if short and self._room() <= 0:
            copy.missing += short

    def _remove(self, copy: _Copy, change: HashesRemoved) -> None:
        names, tier = change.names, change.tier
        count = len(names) // SHORT_HASH_BYTES
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
        """Begins a new state under a hidden slot, in place of any begun before."""
        if self.open:
            self._drop_shadow()
            self._shadow = _Copy(self._slots.take())

    def load(self, chunk: bytes) -> None:
        """Loads one chunk of a snapshot beside the state in use."""
        if self._shadow is not None:
            for change in _decode_piece(chunk):
                self._store(self._shadow, change)

    def commit(self) -> None:
        """Makes the loaded snapshot the state in use."""
        if self._shadow is None:
            return
        old, self._copy, self._shadow = self._copy, self._shadow, None
        self._slots.show(self._copy.slot, self.life.node)
        self._end(old)

    def digest(self) -> int:
        """Digest of the reported state; wrong on purpose when a snapshot is wanted."""
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
        """The slot in use."""
        return self._copy.slot

    @property
    def missing(self) -> int:
        """Blocks that a full tree refused."""
        return self._copy.missing

    @property
    def slots(self) -> int:
        """Slots in use, for audits."""
        return self.open + (self._shadow is not None)

    def close(self) -> None:
        """Removes the worker's blocks. Idempotent; takes time in proportion to them."""
        if self.open:
            self._drop_shadow()
            self._end(self._copy)
            self.open = False
