"""Runs an index of the disk tier and its files together, as an engine core and its threads do."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.files import SegmentFiles
from pdserve.kv.tiers.disk.fingerprint import Fingerprint
from pdserve.kv.tiers.disk.format import PAGE, record_bytes, table_bytes
from pdserve.kv.tiers.disk.index import DiskIndex
from pdserve.kv.tiers.disk.records import TierReadError, TierWriteError
from pdserve.kv.tiers.disk.recovery import find_segments
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from tests.support.faulty_disk import FaultyDisk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.records import (
        RecordPlace,
        SegmentCommand,
        SegmentStore,
        WriteBatch,
    )
    from pdserve.messages.kv_events import KvEvent

PAYLOAD = 5000
"""Bytes of a block in these tests: two pages, the second one partly filled."""
DIRECTORY = bytes(range(16))
FINGERPRINT = Fingerprint("model", b"secret-1", PAYLOAD, "nhd", "bfloat16")
FOLDER = Path("/tier")


def segment_of(records: int, payload: int = PAYLOAD) -> int:
    """Bytes of a segment with room for so many records."""
    return PAGE + records * record_bytes(payload) + table_bytes(records)


def name(*path: int) -> bytes:
    """Hash of the block at the end of a path of numbers."""
    return blake2b(repr(path).encode(), digest_size=16).digest()


def chain(first: int, length: int, root: bytes = b"r" * 16) -> list[TierBlock]:
    """A chain of blocks whose names begin with `first`."""
    names = [root, *(name(first, at) for at in range(length))]
    return [
        TierBlock(own, parent, tokens=16 * at, root=root)
        for at, (parent, own) in enumerate(pairwise(names), 1)
    ]


def payload_of(hash: bytes, size: int = PAYLOAD) -> bytes:
    """The only right content of a block."""
    return (blake2b(hash).digest() * (size // 64 + 1))[:size]


def wanted(events: Sequence[KvEvent], before: set[bytes]) -> set[bytes]:
    """The blocks that a reader of the events knows. No event may say what is known already."""
    known = set(before)
    for event in events:
        match event:
            case BlockStored(hashes=hashes):
                assert known.isdisjoint(hashes)
                known.update(hashes)
            case BlockRemoved(hashes=hashes):
                assert known.issuperset(hashes)
                known.difference_update(hashes)
            case PoolCleared():
                known.clear()
    return known


@dataclass
class Machine:
    """An index, its store, and what is under way between them."""

    index: DiskIndex
    store: SegmentStore
    now: float = 0.0
    batches: list[WriteBatch] = field(default_factory=list)
    commands: list[SegmentCommand] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    ended: list[SegmentCommand] = field(default_factory=list)
    disk: FaultyDisk = field(default_factory=FaultyDisk)
    """What the files are on; unused without files."""

    @staticmethod
    def boot(
        ops: FileOps,
        epoch: int = 1,
        *,
        segments: int = 5,
        records: int = 8,
        fingerprint: Fingerprint = FINGERPRINT,
        folder: Path = FOLDER,
        directory: bytes = DIRECTORY,
        capacity: int = 0,
    ) -> Machine:
        """Open what is on a disk, as `DiskTier.open` does."""
        size = segment_of(records, fingerprint.block_bytes)
        found, bad = find_segments(ops, folder, directory, fingerprint)
        index = DiskIndex(
            capacity or segments * size,
            size,
            epoch=epoch,
            found=found,
            next_segment=max([n.number + 1 for n in bad], default=0),
        )
        files = SegmentFiles(folder, fingerprint, directory=directory, segment_bytes=size, ops=ops)
        machine = Machine(index, files)
        if isinstance(ops, FaultyDisk):
            machine.disk = ops
        machine.look()
        return machine

    # ------------------------------------------------------------------ single steps

    def append(self, blocks: Sequence[TierBlock]) -> WriteBatch | None:
        """Begin to write blocks."""
        batch = self.index.append(blocks, PAYLOAD, self.now)
        if batch is not None:
            self.batches.append(batch)
        return batch

    def write(self, batch: WriteBatch) -> bool:
        """Perform a batch; True if it succeeded."""
        self.batches.remove(batch)
        payloads = [memoryview(payload_of(record.block.hash)) for record in batch.records]
        try:
            self.store.write(batch, payloads)
        except TierWriteError as error:
            self.index.failed(batch, error.errno, self.now)
            return False
        self.index.written(batch, self.now)
        return True

    def perform(self, command: SegmentCommand) -> bool:
        """Perform a command; True if it succeeded."""
        self.commands.remove(command)
        try:
            self.store.run(command)
        except TierWriteError as error:
            self.index.finished(command, self.now, error.errno)
            return False
        self.ended.append(command)
        self.index.finished(command, self.now)
        return True

    def collect(self) -> None:
        """Take the commands that are due."""
        self.commands += self.index.commands(self.now)

    def settle_batches(self) -> None:
        """Perform the batches that are under way, and take no command."""
        for batch in list(self.batches):
            self.write(batch)
        self.look()

    def settle(self) -> None:
        """Perform everything that is under way and follows from it."""
        while True:
            self.collect()
            if not self.batches and not self.commands:
                break
            for batch in list(self.batches):
                self.write(batch)
            for command in list(self.commands):
                self.perform(command)
        self.look()

    def store_all(self, blocks: Sequence[TierBlock]) -> None:
        """Write blocks, one batch, and settle. Room is made as needed."""
        while self.append(blocks) is None:
            self.settle()
        self.settle()

    def read(self, hash: bytes) -> bytes:
        """The payload of a block that is here. Errors: `TierReadError`."""
        place = self.index.place(hash)
        assert place is not None
        return self.read_place(place, hash)

    def read_place(self, place: RecordPlace, hash: bytes) -> bytes:
        into = bytearray(place.payload_bytes)
        self.store.read(place, hash, memoryview(into))
        return bytes(into)

    def read_claimed(self, place: RecordPlace, hash: bytes) -> None:
        """Read a claimed place. It is still the block's content, unless that was erased."""
        try:
            assert self.read_place(place, hash) == payload_of(hash)
        except TierReadError:
            assert self.index.place(hash) != place

    def read_all(self) -> None:
        """Read every block; tell the index of failures."""
        for hash in self.index.hashes():
            place = self.index.place(hash)
            if place is None:
                continue  # its segment went with an earlier one
            try:
                assert self.read_place(place, hash) == payload_of(hash)
            except TierReadError as error:
                self.index.read_failed(place, hash, error.reason, self.now, error.errno)
        self.look()

    def on_disk(self, hash: bytes) -> bool:
        """Whether the block's payload is in some file."""
        return self.disk.find(payload_of(hash, 64))

    def served(self) -> set[bytes]:
        """The blocks that can be read; what is read must be right."""
        found = set()
        for hash in self.index.hashes():
            try:
                content = self.read(hash)
            except TierReadError:
                continue
            assert content == payload_of(hash), "a wrong payload was served"
            found.add(hash)
        return found

    def look(self) -> None:
        """Check the books and the events."""
        self.index.check()
        self.known = wanted(self.index.drain_events(), self.known)
        assert self.known == set(self.index.hashes())

    # ------------------------------------------------------------------ random work

    def work(self, random: Random, steps: int, fresh: int) -> int:
        """Random steps, in which new chains are numbered from `fresh`; returns the next number."""
        for _ in range(steps):
            fresh = self.step(random, fresh)
        return fresh

    def step(self, random: Random, fresh: int) -> int:
        self.now += random.random()
        choice = random.random()
        if choice < 0.35:
            self.append(chain(fresh, random.randint(1, 5)))
            fresh += 1
        elif choice < 0.6 and self.batches:
            self.write(random.choice(self.batches))
        elif choice < 0.75:
            self.collect()
            if self.commands:
                self.perform(random.choice(self.commands))
        elif choice < 0.95 and self.known:
            for hash in random.sample(sorted(self.known), min(3, len(self.known))):
                self.index.touch(hash, self.now)
        elif self.known:
            self.index.drop(random.choice(sorted(self.known)), erase=True)
        self.look()
        return fresh
