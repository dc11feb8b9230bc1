"""Stores which worker and tier hold which KV block, and finds prefix overlaps.

A block's hash covers its tokens and everything before them, so a prompt's overlap with a worker is
the leading run of its hashes that the worker holds. That rule alone defines every answer: `parent`
is only a storage hint, and events may come in any order. Hashes are u64, joined as little-endian
bytes; workers are small slot numbers that the caller assigns.

`PureRadixTree` is the plain statement of this and the oracle for the compiled twin
(native/src/radix.cpp), which stores runs of blocks and answers in microseconds; `Tree` is the one
in use. Neither knows where events come from. The router's index owns one per hash secret.
"""

from __future__ import annotations

from array import array
from struct import unpack
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pdserve import accel

__all__ = ["DEVICE", "DISK", "HOST", "REMOTE", "PureRadixTree", "Tree", "TreeCounters"]

DEVICE, HOST, DISK, REMOTE = range(4)
"""Tiers, nearest first. REMOTE is stored and counted; no lookup includes it yet."""

K = TypeVar("K")

_NOBODY: Final[frozenset[int]] = frozenset()
_TIERS = 4
_MAX_WORKERS = 1 << 16
_MAX_NAME = (1 << 64) - 1
_BYTES_PER_BLOCK = 400  # a dict's entry, an int and a set: what CPython takes, roughly
_BYTES_PER_WORKER_BLOCK = 130  # entries in two sets


class TreeCounters(NamedTuple):
    """Size of a tree, and what it refused since it was made."""

    nodes: int
    """Tree nodes: blocks in the pure tree, runs of blocks in the compiled one."""
    worker_blocks: int
    """Pairs of a block and a (worker, tier) that holds it."""
    bytes: int
    """Memory in bytes: exact in the compiled tree except for the allocator's share, an estimate in
    the pure.
    """
    dropped_full: int
    """Blocks refused because the tree held `max_blocks`."""
    unknown_removed: int
    """Removals of blocks that were not held: events and tree disagree."""


