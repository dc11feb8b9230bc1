"""What the engine can reuse, as the node tells it to routers: the topic `kv`.

A mirror of the pool's content by short name, fed with the engine's own events. Each batch of them
becomes one event of the log, or several if it is long; a reader that starts late gets the mirror.
Only real changes are told, so that both ends may count on them.

The mirror is as large as the pool (some 150 bytes of the node's memory per block). It knows
neither engines nor topics: its owner, the worker's `member`, connects both ends.
"""

from __future__ import annotations

import logging
import sys
from array import array
from typing import TYPE_CHECKING, Final

from pdserve.messages.kv import (
    NAME_BYTES,
    TIERS,
    BlockStored,
    NamesCleared,
    NamesRemoved,
    NamesStored,
    PoolCleared,
    PoolDigest,
)
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pdserve.messages.kv import KvEvent, NamesChange

__all__ = ["KvLog"]

_log = logging.getLogger(__name__)

_PIECE: Final = 4096
"""Names in one event, and in a piece of a snapshot: taking it in does not hold up an event loop."""
_MOST: Final = 1 << 24
"""Names kept, whatever an engine says: a pool of half a billion tokens."""
_HASH_BYTES: Final = 16
_TIER: Final = {tier: number for number, tier in enumerate(TIERS)}

Parents = dict[int, int]
"""Name to the name before it, parents first unless they were removed and came back."""


class KvLog:
    """See `runtime.topics.publisher.LogSource`."""

    def __init__(self, *, most: int = _MOST) -> None:
        """`most` names are kept; more are refused, counted and logged."""
        self._tiers: tuple[Parents, ...] = tuple({} for _ in TIERS)
        self._digest = PoolDigest()
        self._staged: list[NamesChange] = []
        self._staged_names = 0
        self._append: Callable[[bytes], None] | None = None
        self._room = most
        self.refused = 0
        """Names over the bound, not told to anybody."""

    def connect(self, append: Callable[[bytes], None] | None) -> None:
        """`append` takes the log's events from here on; None: nobody does."""
        self._append = append

    # ------------------------------------------------------------------ from the engine

    def apply(self, events: Sequence[KvEvent]) -> None:
        """A batch of the engine's events, in order."""
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
            self._staged.append(NamesCleared(tier))

    def _store(self, tier: int, parent: int, names: array[int]) -> None:
        known, listed = self._tiers[tier], names.tolist()
        if len(listed) > self._room:
            self._refuse(len(listed))
        elif known.keys().isdisjoint(listed) and len(set(listed)) == len(listed):
            self._put(tier, parent, names, listed)
        else:
            self._store_new(tier, parent, listed)

    def _store_new(self, tier: int, parent: int, listed: list[int]) -> None:
        """Some are there already: what is new makes several runs."""
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
        self._staged.append(NamesStored(tier, parent.to_bytes(NAME_BYTES, "little"), packed))

    def _remove(self, tier: int, names: array[int]) -> None:
        pop = self._tiers[tier].pop
        gone = array("Q", [name for name in names if pop(name, None) is not None])
        if gone:
            self._room += len(gone)
            packed = _pack(gone)
            self._digest.change(tier, packed)
            self._staged.append(NamesRemoved(tier, packed))

    def _refuse(self, count: int) -> None:
        if not self.refused:
            _log.error("the engine says more blocks than can be true; routers see a part of them")
        self.refused += count

    # ------------------------------------------------------------------ to the routers

    def _reserve(self, count: int) -> None:
        """What is staged goes out before the mirror changes by more than one event takes."""
        if self._staged_names + count > _PIECE:
            self._flush()
        self._staged_names += count

    def _flush(self) -> None:
        staged, self._staged, self._staged_names = self._staged, [], 0
        if staged and self._append is not None:
            self._append(encode(staged))

    def snapshot(self) -> Iterator[bytes]:
        """See `LogSource`."""
        return _chunks([(tier, dict(known)) for tier, known in enumerate(self._tiers) if known])

    def digest(self) -> int:
        """See `LogSource`."""
        return self._digest.value()

    # ------------------------------------------------------------------ looking

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def leading(self, hashes: bytes) -> int:
        """How many leading ones of these joined block hashes the engine says it can reuse at
        once."""
        known = self._tiers[_TIER["device"]]
        if not known or not hashes:
            return 0
        for index, name in enumerate(_names(hashes)):
            if name not in known:
                return index
        return len(hashes) // _HASH_BYTES

    def names(self, tier: int) -> frozenset[int]:
        """What is told of a tier; for tests and audits."""
        return frozenset(self._tiers[tier])


def _pieces(hashes: list[bytes]) -> Iterator[array[int]]:
    """Short names of so many hashes at a time."""
    for start in range(0, len(hashes), _PIECE):
        yield _names(b"".join(hashes[start : start + _PIECE]))


def _names(hashes: bytes) -> array[int]:
    """Short names of joined hashes: every other u64. Raises ValueError for other lengths."""
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
    """A snapshot's pieces: each tier's runs, parents first."""
    piece: list[NamesStored] = []
    size = 0
    for tier, parents in tiers:
        for parent, run in _runs(parents):
            packed = _pack(run)
            piece.append(NamesStored(tier, parent.to_bytes(NAME_BYTES, "little"), packed))
            size += len(run)
            if size >= _PIECE:
                yield encode(piece)
                piece, size = [], 0
    if piece:
        yield encode(piece)


def _runs(parents: Parents) -> Iterator[tuple[int, array[int]]]:
    """Runs of chains, no longer than a piece; whoever has a parent here comes after it."""
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
    """Mostly they are in order. What was removed and came back may stand after its children."""
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
