"""Tracks the frames of a host arena: which block each holds, who reads it, which one goes next.

A frame is in exactly one state:

    free      holds nothing
    filling   a copy or a read writes to it; its owner commits or abandons it
    valid     holds a block that can be found by its hash; may be claimed by readers
    leaving   its block is no longer found, but a reader has not released it yet

A valid frame is evictable unless it is claimed or pinned. Frames whose block the device has too
(*shadows*) go first, because nothing is lost with them; the others go in the eviction order.
The caller evicts: it may want to write a victim to disk before.

Pure and not thread-safe: its owner is an engine core, which passes the time. It knows no bytes,
jobs or disks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.kv.tiers.change_log import ChangeLog
from pdserve.kv.tiers.eviction import EvictionQueue

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.eviction import EvictionKey, EvictionOrder
    from pdserve.messages.kv_events import KvEvent

__all__ = ["FrameCounts", "HostIndex"]


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """How many frames are in each state."""

    free: int
    filling: int
    valid: int
    claimed: int
    """Those of the valid ones that somebody reads."""
    leaving: int = 0


@dataclass(slots=True)
class _Resident:
    """A frame with its block."""

    frame: int
    block: TierBlock
    last_use: Seconds
    number: int
    """Grows with every arrival and use: the tie-break among equal scores."""
    turns: int
    """Most turns so far; `block` says how many there were when it arrived."""
    claims: int = 0
    shadow: bool = False


class HostIndex:
    """Frames 0 to `frames` - 1 of one arena, and the blocks in them.

    Every operation takes O(log n). Misuse (a frame that is not filling, a release without a claim)
    raises ValueError before anything has changed.
    """

    def __init__(self, frames: int, *, order: EvictionOrder, pin_max_share: float = 0.3) -> None:
        """At most `pin_max_share` of the frames are pinned, so that pins never fill the arena."""
        if frames <= 0:
            raise ValueError("a host tier needs at least one frame")
        self.capacity = frames
        self._order = order
        self._most_pins = int(frames * pin_max_share)
        # Frames are popped from the end, so a fresh arena hands them out in ascending order.
        self._free = list(range(frames - 1, -1, -1))
        self._filling: set[int] = set()
        self._by_hash: dict[bytes, _Resident] = {}
        self._by_frame: dict[int, _Resident] = {}
        """Valid and leaving frames."""
        self._claimed = 0
        self._queue = EvictionQueue()
        self._pins: dict[bytes, Seconds] = {}
        self._pin_ends = EvictionQueue()
        self._number = 0
        self._changes = ChangeLog("host")

    # ------------------------------------------------------------------ reading

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def free(self) -> int:
        """Number of frames that `reserve` can hand out now."""
        return len(self._free)

    @property
    def pinned(self) -> int:
        """Number of pinned frames, as of the last time that was passed."""
        return len(self._pins)

    def counts(self) -> FrameCounts:
        """Number of frames by state."""
        valid = len(self._by_hash)
        leaving = len(self._by_frame) - valid
        return FrameCounts(len(self._free), len(self._filling), valid, self._claimed, leaving)

    def frame(self, block_hash: bytes) -> int | None:
        """The frame with this block. Only a claim keeps it there."""
        resident = self._by_hash.get(block_hash)
        return resident.frame if resident else None

    def block(self, block_hash: bytes) -> TierBlock | None:
        """The block, with its turns as of now."""
        resident = self._by_hash.get(block_hash)
        if resident is None:
            return None
        block, turns = resident.block, resident.turns
        return block if block.turns == turns else replace(block, turns=turns)

    def age(self, block_hash: bytes, now: Seconds) -> Seconds:
        """Seconds since the last use of this block, which is valid."""
        return now - self._by_hash[block_hash].last_use

    def is_shadow(self, block_hash: bytes) -> bool:
        """Whether the device has this block, which is valid, too."""
        return self._by_hash[block_hash].shadow

    def names(self) -> dict[bytes, bytes]:
        """Every hash that can be found, with its parent's. O(all), for audits."""
        return {name: resident.block.parent for name, resident in self._by_hash.items()}

    # ------------------------------------------------------------------ filling

    def reserve(self) -> int | None:
        """Take a free frame to fill it; None: there is none. Never evicts."""
        if not self._free:
            return None
        frame = self._free.pop()
        self._filling.add(frame)
        return frame

    def commit(self, frame: int, block: TierBlock, now: Seconds) -> bool:
        """The frame holds this block now, whole and verified. False: the tier has the block
        already, and the frame is free again."""
        self._end_filling(frame)
        self._expire_pins(now)
        if block.hash in self._by_hash:
            self._free.append(frame)
            return False
        self._number += 1
        resident = _Resident(frame, block, now, self._number, block.turns)
        self._by_hash[block.hash] = self._by_frame[frame] = resident
        if block.pin_until > now:
            self._pin(block.hash, block.pin_until)
        self._place(resident)
        self._changes.stored(block)
        return True

    def abandon(self, frame: int) -> None:
        """The copy failed or is not wanted, and nothing writes to the frame any longer."""
        self._end_filling(frame)
        self._free.append(frame)

    def _end_filling(self, frame: int) -> None:
        if frame not in self._filling:
            raise ValueError(f"frame {frame} is not being filled")
        self._filling.remove(frame)

    # ------------------------------------------------------------------ use

    def claim(self, frame: int) -> None:
        """Keep the block in its frame until as many releases. The frame is valid."""
        resident = self._by_frame.get(frame)
        if resident is None or self._is_leaving(resident):
            raise ValueError(f"frame {frame} has no block that can be claimed")
        self._claimed += not resident.claims
        resident.claims += 1
        self._queue.remove(resident.block.hash)

    def release(self, frame: int) -> None:
        """Give one claim back. A frame whose block was dropped is free after the last one."""
        resident = self._by_frame.get(frame)
        if resident is None or not resident.claims:
            raise ValueError(f"frame {frame} is not claimed")
        resident.claims -= 1
        if resident.claims:
            return
        if self._is_leaving(resident):
            self._vacate(resident)
            return
        self._claimed -= 1
        self._place(resident)

    def touch(
        self,
        block_hash: bytes,
        now: Seconds,
        turns: int | None = None,
        *,
        shadow: bool | None = None,
    ) -> None:
        """The block was used now, in a conversation of `turns` turns. `shadow`: whether the device
        has it, too; None: as before. Nothing happens if the tier does not have it. Callers touch
        the blocks of a chain from its tail, so that among equals a leaf goes before its parent."""
        self._expire_pins(now)
        resident = self._by_hash.get(block_hash)
        if resident is None:
            return
        if turns is not None and turns > resident.turns:
            resident.turns = turns
        if shadow is not None:
            resident.shadow = shadow
        self._number += 1
        resident.number = self._number
        resident.last_use = max(now, resident.last_use)
        self._place(resident)

    def shadow(self, block_hash: bytes, on: bool) -> None:
        """Whether the device has the block, too. Nothing happens if this tier does not have it."""
        resident = self._by_hash.get(block_hash)
        if resident is not None and resident.shadow != on:
            resident.shadow = on
            self._place(resident)

    def pin(self, block_hash: bytes, until: Seconds) -> bool:
        """Do not evict the block before `until`; a pin is only ever prolonged. False: the tier does
        not have the block, or as many are pinned as may be."""
        resident = self._by_hash.get(block_hash)
        if resident is None or not self._pin(block_hash, until):
            return False
        resident.block = replace(resident.block, pin_until=self._pins[block_hash])
        self._queue.remove(block_hash)
        return True

    def _pin(self, block_hash: bytes, until: Seconds) -> bool:
        before = self._pins.get(block_hash)
        if before is None and len(self._pins) >= self._most_pins:
            return False
        if before is None or until > before:
            self._pins[block_hash] = until
            self._pin_ends.put(block_hash, (0, until, 0))
        return True

    def _expire_pins(self, now: Seconds) -> None:
        while self._pins:
            (block_hash,) = self._pin_ends.first(1)
            if self._pins[block_hash] > now:
                return
            self._unpin(block_hash)
            self._place(self._by_hash[block_hash])

    def _unpin(self, block_hash: bytes) -> None:
        self._pins.pop(block_hash, None)
        self._pin_ends.remove(block_hash)

    # ------------------------------------------------------------------ eviction

    def victims(self, count: int, now: Seconds) -> list[bytes]:
        """The next `count` blocks to evict, in order; fewer if the others are claimed or pinned.
        They stay where they are."""
        self._expire_pins(now)
        return self._queue.first(count)

    def evict(self, block_hash: bytes) -> int:
        """Remove a valid block that nobody claims; returns its frame, which is free now."""
        resident = self._by_hash.get(block_hash)
        if resident is None or resident.claims:
            raise ValueError(f"block {block_hash.hex()} is claimed or not in the tier")
        self.drop(block_hash)
        return resident.frame

    def drop(self, block_hash: bytes) -> None:
        """Remove a block because its content is not to be trusted or not wanted. Readers keep the
        frame until they release it. Nothing happens if the tier does not have the block."""
        resident = self._by_hash.get(block_hash)
        if resident is not None:
            self._remove(resident)
            self._changes.removed(block_hash)

    def clear(self) -> None:
        """Drop every block. Frames that are being filled stay with their owners. O(all)."""
        for resident in list(self._by_hash.values()):
            self._remove(resident)
        self._changes.cleared()

    def _remove(self, resident: _Resident) -> None:
        block_hash = resident.block.hash
        del self._by_hash[block_hash]
        self._queue.remove(block_hash)
        self._unpin(block_hash)
        if resident.claims:
            self._claimed -= 1
        else:
            self._vacate(resident)

    def _vacate(self, resident: _Resident) -> None:
        del self._by_frame[resident.frame]
        self._free.append(resident.frame)

    def _is_leaving(self, resident: _Resident) -> bool:
        return self._by_hash.get(resident.block.hash) is not resident

    def _place(self, resident: _Resident) -> None:
        """Put the block where it belongs in the queue, if it may be evicted at all."""
        if not resident.claims and resident.block.hash not in self._pins:
            self._queue.put(resident.block.hash, self._key(resident))

    def _key(self, resident: _Resident) -> EvictionKey:
        score = self._order.score(resident.last_use, resident.turns)
        return (0 if resident.shadow else 1, score, resident.number)

    # ------------------------------------------------------------------ events, self-audit

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order. The owner calls this after every step."""
        return self._changes.drain()

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one state. O(all)."""
        states = [*self._free, *self._filling, *self._by_frame]
        assert len(states) == len(set(states)), "a frame is in two states"
        assert len(states) == self.capacity, f"{len(states)} frames of {self.capacity} have a state"
        for name, resident in self._by_hash.items():
            assert self._by_frame.get(resident.frame) is resident, "a valid block has no frame"
            assert resident.block.hash == name, "a block is found by another's hash"
            kept = resident.claims > 0 or name in self._pins
            assert (name in self._queue) is not kept, "a kept block is a victim, or one is lost"
        claimed = sum(resident.claims > 0 for resident in self._by_hash.values())
        assert claimed == self._claimed, f"{claimed} claimed blocks are counted as {self._claimed}"
        assert self._pins.keys() <= self._by_hash.keys(), "a pinned block is not in the tier"
        assert len(self._pins) <= self._most_pins, "more blocks are pinned than may be"
        assert len(self._queue) == sum(name in self._queue for name in self._by_hash)
        for resident in self._by_frame.values():
            assert resident.claims or not self._is_leaving(resident), "a frame leaves for nobody"
