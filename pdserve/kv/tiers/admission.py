"""Decides which blocks a lower tier takes in, where its room or its writes are scarce.

Most blocks are never used again. While a tier keeps blocks for long enough it takes all of them;
otherwise only those that are likely to be used again: they were used before, belong to a
conversation that went on, or were asked for. A disk has a budget of writes besides, because flash
wears out.

Pure: times are arguments. It does not know where blocks are; the owner tells it of evictions.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.block import TierBlock

__all__ = [
    "ENOUGH_RETENTION",
    "AdmissionMode",
    "DiskAdmission",
    "GhostList",
    "HostAdmission",
    "Retention",
    "WriteBudget",
]

AdmissionMode = Literal["auto", "all", "reused"]

ENOUGH_RETENTION: Final = 150.0
"""Seconds that a host tier must keep blocks to take all of them. Conversations go on after a median
of 87 s and in three of four cases within 225 s (Mooncake's conversation trace); a tier that keeps
blocks for less gets more hits from the reused ones alone."""

_GHOST_BYTES: Final = 8
_RESERVED_SHARE: Final = 0.25
"""Part of a day's writes that is kept for reused blocks."""
_EVICTION_WEIGHT: Final = 0.02
_VERDICT_WEIGHT: Final = 0.01
_DAY: Final = 86_400.0


class GhostList:
    """Names of blocks that a tier evicted or refused, with the time: a block that comes again was
    used again. Bounded: the oldest name is forgotten."""

    def __init__(self, most: int) -> None:
        """`most`: names that are kept; twice the tier's blocks are enough to tell what a tier of
        three times the size would have kept."""
        self._most = most
        self._times: OrderedDict[bytes, Seconds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash[:_GHOST_BYTES] in self._times

    def time(self, block_hash: bytes) -> Seconds | None:
        """When the block was evicted or refused; None: not that the list knows."""
        return self._times.get(block_hash[:_GHOST_BYTES])

    def add(self, block_hash: bytes, now: Seconds) -> None:
        name = block_hash[:_GHOST_BYTES]
        self._times[name] = now
        self._times.move_to_end(name)
        if len(self._times) > self._most:
            self._times.popitem(last=False)

    def forget(self, block_hash: bytes) -> None:
        """The tier has the block again."""
        self._times.pop(block_hash[:_GHOST_BYTES], None)

    def clear(self) -> None:
        self._times.clear()


class Retention:
    """How long a tier keeps a block that is not used, measured from evictions."""

    def __init__(self) -> None:
        self._mean: Seconds | None = None
        self._last: Seconds = 0.0

    def evicted(self, age: Seconds, now: Seconds) -> None:
        """A block was evicted for lack of room, `age` seconds after its last use."""
        before = age if self._mean is None else self._mean
        self._mean = before + _EVICTION_WEIGHT * (age - before)
        self._last = now

    def seconds(self, now: Seconds) -> Seconds | None:
        """None: nothing was evicted yet. A tier that evicted nothing for a while keeps blocks for
        at least as long."""
        return None if self._mean is None else max(self._mean, now - self._last)


class WriteBudget:
    """A token bucket of written bytes. A whole day's writes may be spent at once, so that a new
    disk fills; after that they come back evenly. The credit is never negative."""

    def __init__(self, bytes_per_day: Bytes, now: Seconds) -> None:
        self._per_day = bytes_per_day
        self._credit = float(bytes_per_day)
        self._at = now

    def share(self, now: Seconds) -> float:
        """The credit as a part of a day's writes, 0 to 1."""
        self._refill(now)
        return self._credit / self._per_day if self._per_day else 0.0

    def take(self, size: Bytes, now: Seconds) -> bool:
        """Spend `size` bytes; False, and no change, if there is not as much credit."""
        self._refill(now)
        if size > self._credit:
            return False
        self._credit -= size
        return True

    def refund(self, size: Bytes) -> None:
        """Bytes that were taken have not been written."""
        self._credit = min(float(self._per_day), self._credit + size)

    def _refill(self, now: Seconds) -> None:
        earned = self._per_day * max(0.0, now - self._at) / _DAY
        self._credit = min(float(self._per_day), self._credit + earned)
        self._at = max(self._at, now)


def _is_reused(block: TierBlock, ghosts: GhostList, now: Seconds) -> bool:
    return block.turns >= 2 or block.pin_until > now or block.hash in ghosts


class _Verdicts:
    """What every tier's admission remembers."""

    def __init__(self, mode: AdmissionMode, blocks: int) -> None:
        """`blocks`: those that the tier has room for."""
        self.ghosts = GhostList(2 * blocks)
        self.retention = Retention()
        self.admitted = 0
        self.refused = 0
        self._mode = mode

    def evicted(self, block_hash: bytes, age: Seconds, now: Seconds) -> None:
        """The tier evicted a block for lack of room, `age` seconds after its last use. Blocks that
        the tier above has, too, do not count."""
        self.retention.evicted(age, now)
        self.ghosts.add(block_hash, now)

    def _remember(self, block_hash: bytes, now: Seconds, *, verdict: bool) -> bool:
        """Count a verdict, which is returned; a refused block is remembered."""
        if verdict:
            self.admitted += 1
            self.ghosts.forget(block_hash)
        else:
            self.refused += 1
            self.ghosts.add(block_hash, now)
        return verdict


class HostAdmission(_Verdicts):
    """What host memory takes of the blocks that leave the device.

    `auto` takes everything while the tier would then keep blocks for `ENOUGH_RETENTION` seconds.
    What it would keep them for is measured: the present retention, times the part of the offered
    blocks that is taken now. So the verdict does not flip when it takes effect.
    """

    def __init__(self, mode: AdmissionMode, frames: int) -> None:
        super().__init__(mode, frames)
        self._taken = 1.0
        """Part of the last offered blocks that was taken."""

    def admits(self, block: TierBlock, now: Seconds, *, reused: bool = False) -> bool:
        """Whether to take this block, which the tier does not have. A refused one is remembered.
        `reused`: it was used again since it was computed."""
        verdict = self._takes_all(now) or reused or _is_reused(block, self.ghosts, now)
        self._taken += _VERDICT_WEIGHT * (verdict - self._taken)
        return self._remember(block.hash, now, verdict=verdict)

    def _takes_all(self, now: Seconds) -> bool:
        if self._mode != "auto":
            return self._mode == "all"
        kept = self.retention.seconds(now)
        return kept is None or kept * self._taken >= ENOUGH_RETENTION


class DiskAdmission(_Verdicts):
    """What the disk takes of the blocks that host memory gives up, within the write budget.

    `auto` takes everything while there is credit, except for a part that is reserved for reused
    blocks. On Mooncake's conversation trace reused blocks are a quarter of the writes and, on a
    small disk, nearly all of the hits.
    """

    def __init__(self, mode: AdmissionMode, blocks: int, budget: WriteBudget) -> None:
        super().__init__(mode, blocks)
        self.budget = budget

    def admits(self, block: TierBlock, size: Bytes, now: Seconds, *, reused: bool = False) -> bool:
        """Whether to write this block of `size` bytes, which the disk does not have; if so, its
        bytes are taken from the budget. A refused one is remembered."""
        wanted = self._takes_all(now) or reused or _is_reused(block, self.ghosts, now)
        return self._remember(block.hash, now, verdict=wanted and self.budget.take(size, now))

    def _takes_all(self, now: Seconds) -> bool:
        if self._mode != "auto":
            return self._mode == "all"
        return self.budget.share(now) > _RESERVED_SHARE
