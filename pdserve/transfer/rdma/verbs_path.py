"""Implements a path over queue pairs that complete in order; real RDMA and its fake share it.

Each rail is one reliable queue pair. A part is cut into stripes that go out on all rails; on each
rail the last work request is a notification without data. Order holds only within a rail, so the
destination counts one notification per rail before it tells the sink.

What was posted cannot be recalled, so a stop waits until all of it has completed. The peer's access
ends only when this node has destroyed its queue pairs. A queue pair that has failed is never used
again: its path ends.

It knows no device, only the `QueuePair` interface, which takes work requests as whole chains.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pdserve.messages.transfer import PathGone, StopTicket
from pdserve.transfer.block_mapping import RegionCopy
from pdserve.transfer.copy_plan import CopyRuns, split_runs
from pdserve.transfer.path_base import Delivery, DeliveryKey, PathBase
from pdserve.transfer.rdma.imm_data import ImmData, ImmKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.transfer.base import CallPeer
    from pdserve.transfer.grants import GrantEntry

__all__ = ["STRIPE_BYTES", "QueuePair", "VerbsPath", "WorkRequestChain", "stripe_copies"]

STRIPE_BYTES: Final[Bytes] = 1 << 20
"""Most bytes of one work request: small enough to spread a part over the rails, large enough that a
work request's fixed cost does not matter."""

_REASON: Final = 500


class WorkRequestChain(NamedTuple):
    """The work requests of one part on one rail: writes, then a notification."""

    moves: tuple[RegionCopy, ...]
    word: int
    """The notification's immediate data."""
    key: DeliveryKey
    """Returned with the completion."""


class QueuePair(Protocol):
    """One rail of a path, connected to one queue pair of the peer."""

    def post(self, chain: WorkRequestChain) -> None:
        """Queue a chain after those posted before. `VerbsPath.completed` is called once all of it
        has completed, `VerbsPath.fail` if it fails."""
        ...

    def destroy(self) -> None:
        """Destroy the queue pair; afterwards nothing arrives by it and it reads nothing."""
        ...


class VerbsPath(PathBase):
    """A path over one or more rails. A subclass sets `rails` and `peer_rails` before the path is
    used."""

    def __init__(self, *args: Any, ask: CallPeer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rails: Sequence[QueuePair] = ()
        self.peer_rails = 0
        """How many notifications make a part: the peer's rails."""
        self.stripe: Bytes = STRIPE_BYTES
        self._ask = ask
        self._posted: dict[DeliveryKey, int] = {}  # rails that have not completed it
        self._cut: set[DeliveryKey] = set()  # of those, what some rail has not posted to its end

    def _begin(self, outgoing: Delivery) -> None:
        moves = self.out.moves(outgoing.share, outgoing.ticket.blocks)
        key = outgoing.key
        word = ImmData(ImmKind.PART, key.slot, key.generation, key.part).pack()
        shares = stripe_copies(moves, len(self.rails), self.stripe)
        outgoing.runs = sum(len(move.runs) for share in shares for move in share)
        self._posted[key] = len(self.rails)
        for rail, share in zip(self.rails, shares, strict=True):
            rail.post(WorkRequestChain(share, word, key))

    def completed(self, key: DeliveryKey, *, whole: bool = True) -> None:
        """A rail has completed its chain, or what it had posted of one that was given up."""
        left = self._posted.pop(key, 0) - 1
        if left < 0:
            return
        if not whole:
            self._cut.add(key)
        if left > 0:
            self._posted[key] = left
        elif key in self._cut:
            self._cut.discard(key)
            self.settle(key, self.withdrawn(self.outgoing[key]))
        else:
            self.settle(key)

    def notified(self, word: int) -> None:
        """A rail of the peer has notified a part."""
        event = ImmData.unpack(word)
        granted = self.grants.find(self, event.slot, event.generation)
        if granted is None or event.kind != ImmKind.PART:
            self.arrived(event.slot, event.generation, event.part, 0)  # which counts it as stale
            return
        count = granted.counts.get(event.part, 0) + 1
        granted.counts[event.part] = count
        if count == self.peer_rails:
            self.arrived(event.slot, event.generation, event.part, 0)

    async def _fence(self, granted: GrantEntry, timeout: Seconds) -> None:
        ticket = granted.ticket
        await self._ask(self.peer, StopTicket(self.remote, ticket.slot, ticket.generation), timeout)

    async def _destroy(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # one that fails keeps none of the others
            for rail in self.rails:
                all_of_them.callback(rail.destroy)
        self._posted.clear()
        self._cut.clear()

    def _farewell(self, reason: str) -> None:
        """Tell the peer: a node that only writes does not notice the end of a path."""
        self.tell(PathGone(self.remote, reason[:_REASON]))


def stripe_copies(
    moves: Sequence[RegionCopy], rails: int, size: Bytes
) -> list[tuple[RegionCopy, ...]]:
    """Divide copies among so many rails, in runs of at most `size` bytes, with about as many bytes
    on each."""
    shares: list[list[RegionCopy]] = [[] for _ in range(rails)]
    first = 0
    for move in moves:
        runs = split_runs(move.runs, size)
        for rail in range(min(rails, len(runs))):
            own = slice(rail, None, rails)
            part = CopyRuns(runs.source[own], runs.destination[own], runs.length[own])
            shares[(first + rail) % rails].append(RegionCopy(move.source, move.destination, part))
        first += len(runs)
    return [tuple(share) for share in shares]
