"""Tracks one queue pair's work requests: waiting, posted, completed.

A device's send queue is short, and overflowing it breaks the queue pair. So no more is posted than
fits, and the rest of a chain waits here until completions make room. Work requests are numbered
from 1; only some of them ask for a completion, and one completion means that all before it have
completed. The last work request of every chain asks.

A chain that is given up is not posted any further. An empty write follows what was posted of it:
this asks for a completion and tells the peer nothing.

Pure: it fills a table, and the caller posts it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.transfer.path_base import DeliveryKey
    from pdserve.transfer.rdma.verbs_path import WorkRequestChain

__all__ = ["ChainEnded", "FillableTable", "RailRegions", "SendQueue"]


class FillableTable(Protocol):
    """The part of `work_requests.SendTable` that is used here."""

    def fill(
        self,
        at: int,
        stop: int,
        source: array[int],
        destination: array[int],
        length: array[int],
        run: int,
        done: Bytes,
        ours: array[int],
        theirs: array[int],
    ) -> tuple[int, int, Bytes]: ...

    def empty(self, at: int, word: int, theirs: array[int]) -> None: ...


class RailRegions(NamedTuple):
    """The regions of both ends as this rail reaches them (`work_requests.region_slices`)."""

    ours: Sequence[array[int]]
    theirs: Sequence[array[int]]


class ChainEnded(NamedTuple):
    """A chain has completed, or the posted part of one that was given up."""

    key: DeliveryKey
    whole: bool


@dataclass(slots=True, eq=False)
class _Posting:
    """How much of a chain has been posted."""

    chain: WorkRequestChain
    move: int = 0
    run: int = 0
    done: Bytes = 0
    begun: bool = False
    given_up: bool = False


class SendQueue:
    """The send queue of one queue pair."""

    def __init__(self, depth: int, regions: RailRegions) -> None:
        if depth < 2:
            raise ValueError("a send queue has at least two entries")
        self.depth = depth
        self.regions = regions
        self.posted = 0
        """Number of the last work request that was posted."""
        self.completed = 0
        self._waiting: deque[_Posting] = deque()
        self._ends: deque[tuple[int, ChainEnded]] = deque()

    @property
    def every(self) -> int:
        """One work request of so many asks for a completion: often enough that the queue is
        refilled before it is empty."""
        return max(1, self.depth // 4)

    @property
    def room(self) -> int:
        return self.depth - (self.posted - self.completed)

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is posted."""
        return self.posted == self.completed and not self._waiting

    def push(self, chain: WorkRequestChain) -> None:
        """Append a chain."""
        self._waiting.append(_Posting(chain))

    def give_up(self, key: DeliveryKey) -> bool:
        """Post no more of a chain. True: none of it was posted and it is gone; False: it ends
        through `complete`."""
        for posting in self._waiting:
            if posting.chain.key == key:
                if not posting.begun:
                    self._waiting.remove(posting)
                    return True
                posting.given_up = True
                return False
        return False

    def fill(self, table: FillableTable) -> int:
        """Write the work requests that may be posted now into the table; returns their number. They
        count as posted."""
        at, stop = 0, self.room
        while self._waiting and at < stop:
            posting = self._waiting[0]
            at = self._runs(posting, table, at, stop)
            if at == stop or not self._at_end(posting):
                break
            key, whole = posting.chain.key, not posting.given_up
            table.empty(at, posting.chain.word if whole else -1, self.regions.theirs[0])
            at += 1
            self._ends.append((self.posted + at, ChainEnded(key, whole)))
            self._waiting.popleft()
        self.posted += at
        return at

    def _runs(self, posting: _Posting, table: FillableTable, at: int, stop: int) -> int:
        moves = posting.chain.moves
        while not self._at_end(posting) and at < stop:
            move = moves[posting.move]
            ours, theirs = self.regions
            runs = move.runs
            at, posting.run, posting.done = table.fill(
                at,
                stop,
                runs.source,
                runs.destination,
                runs.length,
                posting.run,
                posting.done,
                ours[move.source],
                theirs[move.destination],
            )
            posting.begun = True
            if posting.run == len(runs):
                posting.move, posting.run = posting.move + 1, 0
        return at

    def _at_end(self, posting: _Posting) -> bool:
        return posting.given_up or posting.move == len(posting.chain.moves)

    def complete(self, number: int) -> list[ChainEnded]:
        """The device reports that all work requests up to this number have completed."""
        self.completed = max(self.completed, number)
        ended = []
        while self._ends and self._ends[0][0] <= self.completed:
            ended.append(self._ends.popleft()[1])
        return ended

    def key_at(self, number: int) -> DeliveryKey | None:
        """The delivery that a work request belongs to, for messages."""
        for last, ended in self._ends:
            if number <= last:
                return ended.key
        return self._waiting[0].chain.key if self._waiting else None

    def clear(self) -> None:
        """Forget everything: the queue pair is destroyed."""
        self._waiting.clear()
        self._ends.clear()
        self.completed = self.posted
