"""Publishes which KV blocks the engine can reuse, as the topic `kv` that routers follow.

Mirrors the pool's content by short block hash, fed with the engine's events. Each batch becomes one
event of the log, or several if it is long; a reader that joins late gets a snapshot of the mirror.
Only real changes are published, so both ends may count them.

The mirror takes some 150 bytes of memory per block. It knows neither engines nor topics: its owner,
the worker's `agent`, connects both ends.
"""

from __future__ import annotations

import logging
import sys
from array import array
from typing import TYPE_CHECKING, Final

from pdserve.messages.kv_events import (
    SHORT_HASH_BYTES,
    TIERS,
    BlockStored,
    HashesCleared,
    HashesRemoved,
    HashesStored,
    PoolCleared,
    PoolDigest,
)
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pdserve.messages.kv_events import HashesChange, KvEvent

__all__ = ["KvEventPublisher"]

_log = logging.getLogger(__name__)

_PIECE: Final = 4096
"""Most hashes in one event or snapshot piece, so that reading one does not block an event loop."""
_MOST: Final = 1 << 24
"""Most hashes kept, whatever an engine reports: a pool of half a billion tokens."""
_HASH_BYTES: Final = 16
_TIER: Final = {tier: number for number, tier in enumerate(TIERS)}

Parents = dict[int, int]
"""Maps a block's hash to its parent's; parents come first unless they were removed and
came back."""


class KvEventPublisher:
    """The `kv` topic of one worker. Implements `runtime.topics.publisher.LogSource`."""

    def __init__(self, *, most: int = _MOST) -> None:
        """Keeps at most `most` hashes; hashes beyond that are dropped, counted and logged."""
        self._tiers: tuple[Parents, ...] = tuple({} for _ in TIERS)
        self._digest = PoolDigest()
        self._staged: list[HashesChange] = []
        self._staged_names = 0
        self._append: Callable[[bytes], None] | None = None
        self._room = most
        self.refused = 0
        """Hashes beyond the bound, which were not published."""

    def connect(self, append: Callable[[bytes], None] | None) -> None:
        """Sets the function that receives the log's events from now on; None: no one does."""
        self._append = append

    # ------------------------------------------------------------------ from the engine

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Applies a batch of the engine's events, in order."""
        for event in events:
            tier = _TIER[event.tier]
            if isinstance(event, PoolCleared):
                self._clear(tier)
            elif isinstance(event, BlockStored):
                parent = _names(event.parent)[0]
                for names in _pieces(event.hashes):
                    self._reserve(len(names))
                    self._store(tier, parent, names)
                    parent = names[-1]
            else:
                for names in _pieces(event.hashes):
                    self._reserve(len(names))
                    self._remove(tier, names)
        self._flush()

    def _clear(self, tier: int) -> None:
        if self._tiers[tier]:
            self._room += len(self._tiers[tier])
            self._tiers[tier].clear()
            self._digest.clear(tier)
            self._staged.append(HashesCleared(tier))

    def _store(self, tier: int, parent: int, names: array[int]) -> None:
        known, listed = self._tiers[tier], names.tolist()
        if len(listed) > self._room:
            self._refuse(len(listed))
        elif known.keys().isdisjoint(listed) and len(set(listed)) == len(listed):
            self._put(tier, parent, names, listed)
        else:
            self._store_new(tier, parent, listed)

    def _store_new(self, tier: int, parent: int, listed: list[int]) -> None:
        """Adds the new hashes of a stored run; known ones in between split it into several runs."""
        known, seen = self._tiers[tier], set[int]()
        run, start = array("Q"), parent
        for name in listed:
            if name not in known and name not in seen:
                run.append(name)
                seen.add(name)
                continue
            if run:
                self._put(tier, start, run, run.tolist())
            run, start = array("Q"), name
        if run:
            self._put(tier, start, run, run.tolist())

    def _put(self, tier: int, parent: int, names: array[int], listed: list[int]) -> None:
        self._tiers[tier].update(zip(listed, (parent, *listed), strict=False))
        self._room -= len(listed)
        packed = _pack(names)
        self._digest.change(tier, packed)
        self._staged.append(HashesStored(tier, parent.to_bytes(SHORT_HASH_BYTES, "little"), packed))

    def _remove(self, tier: int, names: array[int]) -> None:
        pop = self._tiers[tier].pop
        gone = array("Q", [name for name in names if pop(name, None) is not None])
        if gone:
            self._room += len(gone)
            packed = _pack(gone)
            self._digest.change(tier, packed)
            self._staged.append(HashesRemoved(tier, packed))

    def _refuse(self, count: int) -> None:
        if not self.refused:
            _log.error(
                "the engine reports more KV blocks than the limit; routers see only some of them"
            )
        self.refused += count

    # ------------------------------------------------------------------ to the routers

    def _reserve(self, count: int) -> None:
        """Sends staged events before the mirror changes by more than fits in one event."""
        if self._staged_names + count > _PIECE:
            self._flush()
        self._staged_names += count

    def _flush(self) -> None:
        staged, self._staged, self._staged_names = self._staged, [], 0
        if staged and self._append is not None:
            self._append(encode(staged))

    def snapshot(self) -> Iterator[bytes]:
        """Implements `LogSource.snapshot`: the whole mirror in pieces."""
        return _chunks([(tier, dict(known)) for tier, known in enumerate(self._tiers) if known])

    def digest(self) -> int:
        """Implements `LogSource.digest`: a checksum of the mirror."""
        return self._digest.value()

    # ------------------------------------------------------------------ looking

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def leading(self, hashes: bytes) -> int:
        """Number of leading hashes of `hashes` that the engine can reuse now, from any tier."""
        known = [tier for tier in self._tiers if tier]
        if not known or not hashes:
            return 0
        for index, name in enumerate(_names(hashes)):
            if not any(name in tier for tier in known):
                return index
        return len(hashes) // _HASH_BYTES

    def names(self, tier: int) -> frozenset[int]:
        """The published hashes of a tier; for tests and audits."""
        return frozenset(self._tiers[tier])


