"""Keeps the segments of a directory: which one takes new records, which goes next, what to do.

It counts the bytes that the tier takes on disk, and hands out the commands that change segments as
wholes. It does not know which blocks are valid or where; `index` does, and owns it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.disk.format import (
    ENTRY_BYTES,
    PAGE,
    pack_entries,
    record_bytes,
    table_bytes,
)
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    RemoveDirectory,
    SealSegment,
    UnlinkSegment,
)
from pdserve.kv.tiers.disk.segment import Segment, SegmentState, records_that_fit
from pdserve.kv.tiers.disk.trouble import is_barred

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.records import RecordPlace, SegmentCommand, WriteBatch
    from pdserve.kv.tiers.disk.segment import FoundSegment

__all__ = ["SegmentLog"]

_AGAIN: Final[Seconds] = 30.0
"""Pause before a command that failed is tried again."""
_CLOSED: Final = frozenset({SegmentState.FULL, SegmentState.SEALED})


class SegmentLog:
    """The segments, oldest first, and the leftovers that count towards the same capacity."""

    def __init__(
        self,
        capacity: Bytes,
        segment_bytes: Bytes,
        *,
        epoch: int,
        next_segment: int,
        leftovers: Iterable[tuple[str, Bytes]],
    ) -> None:
        self.capacity = capacity
        self.segment_bytes = segment_bytes
        self._epoch = epoch
        self._segments: dict[int, Segment] = {}
        self._clock: deque[int] = deque()
        """Numbers of the segments, next victim first."""
        self._open: Segment | None = None
        self._leftovers = dict(leftovers)
        self._removing: set[str] = set()
        self._commands: list[SegmentCommand] = []
        self._attention: dict[int, Seconds] = {}
        """Segments that may need a command, and from when on."""
        self._next_segment = next_segment
        self._next_seq = 1
        self.allocated: Bytes = sum(self._leftovers.values())
        """Bytes on disk, of segments and leftovers."""
        self._going: Bytes = 0
        """Those of them whose removal was decided."""

    # ------------------------------------------------------------------ reading

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    @property
    def idle(self) -> bool:
        """True if no thread touches a file."""
        return all(segment.quiet for segment in self) and not self._removing

    # ------------------------------------------------------------------ places

    def missing(self, count: int, payload: Bytes) -> int:
        """Segments that must become free before so many records fit; 0: they fit now. Errors:
        ValueError if they never do."""
        here = self._open
        room = records_that_fit(here.size, here.end, here.placed, payload) if here else 0
        if count <= room:
            return 0
        each = records_that_fit(self.segment_bytes, PAGE, 0, payload)
        if not each or count > each * (self.capacity // self.segment_bytes - 1):
            raise ValueError(f"{count} records of {payload} bytes never fit into this disk tier")
        needed = -(-(count - room) // each)
        free = (self.capacity - self.allocated) // self.segment_bytes
        return 0 if free >= needed else needed

    def reserve(self, payload: Bytes, now: Seconds) -> RecordPlace:
        """A place in the open segment, or in a new one. There is room."""
        place = self.reserve_here(payload)
        if place is None:
            self._open_next(now)
            place = self.reserve_here(payload)
        assert place is not None
        return place

    def reserve_here(self, payload: Bytes) -> RecordPlace | None:
        """A place in the open segment; None without one, or if it is full."""
        if self._open is None:
            return None
        place = self._open.reserve(payload, self._next_seq)
        self._next_seq += place is not None
        return place

    def _open_next(self, now: Seconds) -> None:
        self.fill_up_open()
        segment = Segment(self._next_segment, self._epoch, self._next_seq, self.segment_bytes, now)
        self._next_segment += 1
        self._enter(segment)
        self._open = segment

    def _enter(self, segment: Segment) -> None:
        self._segments[segment.number] = segment
        self._clock.append(segment.number)
        self.allocated += segment.size

    def adopt(self, found: FoundSegment) -> Segment:
        """Enter a segment of an earlier life."""
        state = SegmentState.SEALED if found.sealed else SegmentState.FULL
        segment = Segment(
            found.number, found.epoch, found.first_seq, found.size, None, state, found.end
        )
        self._enter(segment)
        self._next_segment = max(self._next_segment, found.number + 1)
        self._next_seq = max([self._next_seq, *(entry.seq + 1 for entry in found.entries)])
        self.attend(segment)
        return segment

    # ------------------------------------------------------------------ users

    def begin(self, batch: WriteBatch) -> None:
        """A batch is under way to its segments."""
        for number in batch.segments:
            self._segments[number].writing += 1

    def end(self, batch: WriteBatch) -> None:
        """It is not any more."""
        for number in batch.segments:
            segment = self._segments[number]
            segment.writing -= 1
            self.attend(segment)

    def claim(self, place: RecordPlace) -> None:
        """A reader comes."""
        self._segments[place.segment].claims += 1

    def release(self, place: RecordPlace) -> None:
        """A reader goes. Errors: ValueError if there is none."""
        segment = self._segments[place.segment]
        if not segment.claims:
            raise ValueError(f"segment {place.segment} has no claim")
        segment.claims -= 1
        self.attend(segment)

    # ------------------------------------------------------------------ ends

    def fill_up(self, segment: Segment) -> None:
        """The segment takes nothing more, and is sealed."""
        if segment is self._open:
            self._open = None
        if segment.state is SegmentState.OPEN:
            segment.state = SegmentState.FULL
        self.attend(segment)

    def fill_up_open(self) -> None:
        """The open segment takes nothing more."""
        if self._open is not None:
            self.fill_up(self._open)

    def retire(self, segment: Segment) -> None:
        """The segment has no valid block any more, and is removed."""
        if segment is self._open:
            self._open = None
        if segment.state is not SegmentState.RETIRING:
            segment.state = SegmentState.RETIRING
            self._going += segment.size
        self.attend(segment)

    def erase(self, place: RecordPlace) -> None:
        """The bytes of a record that is not valid any more must go."""
        segment = self._segments.get(place.segment)
        if segment is not None:
            segment.erasing.append(place)
            self.attend(segment)

    def attend(self, segment: Segment) -> None:
        """Something about the segment changed."""
        self._attention[segment.number] = 0.0

    # ------------------------------------------------------------------ room

    def short_of(self, segments: int) -> bool:
        """True if so many segments will not be free, even after what was decided."""
        return self.allocated - self._going + segments * self.segment_bytes > self.capacity

    def victim(self) -> Segment | None:
        """The first sealed segment of the clock that was not used much; None: there is none."""
        first: Segment | None = None
        for _ in range(len(self._clock)):
            segment = self._segments[self._clock[0]]
            self._clock.rotate(-1)
            if segment.state is not SegmentState.SEALED:
                continue
            if not segment.worn:
                return segment
            segment.forgive()
            first = first or segment
        return first

    def remove_leftover(self) -> bool:
        """Begin to remove the oldest leftover; False if there is none."""
        name = next((name for name in self._leftovers if name not in self._removing), None)
        if name is None:
            return False
        self._removing.add(name)
        self._going += self._leftovers[name]
        self._commands.append(RemoveDirectory(name))
        return True

    # ------------------------------------------------------------------ commands

    def command(self, command: SegmentCommand) -> None:
        """Hand a command out with the next ones."""
        self._commands.append(command)

    def commands(self, now: Seconds) -> list[SegmentCommand]:
        """What is to be done now, each command once."""
        due = [number for number, since in self._attention.items() if since <= now]
        for number in due:
            del self._attention[number]
            segment = self._segments.get(number)
            if segment is not None:
                self._next_command(segment)
        commands, self._commands = self._commands, []
        return commands

    def _next_command(self, segment: Segment) -> None:
        """The next command for a segment, if it may have one now."""
        if segment.busy:
            return
        if segment.state in _CLOSED and not (segment.writing or segment.entries):
            self.retire(segment)
        if segment.state is SegmentState.RETIRING:
            if segment.quiet:
                self._issue(segment, UnlinkSegment(segment.number, segment.epoch))
        elif segment.state is SegmentState.FULL:
            if not segment.writing:
                self._issue(segment, _seal(segment))
        elif segment.erasing:
            self._issue(segment, _erase(segment))

    def _issue(self, segment: Segment, command: SegmentCommand) -> None:
        segment.busy = True
        self._commands.append(command)

    def sealed(self, command: SealSegment, errno: int, now: Seconds) -> Segment | None:
        """Sealing ended. Returns the segment if it is lost: a second attempt to make it durable may
        lie. Where nothing can be written, it can still be read, and is sealed later."""
        segment = self._end_command(command.segment)
        if is_barred(errno):
            self._attention[segment.number] = now + _AGAIN
            return None
        if errno:
            return segment
        if segment.state is SegmentState.FULL:
            segment.state = SegmentState.SEALED
            self._shrink(segment, command)
        return None

    def erased(self, command: EraseRecords, errno: int, now: Seconds) -> Segment | None:
        """Erasing ended. Returns the segment if it is lost: the payloads must go, with the whole
        file if not alone. Where nothing can be written, they go later."""
        segment = self._end_command(command.segment)
        if is_barred(errno):
            segment.erasing += command.places
            self._attention[segment.number] = now + _AGAIN
            return None
        if errno:
            return segment
        if command.seal is not None and segment.state is SegmentState.SEALED:
            self._shrink(segment, command.seal)
        return None

    def unlinked(self, command: UnlinkSegment, errno: int, now: Seconds) -> None:
        """A removal ended."""
        segment = self._end_command(command.segment)
        if errno:
            self._attention[segment.number] = now + _AGAIN
            return
        del self._segments[segment.number]
        self._clock.remove(segment.number)
        self.allocated -= segment.size
        self._going -= segment.size

    def leftover_removed(self, name: str) -> None:
        """A leftover is gone. One that cannot be removed belongs to a worker again, or has files of
        the operator's: in both cases this tier does not answer for it."""
        self._removing.discard(name)
        size = self._leftovers.pop(name)
        self._going -= size
        self.allocated -= size

    def _end_command(self, number: int) -> Segment:
        segment = self._segments[number]
        segment.busy = False
        self.attend(segment)
        return segment

    def _shrink(self, segment: Segment, seal: SealSegment) -> None:
        """The file was cut behind its trailer."""
        size = seal.end + table_bytes(len(seal.table) // ENTRY_BYTES)
        self.allocated -= segment.size - size
        segment.size = size

    # ------------------------------------------------------------------ audit

    def check(self, batches: Iterable[WriteBatch]) -> None:
        """Errors: AssertionError if the books do not add up."""
        sizes = sum(segment.size for segment in self)
        assert self.allocated == sizes + sum(self._leftovers.values())
        assert self.allocated <= self.capacity or self._going, "more than the capacity"
        under_way = list(batches)
        for segment in self:
            assert (segment.state is SegmentState.OPEN) == (segment is self._open)
            writers = [batch for batch in under_way if segment.number in batch.segments]
            assert segment.writing == len(writers)
            _check_spans(segment)


def _seal(segment: Segment) -> SealSegment:
    table = pack_entries(segment.entries.values(), segment.first_seq)
    return SealSegment(segment.number, segment.epoch, segment.first_seq, segment.end, table)


def _erase(segment: Segment) -> EraseRecords:
    places, segment.erasing = tuple(segment.erasing), []
    seal = _seal(segment) if segment.state is SegmentState.SEALED else None
    return EraseRecords(segment.number, segment.epoch, places, seal)


def _check_spans(segment: Segment) -> None:
    """Its records lie behind each other, within it."""
    end = PAGE
    for offset in sorted(segment.entries):
        assert offset >= end, "overlap"
        end = offset + record_bytes(segment.entries[offset].payload_bytes)
    assert end <= segment.end <= segment.size
