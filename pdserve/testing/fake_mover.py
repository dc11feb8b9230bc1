"""Fakes KV movers of cores in one process: bytes are copied when and in the order a test chooses.

It does all that a real transport may do: parts arrive in any order; bytes land after the attempt
was revoked, until it is closed; bytes of a failed send may land later; after a fence nothing lands.
`FreeGuard` detects bytes that land in unexpected blocks, and blocks that are allocated while a peer
may still write to them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    ConnectorEvent,
    PartArrived,
    PartDelivered,
)
from pdserve.errors import PathLost, TransferError, TransferRefused, TransferWithdrawn
from pdserve.messages.transfer import TransferTicket
from pdserve.testing.kv_oracle import POISON
from pdserve.transfer.copy_plan import align_blocks, bind_blocks, plan_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from pdserve.engine_core.kv_transfer.connector import AttemptKey
    from pdserve.ids import NodeLife
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import PathState
    from pdserve.transfer.base import GrantSpec, KvPart, Region
    from pdserve.transfer.copy_plan import CopyRuns

__all__ = ["FakeMover", "FakeNet", "FreeGuard"]


@dataclass(slots=True, eq=False)
class _Grant:
    mover: FakeMover
    key: AttemptKey
    ticket: TransferTicket
    revoked: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Delivery:
    """A part that is on its way."""

    source: FakeMover
    handle: int
    ticket: TransferTicket
    part: KvPart
    error: TransferError | None = None
    """The error that it will end with, without any of it landing; None: none."""
    data: list[bytes] | None = None
    """What is to be sent, when it was ordered; None: not known."""


@dataclass(frozen=True, slots=True)
class _Move:
    """What is copied from one rank's pool to another's."""

    source: Region
    target: Region
    runs: CopyRuns


def _data(moves: list[_Move]) -> list[bytes]:
    """The bytes of all runs, in order."""
    found: list[bytes] = []
    for move in moves:
        view = move.source.view
        assert view is not None
        found += [bytes(view[at : at + size]) for at, _, size in move.runs]
    return found


@dataclass(slots=True, eq=False)
class _Ghost:
    """Bytes whose sender has given up."""

    grant: _Grant
    moves: list[_Move]
    data: list[bytes]


class FakeNet:
    """Connects the movers of one test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """What has happened: copied, lost, late, landed_late, corrupted, refused."""
        self.grants: dict[tuple[int, int], _Grant] = {}
        """Grants by slot and generation, closed ones too."""
        self.under_way: list[Callable[[], None]] = []
        """What may happen next."""
        self.faults: list[str] = []
        """Faults of the next deliveries: `lost`, `late`, `corrupt`, or empty for none."""
        self.bytes_applied = 0

    def step(self, rng: Random | None = None) -> bool:
        """Let one thing happen: the oldest, or a random one. False if there is nothing."""
        if not self.under_way:
            return False
        index = 0 if rng is None else rng.randrange(len(self.under_way))
        self.under_way.pop(index)()
        return True

    def run(self) -> None:
        """Let everything happen."""
        while self.step():
            pass

    def closing(self, mover: FakeMover) -> set[int]:
        """Blocks of a mover's core that a peer may still write to."""
        return {
            block
            for grant in self.grants.values()
            if grant.mover is mover and not grant.closed
            for block in grant.ticket.blocks
        }


