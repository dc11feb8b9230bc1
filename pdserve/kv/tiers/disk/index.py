"""Decides what is where on disk: which block in which segment, and what goes when room is needed.

Pure and for one thread: it hands out batches and commands, threads perform them, and it learns the
results (`written`, `failed`, `finished`). A block can be found only after its batch was written.
Its place is given to nobody else while it has a claim.

Room comes from whole segments, oldest first. A segment of which much was used gets a second chance
(CLOCK); of the others, what was used is copied to the open segment, a quarter at most. One
segment's worth of bytes is kept free for the next one, so writing does not wait for removals.

It knows neither files nor payloads. The engine core owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.change_log import ChangeLog
from pdserve.kv.tiers.disk.format import PAGE, RecordEntry, record_bytes, table_bytes
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    MoveRecords,
    NewRecord,
    RemoveDirectory,
    SealSegment,
    UnlinkSegment,
    WriteBatch,
)
from pdserve.kv.tiers.disk.segment import Segment, SegmentState
from pdserve.kv.tiers.disk.segment_log import SegmentLog
from pdserve.kv.tiers.disk.trouble import CORRUPT, DiskTrouble, is_full
from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.records import ReadFault, RecordPlace, SegmentCommand
    from pdserve.kv.tiers.disk.segment import FoundSegment
    from pdserve.messages.kv_events import KvEvent

__all__ = ["DiskCounts", "DiskIndex", "segment_size"]

_LARGEST_SEGMENT: Final[Bytes] = 1 << 30
_SEGMENTS: Final = 16
"""Segments that a tier is divided into, if records are small: eviction takes one."""
_FEWEST_SEGMENTS: Final = 4
_MIB: Final[Bytes] = 1 << 20
_RECORDS: Final = 16
"""Records that a segment should have at least."""
_MOVE_BYTES: Final[Bytes] = 8 << 20
"""Bytes copied by one `MoveRecords`: after an error they are lost together."""
_BAD_READS: Final = 2
"""Failed reads after which a whole segment goes."""
_NO_ROOT: Final = bytes(16)


def segment_size(capacity: Bytes, payload: Bytes, slack: Bytes = 0) -> Bytes:
    """Bytes of a segment for a tier of this capacity and payloads of this length; segments leave
    `slack` of the capacity.

    Errors: `ConfigError` if four segments of one record do not fit.
    """
    least = PAGE + record_bytes(payload) + table_bytes(1)
    room = capacity - slack
    most = room // _FEWEST_SEGMENTS
    if most < least:
        enough = (_FEWEST_SEGMENTS * least + slack + 2 * _MIB) // _MIB * _MIB
        raise ConfigError(
            "--disk-kv is too small: this worker's part of it has "
            f"{approximate_size(capacity)} for blocks of {approximate_size(payload)}; "
            f"{approximate_size(enough)} for each worker of this process are enough"
        )
    wanted = PAGE + _RECORDS * record_bytes(payload) + table_bytes(_RECORDS)
    size = min(max(room // _SEGMENTS, wanted), max(_LARGEST_SEGMENT, least), most)
    return size // PAGE * PAGE


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """What the tier holds and did. The counters only grow during one life."""

    capacity: Bytes
    allocated: Bytes
    """Bytes of all segments, and of the directories of others that this tier answers for."""
    segments: int
    blocks: int
    """Valid blocks."""
    block_slots: int
    """Blocks that the capacity has room for, at the mean length of those stored; 0: not known."""
    valid_bytes: Bytes
    """Bytes of valid records."""
    writing: int
    """Blocks whose batch is under way."""
    claims: int
    stored: int
    evicted: int
    """Blocks that went for lack of room."""
    dropped: int
    """Blocks that went for another reason: bad, unwanted, lost with their segment."""
    failed_reads: int
    written_bytes: Bytes
    moved_bytes: Bytes
    """Bytes written anew because their segment went."""
    retention: Seconds
    """Age of the last segment that was evicted; 0: none was."""
    errors: dict[int, int]
    """Failed operations by errno; `trouble.CORRUPT` for bad checksums."""


class DiskIndex:
    """The blocks on disk of one worker. Operations take time in proportion to the blocks that they
    name; making room, to the number of segments."""

    def __init__(
        self,
        capacity: Bytes,
        segment_bytes: Bytes,
        *,
        epoch: int = 1,
        found: Iterable[FoundSegment] = (),
        leftovers: Iterable[tuple[str, Bytes]] = (),
        next_segment: int = 0,
    ) -> None:
        """`found`: segments of an earlier life; their blocks are stored again (`drain_events`).
        `leftovers`: subdirectories, oldest first, that count towards the capacity and go before
        anything of this tier. `next_segment`: no file has this number or a larger one."""
        if capacity < 2 * segment_bytes:
            raise ValueError("a disk tier needs room for two segments")
        self.capacity = capacity
        self.segment_bytes = segment_bytes
        self.epoch = epoch
        self.trouble = DiskTrouble()
        self._log = SegmentLog(
            capacity,
            segment_bytes,
            epoch=epoch,
            next_segment=next_segment,
            leftovers=leftovers,
        )
        self._where: dict[bytes, tuple[Segment, int]] = {}
        """Segment and offset of every valid block."""
        self._writing: dict[bytes, int] = {}
        """Number of the batch that is under way with a block."""
        self._batches: dict[int, WriteBatch] = {}
        """Batches under way, of new blocks and of copies."""
        self._next_batch = 0
        self._unwanted: dict[bytes, bool] = {}
        """Blocks that were dropped while their batch is under way; True: erase them, too."""
        self._pins: dict[bytes, Seconds] = {}
        self._changes = ChangeLog("disk")
        self._valid_bytes: Bytes = 0
        self._claims = 0
        self._stored = self._evicted = self._dropped = self._failed_reads = 0
        self._written_bytes = self._moved_bytes = 0
        self._retention: Seconds = 0.0
        self._recover(found)

    # ------------------------------------------------------------------ reading

    def __contains__(self, hash: object) -> bool:
        return hash in self._where

    def __len__(self) -> int:
        return len(self._where)

    def knows(self, hash: bytes) -> bool:
        """True if the block is on disk or being written: `append` refuses it."""
        return hash in self._where or hash in self._writing

    def place(self, hash: bytes) -> RecordPlace | None:
        """Where a valid block is; None if it is not here."""
        found = self._where.get(hash)
        return None if found is None else found[0].place(found[0].entries[found[1]])

    def block(self, hash: bytes) -> TierBlock | None:
        """What is known of a valid block; None if it is not here."""
        found = self._where.get(hash)
        return None if found is None else self._block(found[0].entries[found[1]])

    def born(self, hash: bytes) -> Seconds | None:
        """When the segment of a block was opened; None: in an earlier life, or the block is not
        here."""
        found = self._where.get(hash)
        return None if found is None else found[0].born

    def hashes(self) -> list[bytes]:
        """Every valid block. O(all), for audits and commands of an operator."""
        return list(self._where)

    def counts(self) -> DiskCounts:
        """What the tier holds and did."""
        mean = self._valid_bytes / len(self._where) if self._where else 0
        return DiskCounts(
            capacity=self.capacity,
            allocated=self._log.allocated,
            segments=len(self._log),
            blocks=len(self._where),
            block_slots=int(self.capacity / mean) if mean else 0,
            valid_bytes=self._valid_bytes,
            writing=len(self._writing),
            claims=self._claims,
            stored=self._stored,
            evicted=self._evicted,
            dropped=self._dropped,
            failed_reads=self._failed_reads,
            written_bytes=self._written_bytes,
            moved_bytes=self._moved_bytes,
            retention=self._retention,
            errors=dict(self.trouble.by_errno),
        )

    def drain_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        return self._changes.drain()

    @property
    def idle(self) -> bool:
        """True if no batch or command is under way, and nobody reads."""
        return self._log.idle

    # ------------------------------------------------------------------ readers

    def claim(self, place: RecordPlace) -> None:
        """Keep the record's segment until `release`. The place is fresh from `place`."""
        self._log.claim(place)
        self._claims += 1

    def release(self, place: RecordPlace) -> None:
        """Give a claim back. Errors: ValueError if there is none."""
        self._log.release(place)
        self._claims -= 1

    def touch(self, hash: bytes, now: Seconds, pin_until: Seconds = 0.0) -> None:
        """A block was used; one that is not here is ignored."""
        found = self._where.get(hash)
        if found is None:
            return
        found[0].use(found[1])
        if pin_until > now:
            self._pins[hash] = max(pin_until, self._pins.get(hash, 0.0))

    def read_failed(
        self, place: RecordPlace, hash: bytes, reason: ReadFault, now: Seconds, errno: int = 0
    ) -> None:
        """A read of the block failed: it is dropped, and its segment if that is bad or gone.

        A record that moved or went meanwhile says nothing.
        """
        if self.place(hash) != place:
            return
        self._failed_reads += 1
        segment = self._log[place.segment]
        segment.faults += 1
        # Erased, so that it is not found again after a restart; a device that fails is not written.
        self.drop(hash, erase=reason in ("crc", "format"))
        if reason != "absent":
            self.trouble.failed(errno or CORRUPT, now)
        if reason == "absent" or segment.faults >= _BAD_READS:
            self._lose(segment)

    # ------------------------------------------------------------------ writing

    def append(
        self, blocks: Sequence[TierBlock], payload_bytes: Bytes, now: Seconds
    ) -> WriteBatch | None:
        """Reserve places for blocks with payloads of this length; None: no room now, or writing is
        paused.

        Errors: ValueError, before anything has changed, for a block that is here already
        (`knows`) and for a batch that never fits.
        """
        names = {block.hash for block in blocks}
        if not blocks or len(names) < len(blocks) or any(self.knows(name) for name in names):
            raise ValueError("a batch needs blocks that are not here, each once")
        if not self.trouble.may_write(now) or not self._make_room(len(blocks), payload_bytes, now):
            return None
        records = tuple(
            NewRecord(self._rooted(block), self._log.reserve(payload_bytes, now))
            for block in blocks
        )
        batch = self._start(records)
        for block in blocks:
            self._writing[block.hash] = batch.number
        self._evict_ahead(now)
        return batch

    def written(self, batch: WriteBatch, now: Seconds) -> None:
        """The batch is written: its blocks can be found."""
        self._end(batch)
        self.trouble.wrote(now)
        stored = [record for record in batch.records if self._take_in(record)]
        self._stored += len(stored)
        self._written_bytes += sum(record_bytes(r.place.payload_bytes) for r in batch.records)
        for record in stored:
            self._changes.stored(record.block)
            if record.block.pin_until > now:
                self._pins[record.block.hash] = record.block.pin_until

    def failed(self, batch: WriteBatch, errno: int, now: Seconds) -> None:
        """The batch was not written, and no thread writes it any more: none of it counts, and its
        segments take nothing more. What reached the disk nevertheless is erased: nobody could drop
        it later."""
        self._end(batch)
        self.trouble.failed(errno, now)
        for record in batch.records:
            self._unwanted.pop(record.block.hash, None)
            self._log.erase(record.place)
        self._close(batch)
        if is_full(errno) and not self._log.remove_leftover():
            self._evict_one(now)

    # ------------------------------------------------------------------ dropping

    def drop(self, hash: bytes, *, erase: bool = False) -> bool:
        """Forget a block; `erase`: its bytes are overwritten, too. True if it was here, or being
        written."""
        if hash in self._writing:
            self._unwanted[hash] = erase or self._unwanted.get(hash, False)
            return True
        found = self._where.get(hash)
        if found is None:
            return False
        segment, offset = found
        place = segment.place(segment.entries[offset])
        self._forget([hash])
        self._dropped += 1
        if erase:
            self._log.erase(place)
        return True

    def drop_where(self, unwanted: Callable[[TierBlock], bool], *, erase: bool = True) -> int:
        """Drop every block of which `unwanted` is true, also those being written; how many."""
        names = [hash for hash in self._where if unwanted(self._known(hash))]
        for batch in self._batches.values():
            names += [r.block.hash for r in batch.records if unwanted(r.block)]
        return sum(self.drop(hash, erase=erase) for hash in dict.fromkeys(names))

    def drop_chain(self, root: bytes, *, erase: bool = True) -> int:
        """Drop every block below a chain's root hash: all of a tenant. Returns how many."""
        known = [self._known(hash) for hash in self._where]
        known += [r.block for batch in self._batches.values() for r in batch.records]
        below: set[bytes] = set()
        for block in chain_order(known):
            if root in (block.root, block.parent) or block.parent in below:
                below.add(block.hash)
        return self.drop_where(lambda block: block.hash in below, erase=erase)

    def drop_unreachable(self) -> int:
        """Remove all leftovers now, such as when a tenant's blocks must be gone from every
        directory: under another secret they cannot be told apart. Returns how many."""
        count = 0
        while self._log.remove_leftover():
            count += 1
        return count

    def clear(self) -> None:
        """Drop everything, such as after the model's weights changed."""
        self._changes.cleared()
        for hash in self._writing:
            self._unwanted[hash] = True
        self._dropped += len(self._where)
        self._where.clear()
        self._pins.clear()
        self._valid_bytes = 0
        for segment in self._log:
            segment.entries.clear()
            self._log.retire(segment)

    # ------------------------------------------------------------------ commands

    def commands(self, now: Seconds) -> list[SegmentCommand]:
        """Work for threads: each command once. The result goes to `finished`."""
        return self._log.commands(now)

    def finished(self, command: SegmentCommand, now: Seconds, errno: int = 0) -> None:
        """A command ended; `errno` is 0 if it succeeded."""
        if errno and not isinstance(command, RemoveDirectory):
            self.trouble.failed(errno, now)
        lost: Segment | None = None
        match command:
            case SealSegment():
                lost = self._log.sealed(command, errno, now)
            case EraseRecords():
                lost = self._log.erased(command, errno, now)
            case MoveRecords():
                self._moved(command, errno, now)
            case UnlinkSegment():
                self._log.unlinked(command, errno, now)
            case RemoveDirectory():
                self._log.leftover_removed(command.name)
        if lost is not None:
            self._lose(lost)

    def seal_open(self) -> None:
        """Seal the open segment, before an orderly end."""
        self._log.fill_up_open()

    # ------------------------------------------------------------------ room

    def _make_room(self, count: int, payload: Bytes, now: Seconds) -> bool:
        """Whether so many records fit now; if not, begin to make room."""
        missing = self._log.missing(count, payload)
        if missing:
            self._evict_ahead(now, missing)
        return not missing

    def _evict_ahead(self, now: Seconds, segments: int = 1) -> None:
        """Begin removals until so many segments will be free."""
        while self._log.short_of(segments):
            if not self._log.remove_leftover() and not self._evict_one(now):
                return

    def _evict_one(self, now: Seconds) -> bool:
        """Begin to remove the next victim; False if there is none."""
        victim = self._log.victim()
        if victim is None:
            return False
        kept = self._keep(victim, now)
        gone = [entry.key for entry in victim.entries.values() if entry.key not in kept]
        self._forget(gone)
        self._evicted += len(gone)
        if victim.born is not None:
            self._retention = now - victim.born
        self._log.retire(victim)
        return True

    def _keep(self, victim: Segment, now: Seconds) -> set[bytes]:
        """Begin to copy the victim's best records to the open segment; their hashes."""
        pinned = self._pinned(victim, now)
        run: list[tuple[NewRecord, RecordPlace]] = []
        kept: set[bytes] = set()
        for entry in victim.best(pinned):
            place = self._log.reserve_here(entry.payload_bytes)
            if place is None:
                break
            run.append((NewRecord(self._block(entry), place), victim.place(entry)))
            kept.add(entry.key)
            if len(run) * record_bytes(entry.payload_bytes) >= _MOVE_BYTES:
                self._move(victim, run)
                run = []
        self._move(victim, run)
        return kept

    def _pinned(self, segment: Segment, now: Seconds) -> set[int]:
        if not self._pins:
            return set()
        self._pins = {hash: until for hash, until in self._pins.items() if until > now}
        return {at for at, entry in segment.entries.items() if entry.key in self._pins}

    def _move(self, victim: Segment, run: list[tuple[NewRecord, RecordPlace]]) -> None:
        if not run:
            return
        batch = self._start(tuple(record for record, _ in run))
        move = MoveRecords(batch, tuple(source for _, source in run))
        victim.moving += 1
        self._log.command(move)

    # ------------------------------------------------------------------ results

    def _start(self, records: tuple[NewRecord, ...]) -> WriteBatch:
        batch = WriteBatch(self._next_batch, records)
        self._next_batch += 1
        self._batches[batch.number] = batch
        self._log.begin(batch)
        return batch

    def _end(self, batch: WriteBatch) -> None:
        if self._batches.pop(batch.number, None) is None:
            raise ValueError(f"batch {batch.number} is not under way")
        for record in batch.records:
            if self._writing.get(record.block.hash) == batch.number:
                del self._writing[record.block.hash]
        self._log.end(batch)

    def _take_in(self, record: NewRecord) -> bool:
        """Make a written record valid; False if it was dropped meanwhile, or its segment was."""
        block, place = record.block, record.place
        segment = self._log[place.segment]
        erase = self._unwanted.pop(block.hash, None)
        if segment.state is SegmentState.RETIRING:
            return False
        if erase is not None:
            if erase:
                self._log.erase(place)
            return False
        entry = RecordEntry(
            block.hash,
            block.parent,
            block.root or _NO_ROOT,
            place.offset,
            place.payload_bytes,
            block.tokens,
            place.seq,
            block.turns,
        )
        segment.entries[place.offset] = entry
        self._where[block.hash] = (segment, place.offset)
        self._valid_bytes += record_bytes(place.payload_bytes)
        return True

    def _rooted(self, block: TierBlock) -> TierBlock:
        """The block with its chain's root, if its parent knows it."""
        parent = None if block.root else self.block(block.parent)
        return block if parent is None else replace(block, root=parent.root)

    def _close(self, batch: WriteBatch) -> None:
        """The segments of a failed batch take nothing more."""
        for number in batch.segments:
            self._log.fill_up(self._log[number])

    def _moved(self, move: MoveRecords, errno: int, now: Seconds) -> None:
        self._end(move.batch)
        for record, source in zip(move.batch.records, move.sources, strict=True):
            if errno:
                self._not_moved(record.block.hash, source)
            else:
                self._rename(record, source)
        if errno:
            self._close(move.batch)
        else:
            self.trouble.wrote(now)
        victim = self._log[move.sources[0].segment]
        victim.moving -= 1
        self._log.attend(victim)

    def _not_moved(self, hash: bytes, source: RecordPlace) -> None:
        if self.place(hash) == source:
            self._forget([hash])
            self._evicted += 1

    def _rename(self, record: NewRecord, source: RecordPlace) -> None:
        """A record was copied: from now on it is at its new place, if it is still wanted."""
        hash = record.block.hash
        if self.place(hash) != source:
            self._log.erase(record.place)
            return
        segment, offset = self._where.pop(hash)
        self._valid_bytes -= record_bytes(source.payload_bytes)
        del segment.entries[offset]
        if self._take_in(record):
            self._moved_bytes += record_bytes(source.payload_bytes)
        else:
            self._pins.pop(hash, None)
            self._changes.removed(hash)

    # ------------------------------------------------------------------ blocks

    def _lose(self, segment: Segment) -> None:
        """Drop what a segment has, and remove it."""
        names = [entry.key for entry in segment.entries.values()]
        self._forget(names)
        self._dropped += len(names)
        self._log.retire(segment)

    def _forget(self, names: list[bytes]) -> None:
        """Take blocks out of the index."""
        for name in names:
            segment, offset = self._where.pop(name)
            entry = segment.entries.pop(offset)
            segment.uses.pop(offset, None)
            self._pins.pop(name, None)
            self._valid_bytes -= record_bytes(entry.payload_bytes)
            self._changes.removed(name)
            self._log.attend(segment)

    def _known(self, hash: bytes) -> TierBlock:
        segment, offset = self._where[hash]
        return self._block(segment.entries[offset])

    def _block(self, entry: RecordEntry) -> TierBlock:
        root = b"" if entry.root == _NO_ROOT else entry.root
        pin = self._pins.get(entry.key, 0.0)
        return TierBlock(entry.key, entry.parent, entry.turns, entry.tokens, pin, root)

    # ------------------------------------------------------------------ an earlier life

    def _recover(self, found: Iterable[FoundSegment]) -> None:
        for old in sorted(found, key=lambda segment: segment.number):
            segment = self._log.adopt(old)
            for entry in old.entries:
                self._adopt(segment, entry)
        for block in chain_order(self._known(hash) for hash in self._where):
            self._changes.stored(block)
        self._evict_ahead(0.0)

    def _adopt(self, segment: Segment, entry: RecordEntry) -> None:
        """Take in a record of an earlier life. Of two copies, one that is durable counts, else the
        later one; the other one is erased, so that it cannot come back after a drop."""
        twin = self._where.get(entry.key)
        if twin is not None:
            kept = twin[0].entries[twin[1]]
            if (_durable(twin[0]), kept.seq) > (_durable(segment), entry.seq):
                self._log.erase(segment.place(entry))
                return
            del twin[0].entries[twin[1]]
            self._log.erase(twin[0].place(kept))
            self._valid_bytes -= record_bytes(kept.payload_bytes)
        segment.entries[entry.offset] = entry
        self._where[entry.key] = (segment, entry.offset)
        self._valid_bytes += record_bytes(entry.payload_bytes)

    # ------------------------------------------------------------------ audit

    def check(self) -> None:
        """Errors: AssertionError if the books do not add up."""
        self._log.check(self._batches.values())
        for hash, (segment, offset) in self._where.items():
            assert self._log[segment.number] is segment, "a block of a removed segment"
            assert segment.entries[offset].key == hash
        entries = [entry for segment in self._log for entry in segment.entries.values()]
        assert len(entries) == len(self._where)
        assert self._valid_bytes == sum(record_bytes(e.payload_bytes) for e in entries)
        assert self._claims == sum(segment.claims for segment in self._log)


def _durable(segment: Segment) -> bool:
    return segment.state is SegmentState.SEALED


def chain_order(blocks: Iterable[TierBlock]) -> Iterator[TierBlock]:
    """The blocks, each after its parent if that is among them, and chains in one piece."""
    known = {block.hash: block for block in blocks}
    children: dict[bytes, list[TierBlock]] = {}
    for block in known.values():
        children.setdefault(block.parent, []).append(block)
    waiting = [block for block in known.values() if block.parent not in known]
    while waiting:
        block = waiting.pop()
        yield block
        waiting.extend(children.get(block.hash, ()))
