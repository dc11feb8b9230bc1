"""Serves blocks of this pool to other workers that fetch them: `KvServer`.

    serve     match the hashes in the pool and hold the blocks, or refuse
    staging   lower tiers bring further blocks, if there are any
    sending   parts go to the connector, as many bytes at once as allowed; checksums are taken
    answered  everything is handed over; the blocks are held until the last part has been read
    ended     by the last part, the peer's end, a failure, or the deadline

What is held is bounded by number, by a share of the pool and by time: `SLACK` after the requester's
deadline everything is given back, whatever the peer does. With requests of its own to compute, the
core sends less at once.

It decides nothing about paths: the connector does. The engine core owns this and calls it in its
thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import HASH_BYTES, split_hashes
from pdserve.engine_core.kv_fetch.chains import blocks_up_to
from pdserve.engine_core.kv_transfer.checksums import checksum_of
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import KvPullServed
from pdserve.messages.kv_pull import KvPullGrant
from pdserve.messages.transfer import MAX_PARTS
from pdserve.transfer.base import KvPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_fetch.ports import PullEnd, ServedPool, StageBlocks
    from pdserve.engine_core.kv_transfer.connector import KvConnector, PartDelivered
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import Event, PeerGone, ServeKvPull
    from pdserve.messages.transfer import TransferTicket
    from pdserve.transfer.base import Region

__all__ = ["MAX_SERVED", "SERVE_SHARE", "SLACK", "KvServer", "ServeLimits"]

_log = logging.getLogger(__name__)

MAX_SERVED: Final = 16
"""Pulls served at once; one more is `busy`."""
SERVE_SHARE: Final = 0.25
"""Largest share of the pool that is held for peers."""
SLACK: Final[Seconds] = 1.0
"""Time after the requester's deadline at which its pull ends here, too."""
_NEWEST: Final = 0.3
"""Weight of the newest pull in the mean rate."""


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What one core gives to peers at once."""

    pulls: int = MAX_SERVED
    share: float = SERVE_SHARE
    part: Bytes = 4 << 20
    """Bytes of a part; at least one block."""
    in_flight: Bytes = 32 << 20
    """Bytes that the connector has at once, over all pulls; at least one part."""
    in_flight_busy: Bytes = 16 << 20
    """The same while the core computes requests of its own: each step waits for the checksums of so
    many bytes. Blocks in device memory get none, and this does not hold for them."""


@dataclass(slots=True, eq=False)
class _Serving:
    """One pull of a peer."""

    number: int
    """The node's number."""
    handle: int
    """The connector's, below 0."""
    peer: NodeLife
    ticket: TransferTicket
    hashes: list[bytes]
    begun: Seconds
    until: Seconds
    held: list[int] = field(default_factory=list)
    """Blocks that are held: those before the wanted ones in their chain, then `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """Leading wanted blocks that this pool has."""
    staging: int = 0
    """Number of the staging under way; 0: none."""
    sent: int = 0
    """Leading blocks that the connector has got."""
    parts: int = 0
    checksums: list[int] = field(default_factory=list)
    under_way: dict[int, int] = field(default_factory=dict)
    """Blocks of each part under way."""
    answered: bool = False
    ended: bool = False
    """Nothing more is sent."""

    @property
    def complete(self) -> bool:
        """Whether everything that is granted has been handed over."""
        return not self.staging and self.sent == len(self.blocks)

    @property
    def sendable(self) -> bool:
        return not self.ended and self.sent < len(self.blocks)


class KvServer:
    """The owner's side of KV fetches in one core."""

    def __init__(
        self,
        pool: ServedPool,
        mover: KvConnector,
        region: Region,
        say: Callable[[Event], None],
        limits: ServeLimits | None = None,
    ) -> None:
        """`say` sends an event to the node."""
        self.stage: StageBlocks | None = None
        """Brings blocks of lower tiers; None: there are none."""
        self.served_blocks = 0
        self.served_bytes: Bytes = 0
        self.refused: Counter[str] = Counter()
        """Pulls that ended without all that was asked for, by reason: a `PullEnd`, or `short`."""
        self._pool = pool
        self._mover = mover
        self._region = region
        self._limits = limits or ServeLimits()
        self._block = region.block_bytes
        self._say = say
        self._servings: dict[int, _Serving] = {}
        """Pulls by handle, the oldest first, each until nothing of it is under way."""
        self._handles = 0
        self._in_flight: Bytes = 0
        self._rate = 0.0
        """Mean bytes per second of a pull; 0: unknown."""

    @property
    def serving(self) -> int:
        """Number of pulls for which blocks are held."""
        return len(self._servings)

    # ------------------------------------------------------------------ the node

    def serve(self, command: ServeKvPull, now: Seconds) -> None:
        """Begin to serve a peer's pull, or refuse it."""
        size = len(command.hashes) // HASH_BYTES
        room = self._room(size)
        refused = self._refusal(command, size, room)
        if refused:
            self._refuse(command.number, refused)
            return
        self._handles -= 1
        peer = NodeLife(NodeId(command.node), command.epoch)
        hashes: list[bytes] = [*split_hashes(command.hashes)[:room]]
        until = now + command.timeout + SLACK
        serving = _Serving(command.number, self._handles, peer, command.ticket, hashes, now, until)
        self._servings[serving.handle] = serving
        self._hold(serving)
        self._ask_tiers(serving)
        self._settle(serving, now)

    def _room(self, wanted: int) -> int:
        """Blocks that may be held for a pull that wants so many. A pull that exceeds the share
        alone gets a part of what it wants."""
        limit = max(1, int(self._limits.share * self._pool.num_blocks))
        taken = sum(len(one.hashes) for one in self._servings.values())
        room = max(0, limit - taken)
        return room if room >= wanted or not taken else 0

    def _refusal(self, command: ServeKvPull, size: int, room: int) -> PullEnd:
        ticket, tokens = command.ticket, self._region.layout.tokens
        fits = size and len(command.hashes) == size * HASH_BYTES and len(ticket.blocks) == size
        if not fits or ticket.tokens != size * tokens or ticket.first_token % tokens:
            return "misfit"
        return "" if room and len(self._servings) < self._limits.pulls else "busy"

    def stop(self, number: int) -> None:
        """The node does not want the answer to this question any more."""
        for serving in list(self._servings.values()):
            if serving.number == number:
                serving.answered = True
                self._end(serving, "cancelled")

    def peer_gone(self, command: PeerGone) -> None:
        """A peer is dead: nothing more is sent to it."""
        life = NodeLife(NodeId(command.node), command.epoch)
        for serving in list(self._servings.values()):
            if serving.peer == life:
                self._end(serving, "gone")

    # ------------------------------------------------------------------ blocks

    def _hold(self, serving: _Serving) -> None:
        """Hold the leading wanted blocks that are in the pool, and those before them, without which
        they must not be held."""
        pool = self._pool
        blocks = pool.match(serving.hashes)
        known = len(serving.blocks)
        if len(blocks) <= known or blocks[:known] != serving.blocks:
            return
        held = [*blocks_up_to(pool, pool.parent(blocks[0])), *blocks]
        pool.acquire(held)
        pool.release(serving.held)
        serving.held, serving.blocks = held, blocks

    def _ask_tiers(self, serving: _Serving) -> None:
        missing = serving.hashes[len(serving.blocks) :]
        if self.stage is not None and missing:
            serving.staging = self.stage.begin(missing, partial(self._staged, serving))

    def _staged(self, serving: _Serving) -> None:
        """Lower tiers bring no more."""
        if not serving.ended:
            serving.staging = 0
            self._hold(serving)

    # ------------------------------------------------------------------ sending

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return self._in_flight < self._limits.in_flight_busy and any(
            one.sendable or (one.complete and not one.answered) for one in self._servings.values()
        )

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        lasting = (one.until for one in self._servings.values() if not one.ended)
        return min(lasting, default=None)

    def advance(self, now: Seconds, *, busy: bool) -> None:
        """End what is late, and hand further parts to the connector, the oldest pull first. `busy`:
        the core has requests of its own to compute."""
        limits = self._limits
        slow = busy and self._region.view is not None
        window = limits.in_flight_busy if slow else limits.in_flight
        for serving in list(self._servings.values()):
            if serving.until <= now:
                self._end(serving, "deadline")
            while serving.sendable and self._in_flight < window:
                self._send(serving)
            self._settle(serving, now)

    def _send(self, serving: _Serving) -> None:
        first = serving.sent
        last = min(first + self._part_size(serving), len(serving.blocks))
        blocks, tokens = serving.blocks[first:last], self._region.layout.tokens
        if self._region.view is not None:
            serving.checksums += [checksum_of(self._region, block, tokens) for block in blocks]
        start = serving.ticket.first_token + first * tokens
        part = KvPart(serving.parts, start, tuple(blocks), (0, self._region.layout.layers))
        serving.under_way[part.number] = len(blocks)
        serving.sent = last
        serving.parts += 1
        self._in_flight += len(blocks) * self._block
        self._mover.deliver(serving.handle, serving.peer, serving.ticket, part)

    def _part_size(self, serving: _Serving) -> int:
        """Blocks of a part. Half of the possible part numbers suffice, so that a part that is cut
        short by staging costs none of the rest."""
        least = -(-len(serving.hashes) // (MAX_PARTS // 2))
        return max(1, self._limits.part // self._block, least)

    def delivered(self, moved: PartDelivered, now: Seconds) -> None:
        """The connector reads a part's blocks no more."""
        serving = self._servings.get(moved.handle)
        blocks = None if serving is None else serving.under_way.pop(moved.part, None)
        if serving is None or blocks is None:
            return
        self._in_flight -= blocks * self._block
        if moved.error is None:
            self.served_blocks += blocks
            self.served_bytes += blocks * self._block
        elif not serving.ended:
            _log.info("blocks cannot be sent to %s: %s", serving.peer, moved.error.message)
            self._end(serving, "transfer")
        self._settle(serving, now)

    # ------------------------------------------------------------------ ends

    def _settle(self, serving: _Serving, now: Seconds) -> None:
        """Answer once everything is handed over; give the blocks back once nothing reads them."""
        if serving.handle not in self._servings:
            return
        if serving.complete and not serving.ended:
            self._answer(serving)
        if serving.under_way or not (serving.ended or serving.answered):
            return
        if not serving.ended and serving.sent:
            self._note_rate(serving, now)
        self._let_go(serving)

    def _answer(self, serving: _Serving) -> None:
        if serving.answered:
            return
        serving.answered = True
        if not serving.sent:
            self._refuse(serving.number, "absent")
            return
        if serving.sent < len(serving.ticket.blocks):
            self.refused["short"] += 1
        grant = KvPullGrant(
            granted=serving.sent, parts=serving.parts, checksums=tuple(serving.checksums)
        )
        self._say(KvPullServed(serving.number, grant))

    def _end(self, serving: _Serving, reason: PullEnd) -> None:
        """Send nothing more; the blocks are held until nothing reads them."""
        if serving.ended:
            return
        serving.ended = True
        if serving.staging and self.stage is not None:
            self.stage.cancel(serving.staging)
            serving.staging = 0
        if not serving.answered:
            serving.answered = True
            self._refuse(serving.number, reason)
        if serving.under_way:
            self._mover.withdraw(serving.handle, serving.peer, serving.ticket)
        else:
            self._let_go(serving)

    def _refuse(self, number: int, reason: PullEnd) -> None:
        self.refused[reason] += 1
        eta = self._eta() if reason == "busy" else 0.0
        self._say(KvPullServed(number, KvPullGrant(refused=reason, eta=eta)))

    def _let_go(self, serving: _Serving) -> None:
        del self._servings[serving.handle]
        self._pool.release(serving.held)

    def _note_rate(self, serving: _Serving, now: Seconds) -> None:
        if now > serving.begun:
            rate = serving.sent * self._block / (now - serving.begun)
            self._rate += (rate - self._rate) * (_NEWEST if self._rate else 1.0)

    def _eta(self) -> Seconds:
        """Seconds until what is being served is sent; 0: unknown."""
        left = sum(
            len(one.hashes) - one.sent + sum(one.under_way.values())
            for one in self._servings.values()
            if not one.ended
        )
        return min(3600.0, left * self._block / self._rate) if self._rate else 0.0

    def fenced(self) -> None:
        """The connector is closed: give everything back, since nothing is read any more."""
        for serving in list(self._servings.values()):
            if serving.staging and self.stage is not None:
                self.stage.cancel(serving.staging)
            self._let_go(serving)
        self._in_flight = 0
