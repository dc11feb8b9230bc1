"""A queue pair's books: what waits, what is under way, what has completed.

A device's send queue is short and overflows badly; so never more is posted than fits, and the rest
of a chain waits here until completions make room. Work requests are numbered from 1 on; only some
of them ask for a completion, and one that completes says that all before it have. The last of every
chain asks.

A chain that is given up stops where it is. What of it was posted is followed by an empty write,
which asks for a completion and tells the peer nothing.

It is pure: a table is filled, and someone else posts it.
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
    """`table.SendTable`, as far as it is filled here."""

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
    """Of both ends, as this rail may reach them (`table.slices`)."""

    ours: Sequence[array[int]]
    theirs: Sequence[array[int]]


class ChainEnded(NamedTuple):
    """A chain has completed, or what of it was posted has."""

    key: DeliveryKey
    whole: bool


@dataclass(slots=True, eq=False)
class _Posting:
    """How far a chain has come."""

    chain: WorkRequestChain
    move: int = 0
    run: int = 0
    done: Bytes = 0
    begun: bool = False
    given_up: bool = False


class SendQueue:
    """See above."""

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
        """One work request of so many asks for a completion: often enough that the queue is filled
        again before it is empty."""
        return max(1, self.depth // 4)

    @property
    def room(self) -> int:
        return self.depth - (self.posted - self.completed)

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing waits."""
        return self.posted == self.completed and not self._waiting

    def push(self, chain: WorkRequestChain) -> None:
        """Behind everything else."""
        self._waiting.append(_Posting(chain))

    def give_up(self, key: DeliveryKey) -> bool:
        """Post no more of a chain. True: it has not begun and is gone; else it ends by `complete`,
        whole or not."""
        for posting in self._waiting:
            if posting.chain.key == key:
                if not posting.begun:
                    self._waiting.remove(posting)
                    return True
                posting.given_up = True
                return False
        return False

    def fill(self, table: FillableTable) -> int:
        """Write what may be posted now; returns how many entries. They count as posted."""
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
        """Everything up to this work request has completed."""
        self.completed = max(self.completed, number)
        ended = []
        while self._ends and self._ends[0][0] <= self.completed:
            ended.append(self._ends.popleft()[1])
        return ended

    def key_at(self, number: int) -> DeliveryKey | None:
        """Whose work request this is; for messages."""
        for last, ended in self._ends:
            if number <= last:
                return ended.key
        return self._waiting[0].chain.key if self._waiting else None

    def clear(self) -> None:
        """The queue pair is gone."""
        self._waiting.clear()
        self._ends.clear()
        self.completed = self.posted
