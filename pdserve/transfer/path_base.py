"""Implements what all KV paths share: tracking grants and deliveries, and how a path ends.

A backend extends `PathBase` with how bytes move (`_begin`, `_abandon`), how the writer of one grant
is stopped (`_fence`), and how this node's end is destroyed (`_destroy`). On the loop it reports
events (`arrived`, `spoiled`, `settle`, `fail`).

A path ends once. Its sinks fail at once; then this end is destroyed, which is the fence. Only after
that are grants closed and deliveries ended, since bytes may move until then.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.errors import (
    DeadlineExceeded,
    Overloaded,
    PathLost,
    PdserveError,
    TransferError,
    TransferRefused,
    TransferTimeout,
    TransferWithdrawn,
)
from pdserve.messages.transfer import TicketWithdrawn
from pdserve.transfer.base import PathStats
from pdserve.transfer.block_mapping import BlockMapper
from pdserve.transfer.copy_plan import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, NodeLife, Seconds
    from pdserve.messages.transfer import RegionCard, TransferControl, TransferTicket
    from pdserve.transfer.base import DeliveryDone, GrantSink, GrantSpec, KvPart
    from pdserve.transfer.block_mapping import BlockMapping
    from pdserve.transfer.grants import GrantEntry, GrantTable

__all__ = ["MAX_DELIVERIES", "Delivery", "DeliveryKey", "PathBase"]

_log = logging.getLogger(__name__)

MAX_DELIVERIES: Final = 4096
"""Most deliveries under way on one path; one more raises `Overloaded`."""


class DeliveryKey(NamedTuple):
    """Identifies a delivery on its path."""

    slot: int
    generation: int
    part: int


@dataclass(slots=True, eq=False)
class Delivery:
    """A delivery under way."""

    ticket: TransferTicket
    part: int
    done: DeliveryDone
    share: BlockMapping
    size: Bytes
    runs: int = 0
    ended: asyncio.Future[None] | None = None
    """Set when the delivery ends, if `drain` waits for it."""

    @property
    def key(self) -> DeliveryKey:
        return DeliveryKey(self.ticket.slot, self.ticket.generation, self.part)


class PathBase:
    """Grants and deliveries of one path; implements `base.KvPath`."""

    backend = ""

    def __init__(
        self,
        peer: NodeLife,
        number: int,
        *,
        ours: Sequence[RegionCard],
        theirs: Sequence[RegionCard],
        grants: GrantTable,
        forget: Callable[[PathBase], None],
    ) -> None:
        """Errors: `PlanError` if the two nodes' pools are incompatible."""
        self.peer = peer
        self.number = number
        self.remote = 0
        """The peer's number for this path."""
        self.down: TransferError | None = None
        self.out = BlockMapper(ours, theirs)
        self.into = BlockMapper(theirs, ours)
        self._stats = PathStats()
        self.grants = grants
        self.outgoing: dict[DeliveryKey, Delivery] = {}
        self._stopped: dict[int, int] = {}  # slot of the peer: generation that gets nothing more
        self.patience: Seconds = 0.0
        """How long deliveries may be under way without any progress before the path is given up;
        0: the device knows by itself."""
        self._watching: asyncio.TimerHandle | None = None
        self._forget = forget
        self.tell: Callable[[TransferControl], None] = lambda control: None
        """Tells the peer when it can. Set by the transport."""
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{self.backend} path to {self.peer}{', down' if self.down else ''}>"

    # ------------------------------------------------------------------ what back ends bring

    def _begin(self, outgoing: Delivery) -> None:
        """Start to move the bytes and to notify; `settle` follows. Errors: `PlanError`,
        `Overloaded`."""
        raise NotImplementedError

    def _abandon(self, key: DeliveryKey) -> None:
        """End a delivery soon, through `settle`: it is no longer wanted."""

    def _mark(self) -> object:
        """A value that changes whenever deliveries make progress."""
        return self._stats.parts_delivered, self._stats.deliveries_failed

    async def _fence(self, granted: GrantEntry, timeout: Seconds) -> None:
        """Return when nothing can be written for this grant any more. Errors: `PdserveError`."""
        raise NotImplementedError

    async def _destroy(self) -> None:
        """Return when nothing that came by this path can be written here, and nothing of this
        node's memory is read for it. Not cancelled."""
        raise NotImplementedError

    def _farewell(self, reason: str) -> None:
        """Tell the peer that the path has ended, if it does not notice by itself."""

    async def probe(self, size: Bytes) -> Bytes:
        """Bring bytes of the peer into memory of no use; see `base.KvPath.probe`."""
        raise self._error(TransferRefused, "", "probe", f"{self.backend} has no probes")

    # ------------------------------------------------------------------ the destination

    def grant(self, order: GrantSpec, sink: GrantSink) -> GrantEntry:
        if self.down is not None:
            raise self._error(PathLost, order.transfer, "grant", self.down.message)
        try:
            self.into.check_order(order.first_token, order.tokens, order.blocks)
            granted = self.grants.open(self, order, sink)
        except PlanError as error:
            raise self._error(TransferRefused, order.transfer, "grant", str(error)) from error
        self._stats.grants += 1
        return granted

    def finish(self, granted: GrantEntry) -> None:
        """Close a grant of which all parts have arrived; no fence is needed."""
        self.grants.close(granted)

    async def revoke(self, granted: GrantEntry, timeout: Seconds) -> None:
        """Close a grant behind a fence: it returns when nothing can arrive any more.

        Errors: `TransferTimeout` or another `TransferError` if the peer does not confirm; the
        grant's blocks then stay in quarantine until the path is closed. Cancellation: as after an
        error.
        """
        if granted.closed:
            return
        granted.state = "stopping"
        if self._ending is not None:
            await asyncio.shield(self._ending)
            return
        try:
            async with asyncio.timeout(timeout):
                await self._fence(granted, timeout)
        except (TimeoutError, DeadlineExceeded):
            if not granted.closed:
                reason = f"the peer has not confirmed it within {timeout:g} s"
                transfer = granted.ticket.transfer
                raise self._error(TransferTimeout, transfer, "stop", reason) from None
        except PdserveError as error:
            if not granted.closed:
                transfer = granted.ticket.transfer
                raise self._error(TransferError, transfer, "stop", error.message) from error
        self._closed_by_fence(granted)

    def _closed_by_fence(self, granted: GrantEntry) -> None:
        if not granted.closed:
            self.grants.close(granted)
            self._stats.fenced += 1

    def arrived(self, slot: int, generation: int, part: int, size: Bytes) -> None:
        """A backend reports that all bytes of a part are in a grant's blocks."""
        granted = self.grants.find(self, slot, generation)
        if granted is None or part in granted.parts:
            self._stats.stale += 1
            _log.error("%r: a notification for slot %d, which has no open grant", self, slot)
            return
        if granted.state != "open":
            return
        granted.parts.add(part)
        self._stats.parts_received += 1
        self._stats.bytes_received += size
        granted.sink.on_part(part)

    def spoiled(self, granted: GrantEntry, error: TransferError) -> None:
        """Fail one grant; the path goes on."""
        if granted.state != "open":
            return
        granted.state = "failed"
        self._stats.grants_failed += 1
        granted.sink.on_failed(error)

    def given_up(self, slot: int, generation: int) -> None:
        """The source delivers nothing more to a grant. Ignored if the grant is closed."""
        granted = self.grants.find(self, slot, generation, exact=True)
        if granted is not None:
            transfer, reason = granted.ticket.transfer, "the source has withdrawn it"
            self.spoiled(granted, self._error(TransferWithdrawn, transfer, "withdraw", reason))

    # ------------------------------------------------------------------ the source

    def deliver(self, ticket: TransferTicket, part: KvPart, done: DeliveryDone) -> None:
        """Begin to send a part to the blocks of the peer's ticket; `done` is called once, later.
        Errors: `PathLost`, `Overloaded`, `TransferRefused`; `done` is then not called."""
        if self.down is not None:
            raise self._error(PathLost, ticket.transfer, "deliver", self.down.message)
        if len(self.outgoing) >= MAX_DELIVERIES:
            raise Overloaded(f"{MAX_DELIVERIES} deliveries to {self.peer} are under way")
        try:
            outgoing = self._outgoing(ticket, part, done)
            self.outgoing[outgoing.key] = outgoing
            self._begin(outgoing)
            self._watch()
        except (PlanError, Overloaded) as error:
            self.outgoing.pop(DeliveryKey(ticket.slot, ticket.generation, part.number), None)
            if isinstance(error, Overloaded):
                raise
            raise self._error(TransferRefused, ticket.transfer, "deliver", str(error)) from error

    def _outgoing(self, ticket: TransferTicket, part: KvPart, done: DeliveryDone) -> Delivery:
        if ticket.epoch != self.peer.epoch:
            raise PlanError(f"the ticket is of epoch {ticket.epoch}, the peer of another")
        if self._stopped.get(ticket.slot) == ticket.generation:
            raise PlanError(f"attempt {ticket.attempt} has been stopped")
        key = DeliveryKey(ticket.slot, ticket.generation, part.number)
        if key in self.outgoing:
            raise PlanError(f"part {part.number} is being delivered already")
        self.out.check_order(ticket.first_token, ticket.tokens, ticket.blocks)
        share = self.out.share(
            ticket.first_token, ticket.tokens, part.start, part.blocks, part.layers, part.names
        )
        return Delivery(ticket, part.number, done, share, self.out.size(share))

    def _watch(self) -> None:
        """Set the timer that detects a peer without progress."""
        if self.patience and self._watching is None and self.outgoing:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(self.patience, self._look, self._mark())

    def _look(self, before: object) -> None:
        self._watching = None
        if self.outgoing and self._mark() == before:
            self.fail("deliver", f"the peer has received nothing for {self.patience:g} s")
        else:
            self._watch()

    def withdraw(self, ticket: TransferTicket) -> None:
        """Stop all deliveries under this ticket and tell the peer, whose sink fails."""
        self.stop(ticket.slot, ticket.generation)
        if self.down is None:
            self.tell(TicketWithdrawn(self.remote, ticket.slot, ticket.generation))

    def stop(self, slot: int, generation: int) -> list[Delivery]:
        """Stop deliveries under this ticket, now and later; returns those that are still under
        way."""
        self._stopped[slot] = generation
        mine = [o for key, o in self.outgoing.items() if key[:2] == (slot, generation)]
        for outgoing in mine:
            self._abandon(outgoing.key)
        return [outgoing for outgoing in mine if outgoing.key in self.outgoing]

    async def drain(self, slot: int, generation: int) -> None:
        """Call `stop`, and return when nothing of the ticket is under way."""
        loop, waiting = asyncio.get_running_loop(), []
        for outgoing in self.stop(slot, generation):  # they end while an earlier one is awaited
            if outgoing.ended is None:
                outgoing.ended = loop.create_future()
            waiting.append(outgoing.ended)
        for ended in waiting:
            await asyncio.shield(ended)

    def settle(self, key: DeliveryKey, error: TransferError | None = None) -> None:
        """A delivery has ended: the source's blocks are no longer read for it. Calls its `done`."""
        outgoing = self.outgoing.pop(key, None)
        if outgoing is None:
            return
        stats = self._stats
        if error is None:
            stats.parts_delivered += 1
            stats.bytes_delivered += outgoing.size
            stats.runs_delivered += outgoing.runs
        else:
            stats.deliveries_failed += 1
        if outgoing.ended is not None:
            outgoing.ended.set_result(None)
        outgoing.done(error)

    def withdrawn(self, outgoing: Delivery) -> TransferError:
        """The error of a delivery that was stopped."""
        reason = f"part {outgoing.part} of attempt {outgoing.ticket.attempt} is not wanted any more"
        return self._error(TransferWithdrawn, outgoing.ticket.transfer, "deliver", reason)

    # ------------------------------------------------------------------ the end

    def fail(self, step: str, reason: str) -> None:
        """Begin to end the path. Only the first reason is kept."""
        if self.down is not None:
            return
        self.down = self._error(PathLost, "", step, reason)
        for granted in self.grants.of(self):
            self.spoiled(granted, self._error(PathLost, granted.ticket.transfer, step, reason))
        self._ending = asyncio.get_running_loop().create_task(self._end(step, reason))

    async def close(self, reason: str) -> None:
        """End the path; returns when this node's end is destroyed, which is the fence.
        Idempotent."""
        self.fail("close", reason)
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def _end(self, step: str, reason: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        try:
            await self._destroy()
        finally:  # what cannot be destroyed may still be written through: grants stay as they are
            for key, outgoing in list(self.outgoing.items()):
                self.settle(key, self._error(PathLost, outgoing.ticket.transfer, step, reason))
        for granted in self.grants.of(self):
            self._closed_by_fence(granted)
        self._forget(self)
        self._farewell(reason)

    # ------------------------------------------------------------------ the rest

    @property
    def stats(self) -> PathStats:
        """The path's counters, with the present number of deliveries and grants."""
        self._stats.outgoing = len(self.outgoing)
        self._stats.granted = len(self.grants.of(self))
        return self._stats

    def _error(
        self, kind: type[TransferError], transfer: str, step: str, reason: str
    ) -> TransferError:
        return kind.at(transfer, f"{self.peer} over {self.backend}", step, reason)