@dataclass(slots=True, eq=False)
class FakeMover:
    """A simulated mover; implements `engine_core.kv_transfer.connector.KvConnector`."""

    net: FakeNet
    refuse: str = ""
    """Why there is no path; empty: there is one."""
    closed: bool = False
    region: Region = field(init=False)
    _wake: Callable[[], None] = field(init=False)
    _events: list[ConnectorEvent] = field(default_factory=list)
    _grants: dict[AttemptKey, _Grant] = field(default_factory=dict)

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        self.region, self._wake = region, wake
        return ("fake",)

    def attach(self, peer: NodeLife) -> None:
        """Nothing to do: nodes do not matter here."""

    def paths(self) -> list[PathState]:
        return []

    def poll(self) -> list[ConnectorEvent]:
        events, self._events = self._events, []
        return events

    def say(self, moved: ConnectorEvent) -> None:
        """Queue an event for the core."""
        if not self.closed:
            self._events.append(moved)
            self._wake()

    # ------------------------------------------------------------------ destination

    def open(self, key: AttemptKey, peer: NodeLife, order: GrantSpec) -> None:
        net = self.net
        assert not net.closing(self) & set(order.blocks), "blocks of two attempts at once"
        ticket = TransferTicket(
            transfer=order.transfer,
            attempt=key.attempt,
            epoch=1,
            slot=len(net.grants),
            generation=7,
            first_token=order.first_token,
            tokens=order.tokens,
            blocks=tuple(order.blocks),
        )
        grant = _Grant(self, key, ticket)
        net.grants[ticket.slot, ticket.generation] = self._grants[key] = grant
        net.under_way.append(lambda: self._granted(grant))

    def _granted(self, grant: _Grant) -> None:
        if grant.revoked:
            return
        if self.refuse:
            self.say(AttemptBroken(grant.key, PathLost(self.refuse)))
        else:
            self.say(AttemptGranted(grant.key, grant.ticket))

    def finish(self, key: AttemptKey) -> None:
        self._grants.pop(key).closed = True

    def revoke(self, key: AttemptKey) -> None:
        grant = self._grants.pop(key)
        grant.revoked = True
        self.net.under_way.append(lambda: self._close(grant))

    def _close(self, grant: _Grant) -> None:
        grant.closed = True
        self.say(AttemptFenced(grant.key))

    # ------------------------------------------------------------------ source

    def deliver(self, handle: int, peer: NodeLife, ticket: TransferTicket, part: KvPart) -> None:
        delivery = _Delivery(self, handle, ticket, part)
        grant = self.net.grants[ticket.slot, ticket.generation]
        if self.region.view is not None and not grant.closed:
            delivery.data = _data(self._moves(grant, delivery))
        self.net.under_way.append(lambda: self._land(delivery))
        self._deliveries.append(delivery)

    _deliveries: list[_Delivery] = field(default_factory=list)

    def withdraw(self, handle: int, peer: NodeLife, ticket: TransferTicket) -> None:
        for delivery in self._deliveries:
            if delivery.handle == handle:
                delivery.error = TransferWithdrawn("the source has withdrawn it")

    def _land(self, delivery: _Delivery) -> None:
        if delivery not in self._deliveries:
            return
        self._deliveries.remove(delivery)
        net, ticket = self.net, delivery.ticket
        grant = net.grants[ticket.slot, ticket.generation]
        if grant.closed and delivery.error is None:
            net.counts["refused"] += 1
            delivery.error = TransferRefused("the attempt is over")
        fault = net.faults.pop(0) if net.faults and delivery.error is None else ""
        if fault in ("lost", "late"):
            net.counts[fault] += 1
            delivery.error = PathLost("an injected fault")
            if fault == "late":
                self._leave_ghost(grant, delivery)
        if delivery.error is not None:
            self.say(PartDelivered(delivery.handle, delivery.part.number, 0, delivery.error))
            if not (grant.revoked or grant.closed):
                grant.mover.say(AttemptBroken(grant.key, delivery.error))
            return
        moves = self._moves(grant, delivery)
        data = _data(moves)
        assert delivery.data in (None, data), "blocks have changed while they were sent"
        self._write(moves, data, fault)
        size = sum(move.runs.size for move in moves)
        self.say(PartDelivered(delivery.handle, delivery.part.number, size, None))
        if not grant.revoked:
            grant.mover.say(PartArrived(grant.key, delivery.part.number, size))

    def _moves(self, grant: _Grant, delivery: _Delivery) -> list[_Move]:
        ticket, part, ours = delivery.ticket, delivery.part, self.region.layout
        skip, place = align_blocks(
            ticket.first_token, ticket.tokens, ours.tokens, part.start, len(part.blocks)
        )
        blocks = part.blocks[skip:]
        theirs = ticket.blocks[place : place + len(blocks)]
        return [
            _Move(source, target, bind_blocks(plan, blocks, theirs))
            for source in self.region.pools
            for target in grant.mover.region.pools
            if (plan := plan_block(source.layout, target.layout, part.layers)).spans
        ]

    def _write(self, moves: list[_Move], data: list[bytes], fault: str) -> None:
        pieces = iter(data)
        for move in moves:
            view = move.target.view
            assert view is not None
            for _, at, size in move.runs:
                view[at : at + size] = next(pieces)
                if fault == "corrupt":
                    view[at] ^= 1
                    self.net.counts["corrupted"] += 1
                    fault = ""
        self.net.counts["copied"] += 1
        self.net.bytes_applied += sum(move.runs.size for move in moves)

    def _leave_ghost(self, grant: _Grant, delivery: _Delivery) -> None:
        moves = self._moves(grant, delivery)
        ghost = _Ghost(grant, moves, _data(moves))
        self.net.under_way.append(lambda: self._haunt(ghost))

    def _haunt(self, ghost: _Ghost) -> None:
        """After a fence nothing lands."""
        if not ghost.grant.closed:
            self.net.counts["landed_late"] += 1
            self._write(ghost.moves, ghost.data, "")

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        self.closed = True
        for grant in self._grants.values():
            grant.closed = True
        self._deliveries.clear()


class FreeGuard:
    """Fills free blocks with a pattern, and checks that it stays."""

    def __init__(self, pool: BlockPool, mover: FakeMover) -> None:
        """Check every block that the pool hands out from now on."""
        self._pool, self._mover = pool, mover
        self._filled: set[int] = set()
        self._reserve = pool.reserve
        pool.reserve = self.reserve  # type: ignore[method-assign]

    def reserve(self, *args: object, **kwargs: object) -> list[int] | None:
        """Reserve blocks of the pool, and assert that no peer can still write to any of them."""
        fresh = self._reserve(*args, **kwargs)  # type: ignore[arg-type]
        writable = self._mover.net.closing(self._mover)
        assert not writable & set(fresh or ()), "a block is handed out that a peer may write to"
        known = self._filled.intersection(fresh or ())
        self._filled -= known
        self._look_at(known)
        return fresh

    def check(self) -> None:
        """Assert that no free block was written to, and fill blocks that have become free."""
        free = set(self._pool._free)
        self._look_at(self._filled & free)
        for _, view in self._views(free - self._filled):
            view[:] = bytes([POISON]) * len(view)
        self._filled = free

    def _views(self, blocks: set[int]) -> Iterator[tuple[int, memoryview]]:
        """Each of these blocks with its bytes, on every rank."""
        if not blocks:
            return
        for pool in self._mover.region.pools:
            assert pool.view is not None
            size = pool.block_bytes
            for block in blocks:
                yield block, pool.view[block * size : (block + 1) * size]

    def _look_at(self, blocks: set[int]) -> None:
        poison = b""
        for block, view in self._views(blocks):
            poison = poison or bytes([POISON]) * len(view)
            # A memoryview is compared item by item, bytes at once.
            assert view.tobytes() == poison, f"block {block} was written while it was free"
