"""Shares a table between nodes on one host that tells readers whether blocks are still valid.

The owner writes its table; peers map and read it, and so learn in time that blocks no longer hold
what was announced. An entry belongs to a delivery and is void as soon as the blocks may change. A
header belongs to a block and holds its hash. Mapped memory must be as large as its owner says, and
sealed, so that reading it cannot fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.transfer.copy_plan import PlanError, block_bytes
from pdserve.transfer.copying import copy_runs
from pdserve.transfer.path_base import MAX_DELIVERIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes, Epoch
    from pdserve.messages.transfer import RegionCard
    from pdserve.transfer.block_mapping import BlockMapping

__all__ = [
    "MAX_ENTRIES",
    "ExpectedEntry",
    "PeerMapping",
    "SharedTable",
    "header_at",
    "map_peer",
    "map_table",
]

GIVEN_UP: Final = "the source has given the blocks up"
MAX_ENTRIES: Final = MAX_DELIVERIES
_ENTRY: Final = struct.Struct("<QQQQ")
"""An entry: number (0: none), attempt, epoch, reserved."""
_HEADER: Final = struct.Struct("<16sQQ")
"""A block's header: hash, epoch, reserved."""


class SharedTable:
    """The table of one node, written only by it."""

    def __init__(self, blocks: int, epoch: Epoch) -> None:
        size = MAX_ENTRIES * _ENTRY.size + blocks * _HEADER.size
        self.fd = os.memfd_create("pdserve-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._epoch = epoch
        self._free = deque(range(MAX_ENTRIES))

    def open(self, attempt: int, share: BlockMapping) -> tuple[int, int]:
        """Open an entry for a delivery; returns its index and number. Blocks with hashes get
        headers. Errors: `PlanError` if all entries are in use."""
        if not self._free:
            raise PlanError(f"{MAX_ENTRIES} deliveries are under way")
        if share.names:
            headers = _headers(share, self._epoch)
            copy_runs(memoryview(self._map), headers, *_places(share))
        entry, number = self._free.popleft(), secrets.randbits(63) | 1
        _ENTRY.pack_into(self._map, entry * _ENTRY.size, number, attempt, self._epoch, 0)
        return entry, number

    def void(self, entry: int) -> None:
        """Void an entry: readers discard what they read under it from now on."""
        _ENTRY.pack_into(self._map, entry * _ENTRY.size, 0, 0, 0, 0)

    def give_back(self, entry: int) -> None:
        """Void an entry and free it."""
        self.void(entry)
        self._free.append(entry)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def header_at(block: int) -> int:
    return MAX_ENTRIES * _ENTRY.size + block * _HEADER.size


class ExpectedEntry:
    """What a peer's table must hold as long as a delivery's blocks keep their content."""

    def __init__(self, epoch: Epoch, entry: int, announced: tuple[int, int], share: BlockMapping):
        """`announced` by the peer: the entry's number and the attempt."""
        self._share = share
        self._at = entry * _ENTRY.size
        self._entry = (*announced, epoch)
        self._headers = _headers(share, epoch) if share.names else memoryview(b"")
        self._places = _places(share) if share.names else None

    def mismatch(self, table: mmap.mmap) -> str:
        """How the peer's table differs; empty: not at all."""
        found = _ENTRY.unpack_from(table, self._at)[:3]
        if found != self._entry:
            return GIVEN_UP if not found[0] else "another delivery's entry"
        if self._places is None:
            return ""
        to, from_, lengths = self._places
        seen = memoryview(bytearray(len(self._headers)))
        copy_runs(seen, memoryview(table), from_, to, lengths)
        if seen == self._headers:
            return ""
        size = _HEADER.size
        places = range(0, len(seen), size)
        wrong = next(at for at in places if seen[at : at + size] != self._headers[at : at + size])
        return f"block {self._share.blocks[wrong // size]} of the source holds something else"


def _headers(share: BlockMapping, epoch: Epoch) -> memoryview:
    """The headers of all blocks of a mapping, in order."""
    names = array("Q", share.names)
    words = array("Q", bytes(_HEADER.size * len(share.blocks)))
    words[0::4], words[1::4] = names[0::2], names[1::2]
    words[2::4] = array("Q", (epoch,)) * len(share.blocks)
    return memoryview(words).cast("B")


def _places(share: BlockMapping) -> tuple[array[int], array[int], array[int]]:
    """Returns the positions of the blocks' headers in the table and in a row, and their lengths."""
    first, size, count = header_at(0), _HEADER.size, len(share.blocks)
    table = array("q", [first + block * size for block in share.blocks])
    return table, array("q", range(0, size * count, size)), array("q", (size,)) * count


@dataclass(slots=True)
class PeerMapping:
    """What a peer has passed, mapped for reading: its table and its regions."""

    table: mmap.mmap
    maps: list[mmap.mmap] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    """Bytes of the regions."""

    def close(self) -> None:
        for view in self.views:
            view.release()
        for mapping in (self.table, *self.maps):
            mapping.close()


def map_peer(fds: Sequence[int], cards: Sequence[RegionCard]) -> PeerMapping:
    """Map what the peer has passed, for reading. Errors: `PlanError` if it is too small or not
    sealed, `OSError`."""
    if len(fds) != 1 + len(cards):
        raise PlanError(f"{len(fds)} descriptors for {len(cards)} regions")
    peer = PeerMapping(map_table(fds[0], cards))
    try:
        for fd, card in zip(fds[1:], cards, strict=True):
            peer.maps.append(_map(fd, card.blocks * block_bytes(card.layout)))
            peer.views.append(memoryview(peer.maps[-1]))
    except BaseException:
        peer.close()
        raise
    return peer


def map_table(fd: int, cards: Sequence[RegionCard]) -> mmap.mmap:
    """Map a peer's table, for reading. Errors: `PlanError`, `OSError`."""
    return _map(fd, header_at(max(card.blocks for card in cards)))


def _map(fd: int, size: Bytes) -> mmap.mmap:
    if os.fstat(fd).st_size < size:
        raise PlanError(f"the peer's memory is smaller than the {size} bytes that it announced")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PlanError("the peer's memory is not sealed: it could shrink under the reader")
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