def _pieces(hashes: list[bytes]) -> Iterator[array[int]]:
    """Splits joined hashes into short hashes, a bounded number at a time."""
    for start in range(0, len(hashes), _PIECE):
        yield _names(b"".join(hashes[start : start + _PIECE]))


def _names(hashes: bytes) -> array[int]:
    """Short hashes of joined block hashes: every other u64. Raises ValueError for other lengths."""
    if len(hashes) % _HASH_BYTES or not hashes:
        raise ValueError(f"{len(hashes)} bytes are no hashes of {_HASH_BYTES} each")
    halves = array("Q", hashes)[::2]
    if sys.byteorder == "big":
        halves.byteswap()
    return halves


def _pack(names: array[int]) -> bytes:
    if sys.byteorder == "big":
        names = names[:]
        names.byteswap()
    return names.tobytes()


def _chunks(tiers: Iterable[tuple[int, Parents]]) -> Iterator[bytes]:
    """The snapshot's pieces: runs of each tier, parents first."""
    piece: list[HashesStored] = []
    size = 0
    for tier, parents in tiers:
        for parent, run in _runs(parents):
            packed = _pack(run)
            piece.append(HashesStored(tier, parent.to_bytes(SHORT_HASH_BYTES, "little"), packed))
            size += len(run)
            if size >= _PIECE:
                yield encode(piece)
                piece, size = [], 0
    if piece:
        yield encode(piece)


def _runs(parents: Parents) -> Iterator[tuple[int, array[int]]]:
    """Runs of chains, none longer than a piece; a run comes after its parent if that is
    included."""
    start, run, last = 0, array("Q"), None
    for name in _parents_first(parents):
        parent = parents[name]
        if parent != last or len(run) >= _PIECE:
            if run:
                yield start, run
            start, run = parent, array("Q")
        run.append(name)
        last = name
    if run:
        yield start, run


def _parents_first(parents: Parents) -> Iterator[int]:
    """Orders blocks after their parents; only blocks that were removed and came back are out of
    order.
    """
    done: set[int] = set()
    for name in parents:
        if name in done:
            continue
        chain = [name]
        done.add(name)
        before = parents[name]
        while before in parents and before not in done:
            chain.append(before)
            done.add(before)
            before = parents[before]
        yield from reversed(chain)
