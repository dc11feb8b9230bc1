"""Pulls blocks that no request waits for into the prefix cache: `KvAbsorber`.

A worker that leaves offers its blocks to an heir, and a new worker is warmed: both are orders of
the node, `AbsorbKv`. What the pool has already is held and not pulled. The rest is pulled into
fresh blocks, which become cached ones. Blocks under way are bounded by a share of the pool; an
order beyond it is `busy`, and one that finds little room brings only its leading blocks.

The engine core owns this and calls it in its thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import split_hashes
from pdserve.engine_core.kv_fetch.chains import blocks_up_to
from pdserve.kv.tiers.cleaner import BlockUse
from pdserve.messages.engine import KvAbsorbed
from pdserve.messages.tiers import KvSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_fetch.puller import KvPuller
    from pdserve.engine_core.kv_fetch.uses import BlockUses
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import AbsorbKv, Event

__all__ = ["ABSORB_SHARE", "KvAbsorber"]

ABSORB_SHARE: Final = 0.1
"""Largest share of the pool that is being absorbed at once, so that requests find blocks."""


@dataclass(slots=True, eq=False)
class _Order:
    """One order under way."""

    number: int
    """The node's number."""
    had: int
    """Leading blocks of the order that the pool had."""
    wanted: list[bytes]
    """Hashes that are pulled."""
    parent: bytes
    """Hash before the first of them."""
    held: list[int] = field(default_factory=list)
    """Blocks of the chain before those, held so that they stay."""
    fresh: list[int] = field(default_factory=list)
    use: BlockUse = field(default_factory=BlockUse)
    """How the blocks were used at the other worker."""
    cut: bool = False
    """There was no room for the rest of the order."""


class KvAbsorber:
    """Absorbs chains of other workers; a `PullListener`."""

    def __init__(
        self,
        pool: BlockPool,
        puller: KvPuller,
        say: Callable[[Event], None],
        uses: BlockUses,
    ) -> None:
        """`say` sends an event to the node. `uses` is told of the blocks that have come."""
        self.uses = uses
        self._pool = pool
        self._puller = puller
        self._say = say
        self._orders: dict[int, _Order] = {}
        """Orders under way, by the puller's number: below 0, so that no request has it."""
        self._closing: dict[int, list[int]] = {}
        """Quarantined blocks."""
        self._numbers = 0

    @property
    def under_way(self) -> int:
        """Number of blocks that are being pulled."""
        return sum(len(order.fresh) for order in self._orders.values())

    def absorb(self, command: AbsorbKv, now: Seconds) -> None:
        """Begin an order."""
        pool = self._pool
        hashes: list[bytes] = [*split_hashes(command.hashes)]
        had = len(pool.match(hashes))
        parent = hashes[had - 1] if had else command.parent
        use = BlockUse(command.turns, command.mark)
        order = _Order(command.number, had, hashes[had:], parent, use=use)
        if command.first and not pool.match((command.parent,)):
            self._report(order, 0, "misfit")
        elif not order.wanted:
            self._report(order, 0, "")
        elif not self._reserve(order):
            self._report(order, 0, "busy")
        else:
            self._pull(order, command, now)

    def _reserve(self, order: _Order) -> bool:
        """Hold what the pool has of the chain, and take fresh blocks for as much of the rest as
        there is room for. False: for none, and nothing is held."""
        pool = self._pool
        room = int(ABSORB_SHARE * pool.num_blocks) - self.under_way
        count = min(len(order.wanted), room, pool.available // 2)
        if count <= 0:
            return False
        held = blocks_up_to(pool, order.parent)
        fresh = pool.reserve(count, shared=held)
        if fresh is None:
            return False
        order.held, order.fresh = held, fresh
        order.cut = count < len(order.wanted)
        del order.wanted[count:]
        return True

    def _pull(self, order: _Order, command: AbsorbKv, now: Seconds) -> None:
        self._numbers -= 1
        self._orders[self._numbers] = order
        self._puller.pull(
            self._numbers,
            KvSource(command.node, command.epoch, command.first + order.had + len(order.wanted)),
            order.wanted,
            order.fresh,
            (command.first + order.had) * self._pool.block_size,
            now + command.timeout,
            now=now,
            listener=self,
        )

    # ------------------------------------------------------------------ the puller

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        """Give the blocks that have come their hashes; the others wait for the fence."""
        order = self._orders.pop(number)
        pool, good, rest = self._pool, order.fresh[:blocks_ok], order.fresh[blocks_ok:]
        if rest:
            pool.quarantine(rest)
            self._closing[number] = rest
        used = pool.commit_run(good, order.wanted[:blocks_ok], order.parent)
        if used:
            self.uses.absorbed(order.wanted[:blocks_ok], order.use)
        pool.release([*order.held, *used])
        self._report(order, blocks_ok, error or ("busy" if order.cut else ""))

    def on_fenced(self, number: int) -> None:
        """Nothing is written to the order's other blocks any more."""
        blocks = self._closing.pop(number, None)
        if blocks is not None:
            self._pool.unquarantine(blocks)

    def _report(self, order: _Order, pulled: int, error: str) -> None:
        self._say(KvAbsorbed(order.number, order.had + pulled, pulled, error))

    # ------------------------------------------------------------------ ends

    def drop(self, now: Seconds) -> None:
        """Give up every order: the hashes of the pool's blocks mean something else from now on."""
        for number in list(self._orders):
            self._puller.cancel(number, now)
            self.on_pulled(number, 0, "cancelled")