class PureRadixTree:
    """The oracle: sets of workers by block hash, and of hashes by worker, for each tier."""

    def __init__(self, max_blocks: int) -> None:
        """Args: `max_blocks` bounds distinct blocks; blocks beyond it are counted, not stored."""
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._max_blocks = max_blocks
        self._workers: tuple[dict[int, set[int]], ...] = tuple({} for _ in range(_TIERS))
        self._names: tuple[dict[int, set[int]], ...] = tuple({} for _ in range(_TIERS))
        self._blocks = 0
        self._worker_blocks = 0
        self._dropped_full = 0
        self._unknown_removed = 0

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return self._blocks

    @property
    def counters(self) -> TreeCounters:
        """The counters; cheap enough for every scrape."""
        size = self._blocks * _BYTES_PER_BLOCK + self._worker_blocks * _BYTES_PER_WORKER_BLOCK
        return TreeCounters(
            self._blocks, self._worker_blocks, size, self._dropped_full, self._unknown_removed
        )

    def blocks(self, worker: int) -> int:
        """Number of blocks that the worker holds, each tier counted separately."""
        _check(worker)
        return sum(len(names.get(worker, ())) for names in self._names)

    def stored(self, worker: int, tier: int, parent: int | None, names: bytes) -> int:
        """Adds blocks to a worker's tier: a chain after `parent`, or from a prompt's start. Returns
        how many were new on that tier. Idempotent.
        """
        _check(worker, tier)
        if parent is not None and not 0 <= parent <= _MAX_NAME:
            raise ValueError("parent must be a u64 or None")
        before = self._worker_blocks
        for name in _unpacked(names):
            if self._is_known(name):
                self._hold(worker, tier, name)
            elif self._blocks < self._max_blocks:
                self._blocks += 1
                self._hold(worker, tier, name)
            else:
                self._dropped_full += 1
        return self._worker_blocks - before

    def removed(self, worker: int, tier: int, names: bytes) -> int:
        """Removes blocks from a worker's tier; returns how many it held."""
        _check(worker, tier)
        before = self._worker_blocks
        for name in _unpacked(names):
            if name in self._names[tier].get(worker, ()):
                self._let_go(worker, tier, name)
            else:
                self._unknown_removed += 1
        return before - self._worker_blocks

    def cleared(self, worker: int, tier: int) -> int:
        """Empties a worker's tier; returns how many blocks it held."""
        _check(worker, tier)
        held = list(self._names[tier].get(worker, ()))
        for name in held:
            self._let_go(worker, tier, name)
        return len(held)

    def drop(self, worker: int) -> int:
        """Removes a worker; returns how many blocks it held. Takes time in proportion to them."""
        return sum(self.cleared(worker, tier) for tier in range(_TIERS))

    def match(self, names: bytes) -> dict[int, int]:
        """Leading blocks on the device tier, for each worker that has any."""
        return self._leading(_unpacked(names), HOST)

    def match_into(self, names: bytes, depths: array[int]) -> int:
        """Writes `match` by slot into u32 values, 0 where there is none; returns the slots that
        have any. For a thousand workers, building a dict takes longer than the walk.
        """
        if memoryview(depths).itemsize != 4:
            raise ValueError("depths must be a writable buffer of u32 values")
        found = self.match(names)
        if found and max(found) >= len(depths):
            raise ValueError("depths is shorter than the slots in use")
        depths[:] = array("I", bytes(4 * len(depths)))
        for worker, depth in found.items():
            depths[worker] = depth
        return len(found)

    def match_as(self, names: bytes, shown: dict[int, K]) -> dict[K, int]:
        """`match` by the label of each slot: the longest run of slots with equal labels, without
        slots that have none. One pass instead of one here and one at the caller.
        """
        best: dict[K, int] = {}
        for worker, depth in self.match(names).items():
            if worker in shown and depth > best.get(shown[worker], 0):
                best[shown[worker]] = depth
        return best

    def match_tiers(self, names: bytes) -> dict[int, tuple[int, int, int]]:
        """Leading blocks per worker: on device; on device or host; on device, host or disk."""
        wanted = _unpacked(names)
        device, host, disk = (self._leading(wanted, below) for below in (HOST, DISK, REMOTE))
        # The last holds every worker of the others: each tier can only lengthen a run.
        return {w: (device.get(w, 0), host.get(w, 0), depth) for w, depth in disk.items()}

    def _leading(self, names: tuple[int, ...], below: int) -> dict[int, int]:
        """Leading hashes that each worker holds on any tier nearer than `below`."""
        found: dict[int, int] = {}
        active = set(self._holders(names[0], below)) if names else set[int]()
        for depth, name in enumerate(names):
            if not active:
                break
            here = self._holders(name, below)
            if active <= here:
                continue
            found |= dict.fromkeys(active - here, depth)
            active &= here
        found |= dict.fromkeys(active, len(names))
        return dict(sorted(found.items()))  # in the order of the compiled twin

    def _holders(self, name: int, below: int) -> frozenset[int] | set[int]:
        held = [workers[name] for workers in self._workers[:below] if name in workers]
        return held[0] if len(held) == 1 else _NOBODY.union(*held)

    def _is_known(self, name: int) -> bool:
        return any(name in workers for workers in self._workers)

    def _hold(self, worker: int, tier: int, name: int) -> None:
        names = self._names[tier].setdefault(worker, set())
        self._worker_blocks += name not in names
        names.add(name)
        self._workers[tier].setdefault(name, set()).add(worker)

    def _let_go(self, worker: int, tier: int, name: int) -> None:
        _discard(self._names[tier], worker, name)
        _discard(self._workers[tier], name, worker)
        self._worker_blocks -= 1
        self._blocks -= not self._is_known(name)


def _discard(sets: dict[int, set[int]], key: int, value: int) -> None:
    sets[key].discard(value)
    if not sets[key]:
        del sets[key]


def _unpacked(names: bytes) -> tuple[int, ...]:
    if len(names) % 8:
        raise ValueError("names must be whole little-endian u64 values")
    return unpack(f"<{len(names) // 8}Q", names)


def _check(worker: int, tier: int = DEVICE) -> None:
    if not 0 <= worker < _MAX_WORKERS:
        raise ValueError("worker must be a slot from 0 to 65535")
    if not 0 <= tier < _TIERS:
        raise ValueError("tier must be 0 (device), 1 (host), 2 (disk) or 3 (remote)")


if TYPE_CHECKING:
    Tree = PureRadixTree  # one description of both
elif accel.NATIVE:

    class Tree(accel.native.RadixTree):
        """The compiled twin."""

        __slots__ = ()

        @property
        def counters(self) -> TreeCounters:
            """Plain numbers, cheap enough to read at every scrape."""
            return TreeCounters(*self.numbers())

else:
    Tree = PureRadixTree
